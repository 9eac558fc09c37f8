"""The public API over a scripted model: text, events, ends, stops, stats, chats, and every refusal."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import BackendUnavailableError, ClosedError, ContextLengthError, ModelFileError, RequestError
from localinfer.generation.stream import StreamEvent, TextStream
from localinfer.llm import LLM
from localinfer.loading.load import load
from tests.engine.fakes import PAGE_BYTES, FakeTemplate, fake_model, scripted_logits, text_model
from tests.support.inside import engine_of


def answering(text: str, prompt: str = "ab", **options: Any) -> LLM:
    return LLM(text_model(text, prompt_length=1 + len(prompt.encode()), **options))  # type: ignore[arg-type]


def test_completion_has_text_ids_reason_and_stats():
    completion = answering("hello").complete("ab", temperature=0)
    assert completion.text == "hello"
    assert completion.token_ids == [*b"hello", 257]
    assert completion.finish_reason == "stop"
    stats = completion.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens) == (3, 0, 6)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (0, 0)
    assert stats.time_to_first_token_seconds > 0 and stats.decode_tokens_per_second > 0


def test_stream_yields_an_event_per_token_and_reason_on_the_last():
    stream = answering("hi").stream("ab", temperature=0)
    assert list(stream) == [
        StreamEvent("h", ord("h"), None),
        StreamEvent("i", ord("i"), None),
        StreamEvent("", 257, "stop"),
    ]
    assert stream.stats.completion_tokens == 3


def test_completion_is_the_stream_put_together():
    llm = LLM(fake_model())  # type: ignore[arg-type]
    events = list(llm.stream("xyz", seed=5, temperature=2.0, max_tokens=30))
    completion = llm.complete("xyz", seed=5, temperature=2.0, max_tokens=30)
    assert completion.text == "".join(event.text for event in events)
    assert completion.token_ids == [event.token_id for event in events]
    assert completion.stats.seed == 5


def test_drawn_seed_is_reported_and_repeats_the_text():
    llm = LLM(fake_model())  # type: ignore[arg-type]
    first = llm.complete("a", temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=30)
    second = llm.complete("a", temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=30)
    again = llm.complete("a", temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=30, seed=first.stats.seed)
    assert first.token_ids == again.token_ids != second.token_ids


def test_prompt_of_ids_is_taken_as_it_is():
    llm = answering("hello")
    assert llm.complete([256, 97, 98], temperature=0).text == "hello"
    assert llm.complete(np.array([256, 97, 98]), temperature=0).text == "hello"
    assert llm.complete([256, 97], temperature=0, max_tokens=2).text != "he"


def test_special_tokens_in_a_prompt_are_text_unless_asked_for():
    llm = LLM(fake_model())  # type: ignore[arg-type]
    assert llm.stream("<end>").stats.prompt_tokens == 6
    assert llm.stream("<end>", parse_special=True).stats.prompt_tokens == 1


def test_max_tokens_ends_with_length_and_zero_gives_nothing():
    llm = answering("hello")
    completion = llm.complete("ab", temperature=0, max_tokens=3)
    assert (completion.text, completion.finish_reason) == ("hel", "length")
    nothing = llm.complete("ab", max_tokens=0)
    assert (nothing.text, nothing.token_ids, nothing.finish_reason) == ("", [], "length")
    assert nothing.stats.decode_tokens_per_second == 0.0 and nothing.stats.time_to_first_token_seconds == 0.0


def test_context_end_is_length():
    completion = answering("0123456789" * 3, end=False, context_length=13).complete("ab", temperature=0)
    assert (completion.text, completion.finish_reason) == ("0123456789", "length")


def test_memory_that_ends_inside_a_completion_keeps_its_text_and_says_why():
    def llm() -> LLM:
        model = text_model("hello, all of you", prompt_length=3)
        model.chat_template = FakeTemplate()
        return LLM(model, kv_memory=3 * PAGE_BYTES)  # type: ignore[arg-type]

    completion = llm().complete("ab", temperature=0, stop="ll of y", logprobs=1)
    # What was held back, because a stop text may have begun, comes with the end.
    assert (completion.text, completion.finish_reason) == ("hello, all", "length")
    assert completion.token_ids == [*b"hello, all"] and len(completion.logprobs or []) == 10
    assert "after 10 tokens for lack of memory" in completion.stats.notices[0]
    assert "kv_memory" in completion.stats.notices[0]
    many = llm().complete_many("ab", n=2, temperature=0)
    assert all(one.finish_reason == "length" and "hello" in one.text for one in many)
    reply = llm().chat([{"role": "user", "content": ""}], temperature=0, max_tokens=40)
    assert reply.finish_reason == "length" and len(reply.token_ids) == 10 and reply.stats.notices


def test_ignore_eos_goes_on_past_the_end_token():
    completion = answering("hi").complete("ab", temperature=0, ignore_eos=True, max_tokens=5)
    assert completion.text == "hi\0\0" and completion.finish_reason == "length"


@pytest.mark.parametrize("stop", ["wor", ["xyz", "wor"], ("world", "wor")])
def test_stop_text_ends_the_completion_and_is_left_out(stop: str | Sequence[str]):
    completion = answering("hello world!").complete("ab", temperature=0, stop=stop)
    assert (completion.text, completion.finish_reason) == ("hello ", "stop")
    assert bytes(completion.token_ids) == b"hello wor"


def test_text_held_back_for_a_stop_is_given_when_it_does_not_come():
    events = list(answering("one tw").stream("ab", temperature=0, stop="two"))
    assert [event.text for event in events] == ["o", "n", "e", " ", "", "", "tw"]


def test_stop_text_at_the_last_token_is_a_stop():
    completion = answering("hello").complete("ab", temperature=0, max_tokens=5, stop="o")
    assert (completion.text, completion.finish_reason) == ("hell", "stop")


def test_events_never_hold_half_a_character():
    events = list(answering("né€😀").stream("ab", temperature=0))
    assert [event.text for event in events] == ["n", "", "é", "", "", "€", "", "", "", "😀", ""]
    cut = answering("né€").complete("ab", temperature=0, max_tokens=5)
    assert cut.text == "né�" and cut.finish_reason == "length"


def test_options_reach_the_sampler():
    llm = answering("hello")
    assert llm.complete("ab", temperature=0, logit_bias={104: -100.0}, max_tokens=1).text == "\0"
    assert llm.complete("ab", temperature=0, presence_penalty=60, max_tokens=5).text == "hel\0o"


def test_events_tell_log_probabilities_where_they_are_asked_for():
    llm = answering("hi")
    completion = llm.complete("ab", temperature=0, logprobs=2)
    assert completion.logprobs is not None
    assert [told.top[0][0] for told in completion.logprobs] == completion.token_ids == [*b"hi", 257]
    assert all(told.logprob == told.top[0][1] <= 0.0 and len(told.top) == 2 for told in completion.logprobs)
    events = list(llm.stream("ab", temperature=0, logprobs=0))
    assert [event.logprobs for event in events] == [(told.logprob, ()) for told in completion.logprobs]
    assert llm.complete("ab", max_tokens=0, logprobs=0).logprobs == []
    assert llm.complete("ab", temperature=0).logprobs is None


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("abcab", {}, "d"),
        ("abcab", {"dry_sequence_breakers": "b"}, "c"),
        ("abcab", {"dry_sequence_breakers": ["x", "y"]}, "d"),
        ("abcab", {"dry_breaker_ids": [ord("b")]}, "c"),
        ("abcab", {"dry_multiplier": 0.0}, "c"),
        ("\nc\n", {}, "c"),
        ("\nc\n", {"dry_sequence_breakers": ()}, "d"),
    ],
)
def test_dry_prolongs_no_repetition_but_across_breakers(prompt: str, options: dict[str, Any], text: str):
    def c_then_d(history: np.ndarray, vocab_size: int) -> np.ndarray:
        logits = np.zeros(vocab_size, np.float32)
        logits[ord("c")], logits[ord("d")] = 5.0, 4.0
        return logits

    llm = LLM(fake_model(c_then_d))  # type: ignore[arg-type]
    options = {"dry_multiplier": 2.0, "dry_allowed_length": 1} | options
    assert llm.complete(prompt, temperature=0, max_tokens=1, **options).text == text


def test_chat_renders_messages_and_streams_the_reply():
    model = text_model("fine", prompt_length=5)
    model.chat_template = FakeTemplate()
    llm = LLM(model)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "hi"}]
    completion = llm.chat(messages, temperature=0)
    assert (completion.text, completion.finish_reason, completion.stats.prompt_tokens) == ("fine", "stop", 5)
    assert "".join(event.text for event in llm.stream_chat(messages, temperature=0)) == "fine"


def test_chat_ends_at_the_stops_of_its_template():
    model = text_model("fine<end>more", prompt_length=5)
    model.chat_template = FakeTemplate()
    model.chat_template.stop_strings = ("<end>",)  # type: ignore[attr-defined]
    completion = LLM(model).chat([{"role": "user", "content": "hi"}], temperature=0)  # type: ignore[arg-type]
    assert (completion.text, completion.finish_reason) == ("fine", "stop")


@pytest.mark.parametrize(
    "messages", ["hi", [], None, ["hi"], [{"content": "x"}], [{"role": "user"}], {"role": "user", "content": "x"}]
)
def test_wrong_messages_are_refused(messages: object):
    model = fake_model()
    model.chat_template = FakeTemplate()
    with pytest.raises(RequestError, match="message"):
        LLM(model).chat(messages)  # type: ignore[arg-type]


def test_model_without_tokenizer_completes_ids_and_says_what_it_cannot():
    model = text_model("hi", prompt_length=1)
    model.tokenizer = None
    llm = LLM(model)  # type: ignore[arg-type]
    completion = llm.complete([5], temperature=0, max_tokens=2)
    assert (completion.text, bytes(completion.token_ids)) == ("", b"hi")
    for use in (
        lambda: llm.tokenizer,
        lambda: llm.complete("text"),
        lambda: llm.complete([5], stop="x"),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(RequestError, match="no tokenizer"):
            use()


def test_ids_beyond_the_vocabulary_are_tokens_without_text():
    llm = LLM(fake_model(scripted_logits({1: 300, 2: 65}), vocab_size=320))  # type: ignore[arg-type]
    completion = llm.complete([319], temperature=0, max_tokens=2)
    assert (completion.token_ids, completion.text) == ([300, 65], "A")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "no option temprature; the options are max_tokens"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {999: 1.0}}, "token 999"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": [3]}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": "ab"}, "no token contains"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_wrong_options_are_refused_when_the_stream_is_made(options: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        LLM(fake_model()).stream("a", **options)  # type: ignore[arg-type]


def test_over_long_text_is_refused_with_both_lengths():
    with pytest.raises(ContextLengthError, match="101 tokens, but the context holds 64"):
        LLM(fake_model()).stream("x" * 100)  # type: ignore[arg-type]


def pages_in_use(llm: LLM) -> int:
    with engine_of(llm).exclusive_cache() as cache:
        return cache.pool.num_pages - cache.pool.num_free_pages - cache.tree.num_pages


def test_cancelled_stream_frees_its_pages():
    llm = answering("hello")
    with llm.stream("ab", temperature=0) as stream:
        next(stream)
        assert pages_in_use(llm) == 1
    assert pages_in_use(llm) == 0
    assert list(stream) == []
    assert stream.stats.completion_tokens == 1
    never_started = llm.stream("ab")
    never_started.close()
    assert pages_in_use(llm) == 0


def test_unfinished_stream_does_not_block_the_next_call():
    llm = answering("hello")
    stream = llm.stream("ab", temperature=0)
    next(stream)
    assert llm.complete("ab", temperature=0).text == "hello"
    assert "".join(event.text for event in stream) == "ello"


def test_logits_are_those_of_the_engine():
    logits = LLM(fake_model()).logits([1, 2, 3, 4, 5])  # type: ignore[arg-type]
    assert logits.shape == (5, 260) and logits.dtype == np.float32


def test_closed_model_refuses_every_use():
    model = text_model("hi", prompt_length=3)
    model.chat_template = FakeTemplate()
    with LLM(model) as llm:  # type: ignore[arg-type]
        stream: TextStream = llm.stream("ab", temperature=0)
        next(stream)
    llm.close()
    assert model.times_closed == 1
    for use in (
        lambda: llm.complete("ab"),
        lambda: llm.stream([1]),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.logits([1]),
        lambda: next(stream),
    ):
        with pytest.raises(ClosedError):
            use()
    assert llm.tokenizer.encode("a") == [256, 97]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "tpu"}, BackendUnavailableError, "device is 'tpu'"),
        ({"speculation": "magic"}, RequestError, "speculation is 'magic'"),
        ({"threads": 0}, RequestError, "threads is 0"),
        ({"threads": True}, RequestError, "threads is True"),
        ({"context_length": 1.5}, RequestError, "context_length is 1.5"),
        ({"model": 5}, RequestError, "model is 5"),
        ({"model": "/nowhere/at/all.gguf"}, ModelFileError, "nowhere"),
    ],
)
def test_load_refuses_what_it_cannot_do(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        load(**options)


def test_public_names_can_be_had_and_no_others():
    for name in localinfer.__all__:
        assert getattr(localinfer, name) is not None
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = localinfer.nothing_here


def test_import_loads_nothing_heavy():
    code = "import sys, localinfer; print(sorted({'numba', 'numpy', 'jinja2'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
