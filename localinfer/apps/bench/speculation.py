"""The speedup of speculative decoding: the same texts with and without drafts, alternating, on one loaded model."""

import time
from collections.abc import Sequence
from typing import cast

from localinfer.apps.bench.decode import STREAM_PROMPT, BenchSettings
from localinfer.apps.bench.figures import Record, check_context, model_record, summarize
from localinfer.apps.show.describe import describe_file
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.engine.speculation.verify import SpeculationRecord
from localinfer.errors import RequestError
from localinfer.loading.drafters import make_speculation
from localinfer.models.load.assistant import is_assistant
from localinfer.models.load.loader import Model, load_model
from localinfer.types import ProgressCallback

_PROMPT_IDS = (1, 2, 3, 4)
"""For a model without a tokenizer."""


class _Borrowed:
    """A model whose `close` does nothing, so that it can be used by several engines in turn."""

    def __init__(self, model: Model) -> None:
        self.config, self.program, self.kv_layout = model.config, model.program, model.kv_layout

    def close(self) -> None:
        """Do nothing: the owner closes the model."""


def run_speculation_bench(settings: BenchSettings, draft: str | None, progress: ProgressCallback) -> Record:
    """Decode new texts, then the same texts again, with and without drafts; the texts must be equal.

    draft: path of a draft model, or None for n-gram drafts and those of the model's own draft layers (MTP), if it has
    some. A new text is sampled with a new seed in each repetition; the repeated text is passed as the caller's
    prediction.
    Returns model, settings, drafters, costs (time of a pass over 1, 2, ... rows, relative to one) and, for each kind of
    text, its rates, tokens per pass, and tokens drafted and accepted by position in the draft. Raises: LocalinferError.
    """
    if settings.decode < 2:
        raise RequestError(f"decode is {settings.decode}; drafts follow the first token, so measure at least 2")
    description = describe_file(settings.model)
    needed = settings.decode + 64
    check_context(description, needed)
    assistant = draft if draft is not None and is_assistant(draft) else None
    model = load_model(
        settings.model,
        threads=settings.threads,
        context_length=needed,
        assistant=assistant,
        draft_layers=draft is None,
        progress=progress,
    )
    drafting = None
    try:
        if draft is not None and assistant is None:
            drafting = load_model(draft, beside=model, progress=progress)
        speculation = make_speculation("auto", model, drafting, progress=progress)
    except BaseException:
        if drafting is not None:
            drafting.close()
        model.close()
        raise
    costs = [speculation.costs.seconds(rows) for rows in range(1, speculation.costs.max_draft_tokens + 2)]
    engine, plain_engine = Engine(model, speculation=speculation), Engine(cast(Model, _Borrowed(model)))
    prompt = _PROMPT_IDS if model.tokenizer is None else model.tokenizer.encode(STREAM_PROMPT)
    texts: dict[str, list[tuple[float, float, SpeculationRecord]]] = {"new": [], "said before": []}
    try:
        _generate(plain_engine, prompt, SamplingParams(seed=0), min(8, settings.decode))
        for repetition in range(settings.repetitions):
            progress("measuring speculation", repetition, settings.repetitions)
            expected: Sequence[int] = ()
            for samples in texts.values():
                sampling = SamplingParams(seed=repetition)
                token_ids, plain_rate, _ = _generate(plain_engine, prompt, sampling, settings.decode)
                drafted_ids, rate, record = _generate(engine, prompt, sampling, settings.decode, expected)
                assert drafted_ids == token_ids and record is not None, "drafts change no token"
                samples.append((plain_rate, rate, record))
                expected = token_ids
    finally:
        plain_engine.close()
        engine.close()
    return {
        "model": model_record(description),
        "settings": {**settings.record("decode", "repetitions"), "draft": draft},
        "drafters": ["ngram"] + (["draft"] if draft else ["mtp"] if model.draft_programs else []),
        "plain_step_seconds": costs[0],
        "costs": [seconds / costs[0] for seconds in costs],
        "texts": {name: _text_record(samples) for name, samples in texts.items()},
    }


def _generate(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int, expected: Sequence[int] = ()
) -> tuple[list[int], float, SpeculationRecord | None]:
    """Return the token ids, the tokens per second after the first, and the statistics of drafts."""
    generation = engine.generate(prompt, sampling, max_tokens=max_tokens, prediction=expected)
    token_ids = [next(generation).token_id]
    began = time.perf_counter()
    token_ids += [event.token_id for event in generation]
    return token_ids, (len(token_ids) - 1) / (time.perf_counter() - began), generation.record.speculation


def _text_record(samples: list[tuple[float, float, SpeculationRecord]]) -> Record:
    """Rates with every sample, and drafted and accepted tokens by position, all texts together."""
    plain_rates, rates, records = zip(*samples, strict=True)
    drafted = [sum(counts) for counts in zip(*(record.drafted for record in records), strict=True)]
    accepted = [sum(counts) for counts in zip(*(record.accepted for record in records), strict=True)]
    deepest = max((index + 1 for index, count in enumerate(drafted) if count), default=0)
    passes = sum(record.forward_passes for record in records)
    return {
        "plain_tokens_per_second": summarize(plain_rates),
        "tokens_per_second": summarize(rates),
        "speedup": summarize([rate / plain for plain, rate, _ in samples]),
        "tokens_per_pass": sum(record.decoded_tokens for record in records) / max(1, passes),
        "drafted_by_position": drafted[:deepest],
        "accepted_by_position": accepted[:deepest],
    }
