"""Text to token ids and back, from a model file's metadata alone.

`StreamDecoder` decodes ids as they arrive, whole characters only, and `StopMatcher` passes text on up to a stop string;
neither holds back more text than needed.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import merge
from itertools import chain
from typing import NamedTuple

from localinfer.errors import ContextLengthError, RequestError, TokenIdError, TokenizerError
from localinfer.models.text.encoders import (
    LONG_STRETCH,
    LONG_TEXT,
    SubwordEncoder,
)
from localinfer.models.text.vocabulary import (
    FillInTokens,
    TokenType,
    Vocabulary,
    find_fill_in_tokens,
    read_vocabulary,
    vocabulary_difference,
    vocabulary_fingerprint,
)
from localinfer.system.pieces import pieces
from localinfer.system.registry import Registry
from localinfer.types import UnitsCallback

_ENCODERS: Registry[str, type[SubwordEncoder]] = Registry(
    {
        "spm": "localinfer.models.text.encoders:SentencePieceEncoder",
        "bpe": "localinfer.models.text.encoders:BytePairEncoder",
        "wordpiece": "localinfer.models.text.encoders:WordPieceEncoder",
        "unigram": "localinfer.models.text.unigram:UnigramEncoder",
        "word_end": "localinfer.models.text.encoders:WordEndEncoder",
    }
)
# Answers of `ids_containing` that are kept; callers choose the texts.
_MOST_SEARCHES = 64
# Characters that are looked at together.
_CHECKED = 1 << 20
# Those whose bytes are not always what the encoder says of their text.
_SPELLED_TYPES = (TokenType.BYTE, TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
_ASCII_SPACES = " \t\n\v\f\r"
# Phi-3 keeps the white space after these.
_KEEPS_SPACES_AFTER = ("<unk>", "<s>", "<|endoftext|>")


class Tokenizer:
    """The tokenizer of one model file; threads may share it.

    `kind` is "spm", "bpe", "wordpiece", "unigram" or "word_end". `bos_token_id`, `eos_token_id` and `unknown_token_id`
    are None where the vocabulary has no such token; `eog_token_ids` are all ids that end a generation. `adds_bos` says
    whether `add_special` starts a sequence with the BOS token. `strips_space_at_start` says that the vocabulary puts a
    space before a text, which decoding takes off again (or a text's own, where a folder puts none before that).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        roles = vocabulary.role_ids
        self._vocabulary = vocabulary
        self._types: list[int] = vocabulary.types.tolist()
        self._encoder = _ENCODERS[vocabulary.kind](vocabulary)
        self.kind = vocabulary.kind
        self.vocab_size = len(vocabulary.tokens)
        self.bos_token_id = roles.get("bos")
        self.eos_token_id = roles.get("eos")
        self.unknown_token_id = roles.get("unknown")
        self.eog_token_ids = vocabulary.end_of_generation_ids
        self.strips_space_at_start = self._encoder.adds_space
        self.adds_space_once = vocabulary.flags.get("add_space_prefix_once", False)
        self._before = self._added_ids("bos", self._encoder.adds_bos)
        self._after = self._added_ids("eos", self._encoder.adds_eos)
        if self.kind == "wordpiece":
            # BERT reads every text between [CLS] and [SEP].
            self._after = self._role_id("seperator")
        self.adds_bos = bool(self._before)
        self._containing: dict[str, frozenset[int]] = {}
        self._token_bytes: dict[int, bytes] = {}

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Vocabulary]]:
        """Be pickled as the vocabulary it was built from."""
        return type(self), (self._vocabulary,)

    def __copy__(self) -> Tokenizer:
        return self

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary that it was built from."""
        return self._vocabulary

    @property
    def ids_after(self) -> list[int]:
        """Ids that `add_special` puts after a text."""
        return list(self._after)

    @property
    def ids_between(self) -> list[int]:
        """Ids between the end of the first text of a pair and the second, as rerankers read pairs.

        [CLS] query [SEP] document [SEP] has none; <s> query </s></s> document </s> one more end (RoBERTa).
        """
        separator = self._vocabulary.role_ids.get("seperator")
        return ([separator] if separator is not None else list(self._after)) if self._doubles_ends else []

    @property
    def second_type(self) -> int:
        """The token type of the second text of a pair and of what ends it: 1 as BERT has it, 0 as RoBERTa."""
        return int(self._vocabulary.flags.get("pairs_have_types", not self._doubles_ends))

    @property
    def _doubles_ends(self) -> bool:
        """Return whether two ends stand between the texts of a pair."""
        found = self._vocabulary.flags.get("add_sep_token")
        return bool(self._before) and self.token_text(self._before[0]) == "<s>" if found is None else found

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], told: UnitsCallback | None = None) -> Tokenizer:
        """Build the tokenizer from GGUF metadata, the values decoded (arrays as NumPy arrays or lists).

        told: as in `read_vocabulary`.
        Raises: TokenizerError naming the key at fault, what it holds, what was wanted and the way out;
            also for a file without a vocabulary.
        Warns: TokenizerWarning where the file leaves the way of splitting words open.
        """
        return cls(read_vocabulary(metadata, told))

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = False, *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a text.

        `add_special` puts BOS before and EOS after, as the file or its kind says. Without
        `parse_special`, the spelling of a control token is text like any other. `max_tokens`: what a
        context holds, so that a long text that cannot fit is refused as soon as that is certain; a
        short one is encoded all the same, for its caller to tell its length.
        Raises: RequestError if the text is not a string of whole Unicode characters; ContextLengthError
            for a long text of more than `max_tokens`; TokenizerError where it leads to a damaged normalization.
        """
        return self.encode_segments([(text, parse_special)], add_special, max_tokens=max_tokens)

    def encode_segments(
        self,
        segments: Sequence[tuple[str, bool]],
        add_special: bool = False,
        *,
        continues_run: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of texts in a row, each with its own `parse_special`; errors and `max_tokens` as `encode`.

        The ids are those of the joined text, except that a control token is taken only where no part of
        its spelling lies in a segment that does not allow it. `continues_run`: plain text stands before
        the first segment, so that none of the vocabulary's spaces goes in between.
        """
        parts = self.encode_parts(segments, add_special, continues_run=continues_run, max_tokens=max_tokens)
        return list(chain.from_iterable(parts))

    def encode_parts(
        self,
        segments: Sequence[tuple[str, bool]],
        add_special: bool = False,
        *,
        continues_run: bool = False,
        max_tokens: int | None = None,
    ) -> Iterator[list[int]]:
        """Yield the ids that `encode_segments` gives, part by part: those of a long text need not be held at once."""
        text = "".join(segment for segment, _ in segments)
        _check_characters(text)
        last = self._after if add_special else []
        if add_special and self._before:
            yield list(self._before)
        count = len(self._before) if add_special else 0
        is_long = len(text) >= LONG_TEXT
        limit = max_tokens - len(last) if is_long and max_tokens is not None else sys.maxsize
        stretch_size = LONG_STRETCH if is_long else sys.maxsize
        position = 0
        strips = False
        for spelling in chain(self._find_tokens(text, segments), [Spelling(len(text), len(text), -1)]):
            plain = text[position : spelling.start]
            if strips:
                plain = plain.lstrip(_ASCII_SPACES)
            if plain:
                starts_run = not self.adds_space_once if position else not continues_run
                if len(plain) < stretch_size:
                    part = self._encoder.encode(plain, is_run_start=starts_run)
                    count += len(part)
                    yield part
                else:
                    if count + self._encoder.fewest_ids(plain) > limit:
                        raise _too_long(max_tokens)
                    for part in self._encoder.encode_long(plain, is_run_start=starts_run):
                        count += len(part)
                        if count > limit:
                            break
                        yield part
            if spelling.token_id >= 0:
                count += 1
                yield [spelling.token_id]
                strips = spelling.token_id in self._stripping_ids
            if count > limit:
                raise _too_long(max_tokens)
            position = spelling.end
        if last:
            yield list(last)

    def difference_from(self, other: Tokenizer) -> str | None:
        """Say why some text has other ids in the other tokenizer, or return None, which proves that none has."""
        difference = vocabulary_difference(self._vocabulary, other._vocabulary)
        if difference is None and self.strips_space_at_start != other.strips_space_at_start:
            return "one puts a space before a text and the other does not"
        return difference

    def decode(
        self, token_ids: Iterable[int], *, skip_special: bool = True, previous_token_id: int | None = None
    ) -> str:
        """Return the text of token ids, without control tokens unless `skip_special` is false.

        Bytes that are not UTF-8 become U+FFFD. `previous_token_id`: see StreamDecoder.
        Raises: TokenIdError if an id is not in the vocabulary.
        """
        decoder = StreamDecoder(self, skip_special=skip_special, previous_token_id=previous_token_id)
        return "".join([*map(decoder.push, token_ids), decoder.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for, its space included; a special token's are its spelling."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._spelled_bytes(token_id)
        return found

    def many_token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return what `token_bytes` gives for each of some ids of the vocabulary, in a third of the time."""
        tokens, types = self._vocabulary.tokens, self._types
        found = self._encoder.many_token_bytes([tokens[token_id] for token_id in token_ids])
        for index, token_id in enumerate(token_ids):
            if types[token_id] in _SPELLED_TYPES:
                found[index] = self._spelled_bytes(token_id)
        self._token_bytes.update(zip(token_ids, found, strict=True))
        return found

    def vocabulary_bytes(self) -> list[bytes]:
        """Return what `token_bytes` gives for each id, in a tenth of the time of one by one; other threads run."""
        import numpy as np

        found = [text for texts in pieces(self._vocabulary.tokens) for text in self._encoder.many_token_bytes(texts)]
        is_spelled = np.isin(self._vocabulary.types, _SPELLED_TYPES)
        for token_id in np.flatnonzero(is_spelled).tolist():
            found[token_id] = self._spelled_bytes(token_id)
        return found

    def _spelled_bytes(self, token_id: int) -> bytes:
        text = self.token_text(token_id)
        match self._types[token_id]:
            case TokenType.BYTE:
                return bytes([int(text[3:5], 16)])
            case TokenType.CONTROL | TokenType.UNKNOWN:
                return text.encode("utf-8", "surrogateescape")
            case TokenType.USER_DEFINED if not self.strips_space_at_start:
                return text.encode("utf-8", "surrogateescape")
            case _:
                return self._encoder.token_bytes(text)

    def token_text(self, token_id: int) -> str:
        """Return a token as the file spells it.

        Raises: TokenIdError if the id is not in the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise TokenIdError(
                f"token id {token_id} is not in the vocabulary; wanted 0 to {self.vocab_size - 1}. Use ids that this "
                "model's tokenizer gave."
            )
        return self._vocabulary.tokens[token_id]

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that the file spells so, or None."""
        found = self._vocabulary.ids.get(text)
        return self._vocabulary.special_ids.get(text) if found is None else found

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a control or unknown token: no text of its own."""
        return self._types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def starts_text_after(self, token_id: int) -> bool:
        """Return whether plain text after this token starts a new run: it is cut out before words are."""
        return self._types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)

    def ids_containing(self, text: str) -> frozenset[int]:
        """Return the ids of all tokens, special ones apart, in whose text this one occurs."""
        found = self._containing.get(text)
        if found is None:
            wanted = text.encode("utf-8", "surrogateescape")
            found = frozenset(
                token_id
                for token_id in range(self.vocab_size)
                if not self.is_special(token_id) and wanted in self.token_bytes(token_id)
            )
            if len(self._containing) >= _MOST_SEARCHES:
                self._containing = {}
            self._containing[text] = found
        return found

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of the control and unknown tokens by their spelling."""
        return self._vocabulary.special_ids

    @property
    def fill_in_tokens(self) -> FillInTokens | None:
        """The tokens by which the model fills in between two texts; None if it cannot."""
        return find_fill_in_tokens(self.special_ids, self._vocabulary.role_ids)

    @cached_property
    def special_spellings(self) -> SpellingFinder:
        """Finds spellings of control and unknown tokens in a text."""
        return SpellingFinder(self._vocabulary.special_ids)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides which ids a text gets: 64 hexadecimal digits."""
        return vocabulary_fingerprint(self._vocabulary)

    def _added_ids(self, role: str, default: bool) -> list[int]:
        """Return what `add_special` adds for a role: its id where the file, or else the kind, adds it."""
        wanted = self._vocabulary.flags.get(f"add_{role}_token")
        if wanted:
            return self._role_id(role)
        return self._role_id(role) if wanted is None and default and role in self._vocabulary.role_ids else []

    def _role_id(self, role: str) -> list[int]:
        token_id = self._vocabulary.role_ids.get(role)
        if token_id is None:
            raise TokenizerError(
                f"tokenizer.ggml.{role}_token_id is missing, but this vocabulary adds that token to every text; "
                "wanted its id. Convert the model again with a current converter."
            )
        return [token_id]

    @cached_property
    def _user_spellings(self) -> SpellingFinder:
        import numpy as np

        tokens = self._vocabulary.tokens
        user_defined = np.flatnonzero(self._vocabulary.types == TokenType.USER_DEFINED).tolist()
        return SpellingFinder({tokens[token_id]: token_id for token_id in user_defined})

    @cached_property
    def _stripping_ids(self) -> frozenset[int]:
        """The control tokens that take the white space after them along.

        Not the user-defined ones, which any text may hold: no text may lose a character.
        """
        if not self._vocabulary.strips_after_special:
            return frozenset()
        return frozenset(i for text, i in self.special_ids.items() if text not in _KEEPS_SPACES_AFTER)

    def _find_tokens(self, text: str, segments: Sequence[tuple[str, bool]]) -> Iterator[Spelling]:
        """Yield the tokens that are cut out of a text before words are, in order and without overlap.

        As in llama.cpp, longer spellings are taken first wherever they stand, not the leftmost first.
        """
        found = self._user_spellings.find(text)
        if any(parses for _, parses in segments):
            found = merge(found, self._open_spellings(text, segments))
        tied: list[Spelling] = []
        end = 0
        # Spellings compete only with those that they overlap, or that overlap these.
        for spelling in found:
            if tied and spelling.start >= end:
                yield from self._without_overlap(tied)
                tied = []
            tied.append(spelling)
            end = max(end, spelling.end)
        yield from self._without_overlap(tied)

    def _open_spellings(self, text: str, segments: Sequence[tuple[str, bool]]) -> Iterator[Spelling]:
        """Yield the spellings of control tokens no part of which lies in a segment that does not allow them."""
        closed: list[tuple[int, int]] = []
        start = 0
        for segment, parses in segments:
            if segment and not parses:
                closed.append((start, start + len(segment)))
            start += len(segment)
        first = 0
        for spelling in self.special_spellings.find(text):
            while first < len(closed) and closed[first][1] <= spelling.start:
                first += 1
            if first == len(closed) or spelling.end <= closed[first][0]:
                yield spelling

    def _without_overlap(self, found: list[Spelling]) -> list[Spelling]:
        if len(found) < 2:
            return found
        tokens = self._vocabulary.tokens
        found.sort(key=lambda spelling: (-len(tokens[spelling.token_id].encode("utf-8", "surrogateescape")), spelling))
        first = min(spelling.start for spelling in found)
        taken = bytearray(max(spelling.end for spelling in found) - first)
        chosen: list[Spelling] = []
        for spelling in found:
            start, end = spelling.start - first, spelling.end - first
            if taken.find(1, start, end) < 0:
                taken[start:end] = b"\1" * (end - start)
                chosen.append(spelling)
        return sorted(chosen)


def _too_long(max_tokens: int | None) -> ContextLengthError:
    return ContextLengthError(
        f"the prompt has more than {max_tokens} tokens, but the context holds {max_tokens}; shorten it, "
        "load the model with a larger context_length, or allow context_shift",
        context_length=max_tokens,
    )


def _check_characters(text: str) -> None:
    # In pieces: the UTF-8 of a long text is not needed, and other threads run between two.
    for start in range(0, len(text), _CHECKED):
        piece = text if len(text) <= _CHECKED else text[start : start + _CHECKED]
        try:
            piece.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a character, U+{ord(piece[error.start]):04X}, at index {start + error.start}; "
                "wanted whole Unicode characters. Decode its source as UTF-8 with errors='replace'."
            ) from error


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
        tokenizer: Tokenizer,
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

        Raises: TokenIdError if the id is not in the vocabulary.
        """
        tokenizer = self._tokenizer
        spelled = tokenizer.token_bytes(token_id)
        if tokenizer.starts_text_after(token_id):
            self._strips_next = self._strips
            if self._skip_special and tokenizer.is_special(token_id) and token_id not in self._shown_ids:
                return ""
        elif self._strips_next and spelled:
            spelled = spelled.removeprefix(b" ")
            self._strips_next = False
        if not self._is_inside_character and spelled.isascii():
            return spelled.decode("ascii")
        text = self._decoder.decode(spelled)
        self._is_inside_character = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        """Return what is left: U+FFFD where the stream ended inside a character."""
        self._is_inside_character = False
        return self._decoder.decode(b"", final=True)


class _Progress:
    """Part of one stop string that the text's end matches (Knuth, Morris, Pratt 1977)."""

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


# Characters of a spelling that a first search looks for, and how many different ones it tells apart.
_BEGINNING = 5
_MOST_BEGINNINGS = 64
_SEARCHED = 1 << 18
"""Characters that are searched at a time."""
_FEW_FIRSTS = 8


class Spelling(NamedTuple):
    """A spelling of a special token: text[start:end]."""

    start: int
    end: int
    token_id: int


class SpellingFinder:
    """Finds every occurrence of some texts, overlapping ones too.

    Time grows with the length of the text and the number of different lengths that begin alike, not
    with the number of texts: a vocabulary may hold thousands of special tokens.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        shortest: dict[str, int] = {}
        for text in ids:
            shortest[text[0]] = min(len(text), shortest.get(text[0], _BEGINNING))
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[: shortest[text[0]]], set()).add(len(text))
        self._lengths = {beginning: sorted(found, reverse=True) for beginning, found in lengths.items()}
        self._beginning = _beginnings(self._lengths, shortest)
        self._firsts = "".join(shortest)

    def ignoring_case(self) -> SpellingFinder:
        """Return the finder for lower-cased text."""
        return SpellingFinder({text.lower(): token_id for text, token_id in self._ids.items()})

    def find(self, text: str) -> Iterator[Spelling]:
        """Yield the spellings from left to right, at one position the longest first."""
        if self._beginning is None:
            return
        # In pieces: other threads run Python only between two searches.
        for first in range(0, len(text), _SEARCHED):
            end = first + _SEARCHED
            if len(self._firsts) <= _FEW_FIRSTS and all(text.find(one, first, end) < 0 for one in self._firsts):
                continue
            for match in self._beginning.finditer(text, first, end + _BEGINNING):
                start = match.start()
                if start >= end:
                    break
                for length in self._lengths.get(match[1], ()):
                    token_id = self._ids.get(text[start : start + length])
                    if token_id is not None and start + length <= len(text):
                        yield Spelling(start, start + length, token_id)


def _beginnings(texts: Iterable[str], lengths: Mapping[str, int]) -> re.Pattern[str] | None:
    """Return the pattern of where one of some texts begins; those of one first character are equally long."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    if not rests:
        return None
    ways = []
    for first, found in rests.items():
        # Alternatives are tried one by one, so of many only the length is matched.
        rest = f".{{{lengths[first] - 1}}}" if len(found) > _MOST_BEGINNINGS else "|".join(map(re.escape, found))
        ways.append(f"{re.escape(first)}(?:{rest})")
    firsts = "".join(map(re.escape, rests))
    return re.compile(f"(?=[{firsts}])(?=({'|'.join(ways)}))", re.DOTALL)
