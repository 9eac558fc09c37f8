"""Unigram vocabularies, as of T5 and XLM-RoBERTa: of all ways to cut a text into tokens, the likeliest.

Spaces become marks before, in SentencePiece's way or by the steps of tokenizer.json. Sources: subword regularization
(arXiv 1804.10959), section 3.2; SentencePiece (arXiv 1808.06226); the tokenizers library (Strip, Replace,
WhitespaceSplit and Metaspace).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

from localinfer.errors import TokenizerError
from localinfer.models.text.encoders import SPACE_MARK, SubwordEncoder
from localinfer.models.text.normalizer import CharacterMap, apply_steps
from localinfer.models.text.vocabulary import TokenType, Vocabulary

_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space, which `str.isspace` goes beyond."""
_WORD = re.compile(f"[^{_WHITE_SPACE}]+")
_SPACES = re.compile(" {2,}")
_SQUEEZED = re.compile(f"[{_WHITE_SPACE}]{{2,}}|[\n\r\t]")


def marked_as_by_tokenizers(
    stretches: Iterable[str], normalize: Callable[[str], str], flags: Mapping[str, bool]
) -> Iterator[str]:
    """Yield a text, given in stretches, normalized and marked.

    flags: of the vocabulary. squeezes_white_space: before all else, white space of several characters, and what ends
    lines, becomes one space. strips_left, strips_right: no white space around the text, which `strips_before_map` looks
    for before it is normalized. remove_extra_whitespaces: several spaces are one. splits_at_white_space: only words are
    left, each with a mark. Without it every space becomes a mark. add_space_prefix: where a text begins with none, one
    is put there.
    """
    if flags.get("squeezes_white_space"):
        stretches = (_SQUEEZED.sub(" ", piece) for piece in _whole_spaces(stretches, False, False))
    left, right = flags.get("strips_left", False), flags.get("strips_right", False)
    pieces: Iterable[str]
    if flags.get("strips_before_map"):
        pieces = map(normalize, _whole_spaces(stretches, left, right))
        left = right = False
    else:
        pieces = map(normalize, stretches)
    pieces = _whole_spaces(pieces, left, right)
    if flags.get("splits_at_white_space"):
        return _marked_words(pieces)
    if flags.get("remove_extra_whitespaces"):
        pieces = (_SPACES.sub(" ", piece) for piece in pieces)
    return _marked_spaces(pieces, adds=flags.get("add_space_prefix", True))


def _whole_spaces(pieces: Iterable[str], left: bool, right: bool) -> Iterator[str]:
    """Cut a text so that no white space lies in two pieces; leave out that on its left, or on its right."""
    held = ""
    for piece in pieces:
        text = (held + piece).lstrip(_WHITE_SPACE) if left else held + piece
        body = text.rstrip(_WHITE_SPACE)
        held = text[len(body) :]
        if body:
            left = False
            yield body
    if held and not right:
        yield held


def _marked_words(pieces: Iterable[str]) -> Iterator[str]:
    is_inside_word = False
    for piece in pieces:
        words = _WORD.findall(piece)
        goes_on = is_inside_word and piece[0] not in _WHITE_SPACE
        is_inside_word = piece[-1] not in _WHITE_SPACE
        if words:
            yield ("" if goes_on else SPACE_MARK) + SPACE_MARK.join(words)


def _marked_spaces(pieces: Iterable[str], *, adds: bool) -> Iterator[str]:
    for piece in pieces:
        begins = SPACE_MARK if adds and piece[0] != " " else ""
        adds = False
        yield begins + piece.replace(" ", SPACE_MARK)


_UNKNOWN_PENALTY = 10.0
"""Logarithm by which an unknown character is less likely than every token: SentencePiece's."""
_STRETCH = 1 << 14
"""Characters of a long text that are normalized at once."""
_SPACE = re.compile(r" (?=\S)")


class UnigramEncoder(SubwordEncoder):
    """The likeliest tokens of a whole run of text, by their scores, which are logarithms."""

    adds_bos = False
    adds_eos = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.adds_space = vocabulary.flags.get("add_space_prefix", True)
        self._merges_spaces = vocabulary.flags.get("remove_extra_whitespaces", False)
        self.splits_words = vocabulary.flags.get("splits_words", False)
        self._byte_ids = vocabulary.byte_ids
        self._has_bytes = min(vocabulary.byte_ids) >= 0
        if self._unknown is None and not self._has_bytes:
            raise TokenizerError(
                "tokenizer.ggml.unknown_token_id is missing; wanted the id that stands for characters outside the "
                "vocabulary. Convert the model again with a current converter."
            )
        self._map = None if vocabulary.charsmap is None else CharacterMap(vocabulary.charsmap)

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text; every run of it starts like a text."""
        return [token_id for part in self._encode_stretches([text]) for token_id in part]

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text part by part, cut before spaces for normalization."""
        return self._encode_stretches(_stretches(text))

    def fewest_ids(self, text: str) -> int:
        """Return 0: many characters may become one, or none."""
        return 0

    def _encode_stretches(self, stretches: Iterable[str]) -> Iterator[list[int]]:
        lattice = _Lattice(self)
        for marked in self._marked(stretches):
            yield lattice.push(marked)
        yield lattice.finish()

    def _marked(self, stretches: Iterable[str]) -> Iterator[str]:
        """Normalize a text, given in stretches, and put marks where its spaces are."""
        flags = self._vocabulary.flags
        # Only tokenizer.json says so: SentencePiece puts its space before a text that begins with one, too.
        if flags.get("add_space_prefix_if_none"):
            yield from marked_as_by_tokenizers(stretches, self._normalized, flags)
            return
        spaces = _Spaces(adds=self.adds_space, merges=self._merges_spaces)
        for stretch in stretches:
            yield spaces.mark(self._normalized(stretch))

    def _normalized(self, stretch: str) -> str:
        stretch = apply_steps(self._vocabulary.normalizer_steps, stretch)
        return stretch if self._map is None else self._map.apply(stretch)

    @cached_property
    def scores(self) -> dict[str, tuple[float, int]]:
        """Score and id of each token that text may become: none of two words, where these are split."""
        vocabulary = self._vocabulary
        assert vocabulary.scores is not None, "this kind always has scores"
        scores = vocabulary.scores.tolist()
        types = vocabulary.types
        return {
            token: (0.0 if types[index] == TokenType.USER_DEFINED else scores[index], index)
            for token, index in self._ids.items()
            if not (self.splits_words and SPACE_MARK in token[1:] and types[index] != TokenType.USER_DEFINED)
        }

    @cached_property
    def unknown_score(self) -> float:
        """Score of a character that is no token."""
        vocabulary = self._vocabulary
        assert vocabulary.scores is not None, "this kind always has scores"
        normal = vocabulary.scores[vocabulary.types == TokenType.NORMAL]
        return (float(normal.min()) if normal.size else 0.0) - _UNKNOWN_PENALTY

    @cached_property
    def lengths(self) -> dict[str, tuple[int, ...]]:
        """Lengths of the tokens of three and more characters, by their first three."""
        found: dict[str, set[int]] = {}
        for token in self._ids:
            if len(token) > 2:
                found.setdefault(token[:3], set()).add(len(token))
        return {start: tuple(sorted(sizes)) for start, sizes in found.items()}

    @property
    def longest(self) -> int:
        """Characters of the longest token."""
        return self._longest

    def unknown_ids(self, characters: str) -> list[int]:
        """The ids of characters in a row that are no tokens: their bytes' tokens, else one unknown token."""
        if self._has_bytes:
            return self._fallback(characters)
        assert self._unknown is not None, "checked when the encoder is made"
        return [self._unknown]


class _Spaces:
    """Turns the spaces of a text, given in stretches, into marks: one before each word where they are merged."""

    def __init__(self, *, adds: bool, merges: bool) -> None:
        self._adds, self._merges = adds, merges
        self._is_inside_word = False

    def mark(self, stretch: str) -> str:
        """The marked stretch."""
        if not self._merges:
            before = SPACE_MARK if self._adds and stretch.strip(" ") else ""
            if not before:
                return stretch.replace(" ", SPACE_MARK)
            # As SentencePiece without the removal of spaces: the mark comes before the first word.
            self._adds = False
            spaces = len(stretch) - len(stretch.lstrip(" "))
            return (SPACE_MARK * spaces) + before + stretch[spaces:].replace(" ", SPACE_MARK)
        parts = []
        words = stretch.split(" ")
        for index, word in enumerate(words):
            if index:
                self._is_inside_word = False
            if word:
                parts.append(word if self._is_inside_word else SPACE_MARK + word)
                self._is_inside_word = True
        return "".join(parts)


class _Lattice:
    """The best way to every position of a text that arrives in parts (Viterbi).

    Sums are float64 from the beginning of the text on, and the first of equal ways is kept, so that the ids are those
    of the whole text. What lies before a position that every way passes through is final.
    """

    def __init__(self, encoder: UnigramEncoder) -> None:
        self._encoder = encoder
        self._text = ""
        self._position = 0
        # By position: score of the best way to it, characters of its last token, and its id, -1 for unknown.
        self._best: list[tuple[float, int, int] | None] = [(0.0, 0, 0)]
        self._reach = 0
        self._unknown = ""

    def push(self, text: str) -> list[int]:
        """Take more text; return the ids that are final."""
        self._text += text
        return self._advance(len(self._text) - self._encoder.longest)

    def finish(self) -> list[int]:
        """Return the ids that are left."""
        return [*self._advance(len(self._text)), *self._flush_unknown()]

    def _advance(self, end: int) -> list[int]:
        """Extend every way from the positions before `end`; all tokens from there lie in the text."""
        encoder, text, best = self._encoder, self._text, self._best
        scores, lengths, unknown_score = encoder.scores, encoder.lengths, encoder.unknown_score
        best.extend([None] * (len(text) + 1 - len(best)))
        reach, final = self._reach, 0
        for start in range(self._position, end):
            if start >= reach:
                final = start
            way = best[start]
            assert way is not None, "every character can be unknown"
            so_far = way[0]
            is_known = False
            for size in (1, 2, *lengths.get(text[start : start + 3], ())):
                stop = start + size
                found = scores.get(text[start:stop])
                if found is None or stop > len(text):
                    continue
                is_known = is_known or size == 1
                score, token_id = found
                total = so_far + score
                former = best[stop]
                if former is None or total > former[0]:
                    best[stop] = (total, size, token_id)
                    reach = max(reach, stop)
            if not is_known:
                total = so_far + unknown_score
                former = best[start + 1]
                if former is None or total > former[0]:
                    best[start + 1] = (total, 1, -1)
                    reach = max(reach, start + 1)
        self._position, self._reach = max(self._position, end), reach
        return self._take(len(text) if end == len(text) else final)

    def _take(self, end: int) -> list[int]:
        """The ids of the best way to a position, which is final; forgets what lies before it."""
        pieces: list[tuple[int, int]] = []
        position = end
        while position > 0:
            way = self._best[position]
            assert way is not None, "every position is reached"
            position -= way[1]
            pieces.append((position, way[2]))
        ids: list[int] = []
        for start, token_id in reversed(pieces):
            if token_id < 0:
                if self._encoder.splits_words and self._text[start] == SPACE_MARK:
                    ids += self._flush_unknown()
                self._unknown += self._text[start]
                continue
            ids += self._flush_unknown()
            ids.append(token_id)
        self._text, self._best = self._text[end:], self._best[end:]
        self._position, self._reach = self._position - end, self._reach - end
        return ids

    def _flush_unknown(self) -> list[int]:
        """Unknown characters in a row are one unknown token."""
        characters, self._unknown = self._unknown, ""
        return self._encoder.unknown_ids(characters) if characters else []


def _stretches(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        found = _SPACE.search(text, start + _STRETCH)
        end = len(text) if found is None else found.start()
        yield text[start:end]
        start = end
