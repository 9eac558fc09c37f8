"""Long texts to words, piece by piece: linear time, bounded memory, and the same words as for the text as a whole.

The commonest ways of splitting are compiled. Any other goes through the regular expressions of `pre_tokenizers`, over
stretches of the text: a word counts only if what is beyond its stretch cannot change it.
"""

import unicodedata
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.kernel_abi import (
    CHARACTER_DIGIT,
    CHARACTER_LETTER,
    CHARACTER_NEWLINE,
    CHARACTER_SPACE,
    CHARACTER_SYMBOL,
)
from localinfer.kernels.cpu.text_merging import WordShape, split_words
from localinfer.models.text.splitting import GPT2_PATTERN, PRE_TOKENIZERS, PreTokenizerRule, build_splitter

STRETCH = 1 << 16
"""Characters that are looked at together, or twice as many as long as no word of them is settled."""

_CL100K = WordShape(leads_with_symbols=True, digits=3, symbol_lines=True, lines=True, any_case=True)
_SHAPES: dict[tuple[object, ...], WordShape] = {
    PRE_TOKENIZERS["llama-bpe"].steps: _CL100K,
    PRE_TOKENIZERS["qwen2"].steps: _CL100K._replace(digits=1),
    PRE_TOKENIZERS["seed-coder"].steps: _CL100K._replace(digits=1, symbol_lines=False),
    (GPT2_PATTERN,): WordShape(),
    (r"\p{N}", GPT2_PATTERN): WordShape(digits_first=True),
}
_RUNS_PER_STEP = 6
"""No pattern looks further beyond a word than so many runs of characters of one kind."""


class LongTextSplitter:
    """Splits texts of any length by one rule; threads may share it."""

    def __init__(self, rule: PreTokenizerRule) -> None:
        self._shape = _SHAPES.get(rule.steps)
        self._kinds = CharacterKinds()
        self._rule = rule
        self._split: Callable[[str], list[str]] | None = None

    def stretches(self, text: str) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield pieces of the text in order, and where their words end in them, int64[words].

        Raises: RequestError for a run of white space that the regular expressions give up on.
        """
        start, size = 0, STRETCH
        while start < len(text):
            part = text[start : start + size]
            ends = self._ends(part, start + size >= len(text))
            if not ends.size:
                size *= 2
                continue
            done = int(ends[-1])
            yield part[:done], ends
            start, size = start + done, STRETCH

    def _ends(self, part: str, is_end: bool) -> NDArray[np.int64]:
        if self._shape is not None:
            codes = code_points(part)
            return split_words(codes, self._kinds.of(codes), self._shape, is_end=is_end)
        if self._split is None:
            self._split = build_splitter(self._rule)
        try:
            words = self._split(part)
        except BaseException as error:
            # The library panics, with an exception that is none of Python's, where its regular expressions give up.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                f"a text of {len(part)} characters without a word's end cannot be split into tokens by this model's "
                "rules; give it in shorter pieces, or as token ids"
            ) from None
        ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))
        return ends if is_end else ends[: _settled(part, ends, _RUNS_PER_STEP * len(self._rule.steps))]


class CharacterKinds:
    """Letter, digit, white space, newline or symbol, for each character, as the regular expressions class it.

    They bring their own version of Unicode, so they are asked once about each character that occurs.
    """

    def __init__(self) -> None:
        self._table: NDArray[np.uint8] | None = None

    def of(self, codes: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return the kinds, uint8[T], of code points, int32[T]."""
        table = np.zeros(0x110000, np.uint8) if self._table is None else self._table
        kinds = table[codes]
        if not kinds.all():
            unknown = np.unique(codes[kinds == 0])
            table[unknown] = _classify("".join(map(chr, unknown.tolist())))
            self._table = table
            kinds = table[codes]
        return kinds


def code_points(text: str) -> NDArray[np.int32]:
    """Return int32[T], the code points of a text."""
    return np.frombuffer(text.encode("utf-32-le"), np.int32)


def _classify(characters: str) -> NDArray[np.uint8]:
    from tokenizers import Regex, pre_tokenizers

    kinds = {"\r": CHARACTER_NEWLINE, "\n": CHARACTER_NEWLINE}
    for kind, pattern in ((CHARACTER_LETTER, r"\p{L}"), (CHARACTER_DIGIT, r"\p{N}"), (CHARACTER_SPACE, r"\s")):
        found = pre_tokenizers.Split(Regex(pattern), "removed", invert=True).pre_tokenize_str(characters)
        for piece, _ in found:
            for character in piece:
                kinds.setdefault(character, kind)
    return np.fromiter((kinds.get(character, CHARACTER_SYMBOL) for character in characters), np.uint8, len(characters))


def _settled(text: str, ends: NDArray[np.int64], num_runs: int) -> int:
    """Return how many words no text after this one can change: those before so many whole runs of one kind.

    The last of them ends in neither white space nor a digit, so that no pattern looks back over its end.
    """
    position, kind = len(text), ""
    while num_runs and position:
        position -= 1
        category = unicodedata.category(text[position])
        # What this version of Python does not know may belong to any run.
        found = "L" if category[0] == "M" else "Z" if category == "Cc" else category[0]
        if category != "Cn" and found != kind:
            num_runs -= bool(kind)
            kind = found
    if num_runs:
        return 0
    count = int(np.searchsorted(ends, position, "right"))
    while count:
        before = text[int(ends[count - 1]) - 1]
        if unicodedata.category(before)[0] not in "NZ" and not before.isspace():
            break
        count -= 1
    return count
