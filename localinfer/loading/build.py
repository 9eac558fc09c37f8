"""From checked options to an `LLM`: model, draft model, drafters, cache on disk."""

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from localinfer.cache.block_pool import default_kv_memory
from localinfer.cache.eviction import window_of
from localinfer.engine.admission import EngineLimits
from localinfer.kernels.kv_layout import DevicePages
from localinfer.kv_events.publisher import observer_of
from localinfer.llm import LLM
from localinfer.loading.drafters import load_drafter, make_speculation
from localinfer.loading.host_memory import draft_on_host, host_budget
from localinfer.loading.options import ModelOptions
from localinfer.memory.limit import KVBudget
from localinfer.models.load.loader import load_model
from localinfer.system import machine_limits
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.kernels.cpu.worker_threads import Priority
    from localinfer.kv_events.config import KVEventsConfig
    from localinfer.kv_events.publisher import KVEventPublisher
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.load.loader import Model
    from localinfer.models.load.placement import Placement
    from localinfer.persistence.fingerprint import ModelIdentity
    from localinfer.persistence.prompt_cache import DiskOptions
    from localinfer.quant.checkpoint.model_file import ModelFile

logger = logging.getLogger(__name__)

_LAST_STAGE = "getting ready to answer"


def build_llm(
    options: ModelOptions,
    disk: "DiskOptions | None",
    limits: EngineLimits | None,
    progress: ProgressCallback | None,
    *,
    priority: "Priority",
    measure_again: bool,
    may_measure: bool,
    verify: bool,
    kv_events: "str | KVEventsConfig | KVEventPublisher | None",
) -> LLM:
    """Load what the options name. progress: told of every stage; what it raises ends the load, and leaves nothing.

    Raises: as `localinfer.load`.
    """
    budget = KVBudget(0, options.kv_memory, options.kv_memory)

    def context_that_fits(file: "ModelFile", config: "ModelConfig") -> int:
        nonlocal budget
        budget = options.share(options.plan(file, config), machine_limits.memory_limits())
        return budget.context_length

    def check_host(file: "ModelFile", config: "ModelConfig", placement: "Placement") -> None:
        nonlocal budget
        draft = draft_on_host(options, config, placement)
        budget = host_budget(options, file, config, placement, draft, machine_limits.memory_limits())

    with ExitStack() as loads:
        observer = observer_of(kv_events)
        if observer is not None:
            loads.callback(observer.close)
        loaded = load_model(
            options.path,
            threads=options.threads,
            context_length=options.context_length,
            kv_type=options.kv_type,
            kv_window=options.kv_window,
            device=options.device,
            gpu_layers=options.gpu_layers,
            tensor_split=options.tensor_split,
            cpu_moe=options.cpu_moe,
            draft_layers=options.has_draft_layers,
            assistant=options.assistant,
            changes=options.changes,
            choose_context=context_that_fits,
            check_placement=check_host,
            priority=priority,
            measure_again=measure_again,
            may_measure=may_measure,
            verify=verify,
            progress=progress,
        )
        loads.callback(loaded.close)
        is_encoder, drafts_itself = loaded.config.is_encoder, bool(loaded.draft_programs)
        speculation = options.checked_speculation(is_encoder=is_encoder, drafts_itself=drafts_itself)
        if loaded.config.is_encoder:
            disk = None
        drafting = made = window = None
        keeps_pages = loaded.kv_layout.page_bytes + loaded.kv_layout.windowed_bytes > 0
        if options.kv_window is not None and options.kv_window < loaded.config.context_length and keeps_pages:
            window = window_of(loaded, options.kv_window)
        if options.separate_draft is not None:
            drafting = load_drafter(options, loaded, verify=verify, progress=progress)
            loads.callback(drafting.close)
        if speculation is not None:
            made = make_speculation(
                speculation,
                loaded,
                drafting,
                kv_memory=budget.draft_kv_memory,
                measure_again=measure_again,
                may_measure=may_measure,
                progress=progress,
            )
        if progress is not None:
            progress(_LAST_STAGE, 0, 1)
        llm = LLM(
            loaded,
            kv_memory=_kv_memory(options, budget, loaded),
            kv_window=window,
            identity=_identity(loaded, disk),
            disk=disk,
            speculation=made,
            limits=limits,
            observer=observer,
        )
        loads.callback(llm.close)
        if progress is not None:
            progress(_LAST_STAGE, 1, 1)
        loads.pop_all()
    return llm


def _kv_memory(options: ModelOptions, budget: KVBudget, loaded: "Model") -> int | None:
    """What keys and values may take: what a limit leaves, but no more than they may take by default."""
    if budget.host_kv_memory is not None:
        return _gpu_kv_memory(options, budget.host_kv_memory, loaded)
    if options.kv_memory is not None or budget.kv_memory is None:
        return budget.kv_memory
    default = default_kv_memory(loaded.kv_layout, loaded.config.context_length, loaded.program.max_batch_rows)
    return min(budget.kv_memory, default)


def _gpu_kv_memory(options: ModelOptions, most_in_host: int, loaded: "Model") -> int | None:
    """What keys and values may take of a model on GPUs, whose first layers' may be in main memory."""
    layout = loaded.kv_layout
    if not isinstance(layout, DevicePages) or not layout.host_page_bytes:
        return options.kv_memory
    most = most_in_host // layout.host_page_bytes * layout.page_bytes
    default = default_kv_memory(layout, loaded.config.context_length, loaded.program.max_batch_rows)
    return min(most, default if options.kv_memory is None else options.kv_memory)


def _identity(model: "Model", disk: "DiskOptions | None") -> "ModelIdentity | None":
    from localinfer.persistence.fingerprint import ModelIdentity

    try:
        return ModelIdentity(model.file, model.kv_layout, model.config, None if disk is None else disk.weights_memory)
    except OSError as error:
        logger.warning("%s no longer exists, so nothing is kept on disk: %s", model.file.path.name, error)
        return None
