"""Vocabularies that are known by their merges or special tokens, and settings that contradict them."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.models.checks import Finding
from localinfer.models.checks.quick import check_text_settings
from localinfer.models.checks.text_checks import check_vocabulary
from localinfer.models.text.encoders import BYTE_CHARACTERS, PRE_TOKENIZERS
from localinfer.models.text.known_vocabularies import KNOWN_VOCABULARIES, KnownVocabulary
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import TokenType
from localinfer.quant.gguf.reader import read_gguf
from tests.models.checks.broken_models import demo, edited, findings_of
from tests.models.text.vocabularies import real_metadata

BY_TOKENS = [known for known in KNOWN_VOCABULARIES if known.special_tokens and known.pre_tokenizer != "default"]
"""Of byte-level BPE."""
KEY = "tokenizer.ggml."


def tokenizer_of(metadata: dict[str, Any], **settings: Any) -> Tokenizer:
    return Tokenizer.from_metadata({**metadata, **{KEY + key: value for key, value in settings.items()}})


def checks(tokenizer: Tokenizer) -> list[Finding]:
    return list(check_vocabulary(tokenizer))


def without_last_merge(metadata: dict[str, Any]) -> dict[str, Any]:
    """The same vocabulary, known by nothing."""
    return {**metadata, f"{KEY}merges": metadata[f"{KEY}merges"][:-1]}


def special_vocabulary(known: KnownVocabulary, **settings: Any) -> dict[str, Any]:
    """A vocabulary of bytes, words that merges make, and a family's special tokens."""
    return {**_plain_vocabulary(known), **{KEY + key: value for key, value in settings.items()}}


@cache
def _plain_vocabulary(known: KnownVocabulary) -> dict[str, Any]:
    specials = list(dict.fromkeys((*known.special_tokens, *known.ends, *([known.bos] if known.bos else []))))
    words = [f"a{'b' * length}" for length in range(1, 600)]
    merges = ["a b", *(f"{word} b" for word in words[:-1])]
    tokens = [*BYTE_CHARACTERS, *words, *specials]
    tokens += [f"<unused{index}>" for index in range(known.sizes.start - len(tokens))]
    types = np.full(len(tokens), TokenType.UNUSED, np.int32)
    types[: 256 + len(words)] = TokenType.NORMAL
    types[256 + len(words) : 256 + len(words) + len(specials)] = TokenType.CONTROL
    values = {"model": "gpt2", "pre": known.pre_tokenizer, "tokens": tokens, "merges": merges, "token_type": types}
    ids = {"eos_token_id": tokens.index(known.ends[0])}
    if known.bos:
        ids["bos_token_id"] = tokens.index(known.bos)
    return {KEY + key: value for key, value in {**values, **ids}.items()}


@pytest.mark.parametrize("known", BY_TOKENS, ids=lambda known: known.owner)
def test_a_family_is_known_by_its_special_tokens_and_told_its_word_splitting(known: KnownVocabulary) -> None:
    own = tokenizer_of(special_vocabulary(known))
    assert own.vocabulary.known == known and checks(own) == []
    rule = PRE_TOKENIZERS[known.pre_tokenizer]
    others = {PRE_TOKENIZERS[name].steps: name for name in ("gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "default")}
    wrong = [name for steps, name in others.items() if steps != rule.steps]
    # Each family with one wrong rule, and each rule with some family.
    name = wrong[BY_TOKENS.index(known) % len(wrong)]
    (finding,) = checks(tokenizer_of(special_vocabulary(known, pre=name)))
    assert finding.check == "pre-tokenizer"
    assert f"tokenizer.ggml.pre={known.pre_tokenizer} (--set)" in finding.message


def test_every_known_word_splitting_exists() -> None:
    assert {known.pre_tokenizer for known in KNOWN_VOCABULARIES} <= PRE_TOKENIZERS.keys()


WRONG = {
    "gpt-2": ("default", "llama-bpe", "qwen2", "deepseek-v3", "starcoder", "tekken"),
    "qwen2": ("gpt-2", "deepseek-llm", "deepseek-coder", "falcon", "seed-coder", "laguna"),
}


@pytest.mark.parametrize("vocabulary", list(WRONG))
def test_a_wrong_word_splitting_of_an_unknown_vocabulary_is_found(vocabulary: str) -> None:
    metadata = without_last_merge(real_metadata(vocabulary))
    assert tokenizer_of(metadata).vocabulary.known is None and checks(tokenizer_of(metadata)) == []
    for name in WRONG[vocabulary]:
        (finding,) = checks(tokenizer_of(metadata, pre=name))
        assert finding.check == "pre-tokenizer" and f"is {name!r}, which splits" in finding.message


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "llama-bpe"])
def test_merges_that_were_cut_short_are_found(name: str) -> None:
    metadata = real_metadata(name)
    merges = metadata[f"{KEY}merges"]
    short = tokenizer_of(metadata, merges=merges[: len(merges) // 3])
    assert [finding.check for finding in checks(short)] == ["merges"]


@pytest.mark.parametrize("known", [one for one in BY_TOKENS if one.bos], ids=lambda known: known.owner)
def test_texts_without_the_beginning_of_their_family_are_found(known: KnownVocabulary) -> None:
    file: Any = type("File", (), {"metadata": {}})
    for flag, wanted in ((False, ["beginning of text"]), (True, [])):
        tokenizer = tokenizer_of(special_vocabulary(known, add_bos_token=flag))
        found = list(check_text_settings(file, tokenizer))
        assert [finding.check for finding in found] == wanted
        assert all(f"(--set {KEY}add_bos_token=true)" in finding.message for finding in found)
    file.metadata = type("Replaced", (dict,), {"replaced_keys": frozenset({f"{KEY}add_bos_token"})})()
    tokenizer = tokenizer_of(special_vocabulary(known, add_bos_token=False))
    assert list(check_text_settings(file, tokenizer)) == []


def test_texts_that_begin_with_their_familys_end_are_found() -> None:
    file: Any = type("File", (), {"metadata": {}})
    metadata = real_metadata("qwen2")
    assert list(check_text_settings(file, tokenizer_of(metadata, add_bos_token=False))) == []
    (finding,) = check_text_settings(file, tokenizer_of(metadata, add_bos_token=True))
    assert finding.check == "beginning of text" and "begin with <|endoftext|>, which ends" in finding.message


def test_a_word_as_the_end_of_texts_is_found() -> None:
    word = 1000
    metadata = real_metadata("qwen2")
    assert metadata[f"{KEY}tokens"][word].isalpha()
    (finding,) = checks(tokenizer_of(metadata, eos_token_id=word))
    assert finding.check == "end of text" and f"eos_token_id is {word}, which is the word" in finding.message


@pytest.mark.parametrize("known", BY_TOKENS, ids=lambda known: known.owner)
def test_ends_that_a_family_does_not_have_are_found(known: KnownVocabulary) -> None:
    metadata = special_vocabulary(known)
    tokens = metadata[f"{KEY}tokens"]
    other = tokens.index(known.special_tokens[0])
    # Ends that are known by their spelling alone end replies whatever a file says.
    tokenizer = tokenizer_of(metadata, eos_token_id=other)
    ends = {tokens[index] for index in tokenizer.vocabulary.end_of_generation_ids}
    found = checks(tokenizer)
    if ends & set(known.ends):
        assert found == []
    else:
        assert [finding.check for finding in found] == ["end of text"]
        assert f"eos_token_id={tokens.index(known.ends[0])} (--set)" in found[0].message


def test_markers_of_a_template_that_are_typed_as_words_are_found(tmp_path: Path) -> None:
    with read_gguf(demo()) as file:
        tokens = list(file.metadata[f"{KEY}tokens"])  # type: ignore[call-overload]
        types = np.array(file.metadata[f"{KEY}token_type"], np.int32)
    types[tokens.index("<|im_start|>")] = TokenType.NORMAL
    (finding,) = findings_of(edited(demo(), tmp_path / "typed.gguf", settings={f"{KEY}token_type": types}))
    assert finding.check == "chat template" and "writes <|im_start|>, which" in finding.message


LLAMA2_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the"]


@pytest.mark.parametrize(("sign", "wanted"), [(-1, []), (1, ["tokenizer scores"])])
def test_scores_of_the_wrong_sign_are_found(sign: int, wanted: list[str]) -> None:
    tokens = [*LLAMA2_TOKENS, *(f"▁word{index}" for index in range(32000 - len(LLAMA2_TOKENS)))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    scores = sign * np.maximum(np.arange(len(tokens)) - 259, 0).astype(np.float32)
    values = {"model": "llama", "tokens": tokens, "token_type": np.array(types, np.int32), "scores": scores}
    metadata = {KEY + key: value for key, value in values.items()}
    assert [finding.check for finding in checks(tokenizer_of(metadata))] == wanted
    known = tokenizer_of(metadata).vocabulary.known
    assert known is not None and known.owner == "Llama 2's"
    file: Any = type("File", (), {"metadata": {}})
    beginning = check_text_settings(file, tokenizer_of(metadata, add_bos_token=False))
    assert [finding.check for finding in beginning] == [*wanted, "beginning of text"]


@pytest.mark.parametrize(
    ("old", "new", "settings", "check", "words"),
    [
        ("<|im_end|>", "", {}, "end of turn", "begins turns with <|im_start|> and never writes <|im_end|>"),
        (None, "{% for m in messages %}### {{ m.content }}{% endfor %}", {}, "chat template", "no control token"),
        ("", "", {"eos": "<|im_start|>"}, "end of turn", "<|im_start|> ends generations here, but begins a turn"),
    ],
)
def test_turns_that_a_template_and_a_vocabulary_mark_otherwise_are_found(
    old: str | None, new: str, settings: dict[str, str], check: str, words: str, tmp_path: Path
) -> None:
    with read_gguf(demo()) as file:
        tokens = list(file.metadata[f"{KEY}tokens"])  # type: ignore[call-overload]
        template = str(file.metadata["tokenizer.chat_template"])
    values: dict[str, Any] = {"tokenizer.chat_template": new if old is None else template.replace(old, new)}
    values |= {f"{KEY}{role}_token_id": tokens.index(text) for role, text in settings.items()}
    (finding,) = findings_of(edited(demo(), tmp_path / "broken.gguf", settings=values))
    assert finding.check == check and words in finding.message
