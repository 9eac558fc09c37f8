"""The bytes of all tokens at once, and long lists in pieces, against one by one."""

from itertools import chain

import pytest

from localinfer.models.text.tokenizer import Tokenizer
from localinfer.pieces import PIECE, last_places, pieces
from tests.models.text.vocabularies import (
    CONTROL,
    NORMAL,
    REAL,
    USER_DEFINED,
    bpe_metadata,
    gemma4_metadata,
    real_tokenizer,
    spm_metadata,
    with_token,
)


@pytest.mark.parametrize("name", REAL)
def test_bytes_of_a_vocabulary_are_those_of_each_token(name: str) -> None:
    tokenizer = real_tokenizer(name)
    assert tokenizer.vocabulary_bytes() == [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]


@pytest.mark.parametrize("metadata", [bpe_metadata(), spm_metadata(), gemma4_metadata()])
@pytest.mark.parametrize("text", ["\x80", "\xad", "ſ", "中\n", "a b", "\0"])
def test_tokens_outside_the_byte_alphabet_are_their_own_text(metadata: dict[str, object], text: str) -> None:
    for token_type in (NORMAL, CONTROL, USER_DEFINED):
        tokenizer = Tokenizer.from_metadata(with_token(metadata, text, token_type))
        found = tokenizer.vocabulary_bytes()
        assert found == [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
        assert found[-1] == text.encode()


@pytest.mark.parametrize("count", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_pieces_are_the_whole(count: int) -> None:
    texts = [str(number % (PIECE + 7)) for number in range(count)]
    assert list(chain.from_iterable(pieces(texts))) == texts
    assert last_places(texts) == {text: index for index, text in enumerate(texts)}
