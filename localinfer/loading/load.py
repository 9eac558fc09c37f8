"""`localinfer.load`: from a path and options to an `LLM`."""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from localinfer.arguments import check_flag
from localinfer.cache.block_pool import default_kv_memory
from localinfer.cache.eviction import window_of
from localinfer.engine.admission import EngineLimits
from localinfer.errors import LoadCancelledError
from localinfer.kernels.kv_layout import DevicePages
from localinfer.kv_events.publisher import observer_of
from localinfer.llm import LLM
from localinfer.loading.drafters import load_drafter, make_speculation
from localinfer.loading.host_memory import draft_on_host, host_budget
from localinfer.loading.options import (
    ModelOptions,
    check_limits,
    check_model_options,
    disk_options,
    model_path,
    stoppable,
)
from localinfer.memory.limit import KVBudget
from localinfer.models.load.loader import load_model
from localinfer.models.load.loader import load_tokenizer as tokenizer_of
from localinfer.system import machine_limits
from localinfer.thread_control import checked_priority
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.kernels.cpu.worker_threads import Priority
    from localinfer.kv_events.config import KVEventsConfig
    from localinfer.kv_events.publisher import KVEventPublisher
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.decoder.rope import RopeOptions
    from localinfer.models.load.loader import Model
    from localinfer.models.load.placement import Placement
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.persistence.fingerprint import ModelIdentity
    from localinfer.persistence.prompt_cache import DiskOptions
    from localinfer.quant.checkpoint.model_file import ModelFile

logger = logging.getLogger(__name__)

_LAST_STAGE = "getting ready to answer"


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    gpu_layers: int | None = None,
    tensor_split: Sequence[float] | None = None,
    cpu_moe: bool | int | None = None,
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
    memory_limit: int | None = None,
    priority: str = "normal",
    measure_again: bool = False,
    may_measure: bool = True,
    verify: bool = True,
    kv_events: "str | KVEventsConfig | KVEventPublisher | None" = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> LLM:
    """Load a model and return it ready to answer.

    model: path of a GGUF file (of a split model: any of its parts) or of a Hugging Face folder; None: the bundled demo
        model.
    device: "cpu", "cuda", GPUs by number such as "cuda:1" or "cuda:0,cuda:1", or "auto" for GPUs if there is one that
        holds at least one layer of the model. Several GPUs share the layers in the order in which they are named; if
        none are named, the fewest that hold the whole model are taken.
    gpu_layers: how many of the model's last layers run on GPUs, the others on the CPU; more than it has means all.
        None: as many as fit, with a KV cache of context_length tokens (8,192 if that is None).
    tensor_split: each GPU's share of those layers, such as [3, 1]. None: shares that fill their free memory alike.
    cpu_moe: of a mixture of experts, keep the routed experts on the CPU and all else on GPUs: True for every layer, or
        of how many of the first layers. None: of as few as needed, where that lets more of the model run on GPUs.
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
    memory_limit: maximum bytes of main memory that the model may take: weights as packed, buffers, tokenizer, keys and
        values, and the same of a draft model. Checked before the weights are read; a context that is not requested is
        reduced to what fits, and the KV cache may take what is left, or kv_memory if that is less. Not counted: what
        the process holds anyway (Python and libraries, some 100 MB), texts and logprobs, memory of a GPU. None: what
        the machine has.
    priority: of the threads that load and compute, "normal" or "background"; see `LLM.set_priority`.
    measure_again: do not use what earlier loads have measured of this machine: the number of threads that decodes
        fastest, and what verifying drafts costs. Measurements are kept for 30 days, and none of a busy machine.
    may_measure: whether to measure what no earlier load has. False loads faster, and without work that other models
        would feel: all threads decode, and drafts are tried with care until it shows what they cost.
    verify: make cheap checks of the file, some milliseconds: what is likely wrong, such as a word splitting that is not
        the vocabulary's, is logged and in `llm.info.warnings`; weights that are not finite are refused. False makes
        none. `localinfer show --verify` makes them over every weight.
    kv_events: publish KV cache events for routers, as vLLM does (ZMQ: BlockStored, BlockRemoved, AllBlocksCleared), at
        this address, such as "tcp://127.0.0.1:5557"; or a `localinfer.KVEventsConfig`. Who can connect reads the token
        ids of every text. None: no events.
    progress: called with a stage's name, the units done and the total, in the thread that loads, several times in 200
        ms; what it raises ends the load.
    cancel: once it is set, from any thread, the load stops within 200 ms with LoadCancelledError, and leaves no thread,
        child process, open file or memory behind. Kernels that are compiled in this process, where no child can be
        started, are each compiled to the end.
    Raises: ModelFileError, RequestError, BackendUnavailableError, OutOfMemoryError, LoadCancelledError,
        MissingPackageError.
    """
    options = check_model_options(
        model=model,
        device=device,
        gpu_layers=gpu_layers,
        tensor_split=tensor_split,
        cpu_moe=cpu_moe,
        threads=threads,
        context_length=context_length,
        kv_type=kv_type,
        kv_memory=kv_memory,
        kv_window=kv_window,
        memory_limit=memory_limit,
        speculation=speculation,
        draft=draft,
        chat_template=chat_template,
        rope=rope,
        overrides=overrides,
    )
    check_limits(limits)
    own_priority = checked_priority(priority)
    measure_again = check_flag("measure_again", measure_again)
    may_measure = check_flag("may_measure", may_measure)
    verify = check_flag("verify", verify)
    report = stoppable(progress, cancel)
    disk = disk_options(disk_cache, disk_cache_folder)
    try:
        return _load(
            options,
            disk,
            limits,
            report,
            priority=own_priority,
            measure_again=measure_again,
            may_measure=may_measure,
            verify=verify,
            kv_events=kv_events,
        )
    except LoadCancelledError as error:
        cancelled = str(error)
    # A new one: as long as an app keeps the first, its frames would keep the weights.
    raise LoadCancelledError(cancelled)


def _load(
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


def load_tokenizer(model: str | os.PathLike[str] | None = None) -> "Tokenizer":
    """Load only the tokenizer, of a GGUF file with or without tensors, or of a folder; None: the demo model's.

    Raises: ModelFileError.
    """
    return tokenizer_of(model_path(model))


def _identity(model: "Model", disk: "DiskOptions | None") -> "ModelIdentity | None":
    from localinfer.persistence.fingerprint import ModelIdentity

    try:
        return ModelIdentity(model.file, model.kv_layout, model.config, None if disk is None else disk.weights_memory)
    except OSError as error:
        logger.warning("%s no longer exists, so nothing is kept on disk: %s", model.file.path.name, error)
        return None
