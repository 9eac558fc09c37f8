"""From the options of `load` to an engine's drafters: what was asked is proven to fit, and costs are measured."""

import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localinfer.argument_checks import shown
from localinfer.cache.block_pool import KVLayout, PagePool
from localinfer.cache.sequence import SequenceCache
from localinfer.errors import RequestError
from localinfer.kernels.program import Batch, MeasurableProgram, Program
from localinfer.models.load.measurements import get_measurement, put_measurement
from localinfer.speculation.draft_model import DraftingModel, DraftModel
from localinfer.speculation.ngram import NgramDrafter
from localinfer.speculation.verification_costs import VerificationCosts, measure_costs
from localinfer.speculation.verify import Speculation

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

ProgressCallback = Callable[[str, int, int], None]
KINDS = ("auto", "ngram", "draft", None)

_AGREEING_LOADS = 2
_ALIKE = 1.3
"""Times by which what rows cost may differ between two measurements that agree."""


class SpeculatingModel(DraftingModel, Protocol):
    """What drafts for a model are proven with; `models.loader.Model` is one."""

    @property
    def tokenizer(self) -> "Tokenizer | None": ...


def check_speculation(speculation: str | None, *, has_draft: bool) -> None:
    """Raise RequestError unless the option is known and goes with whether a draft model was given."""
    if not isinstance(speculation, str | None) or speculation not in KINDS:
        raise RequestError(f"speculation is {shown(speculation)}; give 'auto', 'ngram', 'draft' or None")
    if speculation == "draft" and not has_draft:
        raise RequestError("speculation is 'draft', but there is no draft model; give its file as draft, or use 'auto'")
    if speculation in ("ngram", None) and has_draft:
        raise RequestError(f"a draft model was given, but speculation is {speculation!r}; make it 'auto' or 'draft'")


def make_speculation(
    speculation: str,
    model: SpeculatingModel,
    draft: SpeculatingModel | None,
    *,
    kv_memory: int | None = None,
    progress: ProgressCallback | None = None,
) -> Speculation:
    """Make what an engine over `model` drafts with. It owns the draft model from then on; else the caller does.

    Raises: RequestError if the two vocabularies differ.
    """
    if draft is not None:
        _check_vocabularies(model, draft)
    costs = VerificationCosts(_verification_seconds(model.program, model.kv_layout, progress))
    drafter = None
    if draft is not None:
        drafter = DraftModel(draft, target_vocab_size=model.config.vocab_size, kv_memory=kv_memory)
    return Speculation(costs, ngram=None if speculation == "draft" else NgramDrafter(), model=drafter)


def _check_vocabularies(model: SpeculatingModel, draft: SpeculatingModel) -> None:
    if model.tokenizer is None or draft.tokenizer is None:
        raise RequestError(
            "a draft model must give the same ids for the same text, which cannot be proven where a file has no "
            "tokenizer; leave the draft model out"
        )
    difference = model.tokenizer.difference_from(draft.tokenizer)
    if difference is not None:
        raise RequestError(
            f"the draft model does not give the same ids for the same text: {difference}; choose one of the same family"
        )


def _verification_seconds(program: Program, kv_layout: KVLayout, progress: ProgressCallback | None) -> list[float]:
    """Seconds of passes over 1 to 16 rows: where estimates begin; remembered once two loads on a calm machine agree."""
    most = min(program.max_batch_rows, program.max_output_rows)
    key = _fingerprint(program, kv_layout)
    known, loads = ([], 0) if key is None else _recalled_seconds(key)
    if known and loads >= _AGREEING_LOADS:
        return known[:most]
    if progress is not None:
        progress("measuring drafts (once per machine and model)", 0, 0)
    cache = SequenceCache(PagePool(kv_layout), max_length=most)

    def run(num_rows: int) -> None:
        cache.truncate(0)
        cache.reserve(num_rows)
        segment = cache.segment(num_rows)
        program.run(Batch(np.zeros(num_rows, np.int32), (segment,), np.arange(num_rows, dtype=np.int32)))

    seconds, is_calm = measure_costs(run, most)
    if key is not None and is_calm:
        agrees = len(known) == len(seconds) and _is_alike(known, seconds)
        least = [min(pair) for pair in zip(known, seconds, strict=True)] if agrees else seconds
        put_measurement("verification", key, seconds=least, loads=loads + 1 if agrees else 1)
    return seconds


def _recalled_seconds(key: str) -> tuple[list[float], int]:
    """What was measured before, nothing if that is damaged, and how many loads in a row have measured it."""
    record = get_measurement("verification", key) or {}
    seconds, loads = record.get("seconds"), record.get("loads")
    if not isinstance(seconds, list) or not isinstance(loads, int):
        return [], 0
    is_sound = all(isinstance(value, float) and 0 < value < math.inf for value in seconds)
    return (seconds, loads) if is_sound else ([], 0)


def _is_alike(known: list[float], measured: list[float]) -> bool:
    """Whether both say the same of what more rows cost, whatever the pace of the machine was."""
    ratios = [(one / known[0]) / (other / measured[0]) for one, other in zip(known, measured, strict=True)]
    return all(1 / _ALIKE < ratio < _ALIKE for ratio in ratios)


def _fingerprint(program: Program, kv_layout: KVLayout) -> str | None:
    """The same for programs that do the same work on as many threads; None where a program does not tell."""
    if not isinstance(program, MeasurableProgram):
        return None
    work = [(op.kernel, op.rows.value, op.weight_bytes, op.multiply_adds) for op in program.operations()]
    return hashlib.sha256(f"{program.num_threads} {kv_layout.page_bytes} {work}".encode()).hexdigest()
