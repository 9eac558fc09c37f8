"""Drafts of a model's own layers for next-token prediction change speed and nothing else."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.engine.sampling.sampler import SamplingPlan
from localinfer.engine.speculation.costs import DraftFloor, VerificationCosts
from localinfer.engine.speculation.mtp import DraftHead, MTPDrafter
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.errors import RequestError
from localinfer.loading.drafters import make_speculation
from localinfer.models.load.loader import Model, load_model
from tests.models.arch_models import build_model

MODELS = ["qwen35-mtp", "nemotron_h_moe-mtp", "step35-mtp", "deepseek2-mtp"]
PARAMS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.5, seed=4, top_k=0, repetition_penalty=1.2)]
ROWS = 8


class Agreeing(MTPDrafter):
    """Computes every draft, and then says what the text will be, with every n-th token wrong."""

    def __init__(self, model: Model, text: Sequence[int], wrong_every: int) -> None:
        super().__init__(model)
        self._text, self._wrong_every = text, wrong_every
        self.num_rows = 0

    def draft_token(
        self, sequence: SequenceCache, index: int, token_id: int, hidden: NDArray[np.float32] | None, head: DraftHead
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logits, shown = super().draft_token(sequence, index, token_id, hidden, head)
        if not hasattr(self, "num_rows"):
            return logits, shown
        self.num_rows += 1
        place = sequence.length + index + 1
        token = self._text[place] if place < len(self._text) else 0
        scripted = np.full_like(logits, -1e9)
        scripted[(token + (place % self._wrong_every == 0)) % scripted.size] = 1e9
        return scripted, shown


def speculation(drafter: MTPDrafter, *, has_ngram: bool = False) -> Speculation:
    # Rows that cost nothing more, on a clock that never says otherwise, so that every draft is tried.
    costs = VerificationCosts([1.0] * ROWS)
    floor = DraftFloor(costs, most_credit=math.inf)
    return Speculation(
        costs, ngram=NgramDrafter() if has_ngram else None, model=drafter, floor=floor, clock=lambda: 0.0
    )


@pytest.fixture(scope="module", params=MODELS)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield build_model(tmp_path_factory.mktemp("mtp"), request.param).path


def generated(engine: Engine, prompt: Sequence[int], params: SamplingParams, count: int = 36) -> Any:
    generation = engine.generate(prompt, params, max_tokens=count)
    return [event.token_id for event in generation], generation.record


def drafting_engine(
    path: Path, text: Sequence[int], wrong_every: int, *, has_ngram: bool = False, is_short: bool = False
) -> Engine:
    model = load_model(path, threads=1, draft_layers=True)
    drafter = Agreeing(model, text, wrong_every)
    drafter.heads = drafter.heads[int(is_short) :]
    return Engine(model, speculation=speculation(drafter, has_ngram=has_ngram))


@pytest.mark.parametrize(
    ("params", "wrongs"), [(PARAMS[0], (2, 1000)), (PARAMS[1], (4, 1000))], ids=["greedy", "sampled"]
)
def test_texts_are_those_without_drafts_cold_warm_and_edited(
    model_path: Path, params: SamplingParams, wrongs: tuple[int, ...]
) -> None:
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, 128, 70)]
    plain = Engine(load_model(model_path, threads=1))
    text, _ = generated(plain, prompt, params)
    longer = [*prompt, *text, 5, 6, 7]
    wanted = [text, text, generated(plain, longer, params)[0], generated(plain, [*longer[:40], 9], params)[0]]
    plain.close()
    for wrong_every in wrongs:
        options = {"has_ngram": wrong_every == 4, "is_short": wrong_every == 2}
        engine = drafting_engine(model_path, [*prompt, *text], wrong_every, **options)
        found, record = generated(engine, prompt, params)
        assert found == wanted[0]
        assert record.speculation.forward_passes < len(text) * (0.9 if wrong_every > 2 else 1.01)
        assert generated(engine, prompt, params)[0] == wanted[1]
        assert generated(engine, longer, params)[0] == wanted[2]
        assert generated(engine, [*longer[:40], 9], params)[0] == wanted[3]
        engine.close()


def test_texts_side_by_side_are_those_alone(model_path: Path) -> None:
    generator = np.random.default_rng(2)
    prompts = [[int(token) for token in generator.integers(0, 128, count)] for count in (12, 33, 40)]
    plain = Engine(load_model(model_path, threads=1))
    wanted = [generated(plain, prompt, PARAMS[1], 30)[0] for prompt in prompts]
    plain.close()
    engine = drafting_engine(model_path, [*prompts[0], *wanted[0]], 3)
    streams = [engine.generate(prompt, PARAMS[1], max_tokens=30) for prompt in prompts]
    found: list[list[int]] = [[] for _ in streams]
    for _ in range(30):
        for stream, tokens in zip(streams, found, strict=True):
            tokens.append(next(stream).token_id)
    assert found == wanted
    engine.close()


def test_an_option_chooses_the_layers_or_refuses_a_model_without(tmp_path: Path) -> None:
    path = build_model(tmp_path, "glm4moe-mtp").path
    drafters = []
    for option in ("ngram", "mtp", "auto"):
        model = load_model(path, threads=1, draft_layers=option != "ngram")
        drafting = make_speculation(option, model, None)
        drafters.append((drafting.ngram is not None, isinstance(drafting.model, MTPDrafter)))
        model.close()
    assert drafters == [(True, False), (False, True), (True, True)]
    with pytest.raises(RequestError, match="no layers for next-token prediction"):
        localinfer.load(build_model(tmp_path, "llama-gqa").path, threads=1, speculation="mtp")
    with pytest.raises(RequestError, match="draft model was given"):
        localinfer.load(path, threads=1, speculation="mtp", draft=path)


class Noting(MTPDrafter):
    """Notes which heads draft."""

    used: tuple[DraftHead, ...] = ()

    def draft_token(
        self, sequence: SequenceCache, index: int, token_id: int, hidden: NDArray[np.float32] | None, head: DraftHead
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.used = (*self.used, head)
        return super().draft_token(sequence, index, token_id, hidden, head)


def test_the_head_that_promises_more_drafts_and_is_not_blamed_for_tokens_that_it_lacks(tmp_path: Path) -> None:
    model = load_model(build_model(tmp_path, "glm4moe-mtp").path, threads=1, draft_layers=True)
    drafter = Noting(model)
    whole, short = drafter.heads
    assert (whole.num_tokens, short.num_tokens) == (128, 16)
    shared = speculation(drafter)
    for tokens, wanted in ((np.arange(40) % 16, short), (np.arange(40) + 16, whole), (np.arange(40), short)):
        whole.seconds_per_token, short.seconds_per_token, drafter.used = 0.3, 0.02, ()
        history = tokens.astype(np.int32)
        text, sequence = (
            shared.begin(SamplingPlan(PARAMS[0], 128)),
            SequenceCache(PagePool(model.kv_layout), max_length=64),
        )
        forward(model.program.run, (sequence,), (history[:-1],), np.zeros(1, np.int32))
        assert 0 < text.draft(history, 4, sequence=sequence).size == len(drafter.used)
        assert set(drafter.used) == {wanted}
        before = list(shared.model_acceptance.probabilities())
        text.observe(2, 0, 0.0, 77)
        changed = list(shared.model_acceptance.probabilities()) != before
        assert changed == (wanted is whole)
    model.close()


class Recording(MTPDrafter):
    """Keeps what the first token of every draft was chosen from, by position."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.heads = self.heads[:1]
        self.logits: dict[int, NDArray[np.float32]] = {}

    def draft_token(
        self, sequence: SequenceCache, index: int, token_id: int, hidden: NDArray[np.float32] | None, head: DraftHead
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logits, shown = super().draft_token(sequence, index, token_id, hidden, head)
        if index == 0 and hasattr(self, "logits"):
            self.logits[sequence.length] = logits.copy()
        return logits, shown


@pytest.mark.parametrize("name", ["qwen35-mtp", "bailingmoe3-mtp", "step35-mtp", "glm-dsa-mtp", "glm4moe-mtp"])
def test_drafts_after_a_cached_prefix_are_those_of_a_cold_start(name: str, tmp_path: Path) -> None:
    path = build_model(tmp_path, name).path
    prompt = [int(token) for token in np.random.default_rng(5).integers(0, 128, 50)]
    recorded = []
    for is_warm in (False, True):
        model = load_model(path, threads=1, draft_layers=True)
        drafter = Recording(model)
        engine = Engine(model, speculation=speculation(drafter))
        if is_warm:
            for length in (20, 41):
                list(engine.generate(prompt[:length], PARAMS[0], max_tokens=2))
            drafter.logits.clear()
        generation = engine.generate(prompt, PARAMS[0], max_tokens=40)
        list(generation)
        assert (generation.record.cached_tokens >= 40) == is_warm
        recorded.append(drafter.logits)
        engine.close()
    cold, warm = recorded
    common = sorted(cold.keys() & warm.keys())
    assert len(common) > 10
    for position in common:
        np.testing.assert_array_equal(warm[position].view(np.uint32), cold[position].view(np.uint32))
