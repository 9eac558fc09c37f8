"""The bytes of all tokens at once, and long lists in pieces, against one by one."""

import json
from itertools import chain

import pytest

from localinfer.models.text.tokenizer import Tokenizer
from localinfer.system.pieces import PIECE, last_places, parse_json, pieces
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
    some = [*range(0, tokenizer.vocab_size, 7), 3, 3]
    assert tokenizer.many_token_bytes(some) == [tokenizer.token_bytes(index) for index in some]


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


def large(value: object) -> str:
    return json.dumps({"long": "é" * (1 << 17), "value": value}, ensure_ascii=False, indent=1)


@pytest.mark.parametrize(
    "text",
    [
        large({"vocab": {f"a{number}": number for number in range(50)}, "merges": [["a", "b"], [], {}, {"c": [[1]]}]}),
        large([1.5, -2e9, True, False, None, "\n\u0000\ud83d\ude00", {"same": {"same": [[[[]]]]}}]),
        large({"a": 1}).replace('"a": 1', '"a": 1, "a": {"b": 2, "b": 3}'),
        json.dumps("x" * (1 << 17)),
        "[" + "0," * (1 << 17) + "NaN]",
    ],
)
def test_json_is_read_as_the_standard_library_does(text: str) -> None:
    assert repr(parse_json(text)) == repr(json.loads(text))
    for wrong in {text[:-1], text + "]", text.replace(": ", ":: "), text[:-2] + ",}", "\ufeff" + text} - {text}:
        with pytest.raises(json.JSONDecodeError) as found:
            parse_json(wrong)
        with pytest.raises(json.JSONDecodeError) as known:
            json.loads(wrong)
        assert str(found.value) == str(known.value)


def test_json_nested_without_end_is_refused() -> None:
    for text in ("[" * (1 << 17), '{"a":' * (1 << 17)):
        with pytest.raises(RecursionError):
            parse_json(text)
