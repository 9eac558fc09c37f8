"""llguidance's C interface (llguidance.h, github.com/guidance-ai/llguidance), which its Python extension exports too.

A foreign call of `ctypes` releases the interpreter's lock, which llguidance's own classes hold while they build the
trie of a vocabulary: 0.6 s at 128,000 entries. Calls of microseconds keep the lock, which is cheaper than to wait for
it again.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

_DEFAULT_LIMITS = (2000, 1_000_000, 200_000, 50_000, 250_000, 500_000, True, True)
"""What llguidance writes into `Limits`, by which the layout is recognized."""

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
    """Whether LlgConstraintInit, the one structure that does not tell its size, is laid out as declared here."""
    init = MatcherInit()
    library.constraint_init_set_defaults(ctypes.byref(init), ctypes.addressof(init))
    found = tuple(getattr(init.limits, field[0]) for field in Limits._fields_)
    has_flags = init.ff_tokens_ok or init.backtrack_ok
    return init.tokenizer == ctypes.addressof(init) and found == _DEFAULT_LIMITS and not has_flags
