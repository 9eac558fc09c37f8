"""`localinfer.load`: from a path and options to an `LLM`. Naming it imports next to nothing; see `imports.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localinfer.arguments import check_flag
from localinfer.errors import LoadCancelledError
from localinfer.loading.imports import import_modules, shown_progress, stoppable

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Mapping, Sequence

    from localinfer.engine.admission import EngineLimits
    from localinfer.llm import LLM
    from localinfer.models.decoder.rope_options import RopeOptions
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.kv_events.config import KVEventsConfig
    from localinfer.storage.kv_events.publisher import KVEventPublisher
    from localinfer.types import ProgressCallback


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    gpu_layers: int | str | None = None,
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
    rope: RopeOptions | None = None,
    overrides: Mapping[str, bool | int | float | str] | None = None,
    limits: EngineLimits | None = None,
    memory_limit: int | None = None,
    priority: str = "normal",
    measure_again: bool = False,
    may_measure: bool = True,
    verify: bool = True,
    kv_events: str | KVEventsConfig | KVEventPublisher | None = None,
    progress: ProgressCallback | bool | None = None,
    cancel: threading.Event | None = None,
) -> LLM:
    """Load a model and return it ready to answer.

    model: path of a GGUF file (of a split model: any of its parts) or of a Hugging Face folder; None: the bundled demo
        model.
    device: "cpu", "cuda", GPUs by number such as "cuda:1" or "cuda:0,cuda:1", or "auto" for GPUs if there is one that
        holds at least one layer of the model. Several GPUs share the layers in the order in which they are named; if
        none are named, the fewest that hold the whole model are taken.
    gpu_layers: how many of the model's last layers run on GPUs, the others on the CPU; more than it has means all.
        None or "auto": as many as fit, with a KV cache of context_length tokens (8,192 if that is None).
    tensor_split: each GPU's share of those layers, such as [3, 1]. None: shares that fill their free memory alike.
    cpu_moe: of a mixture of experts, keep the routed experts on the CPU and all else on GPUs: True for every layer, or
        of how many of the first layers. None: of as few as needed, where that lets more of the model run on GPUs.
    threads: CPU threads, fewer while other programs are busy; None: the physical cores.
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
        model before such layers, "off" or None with none. It changes speed only, never the text.
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
        ms; what it raises ends the load. True: written to standard error, as in a notebook or a terminal.
    cancel: once it is set, from any thread, the load stops within 200 ms with LoadCancelledError, and leaves no thread,
        child process, open file or memory behind. Kernels that are compiled in this process, where no child can be
        started, are each compiled to the end.
    Raises: ModelFileError, RequestError, BackendUnavailableError, OutOfMemoryError, LoadCancelledError,
        MissingPackageError.
    """
    with shown_progress(progress) as told:
        report = stoppable(told, cancel)
        import_modules(report)
        from localinfer.engine.thread_control import checked_priority
        from localinfer.loading.build import build_llm
        from localinfer.loading.options import check_limits, check_model_options, disk_options

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
        disk = disk_options(disk_cache, disk_cache_folder)
        try:
            return build_llm(
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


def load_tokenizer(model: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load only the tokenizer, of a GGUF file with or without tensors, or of a folder; None: the demo model's.

    Raises: ModelFileError.
    """
    import_modules(None)
    from localinfer.loading.options import model_path
    from localinfer.models.load.loader import load_tokenizer as tokenizer_of

    return tokenizer_of(model_path(model))
