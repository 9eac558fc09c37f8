"""Checks of the options of `localinfer.load`, together, before any file is read."""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localinfer.arguments import check_path, shown
from localinfer.engine.admission import EngineLimits
from localinfer.errors import (
    BackendUnavailableError,
    ModelFileError,
    OutOfMemoryError,
    RequestError,
    UnsupportedFormatError,
)
from localinfer.kernels.kv_layout import PAGE_TOKENS, KVLayout
from localinfer.loading.load_options import SPECULATION, HeaderOptions, LoadOptions, checked_values
from localinfer.loading.memory.limit import KVBudget, keep_within, planned_window
from localinfer.loading.memory.plan import MemoryPlan, choose_context, plan_file, plan_memory
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes
from localinfer.models.load.device_request import GPU_BATCH_ROWS, DeviceRequest, named_gpus
from localinfer.models.load.loader import reason_without_window
from localinfer.models.load.programs import batch_rows_of
from localinfer.models.load.threads import checked_priority
from localinfer.system.files import read_bounded
from localinfer.system.machine_limits import MemoryLimits
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.kernels.cpu.worker_threads import Priority
    from localinfer.loading.media import MediaPlan
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.decoder.rope_options import RopeOptions
    from localinfer.models.load.model_changes import ModelChanges
    from localinfer.quant.checkpoint.model_file import ModelFile
    from localinfer.storage.prompt_cache import DiskOptions


logger = logging.getLogger(__name__)

REFUSED_BY_GPUS = (BackendUnavailableError, OutOfMemoryError, UnsupportedFormatError)
"""Errors after which a draft model is computed on the CPU, whatever its target was asked for."""


class ModelOptions(HeaderOptions, kw_only=True):
    """Checked options that decide what is read of a file and how much memory that takes."""

    path: Path
    """The model."""
    draft_path: Path | None = None
    """The draft model."""
    assistant: Path | None = None
    """The same, if it drafts from the model's own cache."""
    media: "MediaPlan | None" = None
    """The encoders for pictures and sounds."""
    changes: "ModelChanges"
    """Settings in place of the file's."""

    @property
    def media_path(self) -> Path | None:
        """The file of the encoders."""
        return None if self.media is None else self.media.path

    @property
    def gpus(self) -> tuple[int, ...] | None:
        """The numbers of the GPUs that were named; None if any may be taken."""
        return named_gpus(self.device)

    @property
    def request(self) -> DeviceRequest:
        """Devices that the model is wanted on."""
        return device_request(self)

    @property
    def draft_request(self) -> DeviceRequest:
        """Device request of the draft model of a target on GPUs: those that were named, or any."""
        return DeviceRequest(device="auto" if self.gpus is None else self.device)

    @property
    def separate_draft(self) -> Path | None:
        """The draft model, if it has a cache of its own, which an assistant has not."""
        return None if self.assistant is not None else self.draft_path

    @property
    def has_draft_layers(self) -> bool:
        """True if layers for next-token prediction are loaded, if the model brings some."""
        return self.speculation in ("auto", "mtp") and self.draft_path is None and self.kv_window is None

    def window_tokens(self, file: "ModelFile", config: "ModelConfig") -> int | None:
        """Positions that texts of an open model keep between batches, None for all; config: with the requested context
        length.

        Raises: RequestError for a model that has no such window.
        """
        if self.kv_window is None:
            return None
        layout = KVLayout(self.kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))
        has_none = reason_without_window(self.kv_window, file.path.name, config, layout) is not None
        return None if has_none else self.kv_window

    def plan(self, file: "ModelFile", config: "ModelConfig") -> MemoryPlan:
        """Memory of the open model on the CPU with its draft model. Raises: ModelFileError and below, RequestError."""
        plan = plan_memory(
            file,
            replace(config, takes_media=self.media is not None),
            kv_type=self.kv_type,
            draft_layers=self.has_draft_layers,
            assistant=self.assistant,
            changes=self.changes,
        )
        return self._beside_draft(self._with_window(self.with_media(plan), file, config, batch_rows_of(config)))

    def plan_on_gpus(self, file: "ModelFile", config: "ModelConfig") -> MemoryPlan:
        """About what it takes if GPUs compute it, where there are no draft layers; raises: as `plan`."""
        plan = self.with_media(plan_memory(file, config, kv_type=self.kv_type))
        return self._beside_draft(self._with_window(plan, file, config, GPU_BATCH_ROWS))

    def _with_window(self, plan: MemoryPlan, file: "ModelFile", config: "ModelConfig", batch_tokens: int) -> MemoryPlan:
        tokens = self.window_tokens(file, config)
        if tokens is None:
            return plan
        window = planned_window(config, tokens, PAGE_TOKENS, batch_tokens)
        return replace(plan, kv_tokens=window.most_tokens)

    def with_media(self, plan: MemoryPlan) -> MemoryPlan:
        """A plan with the encoders of pictures and sounds, which are in main memory."""
        return plan if self.media is None else plan.with_media(self.media.weight_bytes, self.media.buffer_bytes)

    def _beside_draft(self, plan: MemoryPlan) -> MemoryPlan:
        if self.separate_draft is None:
            return plan
        return replace(plan, beside=plan_file(self.separate_draft, kv_type=self.kv_type))

    def share(self, plan: MemoryPlan, memory: MemoryLimits) -> KVBudget:
        """The context that fits the machine and `memory_limit`, and what keys and values may take.

        Raises: OutOfMemoryError if the model, or the context asked for, does not fit.
        """
        found = choose_context(plan, self.context_length, memory, kv_memory=self.kv_memory)
        if self.memory_limit is None:
            return KVBudget(found, self.kv_memory, self.kv_memory)
        return keep_within(
            plan,
            self.memory_limit,
            found,
            is_requested=self.context_length is not None,
            kv_memory=self.kv_memory,
        )

    def checked_speculation(self, *, is_encoder: bool, drafts_itself: bool) -> str | None:
        """Drafter of the model; drafts_itself: it has layers for that, or a draft model that reads its cache.

        Raises: RequestError if it cannot.
        """
        if is_encoder:
            if self.draft_path is not None or self.speculation not in (None, "auto"):
                raise RequestError(
                    "an encoder generates nothing, so nothing is drafted; leave out speculation and draft"
                )
            return None
        if self.speculation == "mtp" and not drafts_itself:
            raise RequestError(
                "speculation is 'mtp', but this model brings no layers for next-token prediction, or they cannot be "
                "used: they need device 'cpu' and no kv_window; take 'auto'"
            )
        if self.speculation == "draft" and self.assistant is not None and not drafts_itself:
            raise RequestError(
                f"speculation is 'draft', but {self.assistant.name} drafts on the CPU only; take device 'cpu', or "
                "'auto'"
            )
        return self.speculation


class CheckedLoad(Record, kw_only=True):
    """Checked options of a load."""

    model: ModelOptions
    """The model, and its memory."""
    given: LoadOptions
    """Options that need no more than a check."""
    priority: "Priority"
    """Of the threads."""
    disk: "DiskOptions | None"
    """The prompt cache on disk; None: there is none."""


def check_options(options: LoadOptions) -> CheckedLoad:
    """Check options of `load`. Raises: as `check_model_options`."""
    model = check_model_options(options)
    check_limits(options.limits)
    priority = checked_priority(options.priority)
    given = replace(options, **checked_values(options))
    disk = disk_options(options.disk_cache, options.disk_cache_folder)
    return CheckedLoad(model=model, given=given, priority=priority, disk=disk)


def device_request(options: HeaderOptions) -> DeviceRequest:
    """Devices that a model is wanted on, unchecked."""
    return DeviceRequest(**{one.name: getattr(options, one.name) for one in fields(DeviceRequest)})


def check_model_options(options: HeaderOptions) -> ModelOptions:
    """Check options that decide how a model is loaded.

    Raises: RequestError, BackendUnavailableError; ModelFileError for a draft model that cannot be read.
    """
    device_request(options).check()
    values = checked_values(options)
    KVLayout(options.kv_type, [])
    speculation = check_speculation(options.speculation, has_draft=options.draft is not None)
    changes = model_changes(chat_template=options.chat_template, rope=options.rope, overrides=options.overrides)
    path = model_path(options.model)
    if options.kv_window is not None and options.draft is not None:
        raise RequestError("kv_window does not bound the cache of a draft model; leave out one of them")
    draft_path = None if options.draft is None else model_path(options.draft, "draft")
    assistant = None
    if draft_path is not None:
        from localinfer.models.load.assistant import is_assistant

        assistant = draft_path if is_assistant(draft_path) else None
    known = {one.name: values[one.name] for one in fields(HeaderOptions)}
    return ModelOptions(
        **{**known, "speculation": speculation},
        path=path,
        draft_path=draft_path,
        assistant=assistant,
        media=find_encoders(options.mmproj, path),
        changes=changes,
    )


_MAX_CONFIG_BYTES = 1 << 24


def find_encoders(mmproj: object, model: Path) -> "MediaPlan | None":
    """The encoders of a model by the option `mmproj`, None for none; of a folder whose towers do not run, in a warning.

    Raises: RequestError, ModelFileError.
    """
    path = media_path_of(mmproj, model)
    if path is None:
        return None
    from localinfer.loading.media import plan_media

    try:
        return plan_media(path)
    except ModelFileError as error:
        if not path.is_dir():
            raise
        # Its text runs, as it did before anyone asked for more.
        logger.warning("%s reads text only: %s", model.name, error)
        return None


def media_path_of(mmproj: object, model: Path) -> Path | None:
    """The mmproj file of a model by the option `mmproj`, or its folder with towers; None for none.

    Raises: RequestError, ModelFileError.
    """
    if isinstance(mmproj, str) and mmproj == "off":
        return None
    if not isinstance(mmproj, str) or mmproj != "auto":
        given = check_path("mmproj", mmproj, ', "auto" or "off"')
        if not given.is_file():
            raise RequestError(
                f'mmproj is {given}, and there is no such file; give a GGUF file, "auto" or "off"', field="mmproj"
            )
        return given
    # Most models have none, and finding one imports more and reads headers.
    if model.is_dir():
        return model if _has_towers(model) else None
    if not (_has_mmproj(model.parent) or _has_mmproj(model.parent.parent)):
        return None
    from localinfer.loading.media import find_media

    return find_media(model)


def _has_towers(folder: Path) -> bool:
    """Return whether a Hugging Face folder has settings of a part that sees or hears."""
    try:
        text = read_bounded(folder / "config.json", _MAX_CONFIG_BYTES).decode("utf-8", "replace")
    except OSError:
        return False
    return any(f'"{part}_config"' in text for part in ("vision", "audio", "speech", "encoder"))


def _has_mmproj(folder: Path) -> bool:
    try:
        return any("mmproj" in name.lower() for name in os.listdir(folder))
    except OSError:
        return False


def check_limits(limits: EngineLimits | None) -> None:
    """Raise RequestError for what are no limits."""
    if limits is not None and not isinstance(limits, EngineLimits):
        raise RequestError(f"limits is {shown(limits)}; give EngineLimits, or None for the defaults")


def model_changes(
    *,
    chat_template: str | os.PathLike[str] | None = None,
    rope: "RopeOptions | None" = None,
    overrides: Mapping[str, bool | int | float | str] | None = None,
) -> "ModelChanges":
    """The changes to a model's file that arguments of `load` make. Raises: RequestError."""
    from localinfer.models.decoder.rope_options import RopeOptions
    from localinfer.models.load.model_changes import ModelChanges, template_source

    if rope is not None and not isinstance(rope, RopeOptions):
        raise RequestError(f"rope is {rope!r:.80}; give a localinfer.RopeOptions, or None")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise RequestError(f"overrides is {overrides!r:.80}; give a dict of metadata keys and values, or None")
    return ModelChanges(
        overrides=dict(overrides or {}), chat_template=template_source(chat_template), rope=rope or RopeOptions()
    )


def disk_options(disk_cache: bool | int, folder: str | os.PathLike[str] | None) -> "DiskOptions | None":
    """Folder and size of the prompt cache on disk, None without one. Raises: RequestError."""
    if not isinstance(disk_cache, int) or disk_cache < 0:
        raise RequestError(f"disk_cache is {disk_cache!r}; give True, False, or how many bytes it may take")
    if not disk_cache:
        return None
    from localinfer.storage.prompt_cache import DEFAULT_MAX_BYTES, DiskOptions, conversations_folder

    chosen = conversations_folder(None if folder is None else check_path("disk_cache_folder", folder))
    if chosen is None:
        # A user without a home folder learns so when kernels find no folder there either.
        return None
    return DiskOptions(chosen, DEFAULT_MAX_BYTES if disk_cache is True else disk_cache)


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


def check_speculation(speculation: str | None, *, has_draft: bool) -> str | None:
    """Return what drafts, None for nothing; has_draft: whether a draft model was given.

    Raises: RequestError unless the option is known and consistent with that.
    """
    if not isinstance(speculation, str | None) or speculation not in (*SPECULATION, None):
        words = ", ".join(map(repr, SPECULATION))
        raise RequestError(f"speculation is {shown(speculation)}; give one of {words}, or None, which is 'off'")
    if speculation == "off":
        speculation = None
    if speculation == "draft" and not has_draft:
        raise RequestError("speculation is 'draft', but there is no draft model; give its file as draft, or use 'auto'")
    if speculation in ("ngram", "mtp", None) and has_draft:
        found = speculation or "off"
        raise RequestError(f"a draft model was given, but speculation is {found!r}; make it 'auto' or 'draft'")
    return speculation
