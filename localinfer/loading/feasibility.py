"""Feasibility of a load, and its memory, found from the header of the model's file: the work of `availability`."""

from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localinfer.errors import LocalinferError, RequestError, ShapeError, UnsupportedFormatError
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.loading.availability import Availability
from localinfer.loading.drafters import check_vocabularies
from localinfer.loading.load_options import HeaderOptions
from localinfer.loading.memory.gpu_plan import draft_on_host, gpu_placement, host_budget
from localinfer.loading.memory.plan import LEAST_CONTEXT, MemoryPlan
from localinfer.loading.options import ModelOptions, check_model_options
from localinfer.models.load.assistant import check_device
from localinfer.models.load.loader import (
    SHARED_KERNELS,
    open_model_file,
    read_config,
    tokenizer_or_none,
    with_context,
)
from localinfer.models.load.needed_kernels import kernels_of_file
from localinfer.system import machine_limits

if TYPE_CHECKING:
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.load.placement import DevicePlacement
    from localinfer.quant.checkpoint.model_file import ModelFile

_KERNEL_SECONDS = 0.4
"""Of one core of 2023, for a kernel of middle size."""
_START_SECONDS = 1.0
"""For the processes that compile, which import Numba."""
_MOST_PROCESSES = 8


def check_feasible(given: HeaderOptions) -> Availability:
    """Say whether `load` with these options would work. Raises: as `localinfer.availability`."""
    try:
        options = check_model_options(given)
    except RequestError:
        raise
    except LocalinferError as error:
        return _refused(error)
    memory_bytes, context_length = None, options.context_length
    try:
        if options.assistant is not None:
            check_device(options.request)
        with closing(open_model_file(options.path, options.changes, context_length)) as file:
            config = with_context(read_config(file), file, context_length, options.changes)
            config = replace(config, takes_media=options.media_path is not None)
            asked = context_length or min(config.context_length, LEAST_CONTEXT)
            try:
                placement = _placement(options, file, config)
            except LocalinferError:
                with suppress(LocalinferError):
                    memory_bytes = options.plan(file, config).total_bytes(asked)
                raise
            plan = options.plan(file, config)
            memory_bytes = plan.total_bytes(asked)
            if placement is None:
                length = options.share(plan, machine_limits.memory_limits()).context_length
                drafts_on_cpu = True
            else:
                length = config.context_length
                draft_part = draft_on_host(options, config, placement)
                drafts_on_cpu = draft_part.num_bytes > 0
                host_budget(options, file, config, placement, draft_part, machine_limits.memory_limits())
                plan = options.plan_on_gpus(file, config)
            memory_bytes = plan.total_bytes(length)
            _check_drafts(options, file, plan, is_on_gpus=placement is not None)
            kernels = set(SHARED_KERNELS)
            if placement is None or placement.uses_cpu:
                kernels |= _kernels_of(file, plan, length, options)
            if drafts_on_cpu and options.separate_draft is not None:
                kernels |= _kernels_of_draft(options.separate_draft, plan)
    except ShapeError as error:
        reason = (
            f"{options.path.name} has sizes that no kernel of this version computes: {error}. Choose another model."
        )
        return _refused(UnsupportedFormatError(reason), memory_bytes)
    except LocalinferError as error:
        return _refused(error, memory_bytes)
    num_missing = sum(not kernel.is_cached for kernel in kernels)
    return Availability(
        supported=True,
        memory_bytes=memory_bytes,
        context_length=length,
        is_compiled=not num_missing,
        compile_seconds=_seconds_to_compile(num_missing),
    )


def _placement(options: ModelOptions, file: "ModelFile", config: "ModelConfig") -> "DevicePlacement | None":
    """Placement of a load on GPUs; None if the CPU computes all of it. Raises: as the load, if it cannot be."""
    return gpu_placement(
        options.request,
        file,
        config,
        kv_type=options.kv_type,
        context_length=options.context_length,
        window_tokens=options.window_tokens(file, config),
    )


def _check_drafts(options: ModelOptions, file: "ModelFile", plan: MemoryPlan, *, is_on_gpus: bool) -> None:
    """Raise RequestError, as a load does, if what is to draft for a model cannot."""
    drafts_itself = not is_on_gpus and (options.assistant is not None or plan.config.num_draft_layers > 0)
    options.checked_speculation(is_encoder=plan.config.is_encoder, drafts_itself=drafts_itself)
    if options.separate_draft is not None:
        with closing(open_model_file(options.separate_draft)) as draft:
            check_vocabularies(tokenizer_or_none(file), tokenizer_or_none(draft))


def _kernels_of(
    file: "ModelFile", plan: MemoryPlan, context_length: int, options: ModelOptions | None = None
) -> set[Kernel]:
    """The kernels for the CPU of one model, of all its layers; options: of the load, None for its draft model."""
    found = kernels_of_file(
        file,
        replace(plan.config, context_length=context_length),
        plan.kv_layout(context_length),
        has_window=plan.kv_tokens is not None,
        assistant=None if options is None else options.assistant,
        changes=None if options is None else options.changes,
    )
    return set(found)


def _kernels_of_draft(path: Path, target: MemoryPlan) -> set[Kernel]:
    assert target.beside is not None, "planned with its draft model"
    with closing(open_model_file(path)) as draft:
        return _kernels_of(draft, target.beside, target.beside.config.context_length)


def _refused(error: LocalinferError, memory_bytes: int | None = None) -> Availability:
    # Without the frames it was raised in, which hold the file.
    error.__cause__ = error.__context__ = None
    bare = error.with_traceback(None)
    return Availability(supported=False, reason=str(error), error=bare, memory_bytes=memory_bytes)


def _seconds_to_compile(num_kernels: int) -> float:
    if not num_kernels:
        return 0.0
    processes = min(machine_limits.processor_limits().allowed, _MOST_PROCESSES, (num_kernels + 1) // 2)
    return _START_SECONDS + _KERNEL_SECONDS * num_kernels / processes
