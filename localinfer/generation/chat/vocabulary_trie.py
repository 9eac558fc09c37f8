"""The trie of a model's vocabulary, and the grammar matchers over it, by llguidance.

Through llguidance's C interface (llguidance.h, github.com/guidance-ai/llguidance), which its Python extension exports
too: a foreign call of `ctypes` releases the interpreter's lock, which llguidance's own classes hold while they build
the trie of a vocabulary (0.6 s at 128,000 entries). Calls of microseconds keep the lock, which is cheaper than to wait
for it again. Where there is no such interface, through its Python classes, with the same masks.
"""

import ctypes
import json
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ConstraintError
from localinfer.generation.chat.grammar_mask import GrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from localinfer.models.text.tokenizer import Tokenizer


logger = logging.getLogger(__name__)

_DEFAULT_LIMITS = (2000, 1_000_000, 200_000, 50_000, 250_000, 500_000, True, True)
"""Values that llguidance writes into `Limits`, by which the layout is recognized."""

TokenizeFunction = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
)
"""LlgTokenizeFn: user data, the text and its bytes, the ids and their room; returns how many there are."""


class Limits(ctypes.Structure):
    """LlgParserLimits."""

    _fields_ = (
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class MatcherInit(ctypes.Structure):
    """LlgConstraintInit, and room for what later versions may add: their defaults are written there."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", Limits),
        ("room", ctypes.c_uint64 * 64),
    )


class TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2, of which llguidance reads as many bytes as struct_size says."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_void_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", TokenizeFunction),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class MatcherLibrary:
    """The functions of llguidance.h that matchers need, under its names without `llg_`.

    The first group releases the interpreter's lock, the second keeps it.
    """

    new_tokenizer_v2: Any
    free_tokenizer: Any
    new_matcher: Any
    clone_matcher: Any
    free_matcher: Any
    matcher_compute_mask_into: Any
    matcher_compute_ff_tokens: Any

    constraint_init_set_defaults: Any
    matcher_get_mask_byte_size: Any
    matcher_validate_tokens: Any
    matcher_consume_token: Any
    matcher_rollback: Any
    matcher_get_error: Any


_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_CODE = ctypes.c_int32
_RELEASING: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new_tokenizer_v2": (_POINTER, (ctypes.POINTER(TokenizerInit), ctypes.c_char_p, _SIZE)),
    "free_tokenizer": (None, (_POINTER,)),
    "new_matcher": (_POINTER, (ctypes.POINTER(MatcherInit), ctypes.c_char_p, ctypes.c_char_p)),
    "clone_matcher": (_POINTER, (_POINTER,)),
    "free_matcher": (None, (_POINTER,)),
    "matcher_compute_mask_into": (_CODE, (_POINTER, _POINTER, _SIZE)),
    "matcher_compute_ff_tokens": (_CODE, (_POINTER, _POINTER, _SIZE)),
}
_KEEPING: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "constraint_init_set_defaults": (None, (ctypes.POINTER(MatcherInit), _POINTER)),
    "matcher_get_mask_byte_size": (_SIZE, (_POINTER,)),
    "matcher_validate_tokens": (_CODE, (_POINTER, _POINTER, _SIZE)),
    "matcher_consume_token": (_CODE, (_POINTER, ctypes.c_uint32)),
    "matcher_rollback": (_CODE, (_POINTER, _SIZE)),
    "matcher_get_error": (ctypes.c_char_p, (_POINTER,)),
}


@cache
def matcher_library() -> MatcherLibrary | None:
    """The interface of the installed llguidance; None, with a warning, if it is not the one that is known here."""
    from llguidance import _lib

    path = _lib.__file__
    try:
        functions = _declared(ctypes.CDLL(path), _RELEASING) | _declared(ctypes.PyDLL(path), _KEEPING)
    except (OSError, AttributeError) as error:
        logger.warning("the first constraint will stop all threads for a moment: llguidance's C interface: %s", error)
        return None
    library = MatcherLibrary(**functions)
    if not has_known_layout(library):
        logger.warning("the first constraint will stop all threads for a moment: llguidance's C interface has changed")
        return None
    return library


def _declared(library: ctypes.CDLL, signatures: dict[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    functions = {}
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"llg_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


def has_known_layout(library: MatcherLibrary) -> bool:
    """True if LlgConstraintInit, the one structure that does not tell its size, is laid out as declared here."""
    init = MatcherInit()
    library.constraint_init_set_defaults(ctypes.byref(init), ctypes.addressof(init))
    found = tuple(getattr(init.limits, field[0]) for field in Limits._fields_)
    has_flags = init.ff_tokens_ok or init.backtrack_ok
    return init.tokenizer == ctypes.addressof(init) and found == _DEFAULT_LIMITS and not has_flags


_LEXER_FUEL = 100_000
"""Nodes of regular expressions that are opened up at the start: a tenth of llguidance's default, some 0.1 s of work and
36 MB."""
_MOST_ITEMS_PER_STEP = 20_000
"""Of the parser's table: some 0.1 s of work, which only an endless or hostile grammar reaches."""
_CONTROL_MARK = b"\xff"
"""Prefix of the spelling of a control token in llguidance; no text has this byte."""
_MOST_FORCED = 1024
_ERROR_BYTES = 1024


class VocabularyTrie(Protocol):
    """Factory of the matchers of one vocabulary; threads may share it."""

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of a grammar in llguidance's form, or one that has an error."""
        ...


def build_trie(tokenizer: "Tokenizer") -> VocabularyTrie:
    """Build llguidance's view of a vocabulary: the bytes of each id, and which ids are control tokens.

    Raises: ConstraintError if no token ends a text, as a constrained text has to.
    """
    if not tokenizer.eog_token_ids:
        raise ConstraintError("the vocabulary has no token that ends a text, so none can be constrained")
    library = matcher_library()
    return ClassTrie(tokenizer) if library is None else ForeignTrie(tokenizer, library)


def _marked_bytes(tokenizer: "Tokenizer") -> list[bytes]:
    texts = tokenizer.vocabulary_bytes()
    for token_id in filter(tokenizer.is_special, range(len(texts))):
        if not texts[token_id].startswith(_CONTROL_MARK):
            texts[token_id] = _CONTROL_MARK + texts[token_id]
    return texts


class ForeignTrie:
    """A `VocabularyTrie` of the C interface."""

    def __init__(self, tokenizer: "Tokenizer", library: MatcherLibrary) -> None:
        self._library = library
        self._interruptions: list[BaseException] = []
        texts = _marked_bytes(tokenizer)
        lengths = np.fromiter(map(len, texts), np.uint32, len(texts))
        joined = b"".join(texts)
        first, *others = sorted(tokenizer.eog_token_ids)
        other_ends = np.array(others, np.uint32)
        # llguidance calls it as long as there is a matcher, and each matcher refers to this object.
        self._function = _tokenize_function(tokenizer, self._interruptions)
        init = TokenizerInit(
            struct_size=ctypes.sizeof(TokenizerInit),
            vocab_size=len(texts),
            tok_eos=first,
            token_lens=lengths.ctypes.data,
            token_bytes=ctypes.cast(ctypes.c_char_p(joined), ctypes.c_void_p),
            tokenize_assumes_string=True,
            tokenize_fn=self._function,
            tok_eos_extra=other_ends.ctypes.data if others else None,
            tok_eos_extra_count=len(others),
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._pointer = library.new_tokenizer_v2(ctypes.byref(init), error, _ERROR_BYTES)
        if not self._pointer:
            found = error.value.decode("utf-8", "replace")
            raise ConstraintError(f"this model's vocabulary cannot be used for constraints: {found}")
        weakref.finalize(self, library.free_tokenizer, self._pointer).atexit = False

    def matcher(self, grammar: str) -> "ForeignMatcher":
        init = MatcherInit()
        self._library.constraint_init_set_defaults(ctypes.byref(init), self._pointer)
        init.log_stderr_level = 0
        init.limits.initial_lexer_fuel = _LEXER_FUEL
        init.limits.step_max_items = _MOST_ITEMS_PER_STEP
        init.limits.verbose_errors = False
        if "\0" in grammar:
            # A text in C ends there; in JSON it is written otherwise.
            grammar = json.dumps({"grammars": [{"name": "lark_grammar", "lark_grammar": grammar}]})
        made = self._library.new_matcher(ctypes.byref(init), b"llguidance", grammar.encode("utf-8"))
        return ForeignMatcher(self, self._library, made)

    def raise_interruption(self) -> None:
        """Raise what came up while a text was encoded, such as a KeyboardInterrupt, which cannot pass foreign code."""
        if self._interruptions:
            raise self._interruptions.pop()


def _tokenize_function(tokenizer: "Tokenizer", interruptions: list[BaseException]) -> "ctypes._FuncPointer":
    """Callback of llguidance that encodes a text. It does not refer to the trie, whose memory would be freed late."""

    def tokenize(_: int | None, text: int, size: int, ids: int | None, capacity: int) -> int:
        try:
            found = _encode(tokenizer, ctypes.string_at(text, size))
            written = np.array(found[:capacity], np.uint32)
            if written.size:
                ctypes.memmove(ids or 0, written.ctypes.data, written.nbytes)
        except BaseException as error:
            interruptions.append(error)
            return 0
        return len(found)

    return TokenizeFunction(tokenize)


class ForeignMatcher:
    """A `GrammarMatcher` of the C interface, whose calls come one after the other whatever threads make them."""

    def __init__(self, trie: ForeignTrie, library: MatcherLibrary, pointer: int) -> None:
        self._trie = trie
        self._library = library
        self._pointer = pointer
        self._lock = threading.Lock()
        self._mask = np.empty(library.matcher_get_mask_byte_size(pointer), np.uint8)
        self._token = np.empty(1, np.uint32)
        self._forced = np.empty(_MOST_FORCED, np.uint32)
        weakref.finalize(self, library.free_matcher, pointer).atexit = False

    def copy(self) -> "ForeignMatcher":
        with self._lock:
            pointer = self._library.clone_matcher(self._pointer)
        return ForeignMatcher(self._trie, self._library, pointer)

    def mask(self) -> NDArray[np.uint8]:
        with self._lock:
            if self._library.matcher_compute_mask_into(self._pointer, self._mask.ctypes.data, self._mask.nbytes) < 0:
                self._mask[:] = 0
            return self._mask

    def consume(self, token_ids: Sequence[int]) -> int:
        with self._lock:
            for index, token_id in enumerate(token_ids):
                self._token[0] = token_id
                if self._library.matcher_validate_tokens(self._pointer, self._token.ctypes.data, 1) < 1:
                    return index
                if self._library.matcher_consume_token(self._pointer, token_id) < 0:
                    return index
        return len(token_ids)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        ids = np.array(token_ids, np.uint32)
        with self._lock:
            return max(0, int(self._library.matcher_validate_tokens(self._pointer, ids.ctypes.data, ids.size)))

    def rollback(self, count: int) -> None:
        with self._lock:
            self._library.matcher_rollback(self._pointer, count)

    def forced(self) -> list[int]:
        with self._lock:
            count = self._library.matcher_compute_ff_tokens(self._pointer, self._forced.ctypes.data, _MOST_FORCED)
            self._trie.raise_interruption()
            return [int(token_id) for token_id in self._forced[: max(0, count)]]

    def error(self) -> str | None:
        with self._lock:
            found: bytes | None = self._library.matcher_get_error(self._pointer)
        return None if found is None else found.decode("utf-8", "replace")


class ClassTrie:
    """A `VocabularyTrie` of llguidance's classes: no other thread runs Python while it is built."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(tokenizer.eog_token_ids)
        self._trie = LLTokenizer(TokenizerWrapper(_Wrapped(tokenizer, ends[0])), eos_token=ends)

    def matcher(self, grammar: str) -> "ClassMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            verbose_errors=False, initial_lexer_fuel=_LEXER_FUEL, step_max_items=_MOST_ITEMS_PER_STEP
        )
        return ClassMatcher(LLMatcher(self._trie, grammar, log_level=0, limits=limits))


class _Wrapped:
    """A tokenizer in the shape that llguidance's classes read."""

    def __init__(self, tokenizer: "Tokenizer", end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = _marked_bytes(tokenizer)
        self.special_token_ids: list[int] = []

    def __call__(self, text: str | bytes) -> list[int]:
        return _encode(self._tokenizer, text.encode("utf-8") if isinstance(text, str) else text)


class ClassMatcher:
    """A `GrammarMatcher` of llguidance's classes."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def copy(self) -> "ClassMatcher":
        return ClassMatcher(self._matcher.deep_copy())

    def mask(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)

    def consume(self, token_ids: Sequence[int]) -> int:
        return self._matcher.try_consume_tokens(list(token_ids))

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def error(self) -> str | None:
        return self._matcher.get_error() if self._matcher.is_error() else None


def _encode(tokenizer: "Tokenizer", text: bytes) -> list[int]:
    return tokenizer.encode_segments([(text.decode("utf-8"), False)], continues_run=True)
