"""Vocabularies that lie: each ends in a TokenizerError that names key, found, wanted and the way out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from localinfer.errors import LocalinferError, TokenizerError
from localinfer.models.text.encoders import TokenizerWarning
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from tests.models.text.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    bpe_metadata,
    keyed,
    spm_metadata,
    with_token,
    wordpiece_metadata,
)


def without(metadata: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in metadata.items() if key.removeprefix(PREFIX) not in keys}


def named(metadata: dict[str, object], index: int, text: str) -> dict[str, object]:
    """The same vocabulary with one token respelled."""
    tokens = metadata[PREFIX + "tokens"]
    assert isinstance(tokens, list)
    return metadata | keyed(tokens=[*tokens[:index], text, *tokens[index + 1 :]])


def typed(metadata: dict[str, object], index: int, token_type: int) -> dict[str, object]:
    types = metadata[PREFIX + "token_type"]
    assert isinstance(types, np.ndarray)
    changed = types.copy()
    changed[index] = token_type
    return metadata | keyed(token_type=changed)


SPM = spm_metadata()
BPE = bpe_metadata()
COUNT = 265

CASES: list[tuple[str, dict[str, object], str]] = [
    ("empty", {}, "model is missing"),
    ("model of another type", SPM | keyed(model=3), "model is 3"),
    ("no vocabulary", keyed(model="none"), "holds no vocabulary"),
    ("no vocabulary, other name", keyed(model="no_vocab"), "holds no vocabulary"),
    ("test vocabulary", keyed(model="test"), "not known"),
    ("RWKV", SPM | keyed(model="rwkv"), "RWKV"),
    ("PLaMo", SPM | keyed(model="plamo2"), "PLaMo 2"),
    ("no tokens", without(SPM, "tokens"), "tokens is missing"),
    ("zero tokens", SPM | keyed(tokens=[]), "tokens is empty"),
    ("tokens that are numbers", SPM | keyed(tokens=np.arange(9)), "tokens is an array of 9 int64"),
    ("tokens of mixed types", SPM | keyed(tokens=["a", 1]), "tokens is a list of 2 values"),
    ("tokens that are one string", SPM | keyed(tokens="abc"), "tokens is 'abc'"),
    ("the same token twice", named(SPM, 260, "b"), "260 and 261 are both 'b'"),
    ("byte token below zero", named(SPM, 10, "<0x-1>"), "'<0x-1>' at id 10"),
    ("byte token without hexadecimal digits", named(SPM, 10, "<0xZZ>"), "'<0xZZ>' at id 10"),
    ("byte token with a sign", named(SPM, 10, "<0x+1>"), r"'<0x\+1>' at id 10"),
    ("byte token with three digits", named(SPM, 10, "<0x100>"), "'<0x100>' at id 10"),
    ("byte token in other digits", named(SPM, 10, "<0x٣٣>"), "at id 10"),
    ("more byte tokens than bytes", typed(SPM, 260, BYTE), "'a' at id 260, declared to be a byte"),
    ("two tokens for one byte", with_token(SPM, "<0x0a>", BYTE), "two tokens for byte 10"),
    ("fewer scores than tokens", SPM | keyed(scores=np.zeros(5, np.float32)), f"scores is an array of 5 .*{COUNT}"),
    ("more scores than tokens", SPM | keyed(scores=np.zeros(999, np.float32)), "scores is an array of 999"),
    ("no scores", without(SPM, "scores"), "scores is missing"),
    ("scores that are text", SPM | keyed(scores=["a"] * COUNT), "scores is a list"),
    ("a score that is no number", SPM | keyed(scores=np.full(COUNT, np.nan, np.float32)), "not a number at entry 0"),
    ("ragged scores", SPM | keyed(scores=[[1], [1, 2]]), "scores is a list"),
    ("fewer types than tokens", SPM | keyed(token_type=np.ones(5, np.int32)), "token_type is an array of 5"),
    ("types that are fractions", SPM | keyed(token_type=np.ones(COUNT, np.float32)), "token_type is an array"),
    ("a type below zero", typed(SPM, 9, -1), "values from -1"),
    ("a type that does not exist", typed(SPM, 9, 7), "values from 1 to 7"),
    ("BOS beyond the vocabulary", SPM | keyed(bos_token_id=COUNT), f"bos_token_id is {COUNT}; wanted a token id"),
    ("EOS beyond the vocabulary", SPM | keyed(eos_token_id=2**32 - 1), "eos_token_id is 4294967295"),
    ("EOS below zero", SPM | keyed(eos_token_id=-1), "eos_token_id is -1"),
    ("EOT beyond the vocabulary", SPM | keyed(eot_token_id=10**9), "eot_token_id is"),
    ("EOS that is text", SPM | keyed(eos_token_id="2"), "eos_token_id is '2'"),
    ("EOS that is a bool", SPM | keyed(eos_token_id=True), "eos_token_id is True"),
    ("EOS that is a byte", SPM | keyed(eos_token_id=20), "eos_token_id is 20, a byte token"),
    (
        "nothing that ends a text",
        typed(named(without(SPM, "eos_token_id"), 2, "x"), 2, NORMAL),
        "eos_token_id is missing",
    ),
    ("add_bos_token that is a number", SPM | keyed(add_bos_token=1), "add_bos_token is 1"),
    ("add_space_prefix that is text", SPM | keyed(add_space_prefix="yes"), "add_space_prefix is 'yes'"),
    ("BOS wanted but not named", BPE | keyed(add_bos_token=True), "bos_token_id is missing"),
    ("a pre-tokenizer that is a number", BPE | keyed(pre=1), "pre is 1"),
    ("no merges", without(BPE, "merges"), "merges is missing"),
    ("merges that are numbers", BPE | keyed(merges=np.arange(4)), "merges is an array"),
    ("a merge of tokens that do not exist", BPE | keyed(merges=["a b", "q q"]), "'q q' at entry 1"),
    ("a merge without a space", BPE | keyed(merges=["a b", "ab"]), "'ab' at entry 1"),
    ("a merge with two spaces", BPE | keyed(merges=["a b", "a b c"]), "'a b c' at entry 1"),
    ("an empty merge", BPE | keyed(merges=["a b", ""]), "'' at entry 1"),
    ("a merge of nothing", BPE | keyed(merges=["a b", " "]), "' ' at entry 1"),
    ("no [SEP]", without(wordpiece_metadata(), "seperator_token_id"), "seperator_token_id is missing"),
    ("no [UNK]", without(wordpiece_metadata(), "unknown_token_id"), "unknown_token_id is missing"),
]


@pytest.mark.parametrize(("metadata", "found"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_hostile_vocabulary_is_refused_by_name(metadata: dict[str, object], found: str) -> None:
    with pytest.raises(TokenizerError, match=found) as caught:
        Tokenizer.from_metadata(metadata)
    message = str(caught.value)
    assert message.startswith(PREFIX)
    assert "wanted" in message
    assert "Convert the model again" in message


def test_a_missing_byte_without_an_unknown_token_is_refused() -> None:
    metadata = typed(named(without(SPM, "unknown_token_id"), 0, "x"), 0, NORMAL)
    metadata = typed(named(metadata, 13, "y"), 13, NORMAL)
    with pytest.raises(TokenizerError, match="no token <0x0A> and the file names no unknown token"):
        Tokenizer.from_metadata(metadata)


def test_a_padding_id_beyond_the_vocabulary_is_harmless() -> None:
    # Published files carry such ids, and nothing here uses them.
    assert Tokenizer.from_metadata(SPM | keyed(padding_token_id=COUNT)).encode("a") == [1, 262]


def test_empty_tokens_get_names_of_their_own() -> None:
    tokenizer = Tokenizer.from_metadata(named(named(SPM, 260, ""), 261, ""))
    assert tokenizer.token_text(261) == "[EMPTY_261]"


def test_files_without_types_still_have_bytes_and_specials() -> None:
    tokenizer = Tokenizer.from_metadata(without(SPM, "token_type"))
    assert tokenizer.encode("aé</s>") == Tokenizer.from_metadata(SPM).encode("aé</s>")


def test_repeated_merges_keep_their_first_rank() -> None:
    merges = ["a b", "b c", "a b"]
    metadata = with_token(bpe_metadata(merges=("a b", "b c")), "<x>", CONTROL) | keyed(merges=merges)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abc")] == ["ab", "c"]


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none(), st.binary(max_size=3)), max_size=5),
    st.lists(st.integers(-9, 9), max_size=5).map(np.array),
)
KEYS = ("model", "pre", "tokens", "scores", "token_type", "merges", "eos_token_id", "bos_token_id", "add_bos_token")


@pytest.mark.filterwarnings("ignore::localinfer.models.text.encoders.TokenizerWarning")
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["spm", "bpe"]), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_metadata_gives_a_tokenizer_or_a_typed_error(kind: str, changes: dict[str, Any]) -> None:
    try:
        tokenizer = Tokenizer.from_metadata((SPM if kind == "spm" else BPE) | keyed(**changes))
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in tokenizer.encode("ab é"))
        assert isinstance(tokenizer.decode(tokenizer.encode("ab é")), str)
    except LocalinferError:
        pass


def test_warnings_have_a_category_of_their_own() -> None:
    assert issubclass(TokenizerWarning, UserWarning)
