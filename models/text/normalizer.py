"""The normalization of SentencePiece, compiled into a vocabulary: which characters become which others.

A map is a little-endian uint32 (bytes of the trie), the trie as uint32 units, and the replacements, each ended by a
zero byte. The trie is a double array over UTF-8 bytes (Aoe, IEEE Transactions on Software Engineering 15, 1989, in the
form of the Darts-clone library): unit i has in bit 8 whether a key ends there, in its low byte and bit 31 its label, in
bits 10 to 30 the offset of its children, times 256 where bit 9 is set; the unit behind a label 0 is the key's value.
Source: SentencePiece (arXiv 1808.06226), section 3.5.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from localinfer.errors import TokenizerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_KEY = "tokenizer.ggml.precompiled_charsmap"
_LABEL = (1 << 31) | 0xFF
_VALUE = (1 << 31) - 1


class CharacterMap:
    """A compiled map. Raises: TokenizerError if its parts do not fit each other."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        num_bytes = int.from_bytes(data[:4].tobytes(), "little") if data.size >= 4 else -1
        if num_bytes < 4 or num_bytes % 4 or num_bytes > data.size - 4:
            raise _refusal(f"{data.size} bytes that announce a trie of {num_bytes}", "a trie of whole units that fits")
        self._units: list[int] = data[4 : 4 + num_bytes].copy().view("<u4").tolist()
        self._texts = data[4 + num_bytes :].tobytes()
        if self._texts and self._texts[-1]:
            raise _refusal("replacements without an end", "replacements that each end in a zero byte")
        self._root = _children(self._units[0])
        # Characters that begin no key stay as they are; most texts have few different ones.
        self._begins: dict[str, bool] = {}

    def apply(self, text: str) -> str:
        """The text with the longest key at each position replaced, from left to right."""
        return "".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        position, plain = 0, 0
        begins = self._begins
        while position < len(text):
            character = text[position]
            may_begin = begins.get(character)
            if may_begin is None:
                may_begin = begins[character] = self._walk(self._root, character)[1] is not None
            found = self._longest(text, position) if may_begin else None
            if found is None:
                position += 1
                continue
            yield text[plain:position]
            length, replacement = found
            yield replacement
            position = plain = position + length
        yield text[plain:]

    def _longest(self, text: str, start: int) -> tuple[int, str] | None:
        """Characters of the longest key at a position, and what it becomes."""
        node: int | None = self._root
        found = None
        end = start
        while node is not None and end < len(text):
            value, node = self._walk(node, text[end])
            end += 1
            if value is not None:
                found = end - start, value
        return None if found is None else (found[0], self._replacement(found[1]))

    def _walk(self, node: int, character: str) -> tuple[int | None, int | None]:
        """Follow the bytes of a character: the value of a key that ends with it, and the children of its node."""
        value = None
        for byte in character.encode("utf-8", "surrogateescape"):
            position = node ^ byte
            unit = self._unit(position)
            if not byte or unit & _LABEL != byte:
                return None, None
            node = position ^ _children(unit)
            # A key can only end where a character does.
            value = self._unit(node) & _VALUE if unit >> 8 & 1 else None
        return value, node

    def _unit(self, position: int) -> int:
        if position >= len(self._units):
            raise _refusal(
                f"a trie of {len(self._units)} units that leads to number {position}", "a trie of its own units"
            )
        return self._units[position]

    def _replacement(self, value: int) -> str:
        end = self._texts.find(b"\0", value)
        if end < 0:
            found = f"a trie that leads to byte {value} of {len(self._texts)} of replacements"
            raise _refusal(found, "a position among the replacements")
        return self._texts[value:end].decode("utf-8", "replace")


def _children(unit: int) -> int:
    """The offset of a unit's children."""
    return (unit >> 10) << ((unit >> 6) & 8)


def _refusal(found: str, wanted: str) -> TokenizerError:
    return TokenizerError(
        f"{_KEY} has {found}; wanted {wanted}. Convert the model again with a current converter, or run it with token "
        "ids only."
    )


_REPLACE = "replace"


def _lowered(text: str) -> str:
    """Each character by itself: where a word ends does not matter, as it does to Greek in `str.lower`."""
    return text.lower() if text.isascii() else "".join(map(str.lower, text))


def _without_marks(text: str) -> str:
    """Without combining marks of any kind."""
    return text if text.isascii() else "".join(c for c in text if unicodedata.category(c)[0] != "M")


STEPS: Mapping[str, Callable[[str], str]] = {
    "lowercase": _lowered,
    "strip_accents": _without_marks,
    **{form.lower(): partial(unicodedata.normalize, form) for form in ("NFC", "NFD", "NFKC", "NFKD")},
}
"""Steps by name."""

KEEPING_SPACES = ("lowercase", _REPLACE)
"""Steps that neither make white space nor take any."""


def replacement(old: str, new: str) -> str | None:
    """The step that puts one text in position of another; None for texts that a step cannot hold."""
    return None if not old or any(c.isspace() for c in old + new) else f"{_REPLACE}\t{old}\t{new}"


def is_step(step: str) -> bool:
    """Return whether a step is one of those that are known."""
    return step in STEPS or (
        step.startswith(f"{_REPLACE}\t") and len(step.split("\t")) == 3 and step.split("\t")[1] != ""
    )


def keeps_spaces(step: str) -> bool:
    """Return whether a step leaves white space where it is."""
    return step.split("\t")[0] in KEEPING_SPACES


def apply_steps(steps: Iterable[str], text: str) -> str:
    """The text after all of the steps, which `is_step` knows."""
    for step in steps:
        if step in STEPS:
            text = STEPS[step](text)
        else:
            _, old, new = step.split("\t")
            text = text.replace(old, new)
    return text
