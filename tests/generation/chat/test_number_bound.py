"""Numbers in JSON end, whatever a model would rather write; what a schema or a text asks for may be longer."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.grammar_mask import MatcherMask, NumberTokens
from localinfer.generation.options import JsonObject, JsonSchema, Regex
from tests.engine.fakes import ByteTokenizer

pytest.importorskip("llguidance")


class PairTokenizer(ByteTokenizer):
    """Bytes, and behind them pairs, triples and longer runs of what numbers are made of, some with more behind."""

    MORE = (b"77", b"777", b"7777777", b".5", b"e7", b"7.", b"7e", b"e-", b"-7", b"7,", b"77}", b"+", b"7" * 30)

    def vocabulary_bytes(self) -> list[bytes]:
        return [*super().vocabulary_bytes(), *self.MORE]


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(ByteTokenizer(), ByteTokenizer.vocab_size)  # type: ignore[arg-type]


def written(mask: MatcherMask, prefers: Callable[[list[int], list[int]], int], most: int = 400) -> str | None:
    """What a model writes that takes, of the tokens that may come, the one it prefers; None if it never ends."""
    ids: list[int] = []
    while len(ids) < most:
        allowed = np.flatnonzero(mask(np.array(ids, np.int32))).tolist()
        chosen = prefers(allowed, ids)
        if chosen == ByteTokenizer.eos_token_id:
            return bytes(ids).decode()
        ids.append(chosen)
    return None


def digits(favourites: bytes) -> Callable[[list[int], list[int]], int]:
    """A preference for some characters, the first first; then for anything else, the end last."""
    order = {code: place for place, code in enumerate(favourites)}
    return lambda allowed, ids: min(allowed, key=lambda one: (order.get(one, 99), one == ByteTokenizer.eos_token_id))


def member(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("favourites", [b"7", b"-7", b"7.5", b".7", b"7e-", b"e-7", b"-7E+", b"e7", b"0.7", b"-.e7"])
@pytest.mark.parametrize(("kind", "most"), [("integer", 20), ("number", 25)])
@pytest.mark.parametrize("more", [{}, {"minimum": 0}, {"multipleOf": 7}], ids=str)
def test_numbers_end_and_are_numbers(compiler, kind, most, favourites, more):
    mask = compiler.mask(JsonSchema(member({"type": kind, **more})), start=0)
    text = written(mask, digits(favourites))
    assert text is not None, "it never ends"
    number = text.removeprefix('{"a": ').removesuffix("}")
    assert len(number) <= most
    assert isinstance(json.loads(text)["a"], int | float)


@pytest.mark.parametrize(
    ("constraint", "begin", "most"),
    [
        (JsonSchema({"type": "integer"}), b"", 20),
        (JsonSchema({"type": "number"}), b"", 25),
        (JsonSchema({"type": ["integer", "null"]}), b"", 20),
        (JsonSchema({"type": "array", "items": {"type": "number"}}), b"[7, ", 25),
        (JsonObject(), b'{"a": [', 25),
    ],
    ids=str,
)
def test_numbers_end_wherever_they_stand(compiler, constraint, begin, most):
    mask = compiler.mask(constraint, start=0)
    for size in range(most + 1):
        allowed = mask(np.array([*begin, *b"7" * size], np.int32))
        assert allowed[ord("7")] == (size < most)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (JsonSchema({"const": "7" * 50}), f'"{"7" * 50}"'),
        (JsonSchema({"enum": ["7" * 50]}), f'"{"7" * 50}"'),
        (JsonSchema({"type": "string"}), f'"{"7" * 50}"'),
        (JsonSchema({"type": "string", "pattern": r"^7+$"}), f'"{"7" * 50}"'),
        (JsonSchema({"type": "string", "pattern": r"^\d{50}$"}), f'"{"7" * 50}"'),
        (Regex("7+"), "7" * 50),
        (Regex("[0-9.]+"), "7." * 30),
    ],
    ids=str,
)
def test_what_is_no_number_or_a_constant_is_not_bounded(compiler, constraint, text):
    mask = compiler.mask(constraint, start=0)
    spelled = text.encode()
    for size, code in enumerate(spelled):
        allowed = mask(np.frombuffer(spelled[:size], np.uint8).astype(np.int32))
        assert allowed[code], text[:size]


def test_tokens_of_many_characters_stay_within_the_bound():
    tokenizer = PairTokenizer()
    texts = tokenizer.vocabulary_bytes()
    numbers = NumberTokens([b"" if index == ByteTokenizer.eos_token_id else text for index, text in enumerate(texts)])
    everything = np.ones(len(texts), np.bool_)
    for index, text in enumerate(texts):
        if text[:1].isalpha() and text[:1] not in b"eE" or text[:1] in (b'"', b"\\"):
            everything[index] = False
    for size in range(30):
        history = np.full(size, ord("7"), np.int32)
        fits = numbers.bound(everything, history)
        for index in np.flatnonzero(fits):
            head = len(texts[index]) - len(texts[index].lstrip(b"+-.eE0123456789"))
            # A number that no token could go on with ends; what the model was not bound by may already be longer.
            assert head == 0 or size + head <= 25
    fits = numbers.bound(everything, np.full(3, ord("x"), np.int32))
    assert fits[:-1].tolist() == everything[:-1].tolist() and not fits[-1], "but for one that is too long by itself"


def test_mask_depends_on_the_text_alone(compiler):
    mask = compiler.mask(JsonSchema({"type": "number"}), start=3)
    prompt = [*b"123"]
    whole = np.array([*prompt, *b"7" * 25], np.int32)
    mask.prepare(whole, 4)
    prepared = [mask(whole[:size]).copy() for size in range(3, whole.size + 1)]
    other = compiler.mask(JsonSchema({"type": "number"}), start=3)
    for size in reversed(range(3, whole.size + 1)):
        assert np.array_equal(other(whole[:size]), prepared[size - 3])
    assert prepared[24][ord("7")] and not prepared[25][ord("7")]
