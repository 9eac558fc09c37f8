"""`localinfer.load`: from a path and options to an `LLM`."""

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from localinfer.arguments import check_callable, check_number, check_path, shown
from localinfer.cache.block_pool import PagePool
from localinfer.cache.sequence import SequenceCache, forward
from localinfer.engine.scheduler import EngineLimits
from localinfer.errors import BackendUnavailableError, ModelFileError, RequestError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import MeasurableProgram, Program
from localinfer.llm import LLM
from localinfer.models.load.measurements import get_measurement, put_measurement
from localinfer.speculation.assistant import AssistantDrafter
from localinfer.speculation.costs import VerificationCosts, measure_costs
from localinfer.speculation.draft_model import DraftModel
from localinfer.speculation.mtp import MTPDrafter
from localinfer.speculation.ngram import NgramDrafter
from localinfer.speculation.verify import Speculation
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.decoder.rope import RopeOptions
    from localinfer.models.load.loader import Model
    from localinfer.models.load.model_changes import ModelChanges
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.persistence.fingerprint import ModelIdentity
    from localinfer.persistence.prompt_cache import DiskOptions
    from localinfer.quant.checkpoint.model_file import ModelFile

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")

_SPECULATION = ("auto", "ngram", "draft", "mtp", None)
_AGREEING_LOADS = 2
_ALIKE = 1.3
"""Largest ratio of the relative costs of two measurements that agree."""


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    gpu_layers: int | None = None,
    threads: int | None = None,
    context_length: int | None = None,
    kv_type: str = "f16",
    kv_memory: int | None = None,
    kv_window: int | None = None,
    disk_cache: bool | int = False,
    disk_cache_folder: str | os.PathLike[str] | None = None,
    speculation: str | None = "auto",
    draft: str | os.PathLike[str] | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    rope: "RopeOptions | None" = None,
    overrides: Mapping[str, bool | int | float | str] | None = None,
    limits: EngineLimits | None = None,
    progress: ProgressCallback | None = None,
) -> LLM:
    """Load a model and return it ready to answer.

    model: path of a GGUF file (of a split model: any of its parts) or of a Hugging Face folder; None: the bundled demo
        model.
    device: "cpu", "cuda", or "auto" for a GPU if there is one that holds at least one layer of the model.
    gpu_layers: how many of the model's last layers run on the GPU, the others on the CPU; more than it has means all.
        None: as many as fit, with a KV cache of context_length tokens (8,192 if that is None).
    threads: CPU threads; None: the physical cores.
    context_length: tokens of prompt and completion together; None: as trained, or, with a warning, what fits into half
        of the memory that is free beside the weights. More than trained is allowed, with a warning; `rope` scales the
        positions. What cannot fit is refused before the weights are read.
    kv_type: KV cache element type: "f16", "f32", "q8_0" or "q4_0", or one for each such as "q8_0/q4_0".
    kv_memory: maximum bytes of the KV cache, cached prefixes included; None: half of the free memory, or one full
        context if that takes more, but at most 8 GiB or one full context, whichever is more. It is allocated on demand.
    kv_window: evict keys and values so that each sequence keeps at most this many tokens between batches: the first,
        the recent half, and those with the highest attention scores. It bounds memory, not the context. An
        approximation: beyond that many tokens texts differ from those without it, and from one run to the next, since
        what is evicted depends on how prompts were cut into batches and on what was cached; and they are not cached.
        None: keep all.
    disk_cache: keep a prompt cache on disk, so that conversations continue after a restart without a prefill: True, or
        its maximum bytes (True: 4 GiB; evicted by least recent use).
    disk_cache_folder: its location, of which a private subfolder is used; None: this user's cache folder.
    speculation: speculative decoding: "ngram" drafts from earlier text, "draft" with a draft model, "mtp" with the
        layers for next-token prediction that some models bring along (on the CPU), "auto" with all available, a draft
        model before such layers, None: off. It changes speed only, never the text.
    draft: path of a draft model: a much smaller GGUF model of the same vocabulary, or one made to draft from the
        model's own cache (Gemma 4's, on the CPU).
    chat_template: Jinja source in place of the model's own template, or the path of a file.
    rope: a `localinfer.RopeOptions` in place of the file's rotary position embedding.
    overrides: metadata in place of the file's, by GGUF key: {"llama.rope.freq_base": 1e6}. A key that the file lacks
        and localinfer does not read is refused. Entries cached on disk under other settings are not used.
    limits: how many generations run concurrently, and how many may wait; None: 16, and any number.
    progress: called with a stage's name, the units done and the total.
    Raises: ModelFileError, RequestError, BackendUnavailableError, OutOfMemoryError.
    """
    if not isinstance(device, str) or device not in DEVICES:
        raise BackendUnavailableError(f"device is {device!r}; wanted one of {', '.join(map(repr, DEVICES))}")
    sizes = {"threads": threads, "context_length": context_length, "kv_memory": kv_memory, "kv_window": kv_window}
    for name, value in sizes.items():
        check_number(name, value, 1, none="for the default")
    from localinfer.cache.eviction import window_of
    from localinfer.machine_limits import memory_limits
    from localinfer.memory_plan import choose_context, file_bytes, plan_file, plan_memory
    from localinfer.models.load.assistant import is_assistant
    from localinfer.models.load.loader import load_model

    check_callable("progress", progress)
    if limits is not None and not isinstance(limits, EngineLimits):
        raise RequestError(f"limits is {shown(limits)}; give EngineLimits, or None for the defaults")
    check_speculation(speculation, has_draft=draft is not None)
    changes = model_changes(chat_template=chat_template, rope=rope, overrides=overrides)
    path = model_path(model)
    disk = _disk_options(disk_cache, disk_cache_folder)
    if kv_window is not None and draft is not None:
        raise RequestError("kv_window does not bound the cache of a draft model; leave out one of them")
    draft_path = None if draft is None else model_path(draft, "draft")
    assistant = draft_path if draft_path is not None and is_assistant(draft_path) else None
    has_draft_layers = speculation in ("auto", "mtp") and draft is None and kv_window is None

    def context_that_fits(file: "ModelFile", config: "ModelConfig") -> int:
        plan = plan_memory(file, config, kv_type=kv_type, draft_layers=has_draft_layers)
        if assistant is not None:
            plan = replace(plan, weight_bytes=plan.weight_bytes + file_bytes(assistant))
        elif draft_path is not None:
            plan = replace(plan, beside=plan_file(draft_path, kv_type=kv_type))
        return choose_context(plan, context_length, memory_limits(), kv_memory=kv_memory, kv_window=kv_window)

    with ExitStack() as loads:
        loaded = load_model(
            path,
            threads=threads,
            context_length=context_length,
            kv_type=kv_type,
            kv_window=kv_window,
            device=device,
            gpu_layers=gpu_layers,
            draft_layers=has_draft_layers,
            assistant=assistant,
            changes=changes,
            choose_context=context_that_fits,
            progress=progress,
        )
        loads.callback(loaded.close)
        if loaded.config.is_encoder:
            if draft is not None or speculation not in (None, "auto"):
                raise RequestError(
                    "an encoder generates nothing, so nothing is drafted; leave out speculation and draft"
                )
            speculation = disk = None
        if speculation == "mtp" and not loaded.draft_programs:
            raise RequestError(
                "speculation is 'mtp', but this model brings no layers for next-token prediction, or they cannot be "
                "used: they need device 'cpu' and no kv_window; take 'auto'"
            )
        if speculation == "draft" and assistant is not None and not loaded.draft_programs:
            raise RequestError(
                f"speculation is 'draft', but {assistant.name} drafts on the CPU only; take device 'cpu', or 'auto'"
            )
        drafting = made = window = None
        keeps_pages = loaded.kv_layout.page_bytes + loaded.kv_layout.windowed_bytes > 0
        if kv_window is not None and kv_window < loaded.config.context_length and keeps_pages:
            window = window_of(loaded, kv_window)
        if draft_path is not None and assistant is None:
            # If the model left no room on the GPU, the draft model runs on the CPU.
            beside = "cpu" if loaded.device == "cpu" else "auto"
            drafting = load_model(draft_path, kv_type=kv_type, device=beside, beside=loaded, progress=progress)
            loads.callback(drafting.close)
        if speculation is not None:
            made = make_speculation(speculation, loaded, drafting, kv_memory=kv_memory, progress=progress)
        llm = LLM(
            loaded,
            kv_memory=kv_memory,
            kv_window=window,
            identity=_identity(loaded, disk),
            disk=disk,
            speculation=made,
            limits=limits,
        )
        loads.pop_all()
    return llm


def model_changes(
    *,
    chat_template: str | os.PathLike[str] | None = None,
    rope: "RopeOptions | None" = None,
    overrides: Mapping[str, bool | int | float | str] | None = None,
) -> "ModelChanges":
    """The changes to a model's file that arguments of `load` make. Raises: RequestError."""
    from localinfer.models.decoder.rope import RopeOptions
    from localinfer.models.load.model_changes import ModelChanges, template_source

    if rope is not None and not isinstance(rope, RopeOptions):
        raise RequestError(f"rope is {rope!r:.80}; give a localinfer.RopeOptions, or None")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise RequestError(f"overrides is {overrides!r:.80}; give a dict of metadata keys and values, or None")
    return ModelChanges(
        overrides=dict(overrides or {}), chat_template=template_source(chat_template), rope=rope or RopeOptions()
    )


def load_tokenizer(model: str | os.PathLike[str] | None = None) -> "Tokenizer":
    """Load only the tokenizer, of a GGUF file with or without tensors, or of a folder; None: the demo model's.

    Raises: ModelFileError.
    """
    from localinfer.models.load.loader import load_tokenizer as load_from_file

    return load_from_file(model_path(model))


def _disk_options(disk_cache: bool | int, folder: str | os.PathLike[str] | None) -> "DiskOptions | None":
    if not isinstance(disk_cache, int) or disk_cache < 0:
        raise RequestError(f"disk_cache is {disk_cache!r}; give True, False, or how many bytes it may take")
    if not disk_cache:
        return None
    from localinfer.persistence.prompt_cache import DEFAULT_MAX_BYTES, DiskOptions, conversations_folder

    chosen = conversations_folder(None if folder is None else check_path("disk_cache_folder", folder))
    if chosen is None:
        logger.warning("prompts are not cached on disk: this user has no home folder; give a disk_cache_folder")
        return None
    return DiskOptions(chosen, DEFAULT_MAX_BYTES if disk_cache is True else disk_cache)


def _identity(model: "Model", disk: "DiskOptions | None") -> "ModelIdentity | None":
    from localinfer.persistence.fingerprint import ModelIdentity

    try:
        return ModelIdentity(model.file, model.kv_layout, model.config, None if disk is None else disk.weights_memory)
    except OSError as error:
        logger.warning("%s no longer exists, so nothing is kept on disk: %s", model.file.path.name, error)
        return None


def model_path(model: str | os.PathLike[str] | None, name: str = "model") -> Path:
    """Check the path of a model, None for the demo model's; name: of the argument, for errors.

    Raises: RequestError, ModelFileError if there is no demo.
    """
    if model is not None:
        return check_path(name, model, ", or None for the demo model" if name == "model" else "")
    from localinfer.models import demo

    path = Path(demo.__file__).parent / "demo-f16.gguf"
    if not path.exists():
        raise ModelFileError("this installation has no demo model; give the path of a GGUF file")
    return path


def check_speculation(speculation: str | None, *, has_draft: bool) -> None:
    """Raise RequestError unless the option is known and consistent with whether a draft model was given."""
    if not isinstance(speculation, str | None) or speculation not in _SPECULATION:
        raise RequestError(f"speculation is {shown(speculation)}; give 'auto', 'ngram', 'draft', 'mtp' or None")
    if speculation == "draft" and not has_draft:
        raise RequestError("speculation is 'draft', but there is no draft model; give its file as draft, or use 'auto'")
    if speculation in ("ngram", "mtp", None) and has_draft:
        raise RequestError(f"a draft model was given, but speculation is {speculation!r}; make it 'auto' or 'draft'")


def make_speculation(
    speculation: str,
    model: "Model",
    draft: "Model | None",
    *,
    kv_memory: int | None = None,
    progress: ProgressCallback | None = None,
) -> Speculation:
    """Make the drafters for an engine over `model`. Without an error they own the draft model.

    draft: a model of its own; one that drafts from the cache of `model` was loaded with it.

    Raises: RequestError if the two vocabularies differ.
    """
    if draft is not None:
        _check_vocabularies(model, draft)
    costs = VerificationCosts(_verification_seconds(model.program, model.kv_layout, progress))
    drafter: DraftModel | MTPDrafter | None = None
    if draft is not None:
        drafter = DraftModel(draft, target_vocab_size=model.config.vocab_size, kv_memory=kv_memory)
    elif model.draft_programs:
        drafter = MTPDrafter(model) if model.assistant is None else AssistantDrafter(model)
    has_ngram = speculation in ("auto", "ngram")
    return Speculation(costs, ngram=NgramDrafter() if has_ngram else None, model=drafter)


def _check_vocabularies(model: "Model", draft: "Model") -> None:
    if model.tokenizer is None or draft.tokenizer is None:
        raise RequestError(
            "a draft model must give the same ids for the same text, which cannot be checked without a tokenizer in "
            "both files; leave the draft model out"
        )
    difference = model.tokenizer.difference_from(draft.tokenizer)
    if difference is not None:
        raise RequestError(
            f"the draft model does not give the same ids for the same text: {difference}; choose one of the same family"
        )


def _verification_seconds(program: Program, kv_layout: KVLayout, progress: ProgressCallback | None) -> list[float]:
    """Seconds of passes over 1 to 16 rows, as initial estimates; cached once two loads on an idle machine agree."""
    max_rows = min(program.max_batch_rows, program.max_output_rows)
    key = _fingerprint(program, kv_layout)
    known, loads = ([], 0) if key is None else _cached_seconds(key)
    if known and loads >= _AGREEING_LOADS:
        return known[:max_rows]
    if progress is not None:
        progress("measuring drafts (once per machine and model)", 0, 0)
    cache = SequenceCache(PagePool(kv_layout), max_length=max_rows)

    def run(num_rows: int) -> None:
        cache.truncate(0)
        rows = np.arange(num_rows, dtype=np.int32)
        forward(program.run, (cache,), (np.zeros(num_rows, np.int32),), rows, (num_rows - 1,))

    seconds, is_calm = measure_costs(run, max_rows)
    if key is not None and is_calm:
        agrees = len(known) == len(seconds) and _is_alike(known, seconds)
        least = [min(pair) for pair in zip(known, seconds, strict=True)] if agrees else seconds
        put_measurement("verification", key, seconds=least, loads=loads + 1 if agrees else 1)
    return seconds


def _cached_seconds(key: str) -> tuple[list[float], int]:
    """The cached measurement, empty if it is damaged, and how many loads in a row agreed on it."""
    record = get_measurement("verification", key) or {}
    seconds, loads = record.get("seconds"), record.get("loads")
    if not isinstance(seconds, list) or not isinstance(loads, int):
        return [], 0
    is_sound = all(isinstance(value, float) and 0 < value < math.inf for value in seconds)
    return (seconds, loads) if is_sound else ([], 0)


def _is_alike(known: list[float], measured: list[float]) -> bool:
    """Whether the costs relative to one row agree."""
    ratios = [(one / known[0]) / (other / measured[0]) for one, other in zip(known, measured, strict=True)]
    return all(1 / _ALIKE < ratio < _ALIKE for ratio in ratios)


def _fingerprint(program: Program, kv_layout: KVLayout) -> str | None:
    """A key of the program's work and threads; None if the program cannot list its ops."""
    if not isinstance(program, MeasurableProgram):
        return None
    work = [(op.kernel, op.rows.value, op.weight_bytes, op.multiply_adds) for op in program.operations()]
    return hashlib.sha256(f"{program.num_threads} {kv_layout.page_bytes} {work}".encode()).hexdigest()
