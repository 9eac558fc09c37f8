"""Vocabularies of encoders in tokenizer.json, as GGUF has them: BERT's WordPiece, the Unigram of XLM-RoBERTa and T5."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from localinfer.models.checkpoint.tokenizer_document import (
    flag_in,
    list_in,
    metaspace_scheme,
    shown,
    unsupported,
    wrong,
)
from localinfer.models.text.encoders import LONGEST_WORD
from localinfer.models.text.normalizer_steps import STEPS, keeps_spaces, replacement
from localinfer.models.text.vocabulary import PREFIX, TokenType
from localinfer.types import is_finite_number

_SPACE_MARK = "▁"
_CONTINUES = "##"
_MANY_SPACES = {"Regex": " {2,}"}
_SQUEEZED = {"Regex": r"\s{2,}|[\n\r\t]"}
"""What DeBERTa's tokenizer makes one space, as transformers 5 writes it."""

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
    """A step that goes before a compiled map, as `normalizer_steps` has it; None for others."""
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
