"""Stop strings in a stream: found across chunks, with no more text held back than needed."""

from collections.abc import Iterable

from localinfer.errors import RequestError


class _Progress:
    """How much of one stop string the text's end matches (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # borders[n]: the longest proper prefix of stop[:n] that is also its suffix.
        self._borders = [0, 0]
        length = 0
        for character in stop[1:]:
            while length and stop[length] != character:
                length = self._borders[length]
            length += stop[length] == character
            self._borders.append(length)

    def advance(self, character: str) -> bool:
        """Take one character; return whether the stop string is complete."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._borders[matched]
        matched += self.stop[matched] == character
        self.matched = matched
        return matched == len(self.stop)


class StopMatcher:
    """Passes text on until one of the stop strings is complete.

    The stop string that completes first wins, and of those the longest, so the result does not depend
    on how the text is cut into chunks. Held back is the longest end of the text that begins a stop
    string, never more. Time is proportional to the text and the number of stop strings.

    Raises: RequestError if a stop string is empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        unique = dict.fromkeys([stops] if isinstance(stops, str) else stops)
        if not all(isinstance(stop, str) and stop for stop in unique):
            raise RequestError(
                f"stop strings are {list(unique)!r:.80}; wanted at least one character each. Leave out empty ones."
            )
        self._progress = sorted(map(_Progress, unique), key=lambda progress: -len(progress.stop))
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next text; return what may be shown, and the stop string once one is complete.

        The stop string itself and all that follows it is never returned.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._progress:
            return text, None
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            complete = [progress.stop for progress in self._progress if progress.advance(character)]
            if complete:
                self._matched = complete[0]
                self._held = ""
                return pending[: position - len(self._matched)], self._matched
        shown = len(pending) - max(progress.matched for progress in self._progress)
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """Return the text held back; call it when no more text comes."""
        held, self._held = self._held, ""
        return held
