"""Tokenizers against llama.cpp's ids, HF's BPE, a naive SentencePiece loop and themselves."""

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

import localinfer.apps.evaluate
from localinfer.errors import RequestError
from localinfer.models.text.encoders import PRE_TOKENIZERS, TokenizerWarning, build_splitter, merge_by_rank
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from tests.models.text.vocabularies import (
    CONTROL,
    REAL,
    USER_DEFINED,
    bpe_metadata,
    keyed,
    real_metadata,
    real_tokenizer,
    sample_ids,
    sample_texts,
    spm_metadata,
    with_token,
    wordpiece_metadata,
)

PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
AWKWARD = (
    "Zürich \t\n\r\n  中文字 가나다 🦙🏽‍🌾 e\u0301 \u200b\ufeff\0\x7f ﷽ 'LL's don't 1234567 <s></s> <0x41> ▁▁ \u2028x"
)


@pytest.mark.parametrize("name", REAL)
def test_every_reference_line_is_exact(name: str) -> None:
    tokenizer = real_tokenizer(name)
    cases = list(zip(sample_texts(), sample_ids(name), strict=True))
    assert len(cases) == 47
    for text, expected in cases:
        assert tokenizer.encode(text, add_special=False) == expected, text


@pytest.mark.parametrize("name", REAL)
@PROPERTY
@given(text=st.text())
@example(text=AWKWARD)
@example(text=" leading and trailing ")
@example(text="▁")
def test_any_text_survives_a_round_trip(name: str, text: str) -> None:
    tokenizer = real_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@PROPERTY
@given(text=st.text(alphabet="ab <s>/▁é\n0x41"))
def test_small_vocabularies_survive_a_round_trip(text: str) -> None:
    for metadata in (
        spm_metadata(),
        spm_metadata(add_space_prefix=False),
        with_token(spm_metadata(), "ab ", USER_DEFINED),
        bpe_metadata(),
        with_token(bpe_metadata(), "éa", USER_DEFINED),
    ):
        tokenizer = Tokenizer.from_metadata(metadata)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_trained_story_model_has_a_tokenizer(shared: Path) -> None:
    from localinfer.quant.gguf.reader import read_gguf

    with read_gguf(shared / "models" / "stories260K.gguf") as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    ids = tokenizer.encode("Once upon a time")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode(ids) == "Once upon a time"


def scores_of_words(metadata: dict[str, object]) -> dict[str, float]:
    tokens, scores, types = (metadata[PREFIX + key] for key in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, list)
    assert isinstance(scores, np.ndarray)
    assert isinstance(types, np.ndarray)
    return {token: scores[index] for index, token in enumerate(tokens) if types[index] == 1}


def naive_sentencepiece(normal: dict[str, float], text: str) -> list[str]:
    """Merge the pair whose joined token has the highest score, leftmost among equals, one by one."""
    symbols = list(text)
    while True:
        pairs = [
            (-normal[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in normal
        ]
        if not pairs:
            return symbols
        index = min(pairs)[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


def test_sentencepiece_merges_by_score_and_then_from_the_left() -> None:
    normal = scores_of_words(real_metadata("llama-spm"))
    tokenizer = real_tokenizer("llama-spm")
    rng = random.Random(7)
    for length in (1, 2, 5, 31, 32, 33, 34, 200):
        for _ in range(8):
            text = "".join(rng.choices("aaeinrst  THh.,", k=length))
            pieces = [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special=False)]
            assert pieces == naive_sentencepiece(normal, ("▁" + text).replace(" ", "▁"))


@pytest.mark.parametrize("separator", ["", " "])
def test_equal_ranks_merge_from_the_left_however_long_the_word(separator: str) -> None:
    ranks = {"a" + separator + "a": 3, "aa" + separator + "aa": 3, "b" + separator + "a": 3, "aa" + separator + "a": 9}
    rng = random.Random(3)
    for length in (0, 1, 2, 3, 17, 32, 33, 64, 257):
        symbols = rng.choices("aaab", k=length)
        expected = list(symbols)
        while pairs := [
            (ranks[left + separator + right], index)
            for index, (left, right) in enumerate(zip(expected, expected[1:], strict=False))
            if left + separator + right in ranks
        ]:
            index = min(pairs)[1]
            expected[index : index + 2] = [expected[index] + expected[index + 1]]
        assert merge_by_rank(list(symbols), ranks, separator) == expected


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
def test_bpe_agrees_with_the_reference_implementation(name: str) -> None:
    from tokenizers import Tokenizer as Reference, models, pre_tokenizers

    metadata = real_metadata(name)
    tokens, merges = metadata[PREFIX + "tokens"], metadata[PREFIX + "merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    reference = Reference(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=name == "llama-bpe"))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = real_tokenizer(name)
    split = build_splitter(PRE_TOKENIZERS[name])
    text = (Path(localinfer.apps.evaluate.__path__[0]) / "evaluation.txt").read_text("utf-8")[:20000] + AWKWARD * 3
    expected = [token_id for word in split(text) for token_id in reference.encode(word).ids]
    assert tokenizer.encode(text, add_special=False) == expected


def test_a_word_of_a_million_letters_ends() -> None:
    tokenizer = real_tokenizer("phi-3")
    text = "abcdefgh" * 125_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


ADVERSARIAL = ("a", "A", " ", "\n", "1", "'", "中", "\u0301", "a ", " \r\n", "aA1 .\n", "1a")


@pytest.mark.parametrize("name", {rule: name for name, rule in PRE_TOKENIZERS.items()}.values())
def test_every_pre_tokenizer_keeps_all_text_and_takes_linear_time(name: str) -> None:
    # Quadratic time would need minutes here, not a second.
    split = build_splitter(PRE_TOKENIZERS[name])
    for unit in ADVERSARIAL:
        for end in ("", "x", "1"):
            text = unit * (4000 // len(unit)) + end
            assert "".join(split(text)) == text
    assert "".join(split(AWKWARD)) == AWKWARD


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I'll say  it 12345!\n\nx", ["I", "'ll", " say", " ", " it", " 12345", "!", "\n", "\n", "x"]),
        ("llama-bpe", "I'LL say  it 12345!\n\nx", ["I", "'LL", " say", " ", " it", " ", "123", "45", "!\n\n", "x"]),
        ("qwen2", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("deepseek-v3", "x+abc 1234 中文a", ["x", "+abc", " ", "123", "4", " ", "中文", "a"]),
        ("deepseek-llm", "a b\n\n12 中", ["a", " b", "\n", "\n", "12", " ", "中"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "HTMLParser's 1234", ["HTMLParser's", " ", "123", "4"]),
        ("falcon", "ab 12345.", ["ab", " ", "123", "45", "."]),
        ("starcoder", "ab 12", ["ab", " ", "1", "2"]),
        ("tiny_aya", "12345 1234a", ["12", "345", " ", "123", "4", "a"]),
        ("superbpe", "ab 1234567", ["ab ", "1", "234", "567"]),
        ("afmoe", "12345 中", ["12", "345", " ", "中"]),
        ("kimi-k2", "中文abc 1234", ["中文", "abc", " ", "123", "4"]),
        ("bloom", "ab, c", ["ab", ",", " c"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("chameleon", "a 12\n", ["a", " ", "1", "2", "\n"]),
        ("jais-2", "a     b", ["a", "    ", " b"]),
        ("default", "a1234.", ["a", "123", "4", "."]),
    ],
)
def test_pre_tokenizers_cut_where_their_models_were_trained_to(name: str, text: str, words: list[str]) -> None:
    assert build_splitter(PRE_TOKENIZERS[name])(text) == words


@pytest.mark.parametrize("name", ["no-such-model", None])
def test_an_unknown_pre_tokenizer_warns_and_takes_the_default(name: str | None) -> None:
    metadata = bpe_metadata()
    del metadata[PREFIX + "pre"]
    with pytest.warns(TokenizerWarning, match="tokenizer.ggml.pre is"):
        tokenizer = Tokenizer.from_metadata(metadata if name is None else metadata | keyed(pre=name))
    default = Tokenizer.from_metadata(bpe_metadata(pre="default"))
    assert tokenizer.encode("abc 1234") == default.encode("abc 1234")


def test_missing_byte_tokens_warn_where_nothing_can_replace_them() -> None:
    metadata = bpe_metadata()
    tokens = metadata[PREFIX + "tokens"]
    assert isinstance(tokens, list)
    tokens[tokens.index("z")] = "zz"
    with pytest.warns(TokenizerWarning, match="lacks tokens for 1 of 256 bytes"):
        Tokenizer.from_metadata(metadata)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = Tokenizer.from_metadata(metadata | keyed(unknown_token_id=5))
    assert tokenizer.encode("z") == [5]


@pytest.mark.parametrize("name", REAL)
def test_special_tokens_in_user_text_stay_text(name: str) -> None:
    tokenizer = real_tokenizer(name)
    assert tokenizer.special_ids
    for spelling, token_id in list(tokenizer.special_ids.items())[:20]:
        assert token_id not in tokenizer.encode(f"a {spelling} b", add_special=False)
        assert tokenizer.encode(spelling, add_special=False, parse_special=True) == [token_id]
        assert tokenizer.decode(tokenizer.encode(spelling)) == spelling


def test_user_defined_tokens_are_taken_from_any_text() -> None:
    tokenizer = Tokenizer.from_metadata(with_token(bpe_metadata(), "<think>", USER_DEFINED))
    ids = tokenizer.encode("a<think>b")
    assert ids == [tokenizer.token_id("a"), tokenizer.vocab_size - 1, tokenizer.token_id("b")]
    assert tokenizer.decode(ids) == "a<think>b"


def test_tokens_that_contain_a_text_are_found_by_what_they_stand_for() -> None:
    tokenizer = Tokenizer.from_metadata(with_token(with_token(bpe_metadata(), "<a b>", CONTROL), "é b", USER_DEFINED))
    containing = [i for i in range(tokenizer.vocab_size) if b" " in tokenizer.token_bytes(i)]
    special = tokenizer.special_ids["<a b>"]
    assert tokenizer.ids_containing(" ") == frozenset(containing) - {special}
    assert tokenizer.ids_containing("é b") == {tokenizer.vocab_size - 1}
    assert tokenizer.ids_containing("<a b>") == frozenset()


def test_the_longer_of_two_overlapping_special_tokens_wins() -> None:
    metadata = with_token(with_token(bpe_metadata(), "<a>b", CONTROL), "c<a", CONTROL)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("c<a>b", parse_special=True)
    assert [tokenizer.token_text(i) for i in ids] == ["c", "<a>b"]


def test_segments_give_the_ids_of_the_joined_text_but_for_special_tokens() -> None:
    for metadata in (spm_metadata(), bpe_metadata()):
        tokenizer = Tokenizer.from_metadata(metadata)
        end = "</s>" if tokenizer.kind == "spm" else "<|im_end|>"
        parts = [("ab", True), (f" a{end}", False), (f"b{end}", True)]
        ids = tokenizer.encode_segments(parts)
        assert ids.count(tokenizer.token_id(end) or -1) == 1
        assert tokenizer.decode(ids, skip_special=False) == f"ab a{end}b{end}"
        # A spelling that is only partly the template's is not one.
        assert tokenizer.encode_segments([(end[:2], True), (end[2:], False)]) == tokenizer.encode(end, False)


def test_bos_and_eos_follow_the_file_and_the_kind() -> None:
    assert Tokenizer.from_metadata(spm_metadata()).encode("a")[0] == 1
    assert Tokenizer.from_metadata(spm_metadata(add_bos_token=False)).encode("") == []
    assert Tokenizer.from_metadata(spm_metadata(add_eos_token=True)).encode("") == [1, 2]
    assert Tokenizer.from_metadata(bpe_metadata(bos_token_id=3)).encode("") == []
    assert Tokenizer.from_metadata(bpe_metadata(bos_token_id=3, add_bos_token=True)).encode("") == [3]
    # Names of the Llama 3 family want BOS where the file does not say.
    assert Tokenizer.from_metadata(bpe_metadata(bos_token_id=3, pre="llama-bpe")).encode("") == [3]


def test_end_of_generation_ids_come_from_roles_and_spellings() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata())
    assert tokenizer.eog_token_ids == {tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")}
    harmony = bpe_metadata()
    for text in ("<|return|>", "<|call|>", "<|end|>"):
        harmony = with_token(harmony, text, CONTROL)
    ids = Tokenizer.from_metadata(harmony)
    assert ids.token_id("<|call|>") in ids.eog_token_ids
    assert ids.token_id("<|end|>") not in ids.eog_token_ids


def test_raw_bpe_escapes_spaces_and_falls_back_to_bytes() -> None:
    words = ["▁", "a", "b", "▁a", "\n", "\n\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [CONTROL] * 3 + [2] + [6] * 256 + [1] * len(words)
    tokenizer = Tokenizer.from_metadata(
        keyed(
            model="gemma4",
            tokens=tokens,
            token_type=np.array(types, np.int32),
            merges=["▁ a"],
            bos_token_id=2,
            eos_token_id=1,
            unknown_token_id=3,
            # As published files do, and their models need BOS all the same.
            add_bos_token=False,
        )
    )
    ids = tokenizer.encode(" ab a\n\n\u00e9▁")
    assert [tokenizer.token_text(i) for i in ids[:6]] == ["<bos>", "▁a", "b", "▁a", "\n\n", "<0xC3>"]
    assert tokenizer.decode(ids) == " ab a\n\n\u00e9▁"


def test_kimi_ranks_by_id_where_there_are_no_merges() -> None:
    metadata = bpe_metadata(pre="kimi-k2")
    with_merges = Tokenizer.from_metadata(metadata)
    del metadata[PREFIX + "merges"]
    assert Tokenizer.from_metadata(metadata).encode("abc ab") == with_merges.encode("abc ab")


def test_wordpiece_matches_the_longest_and_normalizes() -> None:
    tokenizer = Tokenizer.from_metadata(wordpiece_metadata())

    def pieces(text: str) -> list[str]:
        return [tokenizer.token_text(i) for i in tokenizer.encode(text)]

    assert pieces("Hello  WORLD!") == ["[CLS]", "▁hello", "▁world", "▁!", "[SEP]"]
    assert pieces("unaffable cafés 中x") == ["[CLS]", "▁un", "aff", "able", "▁cafe", "s", "▁中", "[UNK]", "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("hello unaffable world")) == "hello unaffable world"
    cased = Tokenizer.from_metadata(wordpiece_metadata(**{"normalizer.lowercase": False}))
    assert cased.encode("Hello", add_special=False) == [1]


def test_phi_3_takes_the_white_space_after_its_markers() -> None:
    tokenizer = real_tokenizer("phi-3")
    with_line = tokenizer.encode("<|user|>\nHi<|end|>\n<s> x", add_special=False, parse_special=True)
    assert with_line == tokenizer.encode("<|user|>Hi<|end|><s> x", add_special=False, parse_special=True)


@PROPERTY
@given(st.lists(st.integers(3, 31999), max_size=30))
def test_decoding_a_continuation_joins_the_tokens_bytes(token_ids: list[int]) -> None:
    tokenizer = real_tokenizer("llama-spm")
    joined = b"".join(map(tokenizer.token_bytes, token_ids))
    assert tokenizer.decode(token_ids, previous_token_id=300) == joined.decode("utf-8", "replace")


def test_tokens_that_are_not_utf_8_keep_their_bytes() -> None:
    metadata = spm_metadata()
    tokens = metadata[PREFIX + "tokens"]
    assert isinstance(tokens, list)
    raw = [token.encode() for token in tokens]
    raw[-1] = b"\xff\xfea"
    tokenizer = Tokenizer.from_metadata(metadata | keyed(tokens=raw))
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"\xff\xfea"
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "\ufffd\ufffda"
    assert len(tokenizer.fingerprint) == 64


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata())
    with pytest.raises(RequestError, match="not in the vocabulary; wanted 0 to"):
        tokenizer.decode([token_id])
    with pytest.raises(RequestError):
        tokenizer.token_bytes(token_id)


def test_half_characters_are_refused() -> None:
    with pytest.raises(RequestError, match=r"U\+D800, at index 1"):
        Tokenizer.from_metadata(spm_metadata()).encode("a\ud800")


def test_the_fingerprint_changes_with_what_decides_the_ids() -> None:
    same = Tokenizer.from_metadata(bpe_metadata()).fingerprint
    assert Tokenizer.from_metadata(bpe_metadata()).fingerprint == same
    others = [
        bpe_metadata(pre="qwen2"),
        bpe_metadata(merges=("ab c", "a b", "Ġ ab")[::-1]),
        bpe_metadata(eos_token_id=3),
        bpe_metadata(add_bos_token=False),
        with_token(bpe_metadata(), "x y", USER_DEFINED),
        with_token(bpe_metadata(), "x y", CONTROL),
    ]
    prints = {Tokenizer.from_metadata(other).fingerprint for other in others}
    assert len(prints | {same}) == len(others) + 1
