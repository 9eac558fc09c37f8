"""Text to token ids for the three kinds of vocabulary, special tokens aside."""

import re
import unicodedata
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np

from localinfer.errors import TokenizerError
from localinfer.models.byte_level import BYTE_CHARACTERS, bytes_to_characters, characters_to_bytes
from localinfer.models.pre_tokenizers import build_splitter, pre_tokenizer_rule
from localinfer.models.token_merging import merge_by_rank
from localinfer.models.vocabulary import TokenizerWarning, Vocabulary

# The character that stands for a space inside SentencePiece tokens.
SPACE_MARK = "▁"
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
        self._vocabulary = vocabulary
        self._separator = " " if vocabulary.merge_texts else ""
        self._unknown = vocabulary.role_ids.get("unknown")
        self._fallback = _ByteFallback(vocabulary) if rule.is_raw else None
        if self._fallback is None and self._unknown is None:
            self._warn_about_missing_bytes()
        self._memory = _WordMemory()

    def _warn_about_missing_bytes(self) -> None:
        missing = [byte for byte, character in enumerate(BYTE_CHARACTERS) if character not in self._ids]
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
        is_whole = self._rule.ignores_merges or (self._rule.is_raw and word.strip("\n") == "")
        if is_whole and word in self._ids:
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
        self._longest = max(map(len, vocabulary.ids), default=0)
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

    def token_bytes(self, token: str) -> bytes:
        """Return the UTF-8 of a token; one that starts a word starts with a space."""
        return token.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                token_id = self._ids.get(word[start:end])
                if token_id is not None:
                    ids.append(token_id)
                    start = end
                    break
            else:
                return [self._unknown]
        return ids

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
