"""Text that arrives token by token: whole characters, no more held back than needed."""

import random

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from localinfer.errors import RequestError
from localinfer.models.text.tokenizer import StopMatcher, StreamDecoder, Tokenizer
from tests.models.text.vocabularies import REAL, bpe_metadata, real_tokenizer, spm_metadata

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("skip_special", [True, False])
@PROPERTY
@given(seed=st.integers(0, 2**32), length=st.integers(0, 40), has_previous=st.booleans())
def test_what_is_pushed_and_flushed_joins_to_the_decoded_text(
    name: str, skip_special: bool, seed: int, length: int, has_previous: bool
) -> None:
    tokenizer = real_tokenizer(name)
    rng = random.Random(seed)
    ids = [rng.randrange(300 if rng.random() < 0.5 else tokenizer.vocab_size) for _ in range(length)]
    previous = rng.randrange(tokenizer.vocab_size) if has_previous else None
    decoder = StreamDecoder(tokenizer, skip_special=skip_special, previous_token_id=previous)
    chunks = [decoder.push(token_id) for token_id in ids]
    streamed = "".join(chunks) + decoder.flush()
    assert streamed == tokenizer.decode(ids, skip_special=skip_special, previous_token_id=previous)


@pytest.mark.parametrize("metadata", [spm_metadata({"▁": -1.0}), bpe_metadata(merges=())])
@given(text=st.text())
@example(text="🦙 é")
@settings(max_examples=30, deadline=None)
def test_no_chunk_holds_half_a_character(metadata: dict[str, object], text: str) -> None:
    # In these vocabularies nearly every token is a single byte.
    tokenizer = Tokenizer.from_metadata(metadata)
    decoder = StreamDecoder(tokenizer)
    chunks = [decoder.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(chunks) == text
    assert all(chunk in text for chunk in chunks)
    assert decoder.flush() == ""


def test_a_broken_tail_becomes_one_replacement_character() -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata())
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(3 + byte) for byte in "🦙".encode()[:3]] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_a_broken_character_does_not_swallow_the_next() -> None:
    decoder = StreamDecoder(Tokenizer.from_metadata(spm_metadata()))
    assert [decoder.push(3 + byte) for byte in (0xF0, 0x9F, 0x41)] == ["", "", "\ufffdA"]


def test_the_space_before_a_text_goes_once_and_a_continuation_keeps_its_own() -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata())
    space_a = tokenizer.token_id("▁a")
    plain_b = tokenizer.token_id("b")
    assert space_a is not None
    assert plain_b is not None
    assert tokenizer.decode([space_a, space_a]) == "a a"
    assert tokenizer.decode([1, space_a, space_a]) == "a a"
    assert tokenizer.decode([space_a], previous_token_id=plain_b) == " a"
    assert tokenizer.decode([space_a], previous_token_id=1) == "a"
    without_prefix = Tokenizer.from_metadata(spm_metadata(add_space_prefix=False))
    assert without_prefix.decode([space_a]) == " a"


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata())
    ids = [*tokenizer.encode("ab"), 2]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "<s>ab</s>"


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown, matched = "", None
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        shown += text
        if matched is not None:
            break
    return (shown if matched is not None else shown + matcher.flush()), matched


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_the_first_complete_stop_wins_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if ends:
        end, _, stop = min(ends)
        assert run(stops, chunks) == (text[: end - len(stop)], stop)
    else:
        assert run(stops, chunks) == (text, None)


@given(st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1))
@settings(max_examples=200, deadline=None)
def test_only_a_tail_that_begins_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for position, character in enumerate(text, start=1):
        emitted, matched = matcher.push(character)
        shown += emitted
        if matched is not None:
            return
        held = text[len(shown) : position]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_after_a_match_nothing_is_shown_any_more() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("so E") == ("so ", None)
    assert matcher.push("ND and more") == ("", "END")
    assert matcher.push("still more") == ("", "END")
    assert matcher.flush() == ""


def test_one_stop_may_be_given_as_a_string_and_none_at_all() -> None:
    assert StopMatcher("ab").push("xaby") == ("x", "ab")
    assert StopMatcher([]).push("abc") == ("abc", None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [3]])
def test_empty_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="at least one character"):
        StopMatcher(stops)


def test_a_long_stop_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * 200_000 + "b"])
    shown = sum(len(matcher.push("aaaa")[0]) for _ in range(60_000))
    assert shown == 40_000
