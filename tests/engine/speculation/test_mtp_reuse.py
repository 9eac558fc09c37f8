"""Drafts of a model's own layers beside everything that reuses what was computed: not a bit of a text changes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.sampling.sampler import SamplingPlan
from localinfer.engine.speculation.costs import DraftFloor, VerificationCosts
from localinfer.engine.speculation.mtp import DraftHead, MTPDrafter, MTPText
from localinfer.engine.speculation.verify import Speculation
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from localinfer.loading import drafters
from localinfer.models.load.loader import Model
from tests.models.arch_models import skeletons
from tests.models.talking_models import build_talking_model
from tests.support.inside import engine_of
from tests.support.samples import ALL

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1.3, "seed": 4, "top_k": 0, "repetition_penalty": 1.2}
WORDS = localinfer.Regex("[a-z ]{8,30}[0-9]")
WRONG_EVERY = 4


class PromptingDrafter(MTPDrafter):
    """Computes every draft, and then says what the text will be, if that is known, with some tokens wrong."""

    def __init__(self, model: Model, texts: list[list[int]]) -> None:
        super().__init__(model)
        self.texts = texts

    def begin(self, plan: SamplingPlan, salt: bytes = b"") -> "PromptedText":
        return PromptedText(self, plan, self.texts)


class PromptedText(MTPText):
    def __init__(self, drafter: MTPDrafter, plan: SamplingPlan, texts: list[list[int]]) -> None:
        super().__init__(drafter, plan)
        self._texts = texts

    def draft(self, tokens: NDArray[np.int32], out: NDArray[np.int32], sequence: SequenceCache, head: DraftHead) -> int:
        count, known = super().draft(tokens, out, sequence, head), tokens.tolist()
        text = next((text for text in self._texts if text[: len(known)] == known), [])
        for index, token in enumerate(text[len(known) : len(known) + count]):
            out[index] = token if (len(known) + index) % WRONG_EVERY else token + 1
        return count


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Texts that drafts know; what is loaded from now on drafts whenever it may."""
    known: list[list[int]] = []

    def make(speculation: str, model: Model, draft: None, **options: Any) -> Speculation:
        assert speculation == "mtp" and draft is None
        costs = VerificationCosts([1.0] * 8)
        floor = DraftFloor(costs, most_credit=math.inf)
        return Speculation(costs, ngram=None, model=PromptingDrafter(model, known), floor=floor, clock=lambda: 0.0)

    monkeypatch.setattr(drafters, "make_speculation", make)
    return known


ALIKE = ("qwen35-mtp", "qwen3next-mtp", "step35-mtp", "deepseek32-mtp")
"""Whose states, windows and choices of keys others have too."""
NAMES = [name for name in skeletons() if name.endswith("-mtp") and (ALL or name not in ALIKE)]


@pytest.fixture(params=NAMES)
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    path = build_talking_model(tmp_path, request.param)
    with localinfer.load(path, threads=1, speculation=None) as llm:
        yield llm


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(300, 4000, count).tolist()
    return found


def test_every_text_is_that_without_drafts(plain: LLM, texts: list[list[int]], tmp_path: Path) -> None:
    """By turns read from disk by the next process, or in little memory from a session."""
    path = next(tmp_path.glob("*.gguf"))

    def check(llm: LLM, prompt: list[int], cached: int = 0, count: int = 16, **options: Any) -> Completion:
        plain.clear_cache()
        wanted = plain.complete(prompt, max_tokens=count, **options)
        texts[:] = [[*prompt, *wanted.token_ids]]
        found = llm.complete(prompt, max_tokens=count, **options)
        assert found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs
        assert found.stats.cached_tokens >= cached and not found.stats.notices
        if "constraint" not in options:
            assert found.stats.drafted_tokens > found.stats.accepted_tokens > 0
        return found

    first, disk = ids(70), {"disk_cache": True, "disk_cache_folder": tmp_path / "disk"}
    with localinfer.load(path, threads=2, speculation="mtp", **disk) as llm:
        reply = check(llm, first, **GREEDY).token_ids
        check(llm, first, 69, **SAMPLED)
        check(llm, [*first[:40], *ids(20, 1)], **SAMPLED)
        check(llm, [*first, *reply, 5], 80, **GREEDY)
        check(llm, ids(9, 2), **{**SAMPLED, "ignore_eos": False}, constraint=WORDS)
        prompts = [ids(20 + 5 * seed, seed) for seed in range(5)]
        wanted = [plain.complete(prompt, max_tokens=6, **SAMPLED) for prompt in prompts]
        texts[:] = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, wanted, strict=True)]
        streams = [llm.stream(prompt, max_tokens=6, **SAMPLED) for prompt in prompts]
        assert len(list(zip(*streams, strict=True))) == 6
        found = [stream.result() for stream in streams]
        assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in wanted]
        check(llm, first, 69, **GREEDY)
        llm.save_session(tmp_path / "session")
    if NAMES.index(path.stem.removesuffix("-talking")) % 2:
        with localinfer.load(path, threads=1, speculation="mtp", **disk) as llm:
            check(llm, [*first, *reply, 6], 60, **SAMPLED)
        return
    pool = engine_of(llm).pool
    memory = 8 * pool.page_bytes + 8 * pool.windowed_bytes + 6 * pool.states.slot_bytes + 3 * pool.logs.slot_bytes
    with localinfer.load(path, threads=1, speculation="mtp", kv_memory=memory) as llm:
        llm.load_session(tmp_path / "session")
        check(llm, [*first, *reply, 7], 60, **GREEDY)
        for seed in (1, 2, 1):
            check(llm, ids(120, seed), **GREEDY)
        assert engine_of(llm).pool.allocated_bytes <= memory
