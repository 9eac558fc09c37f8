"""The vocabulary of a model file: every tokenizer key of its metadata, read once and proven.

Nothing behind this file has to doubt its input: lengths agree, byte tokens are bytes, every special
id lies in the vocabulary, every merge ends in a token.
"""

from __future__ import annotations

import hashlib
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from localinfer.errors import TokenizerError
from localinfer.models.text.encoders import PRE_TOKENIZERS
from localinfer.models.text.known_vocabularies import KnownVocabulary, known_vocabulary
from localinfer.system.pieces import last_places, pieces
from localinfer.types import Record, UnitsCallback

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILL_IN_ROLES = ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")
"""Names in files; the last three are of older ones."""
_REPOSITORY = "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split()
_SEPARATOR = "<|file_sep|> <|file_separator|> <file_sep>".split()
# Converters leave many of these without a role or even a control type, so they go by their spelling,
# the same list that llama.cpp keeps. Not on it: </s>, an ordinary word of vocabularies with HTML.
_END_TEXTS = frozenset(
    (
        "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>"
        " <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>"
        " <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|>"
        " <fim-repo> <REPO> <reponame> <|file_sep|>"
    ).split()
)
FILL_IN_SPELLINGS = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>".split(),
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>".split(),
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split(),
)
"""Spellings of the tokens that stand before a text, before what follows it, and before what is to be filled in."""
_FILL_IN_TEXTS = frozenset().union(*FILL_IN_SPELLINGS)
CONTROL_TEXTS = _END_TEXTS | _FILL_IN_TEXTS
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

PREFIX = "tokenizer.ggml."
_WAY_OUT = "Convert the model again with a current converter, or run it with token ids only."
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# tokenizer.ggml.model -> how text becomes tokens.
_KINDS = {"llama": "spm", "gpt2": "bpe", "gemma4": "bpe", "bert": "wordpiece", "t5": "unigram", "clip": "word_end"}
KINDS = frozenset(_KINDS)
"""Values of tokenizer.ggml.model whose vocabularies can be built."""
_KNOWN_BUT_NOT_BUILT = dict(rwkv="RWKV", plamo2="PLaMo 2", hybriddna="DNA", whitespace="whitespace")
# Ids that hold where a file of that kind names none, if the text there is what is expected. "seperator"
# is how the GGUF key spells it.
_DEFAULT_IDS: dict[str, dict[str, tuple[int, str]]] = {
    "spm": {"bos": (1, "<s>"), "eos": (2, "</s>"), "unknown": (0, "<unk>")},
    "wordpiece": {"bos": (101, "[CLS]"), "seperator": (102, "[SEP]"), "unknown": (100, "[UNK]")},
    "unigram": {"eos": (1, "</s>"), "unknown": (2, "<unk>")},
    "bpe": {},
    "word_end": {},
}
# An id outside the vocabulary under these keys harms nothing: the model is never asked for them, or only to fill in,
# and published files carry such ids.
_UNUSED_IDS = ("padding", "mask", *FILL_IN_ROLES)
# Published files of these deny the BOS token that their models cannot do without.
_ALWAYS_WITH_BOS = ("gemma4", "granite-embed-multi-311m")
_FLAGS = (
    "add_bos_token add_eos_token add_sep_token add_space_prefix remove_extra_whitespaces normalizer.lowercase"
    " normalizer.strip_accents"
    # Not GGUF's: what tokenizer.json can say and GGUF cannot.
    " add_space_prefix_once add_space_prefix_if_none strips_after_special limits_words strips_left strips_right"
    " strips_before_map splits_at_white_space splits_words pairs_have_types squeezes_white_space"
).split()
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "seperator", "cls", "fim_pad", "fim_rep", "fim_sep")
_ARRAYS = (
    "model pre tokens token_type scores merges precompiled_charsmap end_of_generation_ids normalizer.steps".split()
)

TOKENIZER_KEYS = frozenset(
    f"{PREFIX}{key}" for key in (*_ARRAYS, *_FLAGS, *(f"{role}_token_id" for role in (*_ROLES, *_UNUSED_IDS)))
)
"""Every key that is read here."""

TOKEN_TYPES_KEY = f"{PREFIX}token_type_count"
"""Number of types of tokens that a model tells apart."""

_STEPS = 4


class TokenType(IntEnum):
    """Kind of token that an entry of `tokenizer.ggml.token_type` declares."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Old files declare no types at all.
_TYPE_BY_TEXT = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}


class Vocabulary(Record, kw_only=True):
    """Tokens and rules of one model file.

    `ids` maps the text of each token that text may turn into; `special_ids` that of the control and unknown tokens,
    which only their own spelling gives, and only where asked for. `charsmap` is a compiled normalization, uint8, or
    None. `byte_ids[b]` is the `<0xXX>` token of byte b, -1 where there is none. `merge_texts` are "left right" by rank.
    `scores` is None where the kind has no use for them. `normalizer_steps`: what is done to a text before the charsmap,
    see `unigram.py`.
    """

    kind: str
    pre_tokenizer: str | None
    tokens: list[str]
    types: NDArray[np.uint8]
    scores: NDArray[np.float32] | None
    charsmap: NDArray[np.uint8] | None
    normalizer_steps: tuple[str, ...]
    merge_texts: list[str]
    ids: dict[str, int]
    special_ids: dict[str, int]
    byte_ids: list[int]
    role_ids: Mapping[str, int]
    end_of_generation_ids: frozenset[int]
    flags: Mapping[str, bool]
    strips_after_special: bool

    @cached_property
    def merges(self) -> dict[str, int]:
        """The rank of each "left right"; made by the first text, as it takes longer than reading them."""
        ranks = last_places(self.merge_texts)
        if len(ranks) != len(self.merge_texts):
            ranks = {}
            for rank, merge in enumerate(self.merge_texts):
                ranks.setdefault(merge, rank)
        return ranks

    @cached_property
    def known(self) -> KnownVocabulary | None:
        """The published vocabulary that this one is, by its merges or its special tokens."""
        return known_vocabulary(self.merge_texts, len(self.tokens), ChainMap(self.special_ids, self.ids))


def read_vocabulary(metadata: Mapping[str, object], told: UnitsCallback | None = None) -> Vocabulary:
    """Read and check every tokenizer key.

    told: called with the steps done and their number; what it raises ends the reading.
    Raises: TokenizerError naming the key, what it holds, what was wanted and the way out.
    """
    model = _string(metadata, "model")
    if model is None:
        _refuse("model", "missing", "one of " + ", ".join(_KINDS))
    kind = _kind(model)
    pre_tokenizer = "gemma4" if model == "gemma4" else _string(metadata, "pre")
    tell = told or (lambda done, total: None)
    tell(0, _STEPS)
    tokens = _tokens(metadata)
    tell(1, _STEPS)
    ids = _token_ids(tokens)
    tell(2, _STEPS)
    types = _types(metadata, tokens)
    byte_ids = _byte_ids(tokens, types)
    if kind == "spm" or (pre_tokenizer in PRE_TOKENIZERS and PRE_TOKENIZERS[pre_tokenizer].is_raw):
        _declare_bytes(byte_ids, ids, types)
    for text in CONTROL_TEXTS:
        if text in ids:
            types[ids[text]] = TokenType.CONTROL
    roles = _role_ids(metadata, kind, tokens, types)
    _close_default_end(kind, tokens, types)
    end_of_generation = find_end_of_generation(ids, roles, lambda index: types[index] == TokenType.CONTROL)
    end_of_generation |= _further_ends(metadata, len(tokens))
    if not end_of_generation and kind not in ("wordpiece", "unigram"):
        _refuse(
            "eos_token_id",
            "missing, and no token has the spelling of a known end-of-text token",
            "the id of the token that ends a text",
        )
    _make_control(end_of_generation, tokens, types)
    tell(3, _STEPS)
    merge_texts = _merge_texts(metadata, ids, pre_tokenizer, tell) if kind in ("bpe", "word_end") else []
    tell(_STEPS, _STEPS)
    special_ids = _take_special(tokens, types, ids)
    flags = _flags(metadata)
    if pre_tokenizer in _ALWAYS_WITH_BOS:
        flags["add_bos_token"] = "bos" in roles
    name = metadata.get("general.name")
    # Phi-3 was trained with the white space after its markers removed; its GGUF files only say so by name.
    is_phi3 = isinstance(name, str) and ("phi-3" in name.lower() or "phi3" in name.lower())
    return Vocabulary(
        kind=kind,
        pre_tokenizer=pre_tokenizer,
        tokens=tokens,
        types=types,
        scores=_scores(metadata, len(tokens)) if kind in ("spm", "unigram") else None,
        charsmap=_charsmap(metadata) if kind == "unigram" else None,
        normalizer_steps=_normalizer_steps(metadata) if kind == "unigram" else (),
        merge_texts=merge_texts,
        ids=ids,
        special_ids=special_ids,
        byte_ids=byte_ids,
        role_ids=roles,
        end_of_generation_ids=end_of_generation,
        flags=flags,
        strips_after_special=is_phi3 or flags.get("strips_after_special", False),
    )


def _refuse(key: str, found: str, wanted: str) -> NoReturn:
    raise TokenizerError(f"{PREFIX}{key} is {found}; wanted {wanted}. {_WAY_OUT}")


def _kind(model: str) -> str:
    if model in _KINDS:
        return _KINDS[model]
    wanted = "one of " + ", ".join(_KINDS)
    if model in _KNOWN_BUT_NOT_BUILT:
        _refuse("model", f"{model!r}, the {_KNOWN_BUT_NOT_BUILT[model]} kind that this version does not build", wanted)
    if model in ("none", "no_vocab"):
        _refuse("model", f"{model!r}: the file holds no vocabulary", wanted)
    _refuse("model", f"{model[:40]!r}, which is not known", wanted)


def _describe(value: object) -> str:
    import numpy as np

    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype}"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    return f"{value!r:.60} ({type(value).__name__})"


def _string(metadata: Mapping[str, object], key: str) -> str | None:
    value = metadata.get(PREFIX + key)
    if value is not None and not isinstance(value, str):
        _refuse(key, _describe(value), "a string")
    return value


def _strings(metadata: Mapping[str, object], key: str) -> list[str] | None:
    """Return an array of strings; bytes that are not UTF-8 become surrogate escapes."""
    if PREFIX + key not in metadata:
        return None
    # The reader refuses an entry that is not UTF-8, which a token may be.
    from localinfer.quant.gguf.reader import Metadata

    if isinstance(metadata, Metadata) and metadata.stored(PREFIX + key).count is not None:
        return metadata.texts(PREFIX + key)
    value = metadata[PREFIX + key]
    found = set(map(type, value)) if isinstance(value, list | tuple) else {type(value)}
    if isinstance(value, list | tuple) and found <= {bytes}:
        return [entry.decode("utf-8", "surrogateescape") for entry in value]
    if isinstance(value, list | tuple) and found <= {str}:
        try:
            "".join(value).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            half = f"a list of strings with half a character, U+{ord(error.object[error.start]):04X}"
            _refuse(key, half, "strings of whole Unicode characters")
        return list(value)
    _refuse(key, _describe(value), "an array of strings")


def _normalizer_steps(metadata: Mapping[str, object]) -> tuple[str, ...]:
    steps = tuple(_strings(metadata, "normalizer.steps") or ())
    if steps:
        from localinfer.models.text.normalizer import is_step

        for step in steps:
            if not is_step(step):
                _refuse("normalizer.steps", f"a list with {step[:40]!r}", "names of steps that are known")
    return steps


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = _strings(metadata, "tokens")
    if not tokens:
        _refuse("tokens", "missing" if tokens is None else "empty", "an array of token strings")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    return tokens


def _token_ids(tokens: list[str]) -> dict[str, int]:
    ids = last_places(tokens)
    if len(ids) != len(tokens):
        repeated = next(index for index, token in enumerate(tokens) if ids[token] != index)
        found = f"a list whose entries {repeated} and {ids[tokens[repeated]]} are both {tokens[repeated][:40]!r}"
        _refuse("tokens", found, "tokens that differ")
    return ids


def _numbers(metadata: Mapping[str, object], key: str, count: int, kinds: str, wanted: str) -> NDArray[Any]:
    import numpy as np

    value = metadata[PREFIX + key]
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        _refuse(key, _describe(value), wanted)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        _refuse(key, _describe(value), wanted)
    if array.size != count:
        _refuse(key, f"an array of {array.size} values", f"{count}, one for each token")
    return array


def _types(metadata: Mapping[str, object], tokens: list[str]) -> NDArray[np.uint8]:
    import numpy as np

    if PREFIX + "token_type" not in metadata:
        guessed = (TokenType.BYTE if _BYTE_TOKEN.fullmatch(token) else _TYPE_BY_TEXT.get(token) for token in tokens)
        return np.array([TokenType.NORMAL if guess is None else guess for guess in guessed], np.uint8)
    wanted = f"integers from 0 to {max(TokenType)}"
    types = _numbers(metadata, "token_type", len(tokens), "iu", wanted)
    if int(types.min()) < 0 or int(types.max()) > max(TokenType):
        _refuse("token_type", f"an array with values from {types.min()} to {types.max()}", wanted)
    return types.astype(np.uint8)


def _scores(metadata: Mapping[str, object], count: int) -> NDArray[np.float32]:
    import numpy as np

    if PREFIX + "scores" not in metadata:
        _refuse("scores", "missing", "one number for each token, which decides what merges first")
    scores = _numbers(metadata, "scores", count, "fiu", "an array of numbers")
    if np.isnan(scores).any():
        _refuse("scores", f"not a number at entry {int(np.isnan(scores).argmax())}", "numbers")
    with np.errstate(over="ignore"):
        return scores.astype(np.float32)


def _charsmap(metadata: Mapping[str, object]) -> NDArray[np.uint8] | None:
    import numpy as np

    key, wanted = "precompiled_charsmap", "an array of bytes"
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        _refuse(key, _describe(value), wanted)
    is_bytes = (
        array.ndim == 1 and array.dtype.kind in "iu" and (not array.size or -128 <= array.min() <= array.max() < 256)
    )
    if not is_bytes:
        _refuse(key, _describe(value), wanted)
    return (array.astype(np.int64) & 255).astype(np.uint8) if array.size else None


def _byte_ids(tokens: list[str], types: NDArray[np.uint8]) -> list[int]:
    """Return the id of each byte's `<0xXX>` token, -1 where there is none."""
    import numpy as np

    byte_ids = [-1] * 256
    for index in np.flatnonzero(types == TokenType.BYTE).tolist():
        match = _BYTE_TOKEN.fullmatch(tokens[index])
        if match is None:
            found = f"{tokens[index][:40]!r} at id {index}, declared to be a byte"
            _refuse("tokens", found, "byte tokens spelled <0x00> to <0xFF>")
        byte = int(match[1], 16)
        if byte_ids[byte] >= 0:
            _refuse("tokens", f"two tokens for byte {byte} (ids {byte_ids[byte]} and {index})", "one for each byte")
        byte_ids[byte] = index
    return byte_ids


def _declare_bytes(byte_ids: list[int], ids: Mapping[str, int], types: NDArray[np.uint8]) -> None:
    """Take a token that is spelled as a byte for that byte, where no other is declared to be it.

    Texts are encoded with it, so that decoding must give the byte back, and not the spelling.
    """
    for byte, declared in enumerate(byte_ids):
        index = ids.get(f"<0x{byte:02X}>", -1)
        if declared < 0 <= index and types[index] not in (TokenType.CONTROL, TokenType.UNKNOWN):
            types[index] = TokenType.BYTE
            byte_ids[byte] = index


def _role_ids(metadata: Mapping[str, object], kind: str, tokens: list[str], types: NDArray[np.uint8]) -> dict[str, int]:
    """Return the ids of the tokens that have a part to play: "bos", "eos", "unknown" and so on."""
    import numpy as np

    wanted = f"a token id from 0 to {len(tokens) - 1}"
    roles: dict[str, int] = {}
    for role, (index, text) in _DEFAULT_IDS[kind].items():
        if index < len(tokens) and tokens[index] == text:
            roles[role] = index
    for role in (*_ROLES, *_UNUSED_IDS):
        key = f"{role}_token_id"
        value = metadata.get(PREFIX + key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            _refuse(key, _describe(value), wanted)
        if 0 <= value < len(tokens):
            roles[role] = int(value)
        elif role not in _UNUSED_IDS:
            _refuse(key, str(value), wanted)
    if "cls" in roles:
        roles.setdefault("bos", roles["cls"])
    for role in ("bos", "eos", "eot", "eom"):
        if kind != "wordpiece" and role in roles and types[roles[role]] == TokenType.BYTE:
            _refuse(f"{role}_token_id", f"{roles[role]}, a byte token", "a control token")
    return roles


def _close_default_end(kind: str, tokens: list[str], types: NDArray[np.uint8]) -> None:
    """Take the end that a kind has by itself for one where the file declares it a word of texts, as Phi-3's do.

    Elsewhere in a vocabulary the same spelling is a word: </s> strikes text out in HTML.
    """
    index, text = _DEFAULT_IDS[kind].get("eos", (len(tokens), ""))
    if index < len(tokens) and tokens[index] == text and types[index] == TokenType.USER_DEFINED:
        types[index] = TokenType.CONTROL


def _make_control(ends: Iterable[int], tokens: list[str], types: NDArray[np.uint8]) -> None:
    """Let no text turn into a token that ends a reply, whatever the file declares it to be.

    A single character stays what it is, since texts could not be encoded without it.
    """
    for index in ends:
        if len(tokens[index]) > 1 and types[index] not in (TokenType.BYTE, TokenType.UNKNOWN):
            types[index] = TokenType.CONTROL


def _further_ends(metadata: Mapping[str, object], count: int) -> frozenset[int]:
    """Ids that end a generation beyond those GGUF has keys for; only folders have such a list."""
    value = metadata.get(PREFIX + "end_of_generation_ids", ())
    if not isinstance(value, list | tuple) or not all(type(index) is int and 0 <= index < count for index in value):
        _refuse("end_of_generation_ids", _describe(value), f"token ids from 0 to {count - 1}")
    return frozenset(value)


def _flags(metadata: Mapping[str, object]) -> dict[str, bool]:
    import numpy as np

    flags: dict[str, bool] = {}
    for key in _FLAGS:
        value = metadata.get(PREFIX + key)
        if value is None:
            continue
        if not isinstance(value, bool | np.bool_):
            _refuse(key, _describe(value), "true or false")
        flags[key] = bool(value)
    return flags


def _merge_texts(
    metadata: Mapping[str, object], ids: Mapping[str, int], pre_tokenizer: str | None, tell: UnitsCallback
) -> list[str]:
    merges = _strings(metadata, "merges")
    if merges is None:
        if pre_tokenizer == "kimi-k2":
            return []
        _refuse("merges", "missing", 'an array of "left right" pairs')
    # Thousands of joins at once, in C; the exact search for an offender runs only when there is one.
    for piece in pieces(merges):
        tell(3, _STEPS)
        if not _are_merges(piece, ids):
            _refuse_other(merges, ids)
    return merges


def _refuse_other(merges: list[str], ids: Mapping[str, int]) -> None:
    """Raise TokenizerError for the first text that is no merge, if there is one."""
    for rank, merge in enumerate(merges):
        left, _, right = merge[1:].partition(" ")
        if not right or merge[0] + left + right not in ids:
            found = f"{merge[:60]!r} at entry {rank}"
            _refuse("merges", found, 'a "left right" pair whose join is a token')


def _are_merges(texts: list[str], ids: Mapping[str, int]) -> bool:
    """Return whether each text is two parts whose join is a token."""
    joined = "\0".join(texts)
    results = joined.replace(" ", "").split("\0")
    is_cut = joined.count(" ") == len(texts) == len(results)
    return is_cut and all(map(ids.__contains__, results))


def _take_special(tokens: list[str], types: NDArray[np.uint8], ids: dict[str, int]) -> dict[str, int]:
    """Move the tokens that text must not turn into out of `ids`; return the control and unknown ones."""
    import numpy as np

    special_ids: dict[str, int] = {}
    never_text = (types == TokenType.CONTROL) | (types == TokenType.UNKNOWN) | (types == TokenType.BYTE)
    for index in np.flatnonzero(never_text).tolist():
        del ids[tokens[index]]
        if types[index] != TokenType.BYTE:
            special_ids[tokens[index]] = index
    return special_ids


def vocabulary_fingerprint(vocabulary: Vocabulary) -> str:
    """A hash of everything that decides which ids a text gets: 64 hexadecimal digits."""
    import numpy as np

    digest = hashlib.sha256()
    facts = (
        vocabulary.kind,
        # An unknown name means the default rule, and may mean another one in a later version.
        vocabulary.pre_tokenizer in PRE_TOKENIZERS,
        vocabulary.pre_tokenizer,
        sorted(vocabulary.flags.items()),
        sorted(vocabulary.role_ids.items()),
        sorted(vocabulary.end_of_generation_ids),
        vocabulary.strips_after_special,
    )
    digest.update(repr(facts).encode("utf-8", "surrogateescape"))
    for strings in (vocabulary.tokens, vocabulary.merges):
        for piece in pieces(strings):
            digest.update(np.fromiter(map(len, piece), "<i8", len(piece)).tobytes())
        for piece in pieces(strings):
            digest.update("".join(piece).encode("utf-8", "surrogateescape"))
    digest.update(vocabulary.types.tobytes())
    if vocabulary.scores is not None:
        digest.update(vocabulary.scores.astype("<f4").tobytes())
    if vocabulary.charsmap is not None:
        digest.update(vocabulary.charsmap.tobytes())
    if vocabulary.normalizer_steps:
        digest.update(repr(vocabulary.normalizer_steps).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def vocabulary_difference(one: Vocabulary, other: Vocabulary) -> str | None:
    """Say what makes some text give other ids in one than in the other, or return None if nothing does.

    Everything that encoding reads is compared, so None is a proof. Tokens that no text turns into may be missing in
    one: files of a family are padded to different sizes.
    """
    import numpy as np

    if (one.kind, one.pre_tokenizer) != (other.kind, other.pre_tokenizer):
        kinds = (e.kind if e.pre_tokenizer is None else f"{e.kind} ({e.pre_tokenizer})" for e in (one, other))
        return f"one is {' and the other '.join(kinds)}"
    for name, ids, others in (("token", one.ids, other.ids), ("special token", one.special_ids, other.special_ids)):
        if ids == others:
            continue
        shared = ids.keys() & others.keys()
        # A special token that only one has is its own spelling in the other, and only where special tokens are parsed.
        texts = ids.keys() | others.keys() if name == "token" else shared
        text = min((text for text in texts if ids.get(text) != others.get(text)), default=None)
        if text is not None:
            return f"{name} {text!r} is {_id_text(ids.get(text))} in one and {_id_text(others.get(text))} in the other"
    user_defined = [np.flatnonzero(each.types == TokenType.USER_DEFINED).tolist() for each in (one, other)]
    for what, found, wanted in (
        ("merges", one.merges, other.merges),
        ("byte tokens", one.byte_ids, other.byte_ids),
        ("user-defined tokens", *user_defined),
    ):
        if found != wanted:
            return f"their {what} differ"
    if one.scores is not None and other.scores is not None:
        count = min(one.scores.size, other.scores.size)
        if (one.scores[:count] != other.scores[:count]).any():
            return "the scores of their tokens differ"
    first, second = ([] if each.charsmap is None else each.charsmap.tolist() for each in (one, other))
    if first != second:
        return "their normalizations differ"
    if one.normalizer_steps != other.normalizer_steps:
        return "the steps of their normalizations differ"
    if _splitting_flags(one) != _splitting_flags(other) or one.strips_after_special != other.strips_after_special:
        return "what they do to a text before splitting it differs"
    return None


def _id_text(token_id: int | None) -> str:
    return "missing" if token_id is None else f"id {token_id}"


def _splitting_flags(vocabulary: Vocabulary) -> dict[str, bool]:
    """Flags of changes before a text is split; those around a text reach a draft model from its target."""
    return {name: value for name, value in vocabulary.flags.items() if name.startswith("normalizer.")}


def find_end_of_generation(
    ids: Mapping[str, int], roles: Mapping[str, int], is_control: Callable[[int], bool]
) -> frozenset[int]:
    """Return the ids that end a generation: those with such a role, and the well-known spellings."""
    ending = {ids[text] for text in _END_TEXTS if text in ids}
    if "</s>" in ids and is_control(ids["</s>"]) and "<|tool_response>" not in ids:
        ending.add(ids["</s>"])
    # In the Harmony and Solar formats <|end|> closes one message of several, not the turn.
    has_calls = "<|call|>" in ids or "<|calls|>" in ids
    if has_calls and ("<|return|>" in ids or "<|flush|>" in ids):
        ending.discard(ids.get("<|end|>", -1))
    ending.update(roles[role] for role in _END_ROLES if role in roles)
    return frozenset(ending)


class FillInTokens(NamedTuple):
    """Tokens by which a model for code fills in the text between two others."""

    prefix: int
    """Stands before the first text."""
    suffix: int
    """Stands before the second text."""
    middle: int
    """Stands before the text that is filled in."""
    repository: int | None = None
    """Stands before a project's name; None where the vocabulary has none."""
    separator: int | None = None
    """Stands before each file's name; None where the vocabulary has none."""

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The ids of a prompt for what stands between two texts of these. Source: arXiv 2207.14255 (PSM)."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_fill_in_tokens(special_ids: Mapping[str, int], role_ids: Mapping[str, int]) -> FillInTokens | None:
    """The tokens that a file names for it, or else those that are spelled so; None without all of the first three."""
    found: list[int] = []
    for role, old_role, spellings in zip(FILL_IN_ROLES[:3], FILL_IN_ROLES[3:], FILL_IN_SPELLINGS, strict=True):
        token_id = role_ids.get(role, role_ids.get(old_role, _spelled(spellings, special_ids)))
        if token_id is None:
            return None
        found.append(token_id)
    repository = role_ids.get("fim_rep", _spelled(_REPOSITORY, special_ids))
    prefix, suffix, middle = found
    return FillInTokens(prefix, suffix, middle, repository, role_ids.get("fim_sep", _spelled(_SEPARATOR, special_ids)))


def _spelled(spellings: list[str], special_ids: Mapping[str, int]) -> int | None:
    return next((special_ids[text] for text in spellings if text in special_ids), None)
