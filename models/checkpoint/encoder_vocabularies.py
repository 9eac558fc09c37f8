"""Vocabularies of encoders in tokenizer.json, as GGUF has them: BERT's WordPiece, the Unigram of XLM-RoBERTa and T5."""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from localinfer.models.checkpoint.tokenizer_document import flag_in, list_in, shown, unsupported, wrong
from localinfer.models.text.encoders import LONGEST_WORD
from localinfer.models.text.vocabulary import PREFIX, TokenType

_SPACE_MARK = "▁"
_CONTINUES = "##"
_MANY_SPACES = {"Regex": " {2,}"}

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
        if not is_pair or type(entry[1]) not in (int, float) or not math.isfinite(entry[1]):
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
    scores[: len(given)] = given
    found: dict[str, object] = {f"{PREFIX}model": "t5", f"{PREFIX}scores": scores}
    merges_spaces = False
    for step in normalizers:
        match step:
            case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
                found[f"{PREFIX}precompiled_charsmap"] = _bytes(text)
            case {"type": "Replace", "pattern": pattern, "content": " "} if pattern == _MANY_SPACES:
                merges_spaces = True
            case {"type": "Strip"}:
                pass  # white space around a text is dropped where spaces are merged
            case _:
                raise unsupported(f"its normalizer has the step {shown(step, 200)}", "Precompiled and merged spaces")
    adds_space = None
    for step in pre_tokenizers:
        match step:
            case {"type": "WhitespaceSplit"}:
                merges_spaces = found[f"{PREFIX}splits_at_white_space"] = True
            case {"type": "Metaspace", "replacement": "▁"}:
                scheme = step.get("prepend_scheme", "always" if flag_in(step, "add_prefix_space", True) else "never")
                if scheme not in ("always", "never"):
                    raise unsupported(f"its prepend_scheme is {shown(scheme, 40)}", "always or never")
                adds_space = scheme == "always"
            case _:
                raise unsupported(f"its pre-tokenizer has the step {shown(step, 200)}", "WhitespaceSplit and Metaspace")
    if adds_space is None:
        raise unsupported("nothing in it turns spaces into '▁'", "a Metaspace that does")
    if merges_spaces and not adds_space:
        raise unsupported("its words have no space before them", "a Metaspace that adds one")
    return found | {
        f"{PREFIX}add_space_prefix": adds_space,
        f"{PREFIX}remove_extra_whitespaces": merges_spaces,
    }


def _bytes(text: str) -> Any:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (binascii.Error, ValueError) as error:
        raise wrong(f"its precompiled_charsmap is not base64 ({error})") from None
