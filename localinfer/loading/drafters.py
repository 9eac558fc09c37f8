"""The drafters of a model, and what verifying their drafts costs: measured once per machine and model."""

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.errors import RequestError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import MeasurableProgram, Program
from localinfer.loading.options import REFUSED_BY_GPUS, ModelOptions
from localinfer.models.load.loader import load_model
from localinfer.models.load.threads import (
    Stage,
    Timings,
    checked_run,
    get_measurement,
    is_postponed,
    postpone,
    put_measurement,
    settle,
    time_in_turns,
)
from localinfer.types import ProgressCallback, UnitsCallback

if TYPE_CHECKING:
    from localinfer.engine.speculation.draft_model import DraftModel
    from localinfer.engine.speculation.mtp import MTPDrafter
    from localinfer.models.load.loader import Model
    from localinfer.models.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

STAGE = "measuring drafts (once per machine and model)"

_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
_FEW_MEASURED_ROWS = (1, 2, 4, 8, 16)
_SLOW_SECONDS = 0.03
"""A pass that takes longer is measured at few sizes, so that a first load of a large model stays short."""
_AGREEING_LOADS = 2
_ALIKE = 1.3
"""Largest ratio of the relative costs of two measurements that agree."""


def load_drafter(
    options: ModelOptions, model: "Model", *, verify: bool = True, progress: ProgressCallback | None = None
) -> "Model":
    """Load the draft model of `options` beside its target: on a GPU, if what the target leaves there is enough.

    Raises: as `load_model`.
    """
    path = options.separate_draft
    assert path is not None, "there is one"
    device = "cpu" if model.device == "cpu" else options.draft_request.device
    load = partial(load_model, path, kv_type=options.kv_type, beside=model, verify=verify, progress=progress)
    try:
        return load(device=device)
    except REFUSED_BY_GPUS as error:
        if device in ("cpu", "auto"):
            raise
        logger.warning("%s drafts on the CPU: %s", path.name, error)
    return load(device="cpu")


def make_speculation(
    speculation: str,
    model: "Model",
    draft: "Model | None",
    *,
    kv_memory: int | None = None,
    measure_again: bool = False,
    may_measure: bool = True,
    progress: ProgressCallback | None = None,
) -> Speculation:
    """Make the drafters for an engine over `model`. Without an error they own the draft model.

    draft: a model of its own; one that drafts from the cache of `model` was loaded with it. measure_again: what passes
        cost, whatever earlier loads have found. may_measure: else what one of them has found, or a careful guess.
    Raises: RequestError if the two vocabularies differ.
    """
    if draft is not None:
        check_vocabularies(model.tokenizer, draft.tokenizer)
    costs = VerificationCosts(
        _verification_seconds(
            model.program, model.kv_layout, model.config.vocab_size, progress, measure_again, may_measure
        )
    )
    has_ngram = speculation in ("auto", "ngram")
    return Speculation(
        costs, ngram=NgramDrafter() if has_ngram else None, model=_drafter(model, draft, kv_memory, progress)
    )


def _drafter(
    model: "Model", draft: "Model | None", kv_memory: int | None, progress: ProgressCallback | None
) -> "DraftModel | MTPDrafter | None":
    """A draft model, or layers that draft: most models have neither, and draft from the text alone."""
    if draft is not None:
        from localinfer.engine.speculation.draft_model import DraftModel

        told = Stage(progress, "measuring the draft model")
        return DraftModel(draft, target_vocab_size=model.config.vocab_size, kv_memory=kv_memory, told=told)
    if not model.draft_programs:
        return None
    from localinfer.engine.speculation.mtp import AssistantDrafter, MTPDrafter

    return MTPDrafter(model) if model.assistant is None else AssistantDrafter(model)


def check_vocabularies(own: "Tokenizer | None", drafts: "Tokenizer | None") -> None:
    """Raise RequestError if a draft model's tokenizer is not that of its target; None: it has none."""
    if own is None or drafts is None:
        raise RequestError(
            "a draft model must give the same ids for the same text, which cannot be checked without a tokenizer in "
            "both files; leave the draft model out"
        )
    difference = own.difference_from(drafts)
    if difference is not None:
        raise RequestError(
            f"the draft model does not give the same ids for the same text: {difference}; choose one of the same family"
        )


def _verification_seconds(
    program: Program,
    kv_layout: KVLayout,
    vocab_size: int,
    progress: ProgressCallback | None,
    measure_again: bool,
    may_measure: bool,
) -> list[float]:
    """Seconds of passes over 1 to 16 rows, as initial estimates; cached once two loads on an idle machine agree.

    Beside busy programs a measurement says little: it is not tried by every load, but again after a while, and until
    then passes with drafts show what they cost.
    """
    max_rows = min(program.max_batch_rows, program.max_output_rows)
    key = _fingerprint(program, kv_layout)
    known, loads = ([], 0) if key is None or measure_again else _cached_seconds(key)
    if key is not None and not measure_again and is_postponed("verification", key):
        may_measure = False
    if known and (loads >= _AGREEING_LOADS or not may_measure):
        return known[:max_rows]
    if not may_measure:
        # A row costs as much as a pass of its own, until passes with drafts show what they cost.
        return [float(num_rows) for num_rows in range(1, min(max_rows, MAX_DRAFT_TOKENS + 1) + 1)]
    stage = Stage(progress, STAGE)
    run_batch = checked_run(program, stage)
    cache = SequenceCache(PagePool(kv_layout), max_length=max_rows)
    # Of different tokens, since a router sends equal ones to the same experts, which are then read once.
    tokens = np.linspace(0, vocab_size - 1, MAX_DRAFT_TOKENS + 1, dtype=np.int32)

    def run(num_rows: int) -> None:
        cache.truncate(0)
        rows = np.arange(num_rows, dtype=np.int32)
        forward(run_batch, (cache,), (tokens[:num_rows],), rows, (num_rows - 1,))

    measured = measure_costs(run, max_rows, stage)
    seconds = list(measured.seconds.values())
    if key is not None and measured.is_calm:
        agrees = len(known) == len(seconds) and _is_alike(known, seconds)
        least = [min(pair) for pair in zip(known, seconds, strict=True)] if agrees else seconds
        agreeing = loads + 1 if agrees else 1
        put_measurement("verification", key, load=measured.load, seconds=least, loads=agreeing)
        settle("verification", key)
    elif key is not None:
        postpone("verification", key)
    return seconds


def measure_costs(run: Callable[[int], object], most_rows: int, told: UnitsCallback | None = None) -> Timings[int]:
    """Time `run(num_rows)`, one forward pass, for 1 to at most MAX_DRAFT_TOKENS + 1 rows; some sizes are interpolated.

    told: as in `time_in_turns`.
    """
    most_rows = min(most_rows, MAX_DRAFT_TOKENS + 1)
    if told is not None:
        told(0, 1)
    run(1)
    first = time_in_turns({1: lambda: run(1)}, repetitions=2).seconds[1]
    chosen = _MEASURED_ROWS if first < _SLOW_SECONDS else _FEW_MEASURED_ROWS
    sizes = sorted({size for size in chosen if size < most_rows} | {1, most_rows})
    timed = time_in_turns({size: lambda size=size: run(size) for size in sizes}, told=told)  # type: ignore[misc]
    rows = range(1, most_rows + 1)
    # More rows never take less, whatever the clock says.
    seconds = np.maximum.accumulate(np.interp(rows, sizes, [timed.seconds[size] for size in sizes]))
    return replace(timed, seconds=dict(zip(rows, seconds.tolist(), strict=True)))


def _cached_seconds(key: str) -> tuple[list[float], int]:
    """The cached measurement, empty if it is damaged, and how many loads in a row agreed on it."""
    record = get_measurement("verification", key) or {}
    seconds, loads = record.get("seconds"), record.get("loads")
    if not isinstance(seconds, list) or not isinstance(loads, int):
        return [], 0
    is_sound = all(isinstance(value, float) and 0 < value < math.inf for value in seconds)
    return (seconds, loads) if is_sound else ([], 0)


def _is_alike(known: list[float], measured: list[float]) -> bool:
    """True if the costs relative to one row agree."""
    ratios = [(one / known[0]) / (other / measured[0]) for one, other in zip(known, measured, strict=True)]
    return all(1 / _ALIKE < ratio < _ALIKE for ratio in ratios)


def _fingerprint(program: Program, kv_layout: KVLayout) -> str | None:
    """A key of the program's work and threads; None if the program cannot list its ops."""
    if not isinstance(program, MeasurableProgram):
        return None
    work = [(op.kernel, op.rows.value, op.weight_bytes, op.multiply_adds) for op in program.operations()]
    if any("expert" in kernel for kernel, *_ in work):
        # Costs of experts were once measured with equal tokens.
        work.append(("tokens", "different", 0, 0))
    return hashlib.sha256(f"{program.num_threads} {kv_layout.page_bytes} {work}".encode()).hexdigest()
