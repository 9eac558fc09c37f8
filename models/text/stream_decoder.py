"""From token ids back to text as they arrive: whole characters only (`StreamDecoder`), up to a stop string
(`StopMatcher`), with no more text held back than needed."""

import codecs
from collections.abc import Collection, Iterable
from typing import Protocol

from localinfer.errors import RequestError


class TokenText(Protocol):
    """What decoding asks of a tokenizer."""

    strips_space_at_start: bool

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control or unknown token."""
        ...

    def starts_text_after(self, token_id: int) -> bool:
        """Whether plain text after this token starts anew, with the vocabulary's space before it."""
        ...


class StreamDecoder:
    """Decodes ids one at a time; what `push` and `flush` return, joined, equals `Tokenizer.decode`.

    `previous_token_id` is the last token before the stream, where there is one. A SentencePiece
    vocabulary puts a space before a text, and it is taken off again at the start of a stream or after
    a special token; but not after `previous_token_id` of plain text, whose continuation may well begin
    with a real space. So a completion gives the last id of its prompt here. `keeps_first_space` leaves
    all of the bytes as they are. `shown_ids` are control tokens that are spelled out all the same.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        *,
        skip_special: bool = True,
        previous_token_id: int | None = None,
        keeps_first_space: bool = False,
        shown_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_character = False
        self._strips = tokenizer.strips_space_at_start and not keeps_first_space
        self._strips_next = self._strips and (
            previous_token_id is None or tokenizer.starts_text_after(previous_token_id)
        )

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is now certain, often "" inside a character.

        Raises: RequestError if the id is not in the vocabulary.
        """
        tokenizer = self._tokenizer
        piece = tokenizer.token_bytes(token_id)
        if tokenizer.starts_text_after(token_id):
            self._strips_next = self._strips
            if self._skip_special and tokenizer.is_special(token_id) and token_id not in self._shown_ids:
                return ""
        elif self._strips_next and piece:
            piece = piece.removeprefix(b" ")
            self._strips_next = False
        if not self._is_inside_character and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._is_inside_character = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        """Return what is left: U+FFFD where the stream ended inside a character."""
        self._is_inside_character = False
        return self._decoder.decode(b"", final=True)


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
