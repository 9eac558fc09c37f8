"""Regular expressions of a checkpoint's settings, matched in bounded time.

They come with the file, and Python's own matcher can take for ever on a pattern made for that. Here a pattern maps a
set of positions to the set of those where it can end (Thompson's method): no part visits a position twice.
"""

import re
from collections.abc import Callable

from localinfer.errors import CorruptFileError, UnsupportedFormatError

Positions = frozenset[int]
Node = Callable[[str, Positions], Positions]

_MAX_LENGTH = 1000
_MAX_DEPTH = 50
_MAX_REPEATS = 1000
_REPEAT = re.compile(r"\{(?=\d|,)(\d*)(,?)(\d*)\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


class ModulePattern:
    """A regular expression of the usual syntax without back references and looking behind.

    Raises: CorruptFileError if it is none; UnsupportedFormatError for what is not known here, and for its length.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise _unsupported(text, f"it has {len(text)} characters, more than {_MAX_LENGTH}")
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise CorruptFileError(
                f"quantize_config: the pattern {text!r:.60} is no regular expression: {error}. Download the checkpoint "
                "again, or another one"
            ) from error
        self._node = _Parser(text).whole()

    def matches(self, name: str) -> bool:
        """True if the beginning of a name matches, as by `re.match`."""
        return bool(self._node(name, frozenset((0,))))


class _Parser:
    """Reads a pattern that Python's own compiler has found sound."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> Node:
        return self._alternatives(0)

    def _alternatives(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise _unsupported(self._text, "its groups are nested too deeply")
        branches = [self._sequence(depth)]
        while self._text[self._at : self._at + 1] == "|":
            self._at += 1
            branches.append(self._sequence(depth))
        return lambda name, at: frozenset().union(*(branch(name, at) for branch in branches))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._item(depth)))

        def run(name: str, at: Positions) -> Positions:
            for part in parts:
                if not at:
                    break
                at = part(name, at)
            return at

        return run

    def _item(self, depth: int) -> Node:
        character = self._text[self._at]
        if character == "(":
            return self._group(depth)
        if character == "[":
            found = _CLASS.match(self._text, self._at)
            assert found is not None, "a sound pattern ends its classes"
            return self._single(found[0])
        if character in "^$":
            self._at += 1
            return _at_start if character == "^" else _at_end
        if character == "\\":
            escaped = self._text[self._at : self._at + 2]
            if escaped[1].isalnum() and escaped[1] not in "dDwWsS":
                raise _unsupported(self._text, f"{escaped} is not known here")
            return self._single(escaped)
        return self._single(character)

    def _single(self, source: str) -> Node:
        """One character of a kind, for which Python's matcher is as good as any."""
        self._at += len(source)
        one = re.compile(source if len(source) > 1 or source == "." else re.escape(source))
        return lambda name, at: frozenset(start + 1 for start in at if one.match(name, start))

    def _group(self, depth: int) -> Node:
        self._at += 1
        kind = ""
        if self._text[self._at] == "?":
            kind = self._text[self._at : self._at + 2]
            if kind not in ("?:", "?!", "?="):
                raise _unsupported(self._text, f"({kind} is not known here")
            self._at += 2
        inner = self._alternatives(depth + 1)
        self._at += 1
        if kind not in ("?!", "?="):
            return inner
        return lambda name, at: frozenset(
            start for start in at if bool(inner(name, frozenset((start,)))) == (kind == "?=")
        )

    def _repeated(self, item: Node) -> Node:
        rest = self._text[self._at : self._at + 1]
        counts = _REPEAT.match(self._text, self._at)
        if rest and rest in "*+?":
            self._at += 1
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[rest]
        elif counts is not None:
            self._at = counts.end()
            low = int(counts[1] or 0)
            high = low if not counts[2] else int(counts[3]) if counts[3] else None
            if max(low, high or 0) > _MAX_REPEATS:
                raise _unsupported(self._text, f"it repeats a part more than {_MAX_REPEATS} times")
        else:
            return item
        if self._text[self._at : self._at + 1] == "?":
            self._at += 1  # the order of trials does not change the result
        elif self._text[self._at : self._at + 1] in ("+", "*"):
            raise _unsupported(self._text, "possessive repetition is not known here")
        return lambda name, at: _repeat(item, name, at, low, high)


def _repeat(item: Node, name: str, at: Positions, low: int, high: int | None) -> Positions:
    for _ in range(low):
        following = item(name, at)
        if following == at:
            break
        at = following
    reached = fresh = at
    count = low
    while fresh and (high is None or count < high):
        fresh = item(name, fresh) - reached
        reached |= fresh
        count += 1
    return reached


def _at_start(name: str, at: Positions) -> Positions:
    return at & {0}


def _at_end(name: str, at: Positions) -> Positions:
    return at & ({len(name), len(name) - 1} if name.endswith("\n") else {len(name)})


def _unsupported(text: str, reason: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"quantize_config: the pattern {text!r:.60} cannot be matched: {reason}. Choose another copy of the model."
    )
