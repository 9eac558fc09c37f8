"""Text to token ids for the three kinds of vocabulary, special tokens aside."""

import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localinfer.errors import TokenizerError
from localinfer.models.text.byte_level import BYTE_CHARACTERS, bytes_to_characters, characters_to_bytes
from localinfer.models.text.merging import merge_by_rank
from localinfer.models.text.splitting import build_splitter, pre_tokenizer_rule
from localinfer.models.text.vocabulary import TokenizerWarning, Vocabulary

if TYPE_CHECKING:
    from localinfer.models.text.long_text import SymbolTable
    from localinfer.models.text.word_splitting import LongTextSplitter

# The character that stands for a space inside SentencePiece tokens.
SPACE_MARK = "▁"
LONG_TEXT = 1 << 14
"""Characters from which on a text is worth the tables that are made for it."""
LONG_PIECE = 1 << 9
"""Characters from which on a piece of a long text is worth a call."""
_PART = 1 << 16
# Words up to this long are remembered; at the limit of entries the memory starts afresh.
_MAX_REMEMBERED_LENGTH = 64
_MAX_REMEMBERED_WORDS = 1 << 16


class SubwordEncoder(Protocol):
    """What a tokenizer asks of each kind.

    `adds_space`: a space is put before text that starts a run of plain text. `adds_bos`: a sequence
    starts with the BOS token where the file does not say.
    """

    adds_space: bool
    adds_bos: bool

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of a piece of plain text, in which nothing is special."""
        ...

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the same ids part by part, in time and memory that suit a text of any length."""
        ...

    def fewest_ids(self, text: str) -> int:
        """Return a number of ids that the text has at least, by its length alone."""
        ...

    def token_bytes(self, token: str) -> bytes:
        """Return what a token of ordinary text stands for."""
        ...


class _WordMemory:
    """The ids of words met before."""

    def __init__(self) -> None:
        self._ids: dict[str, list[int]] = {}

    def get(self, word: str) -> list[int] | None:
        return self._ids.get(word)

    def put(self, word: str, ids: list[int]) -> None:
        if len(word) <= _MAX_REMEMBERED_LENGTH:
            if len(self._ids) >= _MAX_REMEMBERED_WORDS:
                self._ids = {}
            self._ids[word] = ids


class _ByteFallback:
    """What becomes of a character that no token holds: its bytes' tokens, else the unknown token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._unknown = vocabulary.role_ids.get("unknown")
        self._byte_ids = list(vocabulary.byte_ids)
        for byte, token_id in enumerate(vocabulary.byte_ids):
            if token_id < 0:
                self._byte_ids[byte] = vocabulary.ids.get(f"<0x{byte:02X}>", -1)
        if self._unknown is None and -1 in self._byte_ids:
            raise TokenizerError(
                f"tokenizer.ggml.tokens has no token <0x{self._byte_ids.index(-1):02X}> and the file names no unknown "
                "token; wanted either, so that every text can be encoded. Convert the model again with a current "
                "converter."
            )

    def encode(self, symbol: str) -> list[int]:
        ids: list[int] = []
        for character in symbol:
            found = [self._byte_ids[byte] for byte in character.encode("utf-8")]
            ids += found if min(found) >= 0 or self._unknown is None else [self._unknown]
        return ids


class SentencePieceEncoder:
    """Merges by score, as SentencePiece and llama.cpp do, with bytes for what no token covers."""

    adds_bos = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        assert vocabulary.scores is not None, "this kind always has scores"
        self.adds_space = vocabulary.flags.get("add_space_prefix", True)
        self._ids = vocabulary.ids
        self._tokens = vocabulary.tokens
        self._longest = max(map(len, vocabulary.ids), default=1)
        self._fallback = _ByteFallback(vocabulary)
        self._scores = vocabulary.scores
        self._memory = _WordMemory()

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """A score's place in descending order: equal scores share a rank, as they share a priority."""
        places = np.unique(-self._scores, return_inverse=True)[1]
        ids = np.fromiter(self._ids.values(), np.int64, len(self._ids))
        return dict(zip(self._ids, places[ids].tolist(), strict=True))

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text; a space comes first where it starts a run and the file wants one."""
        if is_run_start and self.adds_space:
            text = " " + text
        ids: list[int] = []
        # A literal mark would read as a space when decoded, so it goes byte by byte.
        for index, part in enumerate(text.split(SPACE_MARK)):
            if index:
                ids += self._fallback.encode(SPACE_MARK)
            marked = part.replace(" ", SPACE_MARK)
            for word in self._word_pattern.findall(marked) if self._word_pattern else [marked]:
                found = self._memory.get(word)
                if found is None:
                    found = self._encode_word(word)
                    self._memory.put(word, found)
                ids += found
        return ids

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text part by part."""
        # What is compiled is loaded when a long text comes, not with every tokenizer.
        from localinfer.models.text.long_text import encode_marked

        text = " " + text if is_run_start and self.adds_space else text
        return encode_marked(self._table, text, splits_words=self._word_pattern is not None)

    def fewest_ids(self, text: str) -> int:
        """Return a number of ids that the text has at least: no token covers more characters than the longest."""
        return -(-len(text) // self._longest)

    @cached_property
    def _table(self) -> "SymbolTable":
        from localinfer.models.text.long_text import SymbolTable

        table = SymbolTable(self._tokens, self._ids, self._fallback.encode)
        table.merge_results(self._ranks)
        return table

    def token_bytes(self, token: str) -> bytes:
        """Return the UTF-8 of a token, its marks turned into spaces."""
        return token.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")

    @cached_property
    def _word_pattern(self) -> re.Pattern[str] | None:
        """The split into words, or None where some token reaches from one word into the next.

        Without such a token no merge crosses a word's start, so words are independent of each other.
        """
        if re.search(f"[^{SPACE_MARK}\0]{SPACE_MARK}", "\0".join(self._ids)):
            return None
        return re.compile(f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+")

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for symbol in merge_by_rank(list(word), self._ranks, ""):
            token_id = self._ids.get(symbol)
            if token_id is None:
                ids += self._fallback.encode(symbol)
            else:
                ids.append(token_id)
        return ids


class BytePairEncoder:
    """Merges by rank inside the words of the pre-tokenizer that the file names."""

    adds_space = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        rule = pre_tokenizer_rule(vocabulary.pre_tokenizer)
        self._rule = rule
        self.adds_bos = rule.adds_bos
        self._ids = vocabulary.ids
        self._tokens = vocabulary.tokens
        self._vocabulary = vocabulary
        self._separator = " " if vocabulary.merge_texts else ""
        self._unknown = vocabulary.role_ids.get("unknown")
        self._fallback = _ByteFallback(vocabulary) if rule.is_raw else None
        missing = [byte for byte, character in enumerate(BYTE_CHARACTERS) if character not in self._ids]
        self._loses_bytes = self._fallback is None and self._unknown is None and bool(missing)
        if self._loses_bytes:
            self._warn_about_missing_bytes(missing)
        self._memory = _WordMemory()

    def _warn_about_missing_bytes(self, missing: list[int]) -> None:
        # Bytes C0, C1 and F5 to FF occur in no text.
        needed = [byte for byte in missing if byte not in (0xC0, 0xC1) and byte < 0xF5]
        if needed:
            warnings.warn(
                f"tokenizer.ggml.tokens lacks tokens for {len(needed)} of 256 bytes (first: {needed[0]}); text with "
                "these bytes loses them. Convert the model again with a current converter.",
                TokenizerWarning,
                stacklevel=4,
            )

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """Kimi K2 files carry no merges: there, as in tiktoken, a token's id is its rank."""
        return self._vocabulary.merges or self._vocabulary.ids

    @cached_property
    def _split(self) -> Callable[[str], list[str]]:
        return build_splitter(self._rule)

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text."""
        if self._fallback is None or not self._rule.escapes_spaces:
            return self._encode_part(text)
        ids: list[int] = []
        for index, part in enumerate(text.split(SPACE_MARK)):
            if index:
                ids += self._fallback.encode(SPACE_MARK)
            ids += self._encode_part(part.replace(" ", SPACE_MARK))
        return ids

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text part by part."""
        from localinfer.models.text.long_text import encode_split

        rule = self._rule
        table, splitter = self._tables
        return encode_split(table, splitter, text, is_raw=rule.is_raw, escapes_spaces=rule.escapes_spaces)

    def fewest_ids(self, text: str) -> int:
        """Return a number of ids that the text has at least: no token covers more characters than the longest."""
        return 0 if self._loses_bytes else -(-len(text) // self._longest)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=1)

    @cached_property
    def _tables(self) -> "tuple[SymbolTable, LongTextSplitter]":
        from localinfer.models.text.long_text import SymbolTable
        from localinfer.models.text.word_splitting import LongTextSplitter

        expand = self._encode_characters if self._fallback is None else self._fallback.encode
        table = SymbolTable(self._tokens, self._ids, expand)
        take = table.merge_strings if self._separator else table.merge_results
        take(self._ranks, self._is_whole if self._rule.ignores_merges or self._rule.is_raw else None)
        return table, LongTextSplitter(self._rule)

    def _is_whole(self, word: str) -> bool:
        """Whether a word that is a token needs no merging."""
        return self._rule.ignores_merges or (self._rule.is_raw and word.strip("\n") == "")

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes a token stands for."""
        if not self._rule.is_raw:
            return characters_to_bytes(token)
        if self._rule.escapes_spaces:
            token = token.replace(SPACE_MARK, " ")
        return token.encode("utf-8", "surrogateescape")

    def _encode_part(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._split(text):
            found = self._memory.get(word)
            if found is None:
                found = self._encode_word(word if self._rule.is_raw else bytes_to_characters(word))
                self._memory.put(word, found)
            ids += found
        return ids

    def _encode_word(self, word: str) -> list[int]:
        if word in self._ids and self._is_whole(word):
            return [self._ids[word]]
        ids: list[int] = []
        for symbol in merge_by_rank(list(word), self._ranks, self._separator):
            token_id = self._ids.get(symbol)
            if token_id is not None:
                ids.append(token_id)
            elif self._fallback is not None:
                ids += self._fallback.encode(symbol)
            else:
                ids += self._encode_characters(symbol)
        return ids

    def _encode_characters(self, symbol: str) -> list[int]:
        """Return ids for a merge whose result text must not become: one for each of its characters."""
        found = (self._ids.get(character, self._unknown) for character in symbol)
        return [token_id for token_id in found if token_id is not None]


class WordPieceEncoder:
    """Longest match from the left inside each word, on text normalized as BERT does.

    Words come with "▁" before them, as GGUF writes this kind (it drops the "##" of what follows).
    """

    adds_space = True
    adds_bos = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        # Longest first, by the first two characters, so that few are tried in vain.
        lengths: dict[str, set[int]] = {}
        for token in vocabulary.ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        unknown = vocabulary.role_ids.get("unknown")
        if unknown is None:
            raise TokenizerError(
                "tokenizer.ggml.unknown_token_id is missing; wanted the id that stands for words outside the "
                "vocabulary. Convert the model again with a current converter."
            )
        self._unknown = unknown
        self._lowers = vocabulary.flags.get("normalizer.lowercase", True)
        self._strips_accents = vocabulary.flags.get("normalizer.strip_accents", self._lowers)

    def encode(self, text: str, is_run_start: bool) -> list[int]:
        """Return the ids of plain text."""
        ids: list[int] = []
        for word in self._words(text):
            ids += self._encode_word(SPACE_MARK + word)
        return ids

    def encode_long(self, text: str, is_run_start: bool) -> Iterator[list[int]]:
        """Yield the ids of plain text part by part; white space parts words before and after normalization."""
        for part in _parts_at_spaces(text):
            yield self.encode(part, is_run_start)

    def fewest_ids(self, text: str) -> int:
        """Return 0: a word of any length may be one unknown token."""
        return 0

    def token_bytes(self, token: str) -> bytes:
        """Return the UTF-8 of a token; one that starts a word starts with a space."""
        return token.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")

    def _encode_word(self, word: str) -> list[int]:
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
        dropped = {"Cc", "Cf", "Co", "Cn"} | ({"Mn"} if self._strips_accents else set())
        spaced: list[str] = []
        for character in text:
            category = unicodedata.category(character)
            if character.isspace():
                spaced.append(" ")
            elif character == "\ufffd" or category in dropped:
                continue
            elif category.startswith("P") or (category.startswith("S") and character < "\x7f") or _is_han(character):
                spaced.append(f" {character} ")
            else:
                spaced.append(character)
        joined = "".join(spaced)
        return (joined.lower() if self._lowers else joined).split()


def _parts_at_spaces(text: str) -> Iterator[str]:
    """Cut a text at ASCII white space into parts that are not much longer than a stretch."""
    start = 0
    while start < len(text):
        found = _ASCII_SPACE.search(text, start + _PART)
        end = len(text) if found is None else found.end()
        yield text[start:end]
        start = end


_ASCII_SPACE = re.compile(r"[ \t\n\r]")
_HAN_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def _is_han(character: str) -> bool:
    """Whether BERT treats this ideograph as a word of its own."""
    return character >= "\u3400" and any(first <= ord(character) <= last for first, last in _HAN_RANGES)


def build_encoder(vocabulary: Vocabulary) -> SubwordEncoder:
    """Return the encoder for a vocabulary's kind."""
    kinds: dict[str, Callable[[Vocabulary], SubwordEncoder]] = {
        "spm": SentencePieceEncoder,
        "bpe": BytePairEncoder,
        "wordpiece": WordPieceEncoder,
    }
    return kinds[vocabulary.kind](vocabulary)
