"""From tokenizer.json and the small files around it to the vocabulary and chat template a GGUF file would have.

Two kinds are built here: byte-level BPE, and BPE over SentencePiece's pieces with bytes for what no piece covers. Those
of encoders are WordPiece and Unigram. A part of the pipeline that would change the ids and is not built is
refused by name.

Scores in place of merges: SentencePiece ranks merges by the tokens they make, tokenizer.json by the pairs.

SentencePiece's converters write every pair of tokens whose join is a token, ordered by the score of the join. Such
lists say the same as scores do; after others texts may get other ids.
"""

import base64
import binascii
import logging
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import TokenizerError
from localinfer.models.checkpoint.families import config_levels
from localinfer.models.text.encoders import (
    CLIP_PATTERN,
    GPT2_PATTERN,
    LONGEST_WORD,
    PRE_TOKENIZERS,
    WORD_END,
    TokenizerWarning,
)
from localinfer.models.text.normalizer import STEPS, keeps_spaces, replacement
from localinfer.models.text.vocabulary import PREFIX, TokenType
from localinfer.quant.checkpoint.folder import MAX_TOKENIZER_BYTES, CheckpointFolder
from localinfer.system.pieces import pieces
from localinfer.types import is_finite_number

_WAY_OUT = "Use a GGUF file of the model, or run it with token ids only."


def object_in(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key. Raises: TokenizerError."""
    value = record.get(key)
    if not isinstance(value, dict):
        raise wrong(f"{key} is {shown(value, 60)}; wanted an object")
    return value


def list_in(record: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key, empty where there is none. Raises: TokenizerError."""
    value = record.get(key, [])
    if not isinstance(value, list):
        raise wrong(f"{key} is {shown(value, 60)}; wanted a list")
    return value


def flag_in(record: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false under a key. Raises: TokenizerError."""
    value = record.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(f"{key} is {shown(value, 60)}; wanted true or false")
    return default if value is None else value


def metaspace_scheme(step: Mapping[str, Any], built: Sequence[str]) -> str:
    """Scheme by which a Metaspace puts a space before a text: always, never or first; older files have a flag.

    built: the ones that the caller can do. Raises: TokenizerError.
    """
    scheme = step.get("prepend_scheme", "always" if flag_in(step, "add_prefix_space", True) else "never")
    if scheme not in built:
        raise unsupported(f"its prepend_scheme is {shown(scheme, 40)}", f"{', '.join(built[:-1])} or {built[-1]}")
    return str(scheme)


def check_whole(texts: Iterable[str], where: str) -> None:
    """Refuse half characters, which JSON can spell and no text holds."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise wrong(f"{where} has half a character, U+{ord(found):04X}; wanted whole Unicode characters") from None


def shown(value: object, size: int) -> str:
    """The beginning of a value as Python writes it, for a message; a file may nest values however deep."""
    try:
        return repr(value)[:size]
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def wrong(complaint: str) -> TokenizerError:
    """An error, to be raised by the caller, about a tokenizer that makes no sense."""
    return TokenizerError(f"tokenizer.json: {complaint}. {_WAY_OUT}")


def unsupported(found: str, wanted: str) -> TokenizerError:
    """An error, to be raised by the caller, about one that this version does not build."""
    return wrong(f"{found}, which this version does not build; wanted {wanted}")


def merge_scores(merges: Sequence[tuple[str, str]], ids: Mapping[str, int], num_tokens: int) -> NDArray[np.float32]:
    """float32[num_tokens]: minus the rank of the first merge that makes each token, minus infinity where none does.

    Raises: TokenizerError for a merge that makes no token.
    """
    scores = np.full(num_tokens, -np.inf, np.float32)
    for rank, (left, right) in enumerate(merges):
        index = ids.get(left + right)
        if index is None:
            raise wrong(f"the merge {shown(left + right, 60)} is not a token")
        scores[index] = max(scores[index], -rank)
    return scores


def difference_from_scores(merges: Sequence[tuple[str, str]], texts: Collection[str]) -> str | None:
    """Say what of the merges scores cannot say, or return None. texts: the tokens of which ordinary text is made."""
    made: dict[str, None] = {}
    last = ""
    for left, right in merges:
        joined = left + right
        # Runs of one character, of spaces above all, share one score in published vocabularies, so theirs are mixed.
        if joined != last and joined in made and joined in texts and joined.strip(joined[0]):
            return f"the merges that make {shown(joined, 60)} do not follow one another"
        made[joined] = None
        last = joined
    pairs = set(merges)
    for piece in pieces(made):
        for left, right in _pairs(piece, texts):
            if (left, right) not in pairs:
                return f"{shown(left, 60)} and {shown(right, 60)} are not merged, but others to the same token are"
    return None


def _pairs(joins: Iterable[str], texts: Collection[str]) -> Iterable[tuple[str, str]]:
    """All pairs of tokens that make one of these."""
    for text in joins:
        if text in texts:
            for cut in range(1, len(text)):
                if text[:cut] in texts and text[cut:] in texts:
                    yield text[:cut], text[cut:]


_SPACE_MARK = "▁"
_CONTINUES = "##"
_MANY_SPACES = {"Regex": " {2,}"}
_SQUEEZED = {"Regex": r"\s{2,}|[\n\r\t]"}
"""White space that DeBERTa's tokenizer makes one space, as transformers 5 writes it."""

Steps = Sequence[Mapping[str, Any]]


def word_piece(
    model: Mapping[str, Any], normalizers: Steps, pre_tokenizers: Steps, tokens: list[str], types: list[int]
) -> dict[str, object]:
    """The metadata of a WordPiece vocabulary; changes `tokens` to GGUF's spelling.

    There a word's first token has "▁" before it, and what follows has no "##". Raises: TokenizerError.
    """
    if model.get("continuing_subword_prefix", _CONTINUES) != _CONTINUES:
        raise unsupported(f"its pieces begin with {shown(model['continuing_subword_prefix'], 40)}", repr(_CONTINUES))
    longest = model.get("max_input_chars_per_word", LONGEST_WORD)
    if longest != LONGEST_WORD:
        raise unsupported(f"words of more than {shown(longest, 40)} characters are unknown", str(LONGEST_WORD))
    if [step.get("type") for step in pre_tokenizers] != ["BertPreTokenizer"]:
        raise unsupported(f"it splits words by {shown(list(pre_tokenizers), 200)}", "BertPreTokenizer")
    if [step.get("type") for step in normalizers] != ["BertNormalizer"]:
        raise unsupported(f"its normalizer is {shown(list(normalizers), 200)}", "BertNormalizer")
    (normalizer,) = normalizers
    for key in ("clean_text", "handle_chinese_chars"):
        if not flag_in(normalizer, key, True):
            raise unsupported(f"its normalizer has {key} false", "true")
    is_plain = {TokenType.NORMAL, TokenType.USER_DEFINED}
    for index, (text, type) in enumerate(zip(tokens, types, strict=True)):
        if type in is_plain:
            tokens[index] = text.removeprefix(_CONTINUES) if text.startswith(_CONTINUES) else _SPACE_MARK + text
            types[index] = int(TokenType.NORMAL)
    lowers = flag_in(normalizer, "lowercase", True)
    return {
        f"{PREFIX}model": "bert",
        f"{PREFIX}limits_words": True,
        f"{PREFIX}normalizer.lowercase": lowers,
        f"{PREFIX}normalizer.strip_accents": flag_in(normalizer, "strip_accents", lowers),
    }


def unigram_texts(model: Mapping[str, Any]) -> dict[str, int]:
    """The ids of a Unigram model's texts. Raises: TokenizerError."""
    entries = list_in(model, "vocab")
    for entry in entries:
        is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        if not is_pair or not is_finite_number(entry[1]):
            raise wrong(f"the entry {shown(entry, 60)} of model.vocab is not a text and a score")
    found = {entry[0]: index for index, entry in enumerate(entries)}
    if len(found) != len(entries):
        raise wrong("model.vocab has a text twice")
    return found


def unigram(
    model: Mapping[str, Any], normalizers: Steps, pre_tokenizers: Steps, tokens: Sequence[str]
) -> dict[str, object]:
    """The metadata of a Unigram vocabulary. Raises: TokenizerError."""
    scores = np.zeros(len(tokens), np.float32)
    given = [entry[1] for entry in list_in(model, "vocab")][: len(tokens)]
    with np.errstate(over="ignore"):
        scores[: len(given)] = given
    found: dict[str, object] = {f"{PREFIX}model": "t5", f"{PREFIX}scores": scores}
    flags = dict.fromkeys(("strips_left", "strips_right", "strips_before_map", "remove_extra_whitespaces"), False)
    is_mapped = has_marks = False
    steps: list[str] = []
    for step in normalizers:
        is_early = not (is_mapped or has_marks or any(flags.values()))
        early = _early_step(step)
        match step:
            case {"type": "Replace", "pattern": pattern, "content": " "} if pattern == _SQUEEZED and is_early:
                if not all(map(keeps_spaces, steps)):
                    raise unsupported("its normalizer merges white space behind other steps", "it before them")
                found[f"{PREFIX}squeezes_white_space"] = True
            case _ if early is not None and is_early:
                steps.append(early)
            case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
                if is_mapped or flags["remove_extra_whitespaces"]:
                    raise unsupported("its normalizer has a Precompiled behind another, or behind merged spaces", "one")
                found[f"{PREFIX}precompiled_charsmap"] = _bytes(text)
                is_mapped, flags["strips_before_map"] = True, flags["strips_left"] or flags["strips_right"]
                if flags["strips_before_map"] and not all(map(keeps_spaces, steps)):
                    raise unsupported("its normalizer strips a text between other steps", "Strip behind all, or first")
            case {"type": "Replace", "pattern": pattern, "content": " " | "▁" as content} if pattern == _MANY_SPACES:
                flags["remove_extra_whitespaces"], has_marks = True, has_marks or content == "▁"
            case {"type": "Strip"}:
                if flags["strips_before_map"] or has_marks:
                    raise unsupported("its normalizer strips a text twice, or once its spaces are marks", "one Strip")
                flags["strips_left"] |= flag_in(step, "strip_left", True)
                flags["strips_right"] |= flag_in(step, "strip_right", True)
            case _:
                raise unsupported(f"its normalizer has the step {shown(step, 200)}", "Precompiled and merged spaces")
    if steps:
        found[f"{PREFIX}normalizer.steps"] = steps
    splits = False
    adds_space = None
    for step in pre_tokenizers:
        match step:
            case {"type": "WhitespaceSplit"} if adds_space is None and not has_marks:
                splits = True
            case {"type": "Metaspace", "replacement": "▁"} if adds_space is None:
                adds_space = metaspace_scheme(step, ("always", "never")) == "always"
                flags["splits_words"] = splits or flag_in(step, "split", True)
            case _:
                raise unsupported(f"its pre-tokenizer has the step {shown(step, 200)}", "WhitespaceSplit and Metaspace")
    if adds_space is None:
        raise unsupported("nothing in it turns spaces into '▁'", "a Metaspace that does")
    if splits and not adds_space:
        raise unsupported("its words have no space before them", "a Metaspace that adds one")
    # Other readers know two of these flags: theirs are nearest if words that are split count as merged spaces.
    flags["remove_extra_whitespaces"] |= splits
    flags |= {"add_space_prefix": adds_space, "add_space_prefix_if_none": True, "splits_at_white_space": splits}
    return found | {f"{PREFIX}{name}": value for name, value in flags.items()}


def _early_step(step: Mapping[str, Any]) -> str | None:
    """A step that goes before a compiled map, as `unigram.py` has it; None for others."""
    match step:
        case {"type": "StripAccents"}:
            return "strip_accents"
        case {"type": str(name)} if name.lower() in STEPS:
            return name.lower()
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return replacement(old, new)
    return None


def _bytes(text: str) -> Any:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (binascii.Error, ValueError) as error:
        raise wrong(f"its precompiled_charsmap is not base64 ({error})") from None


logger = logging.getLogger(__name__)

_MAX_TOKENS = 1 << 22
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_NESTING = 16
_CLIP_CONTROLS = r"<\|startoftext\|>|<\|endoftext\|>|"
"""Before CLIP's pattern in folders of transformers 5; the step behind it cuts these texts as the pattern does."""
_TEMPLATE = "tokenizer.chat_template"
# GGUF has three keys for tokens that end a turn.
_END_ROLES = ("eos", "eot", "eom")


class TokenizerJson:
    """The tokenizer of a folder, in GGUF's terms.

    ids: the id of every token by its text. metadata: GGUF's keys, those of special roles aside. adds: whether the
    post-processor puts a token of that text before or after every text, None where there is no such processor.
    """

    def __init__(self, document: Mapping[str, Any], vocab_size: int) -> None:
        self._model = object_in(document, "model")
        self._added = [_added_token(entry) for entry in list_in(document, "added_tokens")]
        self._check_model()
        self._normalizers = _steps(document.get("normalizer"), "normalizers")
        self._pre_tokenizers = _steps(document.get("pre_tokenizer"), "pretokenizers")
        self._post_processors = _steps(document.get("post_processor"), "processors")
        self.ids = self._read_ids()
        tokens, types = self._read_tokens(vocab_size)
        self.metadata: dict[str, object] = {f"{PREFIX}tokens": tokens, f"{PREFIX}token_type": types}
        unknown = self._unknown_id()
        if unknown is not None and self._kind != "BPE":
            self.metadata[f"{PREFIX}unknown_token_id"] = unknown
        if self._kind == "WordPiece":
            self.metadata |= word_piece(self._model, self._normalizers, self._pre_tokenizers, tokens, types)
            self.metadata |= self._separator()
        elif self._kind == "Unigram":
            self.metadata |= unigram(self._model, self._normalizers, self._pre_tokenizers, tokens)
        elif self._ends_words:
            self.metadata |= self._word_ends()
        elif any(step.get("type") == "ByteLevel" for step in self._pre_tokenizers):
            self.metadata |= self._byte_level()
        else:
            self.metadata |= self._sentence_piece(tokens, types)

    def added_around(self) -> tuple[list[str], list[str]] | None:
        """Return the tokens that the post-processor puts before and after a text, None where it says nothing.

        Raises: TokenizerError for a post-processor that does anything else.
        """
        found: list[tuple[list[str], list[str]]] = []
        for step in self._post_processors:
            match step.get("type"):
                case "ByteLevel":
                    pass  # it changes where tokens are said to stand in the text, and no ids
                case "BertProcessing" | "RobertaProcessing":
                    found.append(([_first_text(step, "cls")], [_first_text(step, "sep")]))
                case "TemplateProcessing":
                    found.append(_around_text(step))
                case kind:
                    raise unsupported(f"its post-processor is {shown(kind, 40)}", "one that adds special tokens")
        if len(found) > 1:
            raise unsupported(f"{len(found)} of its post-processors add tokens", "one that does")
        return found[0] if found else None

    def pair_flags(self, settings: Mapping[str, Any]) -> dict[str, object]:
        """Flags of a pair of texts as the post-processor joins it, if in a way that rerankers have.

        settings: tokenizer_config.json, whose model_input_names may leave token types out.
        """
        names = settings.get("model_input_names")
        has_types = not isinstance(names, list) or "token_type_ids" in names
        for step in self._post_processors:
            match step.get("type"):
                case "BertProcessing":
                    return _pair_flags(doubles=False, has_types=has_types)
                case "RobertaProcessing":
                    return _pair_flags(doubles=True, has_types=False)
                case "TemplateProcessing":
                    _, after = _around_text(step)
                    between, is_second = _between_texts(step)
                    if after and between in (after, after * 2):
                        return _pair_flags(doubles=between != after, has_types=has_types and is_second)
        return {}

    @property
    def is_word_piece(self) -> bool:
        """Return whether it is BERT's, which has both ends of a text in `metadata`."""
        return self._kind == "WordPiece"

    @property
    def strips_after_special(self) -> bool:
        """Return whether the white space behind special tokens goes with them."""
        return any(token["special"] and token["rstrip"] for token in self._added)

    def _separator(self) -> dict[str, object]:
        """BERT reads every text between two tokens, the second of which has a key of its own."""
        around = self.added_around()
        found = [self.ids.get(text) for side in around or () for text in side]
        if around is None or len(around[0]) != 1 or len(found) != 2 or None in found:
            raise unsupported(f"its post-processor adds {shown(around, 80)}", "one token before and one after a text")
        return {f"{PREFIX}bos_token_id": found[0], f"{PREFIX}seperator_token_id": found[1]}

    def _check_model(self) -> None:
        model = self._model
        self._kind = model.get("type", "BPE" if "merges" in model else None)
        if self._kind not in ("BPE", "WordPiece", "Unigram"):
            raise unsupported(f"its model is {shown(self._kind, 40)}", "BPE, WordPiece or Unigram")
        self._ends_words = self._kind == "BPE" and model.get("end_of_word_suffix") == WORD_END
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key) and self._kind == "BPE" and not (self._ends_words and key == "end_of_word_suffix"):
                raise unsupported(f"its model has {key} {shown(model[key], 40)}", "none")

    def _read_ids(self) -> dict[str, int]:
        is_list = self._kind == "Unigram"
        vocab = unigram_texts(self._model) if is_list else object_in(self._model, "vocab")
        are_ids = all(type(index) is int and 0 <= index < _MAX_TOKENS for index in vocab.values())
        if len(vocab) > _MAX_TOKENS or not are_ids:
            raise wrong(f"model.vocab is not a map of texts to ids below {_MAX_TOKENS}")
        check_whole(vocab, "model.vocab")
        check_whole((token["content"] for token in self._added), "added_tokens")
        ids: dict[str, int] = dict(vocab)
        ids.update((token["content"], token["id"]) for token in self._added)
        if len(set(ids.values())) != len(ids):
            seen: dict[int, str] = {}
            for text, index in ids.items():
                if index in seen:
                    raise wrong(f"{shown(seen[index], 60)} and {shown(text, 60)} both have the id {index}")
                seen[index] = text
        return ids

    def _read_tokens(self, vocab_size: int) -> tuple[list[str], list[int]]:
        """One text and type for each of the `vocab_size` rows of the embedding; ids without a text are unused."""
        beyond = [text for text, index in self.ids.items() if index >= vocab_size]
        added = {token["content"] for token in self._added}
        if not added.issuperset(beyond):
            raise wrong(
                f"{len(beyond)} ids, such as that of {shown(beyond[0], 60)}, lie outside the {vocab_size} rows of the "
                "embedding"
            )
        for text in beyond:
            del self.ids[text]  # for pictures and the like: the model has no row for them
        tokens = [f"[PAD{index}]" for index in range(vocab_size)]
        types = [int(TokenType.UNUSED)] * vocab_size
        has_bytes = flag_in(self._model, "byte_fallback")
        for text, index in self.ids.items():
            tokens[index] = text
            is_byte = has_bytes and _BYTE_TOKEN.fullmatch(text)
            types[index] = int(TokenType.BYTE if is_byte else TokenType.NORMAL)
        for token in self._added:
            if token["id"] < vocab_size and types[token["id"]] != TokenType.BYTE:
                types[token["id"]] = int(TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED)
        unknown = self._unknown_id()
        if unknown is not None and unknown < vocab_size:
            types[unknown] = int(TokenType.UNKNOWN)
        return tokens, types

    def _unknown_id(self) -> int | None:
        if self._ends_words:
            # It names the token that ends a text, and every byte has tokens.
            return None
        if self._kind != "Unigram":
            return self.ids.get(str(self._model.get("unk_token")))
        found = self._model.get("unk_id")
        if found is not None and (type(found) is not int or not 0 <= found < len(self.ids)):
            raise wrong(f"unk_id is {shown(found, 40)}; wanted the id of a token")
        return found

    def _merges(self) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for entry in list_in(self._model, "merges"):
            pair = entry.split(" ") if isinstance(entry, str) else entry
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
                raise wrong(f"the merge {shown(entry, 60)} is not a pair of texts")
            pairs.append((pair[0], pair[1]))
        check_whole((part for pair in pairs for part in pair), "model.merges")
        return pairs

    def _word_ends(self) -> dict[str, object]:
        """CLIP's: small letters, words without white space."""
        steps = [step.get("type") for step in self._normalizers]
        if steps != ["NFC", "Replace", "Lowercase"] or self._normalizers[1].get("pattern") != {"Regex": r"\s+"}:
            raise unsupported(f"its normalizers are {shown(steps, 80)}", "NFC, merged white space and small letters")
        patterns = [pattern for step in self._pre_tokenizers for pattern in _patterns(step)]
        if patterns not in ([CLIP_PATTERN, GPT2_PATTERN], [_CLIP_CONTROLS + CLIP_PATTERN, GPT2_PATTERN]):
            raise unsupported(f"it splits words by {shown(patterns, 300)}", "CLIP's rules, as its words end in </w>")
        merges = [f"{left} {right}" for left, right in self._merges()]
        return {f"{PREFIX}model": "clip", f"{PREFIX}pre": "gpt-2", f"{PREFIX}merges": merges}

    def _byte_level(self) -> dict[str, object]:
        for step in self._normalizers:
            # NFC changes only texts that are not composed, which hardly any source of text writes.
            if step.get("type") != "NFC":
                raise unsupported(f"its normalizer is {shown(step.get('type'), 40)}", "none, or NFC")
        patterns = [pattern for step in self._pre_tokenizers for pattern in _patterns(step)]
        ignores_merges = flag_in(self._model, "ignore_merges")
        names = (
            name
            for name, rule in PRE_TOKENIZERS.items()
            if list(rule.steps) == patterns and rule.ignores_merges == ignores_merges and not rule.is_raw
        )
        name = next(names, None)
        if name is None:
            raise unsupported(f"it splits words by {shown(patterns, 300)}", "the rules of a supported vocabulary")
        merges = [f"{left} {right}" for left, right in self._merges()]
        return {f"{PREFIX}model": "gpt2", f"{PREFIX}pre": name, f"{PREFIX}merges": merges}

    def _sentence_piece(self, tokens: list[str], types: list[int]) -> dict[str, object]:
        """Scores stand in for merges: SentencePiece ranks a merge by its result, and so were the merges made."""
        if not flag_in(self._model, "byte_fallback"):
            raise unsupported("it is neither byte-level nor has it byte_fallback", "one of the two")
        merges = self._merges()
        scores = merge_scores(merges, self.ids, len(tokens))
        # Other tokens are cut out of a text before it is merged.
        texts = {text for text, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
        if (difference := difference_from_scores(merges, texts)) is not None:
            warnings.warn(
                f"tokenizer.json: its merges are no order of tokens, as SentencePiece has one ({difference}): texts "
                "may get other token ids than from its library. Use a GGUF file of the model.",
                TokenizerWarning,
                stacklevel=4,
            )
        metadata: dict[str, object] = {f"{PREFIX}model": "llama", f"{PREFIX}scores": scores}
        return metadata | {f"{PREFIX}{name}": value for name, value in self._space_prefix().items()}

    def _space_prefix(self) -> dict[str, bool]:
        """Flags: whether plain text gets a space before it, where it has none only, and at the very start only."""
        has_prefix = only_first = only_if_none = marks_spaces = False
        for step in [*self._normalizers, *self._pre_tokenizers]:
            match step:
                case {"type": "Prepend", "prepend": "▁"}:
                    if has_prefix:
                        raise unsupported("its normalizer puts '▁' before a text twice", "one Prepend")
                    has_prefix = True
                case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                    marks_spaces = True
                case {"type": "Split", "pattern": {"String": " "}}:
                    pass  # every space has become a mark before this looks for one
                case {"type": "Metaspace", "replacement": "▁"}:
                    if flag_in(step, "split", True):
                        raise unsupported("its Metaspace splits words", "split false")
                    scheme = metaspace_scheme(step, ("always", "never", "first"))
                    marks_spaces = True
                    if scheme != "never" and not has_prefix:
                        has_prefix, only_if_none, only_first = True, True, scheme == "first"
                case _:
                    raise unsupported(f"a step of its pipeline is {shown(step, 120)}", "SentencePiece's own")
        if not marks_spaces:
            raise unsupported("nothing in it turns spaces into '▁'", "a Replace or Metaspace that does")
        flags = {"add_space_prefix_once": only_first, "add_space_prefix_if_none": only_if_none}
        return {"add_space_prefix": has_prefix} | {name: True for name, value in flags.items() if value}


def read_tokenizer(folder: CheckpointFolder, vocab_size: int) -> dict[str, object]:
    """Return the tokenizer's metadata; a model of an unknown vocabulary gets only a key that says why.

    Raises: CorruptFileError if a file is damaged, TokenizerError if the vocabulary is of a kind that is not built.
    """
    document = folder.json("tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
    if document is None:
        others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder.path / name).exists()]
        raise TokenizerError(
            f"{folder.path.name} has no tokenizer.json{f' (only {others[0]})' if others else ''}; wanted that form of "
            "the tokenizer. Save it again with a current version of its library, or use token ids only"
        )
    tokenizer = TokenizerJson(document, vocab_size)
    settings = folder.json("tokenizer_config.json") or {}
    generation = folder.json("generation_config.json") or {}
    metadata = dict(tokenizer.metadata)
    if not tokenizer.is_word_piece:
        metadata |= _roles(tokenizer, settings, generation, folder.config)
        metadata |= _added_tokens(tokenizer, settings, metadata)
    metadata |= tokenizer.pair_flags(settings)
    metadata |= read_templates(folder)
    if tokenizer.strips_after_special:
        metadata[f"{PREFIX}strips_after_special"] = True
    return metadata


def _roles(
    tokenizer: TokenizerJson, settings: dict[str, Any], generation: dict[str, Any], config: dict[str, Any]
) -> dict[str, object]:
    roles: dict[str, object] = {}
    for role, key in (("bos", "bos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = _token_id(tokenizer, settings, key)
        if token_id is None and role == "bos":
            token_id = next(_ids_in(config.get("bos_token_id")), None)
        if token_id is not None:
            roles[f"{PREFIX}{role}_token_id"] = token_id
    eos = _token_id(tokenizer, settings, "eos_token")
    # What the post-processor puts behind every text is what ends a text, whatever ends a turn of a chat.
    around = tokenizer.added_around()
    behind = [] if around is None else [tokenizer.ids[text] for text in around[1] if text in tokenizer.ids]
    ends = [*(behind if len(behind) == 1 else []), *([] if eos is None else [eos])]
    for source in (generation, *config_levels(config).values()):
        ends += _ids_in(source.get("eos_token_id"))
    known = set(tokenizer.ids.values())
    ends = [token_id for token_id in dict.fromkeys(ends) if token_id in known]
    roles |= {f"{PREFIX}{role}_token_id": token_id for role, token_id in zip(_END_ROLES, ends, strict=False)}
    if len(ends) > len(_END_ROLES):
        roles[f"{PREFIX}end_of_generation_ids"] = ends
    return roles


def _token_id(tokenizer: TokenizerJson, settings: dict[str, Any], key: str) -> int | None:
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    return tokenizer.ids.get(text) if isinstance(text, str) else None


def _ids_in(value: object) -> Iterator[int]:
    values = value if isinstance(value, list) else [value]
    return iter([entry for entry in values if type(entry) is int])


def _added_tokens(tokenizer: TokenizerJson, settings: dict[str, Any], metadata: dict[str, object]) -> dict[str, object]:
    """Tokens that are added around a text, by the post-processor, else by tokenizer_config.json."""
    around = tokenizer.added_around()
    added: dict[str, object] = {}
    for index, role in enumerate(("bos", "eos")):
        key = f"add_{role}_token"
        role_id = metadata.get(f"{PREFIX}{role}_token_id")
        if around is None:
            added[f"{PREFIX}{key}"] = settings.get(key) is True and role_id is not None
            continue
        found = [tokenizer.ids.get(text) for text in around[index]]
        if role_id is None and len(found) == 1 and found[0] is not None:
            # Nothing else names the token, but what stands before every text is what begins a text.
            added[f"{PREFIX}{role}_token_id"] = role_id = found[0]
        if found not in ([], [role_id]):
            raise wrong(
                f"its post-processor adds {around[index]!r:.80} to every text; this version adds only the {role} token"
            )
        added[f"{PREFIX}{key}"] = bool(found)
    return added


def read_templates(folder: CheckpointFolder) -> dict[str, object]:
    """Return the metadata of the chat template, from its own file or tokenizer_config.json: one, or several by name.

    Raises: CorruptFileError if a file is damaged.
    """
    text = folder.text("chat_template.jinja")
    value: object = text if text is not None else (folder.json("tokenizer_config.json") or {}).get("chat_template")
    if value is None:
        value = (folder.json("chat_template.json") or {}).get("chat_template")
    if isinstance(value, str):
        return {_TEMPLATE: value}
    templates: dict[str, object] = {}
    for entry in value if isinstance(value, list) else []:
        match entry:
            case {"name": "default", "template": str(template)}:
                templates[_TEMPLATE] = template
            case {"name": "tool_use", "template": str(template)}:
                templates[f"{_TEMPLATE}.tool_use"] = template
            case {"name": name}:
                logger.warning("%s: the chat template %.40r is not used", folder.path.name, name)
    return templates


def _patterns(step: Mapping[str, Any]) -> list[str]:
    """The regular expressions by which one pre-tokenizer cuts, as `PRE_TOKENIZERS` spells them."""
    match step:
        case {"type": "ByteLevel"}:
            if flag_in(step, "add_prefix_space"):
                raise unsupported("its ByteLevel step adds a space before texts", "add_prefix_space false")
            return [GPT2_PATTERN] if flag_in(step, "use_regex", True) else []
        case {"type": "Digits"}:
            return [r"\p{N}" if flag_in(step, "individual_digits") else r"\p{N}+"]
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return [pattern]
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}:
            return [pattern]  # such patterns match all of a text, so nothing is removed
        case _:
            raise unsupported(f"its pre-tokenizer has the step {shown(step, 200)}", "Split, Digits and ByteLevel")


def _around_text(step: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The special tokens before and after the text in a template of it."""
    before: list[str] = []
    after: list[str] = []
    num_texts = 0
    for piece in list_in(step, "single"):
        match piece:
            case {"Sequence": {"id": "A"}}:
                num_texts += 1
            case {"SpecialToken": {"id": str(text)}}:
                (after if num_texts else before).append(text)
            case _:
                raise unsupported(f"its post-processor has {shown(piece, 80)}", "the text and special tokens")
    if num_texts != 1:
        raise unsupported(f"its post-processor gives a text {num_texts} times", "once")
    return before, after


def _between_texts(step: Mapping[str, Any]) -> tuple[list[str] | None, bool]:
    """The special tokens between two texts in a template of them, None without such a template; whether the second text
    is of another type."""
    types: dict[str, object] = {}
    between: list[str] = []
    for piece in list_in(step, "pair"):
        match piece:
            case {"Sequence": {"id": str(name), **rest}}:
                types[name] = rest.get("type_id")
            case {"SpecialToken": {"id": str(text)}} if list(types) == ["A"]:
                between.append(text)
    return (between if list(types) == ["A", "B"] else None), types.get("B") == 1


def _pair_flags(*, doubles: bool, has_types: bool) -> dict[str, object]:
    return {f"{PREFIX}add_sep_token": doubles, f"{PREFIX}pairs_have_types": has_types}


def _first_text(step: Mapping[str, Any], key: str) -> str:
    """The text of a pair of text and id."""
    pair = list_in(step, key)
    if len(pair) != 2 or not isinstance(pair[0], str):
        raise wrong(f"{key} of its post-processor is {shown(pair, 60)}; wanted a text and an id")
    return pair[0]


def _steps(value: object, parts: str, depth: int = 0) -> list[Mapping[str, Any]]:
    """The steps of a pipeline, those of nested sequences in order."""
    if value is None:
        return []
    if not isinstance(value, dict):
        raise wrong(f"a step of the pipeline is {shown(value, 60)}; wanted an object")
    if value.get("type") != "Sequence":
        return [value]
    if depth == _MAX_NESTING:
        raise wrong(f"{parts} are nested more than {_MAX_NESTING} deep; wanted steps in a row")
    return [step for entry in list_in(value, parts) for step in _steps(entry, parts, depth + 1)]


def _added_token(entry: object) -> dict[str, Any]:
    wanted = {"content": str, "id": int, "special": bool}
    if not isinstance(entry, dict) or any(type(entry.get(key)) is not kind for key, kind in wanted.items()):
        raise wrong(f"the added token {shown(entry, 80)} lacks content, id or special")
    if not entry["content"] or not 0 <= entry["id"] < _MAX_TOKENS:
        raise wrong(f"the added token {shown(entry, 80)} is empty or has no sound id")
    return {"rstrip": flag_in(entry, "rstrip"), **{key: entry[key] for key in wanted}}
