"""Text to token ids for three kinds of vocabulary, special tokens aside; `unigram.py` has a fourth.

Byte-level BPE cuts a text into words first. Merges never cross a word's edge, so a wrong rule changes the ids without
any visible error. The patterns, by the name in `tokenizer.ggml.pre`, are those of the models' own tokenizers, in
Oniguruma syntax; the names are the ones llama.cpp writes into files. Each step cuts what the step before it left.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from localinfer.errors import TokenizerError
from localinfer.models.text.known_vocabularies import KnownVocabulary
from localinfer.system.pieces import pieces
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.models.text.long_text import LongTextSplitter, SymbolTable
    from localinfer.models.text.vocabulary import Vocabulary

# The character that stands for a space inside SentencePiece tokens.
SPACE_MARK = "▁"
LONG_TEXT = 1 << 14
"""Characters from which on a text is worth the tables that are made for it."""
LONG_STRETCH = 1 << 9
"""Characters from which on a stretch of a long text is worth a call."""
_PART = 1 << 16
# Words up to this length are cached; at the limit of entries the cache starts afresh.
_MAX_CACHED_LENGTH = 64
_MAX_CACHED_WORDS = 1 << 16
# Scanning a short list for its lowest rank beats keeping a heap up to about this many symbols.
_SCAN_LIMIT = 32
_NEVER = 1 << 62


def _byte_characters() -> str:
    """Return 256 characters; the one at index b stands for byte b.

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in
    order. Source: the GPT-2 vocabulary, which every byte-level vocabulary since then shares.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
"""The alphabet of byte-level BPE: every byte has a printable character that stands for it."""
_TO_CHARACTER = dict(enumerate(BYTE_CHARACTERS))
_TO_BYTE = {character: bytes([byte]) for byte, character in enumerate(BYTE_CHARACTERS)}
# Code points to those of Latin-1, which are bytes; what stands for no byte, to one that Latin-1 lacks.
_TO_LATIN_1 = {code: ord(_TO_BYTE[chr(code)]) if chr(code) in _TO_BYTE else 0xFFFF for code in range(0x80, 0x180)}
_TO_LATIN_1 |= {ord(character): ord(byte) for character, byte in _TO_BYTE.items()}


def merge_by_rank(symbols: list[str], ranks: Mapping[str, int], separator: str) -> list[str]:
    """Merge neighbours, lowest rank first and leftmost among equals, until no pair has a rank.

    The loop that SentencePiece (by score) and BPE (by rank) share. A pair's rank is looked up as `left + separator +
    right`. Ranks lie in 0 .. 2**31 - 1. Time grows as n log n with the number of symbols; `symbols` may be changed.
    """
    # pair_ranks[i] is the rank of the pair that starts at symbol i now.
    pairs = zip(symbols, symbols[1:], strict=False)
    pair_ranks = [ranks.get(left + separator + right, _NEVER) for left, right in pairs]
    merge = _merge_by_scanning if len(symbols) <= _SCAN_LIMIT else _merge_by_heap
    return merge(symbols, pair_ranks, ranks, separator)


def _merge_by_scanning(
    symbols: list[str], pair_ranks: list[int], ranks: Mapping[str, int], separator: str
) -> list[str]:
    while pair_ranks:
        lowest = min(pair_ranks)
        if lowest == _NEVER:
            break
        index = pair_ranks.index(lowest)
        merged = symbols[index] + symbols[index + 1]
        symbols[index : index + 2] = [merged]
        del pair_ranks[index]
        if index:
            pair_ranks[index - 1] = ranks.get(symbols[index - 1] + separator + merged, _NEVER)
        if index < len(pair_ranks):
            pair_ranks[index] = ranks.get(merged + separator + symbols[index + 1], _NEVER)
    return symbols


def _merge_by_heap(symbols: list[str], pair_ranks: list[int], ranks: Mapping[str, int], separator: str) -> list[str]:
    count = len(symbols)
    following = [*range(1, count), -1]
    preceding = list(range(-1, count - 1))
    pair_ranks.append(_NEVER)
    # A heap entry is rank * count + i, one integer, which compares fastest; one that contradicts `pair_ranks` is stale.
    heap = [rank * count + index for index, rank in enumerate(pair_ranks) if rank != _NEVER]
    heapify(heap)
    while heap:
        rank, left = divmod(heappop(heap), count)
        if pair_ranks[left] != rank:
            continue
        right = following[left]
        merged = symbols[left] + symbols[right]
        symbols[left] = merged
        symbols[right] = ""
        pair_ranks[right] = _NEVER
        after = following[left] = following[right]
        pair_ranks[left] = _NEVER
        if after >= 0:
            preceding[after] = left
            rank = ranks.get(merged + separator + symbols[after], _NEVER)
            if rank != _NEVER:
                pair_ranks[left] = rank
                heappush(heap, rank * count + left)
        before = preceding[left]
        if before >= 0:
            rank = ranks.get(symbols[before] + separator + merged, _NEVER)
            pair_ranks[before] = rank
            if rank != _NEVER:
                heappush(heap, rank * count + before)
    return [symbol for symbol in symbols if symbol]


def _weakly(method: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """A method for what its own object holds: kept itself, it would keep the vocabulary until the next full garbage
    collection."""
    reference = WeakMethod(method)

    def call(symbol: str) -> list[int]:
        found = reference()
        assert found is not None, "its object holds this"
        return found(symbol)

    return call


class SubwordEncoder:
    """Encoder of plain text for one kind of vocabulary.

    `adds_space`: a space is put before text that starts a run of plain text. `adds_bos`, `adds_eos`: a
    sequence starts with the BOS token, or ends with the EOS token, where the file does not say.
    """

    adds_space = True
    adds_bos = True
    adds_eos = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids = vocabulary.ids
        self._unknown = vocabulary.role_ids.get("unknown")
        self._byte_ids: list[int] = []
        self._cache: dict[str, list[int]] = {}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=1)

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text, in which nothing is special."""
        raise NotImplementedError

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the same ids part by part, in time and memory that suit a text of any length."""
        raise NotImplementedError

    def fewest_ids(self, text: str) -> int:
        """Return a number of ids that the text has at least: no token covers more characters than the longest."""
        return -(-len(text) // self._longest)

    def token_bytes(self, token: str) -> bytes:
        """Return what a token of ordinary text stands for: its UTF-8, its marks turned into spaces."""
        return token.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")

    def many_token_bytes(self, tokens: list[str]) -> list[bytes]:
        """Return what `token_bytes` gives for each token."""
        return list(map(self.token_bytes, tokens))

    def _encode_word(self, word: str) -> list[int]:
        raise NotImplementedError

    def _encode_words(self, words: list[str]) -> list[int]:
        """Return the ids of words in a row, those of short ones out of the cache."""
        ids: list[int] = []
        for word in words:
            found = self._cache.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _MAX_CACHED_LENGTH:
                    if len(self._cache) >= _MAX_CACHED_WORDS:
                        self._cache = {}
                    self._cache[word] = found
            ids += found
        return ids

    def _encode_marked(self, text: str, split: Callable[[str], list[str]]) -> list[int]:
        """Return the ids of a text in whose tokens a mark stands for a space; `split` takes one with its marks."""
        ids: list[int] = []
        # A literal mark would read as a space when decoded, so it goes byte by byte.
        for index, part in enumerate(text.split(SPACE_MARK)):
            if index:
                ids += self._fallback(SPACE_MARK)
            ids += self._encode_words(split(part.replace(" ", SPACE_MARK)))
        return ids

    def _ids_of(self, symbols: list[str]) -> list[int]:
        ids: list[int] = []
        for symbol in symbols:
            token_id = self._ids.get(symbol)
            if token_id is None:
                ids += self._expand(symbol)
            else:
                ids.append(token_id)
        return ids

    def _expand(self, symbol: str) -> list[int]:
        """Ids for a symbol that is no token."""
        return self._fallback(symbol)

    def _fallback(self, symbol: str) -> list[int]:
        """Return the ids of characters that no token holds: their bytes' tokens, else the unknown token."""
        ids: list[int] = []
        for character in symbol:
            found = [self._byte_ids[byte] for byte in character.encode("utf-8")]
            ids += found if min(found) >= 0 or self._unknown is None else [self._unknown]
        return ids


def _byte_token_ids(vocabulary: Vocabulary) -> list[int]:
    """The id of each byte's token, -1 where there is none and the unknown token takes its place."""
    declared = vocabulary.byte_ids
    found = [i if i >= 0 else vocabulary.ids.get(f"<0x{byte:02X}>", -1) for byte, i in enumerate(declared)]
    if -1 in found and "unknown" not in vocabulary.role_ids:
        raise TokenizerError(
            f"tokenizer.ggml.tokens has no token <0x{found.index(-1):02X}> and the file names no unknown token; wanted "
            "either, so that every text can be encoded. Convert the model again with a current converter."
        )
    return found


class _RanksOfTokens(Mapping[str, int]):
    """Ranks by text through the ids, as a dictionary takes long to make. ranks: by id, then one more; -1 for none."""

    def __init__(self, ids: Mapping[str, int], ranks: list[int]) -> None:
        self._ids = ids
        self._ranks = ranks

    def get(self, text: str, default: Any = None) -> Any:
        """The rank of a text, or the default."""
        rank = self._ranks[self._ids.get(text, -1)]
        return default if rank < 0 else rank

    def __getitem__(self, text: str) -> int:
        if self._ranks[self._ids[text]] < 0:
            raise KeyError(text)
        return self._ranks[self._ids[text]]

    def __iter__(self) -> Iterator[str]:
        return (text for text, token_id in self._ids.items() if self._ranks[token_id] >= 0)

    def __len__(self) -> int:
        return sum(self._ranks[token_id] >= 0 for token_id in self._ids.values())


class SentencePieceEncoder(SubwordEncoder):
    """Merges by score, as SentencePiece and llama.cpp do, with bytes for what no token covers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.adds_space = vocabulary.flags.get("add_space_prefix", True)
        self._adds_if_none = vocabulary.flags.get("add_space_prefix_if_none", False)
        self._byte_ids = _byte_token_ids(vocabulary)

    @cached_property
    def _ranks(self) -> Mapping[str, int]:
        """The rank of a score in descending order: equal scores share a rank, as they share a priority.

        A token whose score is minus infinity is made by no merge.
        """
        import numpy as np

        scores = self._vocabulary.scores
        assert scores is not None, "this kind always has scores"
        order = np.unique(-scores, return_inverse=True)[1]
        order[np.isneginf(scores)] = -1
        return _RanksOfTokens(self._ids, [*order.tolist(), -1])

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text; a space comes first where it starts a run and the file adds one."""
        text = self._with_space(text) if is_run_start else text
        pattern = self._word_pattern
        return self._encode_marked(text, pattern.findall if pattern else lambda marked: [marked])

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text part by part."""
        # What is compiled is loaded when a long text comes, not with every tokenizer.
        from localinfer.models.text.long_text import encode_marked

        text = self._with_space(text) if is_run_start else text
        return encode_marked(self._table, text, splits_words=self._word_pattern is not None)

    def _with_space(self, text: str) -> str:
        has_one = self._adds_if_none and text.startswith(" ")
        return " " + text if self.adds_space and not has_one else text

    @cached_property
    def _table(self) -> SymbolTable:
        from localinfer.models.text.long_text import SymbolTable

        table = SymbolTable(self._vocabulary.tokens, self._ids, _weakly(self._expand))
        table.merge_results(self._ranks)
        return table

    @cached_property
    def _word_pattern(self) -> re.Pattern[str] | None:
        """The split into words, or None where some token reaches from one word into the next.

        Without such a token no merge crosses a word's start, so words are independent of each other.
        """
        space_inside = re.compile(f"[^{SPACE_MARK}\0]{SPACE_MARK}")
        if any(space_inside.search("\0".join(piece)) for piece in pieces(self._ids)):
            return None
        return re.compile(f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+")

    def _encode_word(self, word: str) -> list[int]:
        return self._ids_of(merge_by_rank(list(word), self._ranks, ""))


class BytePairEncoder(SubwordEncoder):
    """Merges by rank inside the words of the pre-tokenizer that the file names."""

    adds_space = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._rule = rule = pre_tokenizer_rule(vocabulary.pre_tokenizer, vocabulary.known)
        self.adds_bos = rule.adds_bos
        self._separator = " " if vocabulary.merge_texts else ""
        missing = [byte for byte, character in enumerate(BYTE_CHARACTERS) if character not in self._ids]
        self._loses_bytes = not rule.is_raw and self._unknown is None and bool(missing)
        # Bytes C0, C1 and F5 to FF occur in no text.
        needed = [byte for byte in missing if byte not in (0xC0, 0xC1) and byte < 0xF5]
        if rule.is_raw:
            self._byte_ids = _byte_token_ids(vocabulary)
        elif self._loses_bytes and needed:
            warnings.warn(
                f"tokenizer.ggml.tokens lacks tokens for {len(needed)} of 256 bytes (first: {needed[0]}); text with "
                "these bytes loses them. Convert the model again with a current converter.",
                TokenizerWarning,
                stacklevel=3,
            )

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """Kimi K2 files carry no merges: there, as in tiktoken, a token's id is its rank."""
        return self._vocabulary.merges or self._ids

    @cached_property
    def _split(self) -> Callable[[str], list[str]]:
        return build_splitter(self._rule)

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text."""
        if self._rule.is_raw and self._rule.escapes_spaces:
            return self._encode_marked(text, self._split)
        return self._encode_words(self._split(text))

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text part by part."""
        from localinfer.models.text.long_text import encode_split

        rule = self._rule
        table, splitter = self._tables
        return encode_split(table, splitter, text, is_raw=rule.is_raw, escapes_spaces=rule.escapes_spaces)

    def fewest_ids(self, text: str) -> int:
        """Return a number of ids that the text has at least; 0 where bytes may be lost."""
        return 0 if self._loses_bytes else super().fewest_ids(text)

    @cached_property
    def _tables(self) -> tuple[SymbolTable, LongTextSplitter]:
        from localinfer.models.text.long_text import LongTextSplitter, SymbolTable

        table = SymbolTable(self._vocabulary.tokens, self._ids, _weakly(self._expand))
        take = table.merge_strings if self._separator else table.merge_results
        take(self._ranks, self._is_whole if self._rule.ignores_merges or self._rule.is_raw else None)
        return table, LongTextSplitter(self._rule)

    def _is_whole(self, word: str) -> bool:
        """Return whether a word that is a token needs no merging."""
        return self._rule.ignores_merges or (self._rule.is_raw and word.strip("\n") == "")

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes a token stands for.

        A character outside the byte-level alphabet (some vocabularies store added tokens as plain text)
        gives its own UTF-8.
        """
        if not self._rule.is_raw:
            found = (_TO_BYTE.get(character) or character.encode("utf-8", "surrogateescape") for character in token)
            return b"".join(found)
        return super().token_bytes(token) if self._rule.escapes_spaces else token.encode("utf-8", "surrogateescape")

    def many_token_bytes(self, tokens: list[str]) -> list[bytes]:
        if self._rule.is_raw:
            return super().many_token_bytes(tokens)
        try:
            joined = "".join(tokens).translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:
            return super().many_token_bytes(tokens)
        # Each character has become one byte.
        ends = list(accumulate(map(len, tokens), initial=0))
        return [joined[start:end] for start, end in pairwise(ends)]

    def _encode_word(self, word: str) -> list[int]:
        if not self._rule.is_raw:
            word = word.encode("utf-8").decode("latin-1").translate(_TO_CHARACTER)
        if word in self._ids and self._is_whole(word):
            return [self._ids[word]]
        return self._ids_of(merge_by_rank(list(word), self._ranks, self._separator))

    def _expand(self, symbol: str) -> list[int]:
        return self._fallback(symbol) if self._rule.is_raw else self._encode_characters(symbol)

    def _encode_characters(self, symbol: str) -> list[int]:
        """Return ids for a merge whose result text must not become: one for each of its characters."""
        found = (self._ids.get(character, self._unknown) for character in symbol)
        return [token_id for token_id in found if token_id is not None]


WORD_END = "</w>"
"""Mark behind the last symbol of a word in the tokens of CLIP."""
CLIP_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""Pattern of words in CLIP; what it does not match, white space, is lost."""


class WordEndEncoder(BytePairEncoder):
    """Merges by rank inside words whose last symbol is marked, in small letters, as CLIP reads texts.

    Texts are short: a long one is encoded as any other.
    """

    @cached_property
    def _split(self) -> Callable[[str], list[str]]:
        from tokenizers import Regex, normalizers, pre_tokenizers

        written = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        words = pre_tokenizers.Split(Regex(CLIP_PATTERN), "removed", invert=True)
        cut = pre_tokenizers.Sequence([words, pre_tokenizers.Split(Regex(GPT2_PATTERN), "isolated")])
        return lambda text: [word for word, _ in cut.pre_tokenize_str(written.normalize_str(text))]

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text, all at once."""
        yield self.encode(text, is_run_start)

    def fewest_ids(self, text: str) -> int:
        """Return 0: white space is lost."""
        return 0

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes a token stands for, with a space behind the end of a word."""
        found = super().token_bytes(token.removesuffix(WORD_END))
        return found + b" " if token.endswith(WORD_END) else found

    def many_token_bytes(self, tokens: list[str]) -> list[bytes]:
        return list(map(self.token_bytes, tokens))

    def _encode_word(self, word: str) -> list[int]:
        symbols = list(word.encode("utf-8").decode("latin-1").translate(_TO_CHARACTER))
        symbols[-1] += WORD_END
        return self._ids_of(merge_by_rank(symbols, self._ranks, self._separator))


LONGEST_WORD = 100
"""Characters of a word in BERT's own code, in every published tokenizer.json of this kind; llama.cpp has no limit."""


class WordPieceEncoder(SubwordEncoder):
    """Longest match from the left inside each word, on text normalized as BERT does.

    Words come with "▁" before them, as GGUF writes this kind (it drops the "##" of what follows). A longer word than
    LONGEST_WORD is unknown where the vocabulary says so ("limits_words").
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        # Longest first, by the first two characters, so that few are tried in vain.
        lengths: dict[str, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        if self._unknown is None:
            raise TokenizerError(
                "tokenizer.ggml.unknown_token_id is missing; wanted the id that stands for words outside the "
                "vocabulary. Convert the model again with a current converter."
            )
        self._lowers = vocabulary.flags.get("normalizer.lowercase", True)
        self._strips_accents = vocabulary.flags.get("normalizer.strip_accents", self._lowers)
        self._limits_words = vocabulary.flags.get("limits_words", False)

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text."""
        return [token_id for word in self._words(text) for token_id in self._encode_word(SPACE_MARK + word)]

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text part by part; white space parts words before and after normalization."""
        start = 0
        while start < len(text):
            found = _ASCII_SPACE.search(text, start + _PART)
            end = len(text) if found is None else found.end()
            yield self.encode(text[start:end], is_run_start)
            start = end

    def fewest_ids(self, text: str) -> int:
        """Return 0: a word of any length may be one unknown token."""
        return 0

    def _encode_word(self, word: str) -> list[int]:
        assert self._unknown is not None, "checked when the encoder is made"
        if self._limits_words and len(word) - len(SPACE_MARK) > LONGEST_WORD:
            return [self._unknown]
        ids: list[int] = []
        start = 0
        while start < len(word):
            size, token_id = self._longest_at(word, start)
            if not size:
                return [self._unknown]
            ids.append(token_id)
            start += size
        return ids

    def _longest_at(self, word: str, start: int) -> tuple[int, int]:
        """Return the length and id of the longest token that stands there; length 0 if none does."""
        for first in (word[start : start + 2], word[start]):
            for size in self._lengths.get(first, ()):
                token_id = self._ids.get(word[start : start + size])
                if token_id is not None and start + size <= len(word):
                    return size, token_id
        return 0, -1

    def _words(self, text: str) -> list[str]:
        if self._strips_accents:
            text = unicodedata.normalize("NFD", text)
        dropped = {"Cc", "Cf", "Co"} | ({"Mn"} if self._strips_accents else set())
        spaced: list[str] = []
        for character in text:
            category = unicodedata.category(character)
            # Other control characters are not white space to BERT, though some are to Python.
            if character.isspace() and (category != "Cc" or character in "\t\n\r"):
                spaced.append(" ")
            elif character == "\ufffd" or category in dropped:
                continue
            elif category[0] == "P" or (category[0] == "S" and character < "\x7f") or _IDEOGRAPH.match(character):
                spaced.append(f" {character} ")
            else:
                spaced.append(character)
        joined = "".join(spaced)
        # Each character by itself: where a word ends does not matter, as it does to Greek in `str.lower`.
        return ("".join(map(str.lower, joined)) if self._lowers else joined).split()


_ASCII_SPACE = re.compile(r"[ \t\n\r]")
# What BERT treats as a word of its own.
_IDEOGRAPH = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b920-\U0002ceaf\U0002f800-\U0002fa1f]"
)


class TokenizerWarning(UserWarning):
    """The tokenizer works, but may not be the one the model was trained with."""


class DigitGroups(Record):
    """A step that cuts every run of digits matching `pattern` into threes, counted from its end.

    A regular expression can say the same with a look-ahead over the rest of the run, but then takes
    quadratic time on a long one.
    """

    pattern: str


class PreTokenizerRule(Record):
    """Word splitting of one family of vocabularies.

    A word that is a token as a whole skips the merges where `ignores_merges` holds. Where `is_raw`
    holds, tokens are plain UTF-8 instead of the byte-level alphabet, and where `escapes_spaces` does,
    "▁" stands for a space in them. `adds_bos` is what holds where a file does not say.
    """

    steps: tuple[str | DigitGroups, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_raw: bool = False
    escapes_spaces: bool = False


def _characters(ranges: str) -> str:
    """Return the inside of a character class from hexadecimal code points and ranges."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split())


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
"""Pattern of words in GPT-2, and in every byte-level step that names no other."""
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _contraction_first(digits: str, word: str = _WORD, symbols: str = _SYMBOLS, rest: str = _LINES) -> str:
    return "|".join((_CONTRACTION, word, digits, symbols, rest))


_LLAMA3 = _contraction_first(r"\p{N}{1,3}")
_QWEN2 = _contraction_first(r"\p{N}")


def _cased(digits: str, contraction: str, symbols_end: str = r"[\r\n/]*", without: str = "") -> str:
    """Return the o200k shape: a word is capitals then small letters, so that camelCase splits."""
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for case in (r"Lu}\p{Lt", "Ll"))
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
    return "|".join((words, digits, rf" ?[^\s\p{{L}}\p{{N}}]+{symbols_end}", _LINES))


_O200K = _cased(r"\p{N}{1,3}", _CONTRACTION + "?")
_CJK = f"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_ASCII_SYMBOL_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3_MAIN = _ASCII_SYMBOL_WORD + r"| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES
_BLOOM = " ?[^(" + r"\s" + "|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
# (?<!\s) keeps the search linear: otherwise every space of a long run scans the rest of it in vain.
_TRAILING_SPACES = r"(?<!\s)\s+$"

_CASED_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1"
    " 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77"
    " 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE"
    " 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124"
    " 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3"
    " A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A"
    " 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_PUNCTUATION = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_CJK = f"[{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_YOUTU_SCRIPTS = "|".join(
    f"[{_characters(ranges)}]+"
    for ranges in (
        "AC00-D7A3 3131-318E",
        "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F",
        "3105-312F",
        "4E00-9FA5 3040-309F 30A0-30FF",
    )
)
_AFMOE_SCRIPTS = _characters(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F"
    " AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_JAIS2_SPACES = "|".join([*(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"])


def _rule(*steps: str | DigitGroups, **options: bool) -> PreTokenizerRule:
    return PreTokenizerRule(steps, **options)


_RULES: dict[str, PreTokenizerRule] = {
    "default": _rule(r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", _THREE_DIGITS),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _rule(
        _LLAMA3, ignores_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": _rule(_LLAMA3),
    "jais-2": _rule(_contraction_first(r"\p{N}{1,3}", rest=r"\s*[\r\n]+|" + _JAIS2_SPACES)),
    "minicpm5": _rule(r"\p{N}{1,3}", _contraction_first(r"\p{N}+"), ignores_merges=True),
    "deepseek-llm": _rule(
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
        _TRAILING_SPACES,
        _DEEPSEEK_CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": _rule(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _rule(r"\p{N}{1,3}", _CJK, _DEEPSEEK3_MAIN),
    "spark2_5": _rule(r"\p{N}{1,3}", _CJK, _ASCII_SYMBOL_WORD + r"| ?[\p{P}\p{S}]+|[\r\n]|" + _SPACES, r"\p{N}"),
    "youtu": _rule(_YOUTU_SCRIPTS, _cased(r"\p{N}", _CONTRACTION + "?"), ignores_merges=True),
    "falcon": _rule(_PUNCTUATION, GPT2_PATTERN, _THREE_DIGITS),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _rule(r"\p{N}", GPT2_PATTERN),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en"
        " jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling"
    ): _rule(GPT2_PATTERN),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2"): _rule(_QWEN2),
    "qwen35": _rule(
        _contraction_first(r"\p{N}", word=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
    ),
    "ufakzeka": _rule("|".join((_WORD, r"\p{N}", _SYMBOLS, _LINES))),
    "poro-chat bloom gpt3-finnish": _rule(_BLOOM),
    "viking": _rule(_BLOOM, r"\p{N}"),
    "tekken": _rule(_cased(r"\p{N}", ""), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _rule(_O200K),
    "granite-embed-multi-97m": _rule(_O200K, ignores_merges=True),
    "tiny_aya cohere2moe": _rule(DigitGroups(r"(?<!\d)\d++(?!\w)"), _O200K),
    "kimi-k2": _rule(r"\p{Han}+|" + _cased(r"\p{N}{1,3}", _CONTRACTION + "?", r"[\r\n]*", without=r"&&[^\p{Han}]")),
    "superbpe": _rule(r"\p{N}+", DigitGroups(r"\d+")),
    "afmoe": _rule(DigitGroups(r"\p{N}+"), f"[{_AFMOE_SCRIPTS}]+", _DEEPSEEK3_MAIN),
    "bailingmoe bailingmoe2 llada-moe": _rule(
        "|".join((r"'(?i:[sdmt]|ll|ve|re)", _WORD, r"\p{N}", _SYMBOLS, r"\s*[\r\n]", _SPACES))
    ),
    "seed-coder": _rule(_contraction_first(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}]+")),
    "laguna": _rule(r"[^\n]+|\n+", _QWEN2),
    "exaone-moe": _rule(
        _contraction_first(
            r"\p{N}",
            word=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            rest=r"\s*[\r\n]|" + _SPACES,
        )
    ),
    "chameleon": _rule(
        r"<sentinel:[0-9]+>",
        r"IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2_PATTERN,
        adds_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": _rule(r"[^\n]+|\n+", adds_bos=True, is_raw=True, escapes_spaces=True),
    "sarvam-moe": _rule(r"[^\n]+|\n+", is_raw=True, escapes_spaces=True),
    "whitespace": _rule(r"\S+", is_raw=True),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names.split()}


def pre_tokenizer_rule(name: str | None, known: KnownVocabulary | None = None) -> PreTokenizerRule:
    """Return the rule of that name; warn and return the default where it is missing or unknown.

    known: the published vocabulary that it is, by which the warning says the right name.
    """
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = "missing" if name is None else f"{name[:40]!r}, which this version does not know"
    way_out = "Convert the model again with a current converter."
    if known is not None:
        way_out = (
            f"The vocabulary is {known.owner}: set tokenizer.ggml.pre={known.pre_tokenizer} (--set), or get a current "
            "conversion."
        )
    warnings.warn(
        f"tokenizer.ggml.pre is {found}; the default word splitting is used, so ids may differ from those the "
        f"model was trained with and its answers may be worse. {way_out}",
        TokenizerWarning,
        stacklevel=2,
    )
    return PRE_TOKENIZERS["default"]


def build_splitter(rule: PreTokenizerRule) -> Callable[[str], list[str]]:
    """Return the function that cuts a text into the words of that rule; they join to the text again."""
    from tokenizers import Regex, pre_tokenizers

    # Patterns between two groupings of digits run as one sequence.
    stages: list[tuple[pre_tokenizers.PreTokenizer, bool]] = []
    for groups_digits, steps in groupby(rule.steps, lambda step: isinstance(step, DigitGroups)):
        patterns = [step.pattern if isinstance(step, DigitGroups) else step for step in steps]
        cutters = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        if groups_digits:
            stages += [(cutter, True) for cutter in cutters]
        else:
            stages.append((pre_tokenizers.Sequence(cutters), False))

    def split(text: str) -> list[str]:
        words = [text]
        for cutter, groups_digits in stages:
            words = [word for whole in words for word, _ in cutter.pre_tokenize_str(whole)]
            if groups_digits:
                words = [group for word in words for group in _group_digits(word)]
        return words

    return split


def _group_digits(word: str) -> list[str]:
    """Cut a word that is all digits into threes from its end; return any other as it is."""
    if not all(unicodedata.category(character).startswith("N") for character in word):
        return [word]
    first = len(word) % 3 or 3
    return [word[:first], *(word[start : start + 3] for start in range(first, len(word), 3))]
