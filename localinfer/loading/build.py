"""From checked options to an `LLM`: model, draft model, drafters, cache on disk."""

import logging
import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localinfer.engine.cache.block_pool import default_kv_memory
from localinfer.engine.cache.sequence import KVEviction
from localinfer.engine.sampling.params import file_sampling
from localinfer.errors import ModelFileError
from localinfer.kernels.kv_layout import DevicePages
from localinfer.llm import LLM
from localinfer.loading.memory.limit import KVBudget, window_of
from localinfer.loading.memory.plan import plan_memory
from localinfer.loading.options import CheckedLoad, ModelOptions
from localinfer.models.load.loader import BuildOptions, build_on_cpu, build_on_gpus, opened_model
from localinfer.system import machine_limits
from localinfer.types import ModelInfo, ProgressCallback

if TYPE_CHECKING:
    from pathlib import Path

    from localinfer.generation.chat.reply import TemplateFormats
    from localinfer.loading.media import LoadedMedia, MediaPlan
    from localinfer.models.load.loader import Model
    from localinfer.storage.fingerprint import ModelIdentity
    from localinfer.storage.prompt_cache import DiskOptions

logger = logging.getLogger(__name__)

_LAST_STAGE = "getting ready to answer"


def build_llm(checked: CheckedLoad) -> LLM:
    """Load a model with its options; what their `progress` raises ends the load, and leaves nothing.

    Raises: as `localinfer.load`.
    """
    options, given, disk = checked.model, checked.given, checked.disk
    progress = given.progress if callable(given.progress) else None
    measuring: Any = {"measure_again": given.measure_again, "may_measure": given.may_measure}
    with ExitStack() as loads:
        observer = None
        if given.kv_events is not None:
            # An optional part.
            from localinfer.storage.kv_events import observer_of

            observer = observer_of(given.kv_events)
        if observer is not None:
            loads.callback(observer.close)
        loaded, budget = _load(checked, progress)
        loads.callback(loaded.close)
        media = None
        if options.media_path is not None:
            media = _media_of(options.media_path, loaded, disk, progress)
        if media is not None:
            loads.callback(media.close)
        is_encoder, drafts_itself = loaded.config.is_encoder, bool(loaded.draft_programs)
        speculation = options.checked_speculation(is_encoder=is_encoder, drafts_itself=drafts_itself)
        if loaded.config.is_encoder:
            disk = None
        drafting = made = window = None
        keeps_pages = loaded.kv_layout.page_bytes + loaded.kv_layout.windowed_bytes > 0
        if options.kv_window is not None and options.kv_window < loaded.config.context_length and keeps_pages:
            window = window_of(loaded, options.kv_window)
        if options.separate_draft is not None:
            from localinfer.loading.drafters import load_drafter

            drafting = load_drafter(options, loaded, verify=given.verify, progress=progress)
            loads.callback(drafting.close)
        if speculation is not None:
            from localinfer.loading.drafters import make_speculation

            made = make_speculation(
                speculation, loaded, drafting, kv_memory=budget.draft_kv_memory, progress=progress, **measuring
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
            limits=given.limits,
            observer=observer,
            media=media,
            describe=partial(model_info, encoders=None if media is None else options.media),
        )
        loads.callback(llm.close)
        if progress is not None:
            progress(_LAST_STAGE, 1, 1)
        loads.pop_all()
    return llm


def _load(checked: CheckedLoad, progress: ProgressCallback | None) -> tuple["Model", KVBudget]:
    """Open a model, plan its memory and build it; also what keys and values may take of that."""
    options, given = checked.model, checked.given
    build = BuildOptions(
        threads=options.threads,
        priority=checked.priority,
        measure_again=given.measure_again,
        may_measure=given.may_measure,
        verify=given.verify,
    )
    with opened_model(
        options.path,
        context_length=options.context_length,
        kv_type=options.kv_type,
        kv_window=options.kv_window,
        device=options.request,
        draft_layers=options.has_draft_layers,
        assistant=options.assistant,
        takes_media=options.media_path is not None,
        changes=options.changes,
        progress=progress,
    ) as opened:
        if opened.placement is not None:
            from localinfer.loading.memory.gpu_plan import draft_on_host, host_budget

            config, placement = opened.config, opened.placement
            draft = draft_on_host(options, config, placement)
            budget = host_budget(options, opened.file, config, placement, draft, machine_limits.memory_limits())
            loaded = build_on_gpus(opened, build)
            if loaded is not None:
                return loaded, budget
        budget = options.share(options.plan(opened.file, opened.config), machine_limits.memory_limits())
        opened.set_context(budget.context_length)
        return build_on_cpu(opened, build), budget


def _media_of(
    path: "Path", loaded: "Model", disk: "DiskOptions | None", progress: ProgressCallback | None
) -> "LoadedMedia | None":
    """The encoders of a loaded model; None, with a warning, where a folder's do not run."""
    from localinfer.loading.media import missing_packages, open_media

    try:
        media = open_media(path, loaded, None if disk is None else disk.weights_memory, progress)
    except ModelFileError as error:
        if not path.is_dir():
            raise
        # Its text runs, as it did before anyone asked for more.
        logger.warning("%s reads text only: %s", loaded.file.path.name, error)
        return None
    if loaded.device != "cpu":
        from localinfer.loading.memory.gpu_plan import ENCODERS_ON_CPU

        logger.info("%s: %s", loaded.file.path.name, ENCODERS_ON_CPU)
    missing = missing_packages(media.kinds)
    if missing is not None:
        logger.warning("%s: %s", loaded.file.path.name, missing)
    return media


def _kv_memory(options: ModelOptions, budget: KVBudget, loaded: "Model") -> int | None:
    """Memory for keys and values: the rest of a limit, but no more than their default."""
    if budget.host_kv_memory is not None:
        return _gpu_kv_memory(options, budget.host_kv_memory, loaded)
    if options.kv_memory is not None or budget.kv_memory is None:
        return budget.kv_memory
    default = default_kv_memory(loaded.kv_layout, loaded.config.context_length, loaded.program.max_batch_rows)
    return min(budget.kv_memory, default)


def _gpu_kv_memory(options: ModelOptions, most_in_host: int, loaded: "Model") -> int | None:
    """Memory for keys and values of a model on GPUs, whose first layers' may be in main memory."""
    layout = loaded.kv_layout
    if not isinstance(layout, DevicePages) or not layout.host_page_bytes:
        return options.kv_memory
    most = most_in_host // layout.host_page_bytes * layout.page_bytes
    default = default_kv_memory(layout, loaded.config.context_length, loaded.program.max_batch_rows)
    return min(most, default if options.kv_memory is None else options.kv_memory)


def _identity(model: "Model", disk: "DiskOptions | None") -> "ModelIdentity | None":
    from localinfer.storage.fingerprint import ModelIdentity

    try:
        return ModelIdentity(model.file, model.kv_layout, model.config, None if disk is None else disk.weights_memory)
    except OSError as error:
        logger.warning("%s no longer exists, so nothing is kept on disk: %s", model.file.path.name, error)
        return None


def model_info(
    model: "Model",
    replies: "TemplateFormats | None",
    window: "KVEviction | None" = None,
    *,
    encoders: "MediaPlan | None" = None,
) -> ModelInfo:
    """Gather the facts of a loaded model, in some ten milliseconds.

    replies: of its chat template, if it has one. window: what bounds its texts' keys and values. encoders: of pictures
    and sounds.
    Raises: ClosedError once the model is closed.
    """
    config, file, template = model.config, model.file, model.chat_template
    tensors = file.tensors.values()
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    plan = plan_memory(file, config, kv_type=model.kv_layout.kv_type)
    if window is not None:
        plan = replace(plan, kv_tokens=window.most_tokens)
    if encoders is not None:
        plan = plan.with_media(encoders.weight_bytes, encoders.buffer_bytes)
    name, trained = file.metadata.get("general.name"), file.metadata.get(f"{config.architecture}.context_length")
    source = None if template is None or template.source is None or template.is_fallback else template.source
    # A general form, which stands in for a missing template, says nothing about the model.
    own = replies if source is not None and "chat" in model.capabilities else None
    return ModelInfo(
        name=name if isinstance(name, str) and name else file.path.stem,
        path=file.path,
        architecture=config.architecture,
        capabilities=model.capabilities,
        parameters=parameters,
        quantization=_quantization(model),
        bits_per_weight=8 * sum(tensor.num_bytes for tensor in tensors) / max(1, parameters),
        file_bytes=file.num_bytes,
        num_layers=config.num_main_layers,
        num_experts=0 if config.experts is None else config.experts.num_experts,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        trained_context_length=trained if isinstance(trained, int) else config.context_length,
        device=model.device,
        threads=model.pool.num_threads,
        kv_type=model.kv_layout.kv_type,
        memory_bytes=plan.total_bytes(config.context_length),
        chat_template=source,
        supports_tools=own is not None and (own.calls.is_native or own.calls.describes_tools),
        supports_thinking=own is not None and own.reasoning is not None,
        sampling=file_sampling(file.metadata, name=file.path.name),
        warnings=tuple(finding.message for finding in model.findings),
    )


def _quantization(model: "Model") -> str:
    """The type of most weights; of a folder how it stores its quantized matrices."""
    stored = getattr(model.file, "quantization", ())
    if stored:
        return ", ".join(str(form) for form in stored)
    weights: Counter[str] = Counter()
    for tensor in model.file.tensors.values():
        weights[tensor.type.name] += math.prod(tensor.shape)
    return weights.most_common(1)[0][0]
