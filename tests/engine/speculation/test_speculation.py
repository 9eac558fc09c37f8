"""Drafts change speed and nothing else: tokens, errors and cache are those of plain decoding, whatever is drafted."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.engine import Engine
from localinfer.engine.request import TokenEvent
from localinfer.engine.sampling.sampler import SamplingParams, TokenLogprobs, TokenMask
from localinfer.engine.speculation.costs import DraftFloor, VerificationCosts
from localinfer.engine.speculation.draft_model import DraftModel
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.errors import LocalinferError, RequestError
from localinfer.loading.drafters import make_speculation
from localinfer.loading.options import check_speculation, model_path
from localinfer.types import TokenIds
from tests.engine.fakes import PAGE_BYTES, FakeModel, fake_model, hashed_logits

PROMPT = [256, 72, 105, 33]
ROWS = 6
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"seed": 2, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_last_n": 7},
    {"seed": 3, "logit_bias": {5: 4.0, 72: -np.inf}},
]
RARE_OPTIONS: list[dict[str, Any]] = [
    {"seed": 4, "temperature": 1.5, "top_k": 0, "typical_p": 0.6},
    {"seed": 5, "temperature": 3.0, "top_k": 0, "top_n_sigma": 1.0},
    {"seed": 6, "temperature": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"seed": 7, "temperature": 1.0, "dynatemp_range": 0.8, "dynatemp_exponent": 2.0, "min_p": 0.0},
    {"seed": 8, "temperature": 1.5, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.4},
    {"seed": 9, "dry_multiplier": 4.0, "dry_allowed_length": 1, "logit_bias": {5: 8.0, 6: 8.0, 7: 8.0}},
]


class Oracle:
    """Drafts what a text will be, with every n-th token wrong; or nonsense, if it is given none."""

    def __init__(self, text: Sequence[int], *, wrong_every: int = 0) -> None:
        self.text = list(text)
        self.wrong_every = wrong_every
        self.match_length = 64

    def begin(self, prediction: TokenIds, salt: bytes) -> "Oracle":
        return self

    def draft(self, tokens: TokenIds, out: TokenIds) -> int:
        for index in range(out.size):
            place = tokens.size + index
            token = self.text[place] if place < len(self.text) else 7
            is_wrong = self.wrong_every and place % self.wrong_every == 0
            out[index] = (token + 1) % 200 if is_wrong else token
        return int(out.size)


def speculation(drafter: NgramDrafter | None, model: DraftModel | None = None) -> Speculation:
    # Rows that cost nothing more, on a clock that never says otherwise, so that every draft is tried.
    costs = VerificationCosts([1.0] * ROWS)
    floor = DraftFloor(costs, most_credit=math.inf)
    return Speculation(costs, ngram=drafter, model=model, floor=floor, clock=lambda: 0.0)


def wide_model(logits_of: Callable[[TokenIds, int], Any] = hashed_logits, **sizes: Any) -> FakeModel:
    return fake_model(logits_of, max_batch_rows=8, max_output_rows=ROWS, **sizes)


def events(
    drafting: Speculation | None,
    params: SamplingParams,
    mask: TokenMask | None = None,
    kv_memory: int | None = None,
    **options: Any,
) -> list[TokenEvent | str]:
    """Every event of a generation, and the error at its end if there is one."""
    engine = Engine(wide_model(), speculation=drafting, kv_memory=kv_memory)
    result: list[TokenEvent | str] = []
    try:
        result.extend(engine.generate(PROMPT, engine.plan(params, mask), **options))
    except LocalinferError as error:
        result.append(str(error))
    engine.close()
    return result


def ids(happened: Sequence[TokenEvent | str]) -> list[int]:
    return [event.token_id for event in happened if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("options", OPTIONS + RARE_OPTIONS)
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3, 5])
def test_drafts_right_and_wrong_leave_every_token_as_it_is(options: dict[str, Any], wrong_every: int) -> None:
    params = SamplingParams(**options)
    plain = events(None, params)
    drafting = speculation(Oracle(PROMPT + ids(plain), wrong_every=wrong_every))
    assert events(drafting, params) == plain
    assert len(plain) == 60


@pytest.mark.parametrize("options", RARE_OPTIONS)
def test_rare_samplers_change_the_text(options: dict[str, Any]) -> None:
    kept = ("seed", "temperature", "logit_bias", "top_k", "min_p")
    plain = {name: value for name, value in options.items() if name in kept}
    assert events(None, SamplingParams(**options)) != events(None, SamplingParams(**plain))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 8, "mirostat": 2}])
def test_log_probabilities_are_the_same_inside_drafts(options: dict[str, Any]) -> None:
    def told(drafting: Speculation | None) -> tuple[list[int], dict[int, TokenLogprobs]]:
        engine = Engine(wide_model(), speculation=drafting)
        plan = engine.plan(SamplingParams(**options, logprobs=3))
        tokens = [event.token_id for event in engine.generate(PROMPT, plan)]
        engine.close()
        return tokens, plan.logprobs

    plain, logprobs = told(None)
    assert list(logprobs) == list(range(len(PROMPT), len(PROMPT) + len(plain)))
    assert told(speculation(Oracle(PROMPT + plain, wrong_every=4))) == (plain, logprobs)


def test_drafts_are_accepted_and_counted_by_their_place() -> None:
    params = SamplingParams(temperature=0.0)
    plain = events(None, params)
    engine = Engine(wide_model(), speculation=speculation(Oracle(PROMPT + ids(plain))))
    generation = engine.generate(PROMPT, params, max_tokens=31)
    tokens = list(generation)
    record = generation.record.speculation
    assert record is not None
    assert record.decoded_tokens == len(tokens) - 1 == 30
    assert record.drafted == record.accepted
    assert record.forward_passes + sum(record.accepted) == 30
    assert sum(record.accepted) > 20


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 7, 8])
def test_a_draft_does_not_outlast_max_tokens(max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0)
    plain = events(None, params, max_tokens=max_tokens)
    oracle = Oracle(PROMPT + ids(events(None, params)))
    assert events(speculation(oracle), params, max_tokens=max_tokens) == plain
    assert len(plain) == max_tokens


@pytest.mark.parametrize("index", [0, 1, 2, 4, 9])
def test_a_stop_token_inside_a_draft_ends_the_generation_there(index: int) -> None:
    params = SamplingParams(temperature=0.0)
    whole = ids(events(None, params))
    plain = events(None, params, stop_token_ids=[whole[index]])
    happened = events(speculation(Oracle(PROMPT + whole)), params, stop_token_ids=[whole[index]])
    assert happened == plain
    assert isinstance(happened[-1], TokenEvent)
    assert happened[-1].finish_reason == "stop"


def test_a_mask_is_asked_once_per_position_and_holds_inside_drafts() -> None:
    def masked(drafting: Speculation | None) -> tuple[list[TokenEvent | str], list[int]]:
        asked: list[int] = []

        def even_after_odd(tokens: TokenIds) -> NDArray[np.bool_]:
            asked.append(tokens.size)
            return np.arange(260) % 2 == tokens.size % 2

        return events(drafting, SamplingParams(seed=5), even_after_odd), asked

    plain, asked = masked(None)
    assert asked == list(range(len(PROMPT), 64))
    assert all(token % 2 == (index + len(PROMPT)) % 2 for index, token in enumerate(ids(plain)))
    for wrong_every in (0, 3):
        oracle = Oracle(PROMPT + ids(plain), wrong_every=wrong_every)
        assert masked(speculation(oracle)) == (plain, asked)


def test_an_error_inside_a_draft_comes_after_the_tokens_before_it() -> None:
    def nothing_after_ten(tokens: TokenIds) -> NDArray[np.bool_]:
        return np.full(260, tokens.size < 14)

    params = SamplingParams(seed=5)
    plain = events(None, params, nothing_after_ten)
    assert isinstance(plain[-1], str)
    assert len(plain) == 11
    assert events(speculation(Oracle(PROMPT + ids(plain))), params, nothing_after_ten) == plain


def test_a_draft_that_does_not_fit_into_memory_is_left_out() -> None:
    params = SamplingParams(temperature=0.0)
    # One page short of the context, so that the last draft wants a page more than there is.
    memory = 9 * PAGE_BYTES
    plain = events(None, params, kv_memory=memory, max_tokens=32)
    assert len(plain) == 32
    oracle = Oracle(PROMPT + ids(events(None, params)))
    assert events(speculation(oracle), params, kv_memory=memory, max_tokens=32) == plain


def test_a_shifting_context_goes_on_alike() -> None:
    params = SamplingParams(seed=8)
    plain = events(None, params, context_shift=True, max_tokens=150)
    assert len(plain) == 150
    for wrong_every in (0, 4):
        oracle = Oracle(PROMPT + ids(plain), wrong_every=wrong_every)
        assert events(speculation(oracle), params, context_shift=True, max_tokens=150) == plain


def test_a_generation_cancelled_inside_a_draft_leaves_a_right_cache() -> None:
    params = SamplingParams(temperature=0.0)
    plain = events(None, params)
    engine = Engine(wide_model(), speculation=speculation(Oracle(PROMPT + ids(plain), wrong_every=7)))
    for count in (1, 2, 3, 5, 8):
        generation = engine.generate(PROMPT, params)
        assert [next(generation) for _ in range(count)] == plain[:count]
        generation.close()
    assert list(engine.generate(PROMPT, params)) == plain
    longer = [*PROMPT, *ids(plain)[:20], 9]
    alone = Engine(wide_model())
    assert list(engine.generate(longer, params)) == list(alone.generate(longer, params))


def test_generations_that_take_turns_draft_for_themselves() -> None:
    params = SamplingParams(temperature=0.0)
    prompts = [PROMPT, [*PROMPT, 3], [256, 9, 9, 9, 9]]
    plain = [list(Engine(wide_model()).generate(prompt, params)) for prompt in prompts]
    engine = Engine(wide_model(), speculation=speculation(NgramDrafter()))
    generations = [engine.generate(prompt, params) for prompt in prompts]
    taken: list[list[TokenEvent]] = [[] for _ in prompts]
    for _ in range(60):
        for generation, events_so_far in zip(generations, taken, strict=True):
            events_so_far.extend(event for event in [next(generation, None)] if event is not None)
    assert taken == plain


@pytest.mark.parametrize("options", OPTIONS + RARE_OPTIONS[2:5:2])
@pytest.mark.parametrize("draft_vocabulary", [260, 200, 300])
@pytest.mark.parametrize("is_alike", [True, False])
def test_a_draft_model_leaves_every_token_as_it_is(
    options: dict[str, Any], draft_vocabulary: int, is_alike: bool
) -> None:
    def twisted(history: TokenIds, vocab_size: int) -> Any:
        return hashed_logits(history if is_alike or history.size % 3 else history[1:], vocab_size)

    params = SamplingParams(**options)
    plain = events(None, params)
    drafting_model = wide_model(twisted, vocab_size=draft_vocabulary, context_length=50)
    model = DraftModel(drafting_model, target_vocab_size=260)
    model.seconds_per_token = 0.0
    drafting = speculation(None, model)
    assert events(drafting, params) == plain
    assert drafting_model.times_closed == 1
    if draft_vocabulary == 260 and is_alike:
        assert drafting_model.program.batch_sizes


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_text_of_a_real_model_is_equal_with_every_kind_of_draft(shared: Path, kv_type: str) -> None:
    path = shared / "models" / "stories260K.gguf"
    requests: list[dict[str, Any]] = [{**options, "max_tokens": 90} for options in OPTIONS]
    requests.append({"temperature": 0.0, "stop": "mom", "max_tokens": 150})
    prompt = "Once upon a time, there was a little dog. Once upon a time, there was"

    def texts(prediction: str | None = None, **loading: Any) -> list[tuple[list[int], str, str]]:
        found = []
        with localinfer.load(path, threads=1, kv_type=kv_type, **loading) as llm:
            for request in requests * 2:
                expected = {} if prediction is None else {"prediction": prediction}
                completion = llm.complete(prompt, **request, **expected)
                found.append((completion.token_ids, completion.text, completion.finish_reason))
        return found

    plain = texts(speculation=None)
    assert texts() == plain
    assert texts(draft=path) == plain
    assert texts(speculation="draft", draft=path) == plain
    assert texts(prediction=plain[0][1]) == plain


def test_options_that_do_not_go_together_are_refused() -> None:
    for speculation_kind, has_draft, words in (
        ("fast", False, "give one of 'auto'"),
        ("off", True, "a draft model was given"),
        ("draft", False, "there is no draft model"),
        ("ngram", True, "a draft model was given"),
        (None, True, "a draft model was given"),
    ):
        with pytest.raises(RequestError, match=words):
            check_speculation(speculation_kind, has_draft=has_draft)
    for speculation_kind, has_draft in (("auto", False), ("auto", True), ("ngram", False), ("draft", True)):
        check_speculation(speculation_kind, has_draft=has_draft)
    assert check_speculation(None, has_draft=False) is check_speculation("off", has_draft=False) is None


def test_a_draft_model_without_a_tokenizer_is_refused() -> None:
    draft = wide_model()
    draft.tokenizer = None
    with pytest.raises(RequestError, match="without a tokenizer"):
        make_speculation("auto", wide_model(), draft)  # type: ignore[arg-type]


def test_a_draft_model_of_another_vocabulary_is_refused_with_the_reason(shared: Path) -> None:
    with pytest.raises(RequestError, match="not give the same ids.*spm.*bpe"):
        localinfer.load(shared / "models" / "stories260K.gguf", draft=model_path(None))
