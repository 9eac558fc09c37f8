"""Loading a model in two steps: `opened_model` reads header, configuration and vocabulary, and opens devices;
`build_on_gpus` and `build_on_cpu` read its weights and write its program. Between them its memory can be planned."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from localinfer.errors import (
    CorruptFileError,
    RequestError,
    ShapeError,
    TokenizerError,
    UnsupportedFormatError,
)
from localinfer.kernels import address_space
from localinfer.kernels.cpu import sampling, text_merging, token_history
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS, lower_to_cpu
from localinfer.kernels.cpu.program import POOL_KERNELS, ThreadPool
from localinfer.kernels.cpu.weights import KERNELS as WEIGHT_KERNELS
from localinfer.kernels.cpu.worker_threads import Priority
from localinfer.kernels.jit.compile_ahead import compile_ahead
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import WeightSource
from localinfer.kernels.program import HiddenProgram, Program
from localinfer.models.checks import Finding
from localinfer.models.checks.quick import check_kind, check_loaded
from localinfer.models.decoder.architectures import check_architecture, find_architecture
from localinfer.models.decoder.block_config import MAX_CONTEXT, Pooling, classified_rows, read_pooling
from localinfer.models.decoder.checked_weights import ROW_TYPES
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes
from localinfer.models.decoder.metadata_keys import DYNAMIC_ROPE_KEY
from localinfer.models.decoder.sparse_attention import index_layers
from localinfer.models.load.device_request import DeviceRequest, cached_tokens, cpu_only, looks_for_gpus, stay_on_cpu
from localinfer.models.load.model_changes import ModelChanges, apply_changes, note_unknown_settings
from localinfer.models.load.programs import (
    GpuModel,
    Parts,
    batch_rows_of,
    compile_text_kernels,
    has_draft_layers,
    prepare_text_programs,
    text_writer,
    with_draft_layers,
    write_draft_programs,
    write_on_cpu,
)
from localinfer.models.load.threads import available_threads, checked_threads
from localinfer.models.load.weights import CpuWeights, defers_packing
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import TOKEN_TYPES_KEY
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.gguf.reader import GGUFFile, read_gguf
from localinfer.system.machine_limits import processor_limits
from localinfer.types import ProgressCallback, Record

if TYPE_CHECKING:
    from localinfer.kernels.cuda.device import CudaDevice
    from localinfer.models.checkpoint.model import CheckpointModel
    from localinfer.models.load.assistant import Assistant
    from localinfer.models.load.placement import DevicePlacement
    from localinfer.models.text.chat_template import ChatTemplate


def reason_without_window(kv_window: int, name: str, config: ModelConfig, kv_layout: KVLayout) -> str | None:
    """Why texts of a model are kept whole all the same, in words; None if they are not.

    name: of the model. config: with the requested context length. Raises: RequestError for a model that has no window.
    """
    if kv_window >= config.context_length:
        return (
            f"kv_window is {kv_window} tokens, but the context ends after {config.context_length}: texts are kept "
            "whole, without a window"
        )
    if not kv_layout.page_bytes + kv_layout.windowed_bytes and not config.is_encoder:
        return f"kv_window has no effect: {name} keeps no keys and values"
    if index_layers(config):
        raise RequestError(
            f"kv_window keeps the pages that get most attention, and a {config.architecture} model itself chooses "
            "what it attends to; leave kv_window out"
        )
    if config.is_encoder:
        raise RequestError("kv_window bounds what generations keep, and an encoder keeps nothing; leave it out")
    return None


logger = logging.getLogger(__name__)

SHARED_KERNELS: Sequence[Kernel] = (
    *(*POOL_KERNELS, *sampling.KERNELS, *token_history.KERNELS),
    *(*text_merging.KERNELS, *WEIGHT_KERNELS),
)
"""Kernels that every model needs beside those of its tape."""


class Model(Record):
    """A loaded model."""

    config: ModelConfig
    """Its `context_length` is the context that the model was loaded with."""
    tokenizer: Tokenizer | None
    """None if the file has none."""
    program: Program
    kv_layout: KVLayout
    file: ModelFile
    pool: ThreadPool
    device: str = "cpu"
    weights: WeightSource | None = None
    draft_programs: tuple[tuple[HiddenProgram, ...], ...] = ()
    """Programs over the model's cache: of its layers for next-token prediction, if they were asked for (see
    `write_draft_programs`), or of the draft model of the file `assistant`."""
    assistant: ModelFile | None = None
    findings: tuple[Finding, ...] = ()
    """Likely faults of its file."""
    placement: "DevicePlacement | None" = None
    """Parts of it that GPUs have; None on the CPU alone."""
    on_gpus: GpuModel | None = None
    """Of a model on GPUs, from which further programs are written."""

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """Read when it is first asked for, as not every model chats; None without a tokenizer."""
        from localinfer.models.text.chat_template import ChatTemplate

        return None if self.tokenizer is None else ChatTemplate.from_metadata(self.file.metadata, self.tokenizer)

    def text_program(self, pooling: Pooling, max_rows: int = MAX_BATCH_ROWS) -> Program:
        """Write a second program over the same weights, on the same devices and threads; only one may run at a time.

        `run` returns what `pooling` makes of texts, see `write_text_model`. max_rows: of a batch, all of which may be
        output rows. Raises: as `read_pooling`, `write_text_model` and the devices' `lower`.
        """
        write = text_writer(self.config, pooling, self.classified_rows)
        if self.on_gpus is not None:
            return self.on_gpus.further_program(write, max_rows)
        assert self.weights is not None, "a model on the CPU has its weights"
        graph = write(self.weights, self.kv_layout.layers, [])
        return lower_to_cpu(graph, self.pool, self.kv_layout, max_batch_rows=max_rows, max_output_rows=max_rows)

    @property
    def reserved_bytes(self) -> dict[int, int]:
        """By a GPU's number the bytes of it that this model's cache will take."""
        return {} if self.placement is None else {one.device.index: one.cache_bytes for one in self.placement.gpus}

    @property
    def pooling(self) -> Pooling:
        """The pooling of an embedding model; the mean if the file has none."""
        return read_pooling(self.file.metadata)

    @property
    def has_dense(self) -> bool:
        """True if matrices follow the pooling of an embedding model."""
        return "dense_2.weight" in self.file.tensors

    @property
    def adapts_media(self) -> bool:
        """True if an adapter changes texts with pictures or sounds."""
        return self.config.takes_media and ROW_TYPES in self.file.tensors

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Tasks of the model: see `capabilities`."""
        return capabilities(self.config, self.file.metadata)

    @property
    def classified_rows(self) -> Pooling:
        """Pooling of the rows that a reranker's classifier reads."""
        return classified_rows(self.file.metadata, is_encoder=self.config.is_encoder)

    @property
    def num_token_types(self) -> int:
        """Number of token types that it distinguishes; the first is that of single texts."""
        table, declared = self.file.tensors.get("token_types.weight"), self.file.metadata.get(TOKEN_TYPES_KEY)
        rows = 1 if table is None or len(table.shape) < 2 else table.shape[0]
        return min(rows, declared) if isinstance(declared, int) else rows

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of a reranker's scores, as far as the file has them."""
        found = self.file.metadata.get(f"{self.config.architecture}.classifier.output_labels", ())
        return tuple(map(str, found)) if isinstance(found, list | tuple) else ()

    def close(self) -> None:
        """Release threads, memory and the file; may be called again."""
        self.program.close()
        for head in self.draft_programs:
            for program in head:
                program.close()
        self.pool.close()
        if isinstance(self.weights, CpuWeights):
            self.weights.close()
        self.file.close()
        if self.assistant is not None:
            self.assistant.close()


@dataclass(eq=False)
class OpenModel:
    """A model whose header, configuration and vocabulary were read, and whose GPUs are open; nothing large is read yet.

    `opened_model` closes it, unless a model was built of it.
    """

    file: ModelFile
    own_config: ModelConfig
    """The configuration as the file says."""
    config: ModelConfig
    """The same with the context length that was requested, or set since."""
    tokenizer: Tokenizer | None
    kv_layout: KVLayout
    request: DeviceRequest
    window_tokens: int | None
    """Positions that a text keeps between batches; None for texts that are kept whole, whatever was asked for."""
    draft_layers: bool
    """True if layers for next-token prediction are wanted."""
    changes: ModelChanges | None
    progress: ProgressCallback | None
    assistant: "Assistant | None" = None
    """Draft model over its cache."""
    gpus: "Sequence[CudaDevice]" = ()
    placement: "DevicePlacement | None" = None
    """Parts that the GPUs are planned to compute; None if the CPU computes all."""

    def set_context(self, context_length: int) -> None:
        """Choose another context length, beside which other windows may be short."""
        if context_length != self.config.context_length:
            self.config = replace(self.config, context_length=context_length)
            self.kv_layout = replace(self.kv_layout, layers=kv_layer_shapes(self.config, parts_windows=True))

    def close(self) -> None:
        """Close file and devices."""
        for gpu in self.gpus:
            gpu.close()
        self.file.close()
        if self.assistant is not None:
            self.assistant.file.close()


class BuildOptions(Record, kw_only=True):
    """Options of a model's threads and checks."""

    threads: int | None = None
    """None for the physical cores, of which as many decode as is fastest."""
    beside: Model | None = None
    """A model whose threads to share; only one of both runs at a time, and closing either ends both."""
    batch_rows: int | None = None
    """Most rows of a batch on the CPU; those of a picture that see each other have to fit in one. None for
    `batch_rows_of`."""
    priority: Priority = "normal"
    """Of the threads."""
    measure_again: bool = False
    """Measure how many threads decode fastest, whatever earlier loads have found."""
    may_measure: bool = True
    """Measure it where earlier loads have not."""
    defers_packing: bool | None = None
    """Compute the first batch before matrices are packed, where that is possible; None for what the function of that
    name finds best."""
    verify: bool = True
    """Check the file (`models.verification`): what is likely wrong is logged, what cannot work is refused."""


def load_model(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    context_length: int | None = None,
    kv_type: str = "f16",
    kv_window: int | None = None,
    device: str | DeviceRequest = "cpu",
    beside: Model | None = None,
    draft_layers: bool = False,
    assistant: str | os.PathLike[str] | None = None,
    takes_media: bool = False,
    batch_rows: int | None = None,
    changes: ModelChanges | None = None,
    priority: Priority = "normal",
    measure_again: bool = False,
    may_measure: bool = True,
    defers_packing: bool | None = None,
    verify: bool = True,
    progress: ProgressCallback | None = None,
) -> Model:
    """Load a GGUF file or a Hugging Face folder and compile its kernels, whatever memory there is.

    See `opened_model` and `BuildOptions` for the options. Raises: as `opened_model`.
    """
    options = BuildOptions(
        threads=threads,
        beside=beside,
        batch_rows=batch_rows,
        priority=priority,
        measure_again=measure_again,
        may_measure=may_measure,
        defers_packing=defers_packing,
        verify=verify,
    )
    with opened_model(
        path,
        context_length=context_length,
        kv_type=kv_type,
        kv_window=kv_window,
        device=device,
        reserved=None if beside is None else beside.reserved_bytes,
        draft_layers=draft_layers,
        assistant=assistant,
        takes_media=takes_media,
        changes=changes,
        progress=progress,
    ) as opened:
        model = None if opened.placement is None else build_on_gpus(opened, options)
        return build_on_cpu(opened, options) if model is None else model


@contextmanager
def opened_model(
    path: str | os.PathLike[str],
    *,
    context_length: int | None = None,
    kv_type: str = "f16",
    kv_window: int | None = None,
    device: str | DeviceRequest = "cpu",
    reserved: Mapping[int, int] | None = None,
    draft_layers: bool = False,
    assistant: str | os.PathLike[str] | None = None,
    takes_media: bool = False,
    changes: ModelChanges | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[OpenModel]:
    """Open a GGUF file or a Hugging Face folder to build a model of it: its owner, unless an error ends the context.

    context_length: maximum tokens of a sequence; more than the model was trained for logs a warning. None: trained.
    kv_window: sequences evict pages by attention scores, and keep this many positions between batches.
    device: a kind of devices, GPUs by number, or a request. The part that fits GPUs is computed with a KV cache of
        `context_length` tokens, or 8,192 if it is None. reserved: by a GPU's number bytes that another model takes.
    draft_layers: load the layers for next-token prediction too, if the file has some and the model runs on the CPU.
    assistant: file of a draft model that attends to this model's cache (`assistant.is_assistant`), in place of those
        layers; it is left out, with a warning, if the model runs on a GPU.
    takes_media: its batches may have embeddings of pictures or sounds in place of tokens.
    changes: settings in place of the file's.
    Raises: ModelFileError or a subclass, RequestError for an invalid option, OutOfMemoryError, also for errors of the
        context: those of memory, and of sizes that no kernel computes.
    """
    request = device if isinstance(device, DeviceRequest) else DeviceRequest(device=device)
    request.check()
    if assistant is not None:
        # Few models have a draft model of this kind.
        from localinfer.models.load.assistant import Target, check_device, open_assistant

        check_device(request)
    file = open_model_file(path, changes, context_length, progress)
    opened: OpenModel | None = None
    try:
        own_config = read_config(file)
        config = with_context(own_config, file, context_length, changes)
        config = replace(config, takes_media=takes_media and not find_architecture(config).compares_pictures)
        note_unknown_settings(file, "which may change the model's answers")
        tokenizer = tokenizer_or_none(file, progress)
        if tokenizer is None and changes is not None and changes.chat_template is not None:
            raise RequestError("a chat template needs a tokenizer, and this model has none; leave chat_template out")
        kv_layout = KVLayout(kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))
        opened = OpenModel(
            file, own_config, config, tokenizer, kv_layout, request, kv_window, draft_layers, changes, progress
        )
        if assistant is not None:
            opened.assistant = open_assistant(assistant, Target(file, config, kv_layout), changes)
        _find_devices(opened, context_length, reserved)
        yield opened
    except BaseException as error:
        if opened is None:
            file.close()
        else:
            opened.close()
        if address_space.is_shortage(error):
            raise address_space.shortage(file.num_bytes, f"loading {file.path.name}") from error
        if isinstance(error, ShapeError):
            raise UnsupportedFormatError(
                f"{file.path.name} has sizes that no kernel of this version computes: {error}. Choose another model."
            ) from error
        raise


def _find_devices(opened: OpenModel, context_length: int | None, reserved: Mapping[int, int] | None) -> None:
    """Decide what bounds texts, and open the GPUs that are to compute a part. context_length: the requested one."""
    file, config, kv_layout = opened.file, opened.config, opened.kv_layout
    if opened.window_tokens is not None:
        without = reason_without_window(opened.window_tokens, file.path.name, config, kv_layout)
        if without is not None:
            logger.warning(without)
            opened.window_tokens = None
    reason = cpu_only(config, kv_layout)
    if reason is not None:
        stay_on_cpu(opened.request, reason)
    if opened.request.cpu_moe and config.experts is None:
        logger.warning("cpu_moe has no effect: %s has no experts", file.path.name)
        opened.request = replace(opened.request, cpu_moe=None)
    if reason is None and looks_for_gpus(opened.request):
        # Most machines have no GPU.
        from localinfer.models.load.devices import open_devices
        from localinfer.models.load.placement import memory_needs

        kv_tokens = cached_tokens(config, context_length, opened.window_tokens)
        needs = partial(memory_needs, file, config, kv_layout, kv_tokens)
        placed = open_devices(opened.request, needs, opened.progress, reserved=reserved)
        if placed is not None:
            opened.gpus, opened.placement = placed


def build_on_gpus(opened: OpenModel, options: BuildOptions) -> Model | None:
    """Build a model as it was placed on GPUs; None, after logging why, if it cannot run there and need not.

    Raises: ModelFileError and below, BackendUnavailableError, OutOfMemoryError.
    """
    from localinfer.models.load.pipeline import write_on_gpus

    placement = opened.placement
    assert placement is not None, "a part of it was placed"
    config = opened.config
    compile_ahead(SHARED_KERNELS, opened.progress)
    with _made_threads(options) as pool:
        parts = _parts(opened, options, config, pool)
        on_gpus = write_on_gpus(parts, opened.gpus, placement, is_required=opened.request.is_required)
        if on_gpus is not None:
            prepare_text_programs(config, opened.file, on_gpus)
            _leave_out_drafters(opened)
            model = Model(
                config,
                opened.tokenizer,
                on_gpus.program,
                on_gpus.kv_layout,
                opened.file,
                pool,
                device="cuda",
                placement=placement,
                on_gpus=on_gpus,
            )
            return _checked(opened, options, model)
    opened.gpus, opened.placement = (), None
    return None


def _leave_out_drafters(opened: OpenModel) -> None:
    """Say that what drafts on the CPU only does not."""
    if opened.assistant is not None:
        logger.warning("%s drafts on the CPU only, so the GPU decodes without it", opened.assistant.file.path.name)
        opened.assistant.file.close()
        opened.assistant = None
    elif opened.draft_layers and has_draft_layers(opened.file):
        logger.warning("%s: its layers for next-token prediction draft on the CPU only", opened.file.path.name)


def build_on_cpu(opened: OpenModel, options: BuildOptions) -> Model:
    """Build a model on the CPU. Raises: ModelFileError and below, OutOfMemoryError."""
    file, config, kv_layout, drafter = opened.file, opened.config, opened.kv_layout, opened.assistant
    progress = opened.progress
    if opened.draft_layers:
        found = read_config(file, with_draft_layers=True)
        found = replace(found, context_length=config.context_length, takes_media=config.takes_media)
        if found.num_draft_layers:
            config, kv_layout = found, with_draft_layers(found, kv_layout)
    needed = SHARED_KERNELS
    if not all(kernel.is_cached for kernel in needed):
        # A first start: the tape's kernels too, in the same processes. Else they wait until the program is written.
        from localinfer.models.load.needed_kernels import kernels_of_file

        assistant = None if drafter is None else drafter.file.path
        has_window = opened.window_tokens is not None
        needed = kernels_of_file(
            file, config, kv_layout, has_window=has_window, assistant=assistant, changes=opened.changes
        )
    compile_ahead(needed, progress)
    with _made_threads(options) as pool:
        parts = _parts(opened, options, config, pool)
        is_plain = not (config.is_encoder or config.takes_media or config.num_draft_layers or drafter or options.beside)
        defers = options.defers_packing
        defers = defers_packing(file) if defers is None else defers
        weights = CpuWeights(file, pool, progress, defers=is_plain and defers)
        rows = batch_rows_of(config) if options.batch_rows is None else options.batch_rows
        held = parts.summed_tokens(rows, kv_layout.page_tokens)
        program = write_on_cpu(parts, weights, kv_layout, held, shows_states=drafter is not None, batch_rows=rows)
        compile_text_kernels(config, file, weights, pool, kv_layout, progress)
        if drafter is None:
            drafts = write_draft_programs(config, weights, program, pool, kv_layout, progress)
        else:
            from localinfer.models.load.assistant import Target

            drafts = ((drafter.write(Target(file, config, kv_layout), weights, program, progress),),)
        model = Model(
            config,
            opened.tokenizer,
            program,
            kv_layout,
            file,
            pool,
            weights=weights,
            draft_programs=drafts,
            assistant=None if drafter is None else drafter.file,
        )
        return _checked(opened, options, model)


@contextmanager
def _made_threads(options: BuildOptions) -> Iterator[ThreadPool]:
    """Threads of a model, its own or those of the model beside; own ones are closed unless the context returns one."""
    if options.beside is not None:
        yield options.beside.pool
        return
    threads = options.threads
    pool = ThreadPool(
        available_threads() if threads is None else checked_threads(threads),
        priority=options.priority,
        performance_cores=processor_limits().performance_cores,
    )
    try:
        yield pool
    except BaseException:
        pool.close()
        raise


def _parts(opened: OpenModel, options: BuildOptions, config: ModelConfig, pool: ThreadPool) -> Parts:
    return Parts(
        config,
        opened.file,
        pool,
        opened.kv_layout.kv_type,
        opened.progress,
        options.threads is None,
        options.measure_again,
        options.may_measure,
        opened.window_tokens,
    )


def _checked(opened: OpenModel, options: BuildOptions, model: Model) -> Model:
    """A model with the findings about its file. Raises: CorruptFileError for what cannot work."""
    file = opened.file
    findings = _verified(file, opened.own_config, model.config, opened.tokenizer) if options.verify else ()
    if file.has_changed:
        # The file may have been read in two versions.
        raise CorruptFileError(f"{file.path} was changed while it was being loaded; load it again when it is complete")
    return replace(model, findings=findings)


def _verified(
    file: ModelFile, own_config: ModelConfig, config: ModelConfig, tokenizer: Tokenizer | None
) -> tuple[Finding, ...]:
    """Log what is likely wrong with a file. Raises: CorruptFileError for what cannot work.

    own_config: as the file says; config: with the context length that is used, which counts if it is shorter.
    """
    context_length = min(own_config.context_length, config.context_length)
    findings = check_loaded(file, replace(own_config, context_length=context_length), tokenizer)
    for finding in findings:
        if finding.is_error:
            way_out = "or load it all the same with verify=False (--no-verify)"
            raise CorruptFileError(f"{file.path.name}: {finding.message}, {way_out}")
        logger.warning("%s: %s", file.path.name, finding.message)
    return findings


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Build the tokenizer of a GGUF file, with or without tensors, or of a Hugging Face folder.

    Raises: ModelFileError and below.
    """
    file = open_model_file(path)
    try:
        return read_tokenizer(file)
    finally:
        file.close()


def open_model_file(
    path: str | os.PathLike[str],
    changes: ModelChanges | None = None,
    context_length: int | None = None,
    progress: ProgressCallback | None = None,
) -> ModelFile:
    """Open a GGUF file, or the checkpoint in a folder.

    changes: settings in place of the file's. context_length: the requested one, on which some changes depend.
    Raises: ModelFileError or a subclass; RequestError for invalid changes.
    """
    file: GGUFFile | CheckpointModel
    check = None if progress is None else partial(progress, "reading the header", 0, 1)
    if check is not None:
        check()
    if not os.path.isdir(path):
        file = read_gguf(path, check)
    else:
        from localinfer.models.checkpoint.model import open_checkpoint

        file = open_checkpoint(path)
    try:
        if changes is not None:
            apply_changes(file, changes, context_length)
        if progress is not None:
            progress("reading the header", 1, 1)
        return file
    except BaseException:
        file.close()
        raise


def read_config(file: ModelFile, *, with_draft_layers: bool = False) -> ModelConfig:
    """Read and check the hyperparameters of a supported model; see `ModelConfig.from_metadata`.

    Raises: ModelFileError or a subclass.
    """
    check_kind(file)
    architecture = file.metadata.get("general.architecture")
    if isinstance(architecture, str):
        # First, as the metadata of some recurrent models lacks attention keys.
        check_architecture(architecture)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    return ModelConfig.from_metadata(file.metadata, shapes, with_draft_layers=with_draft_layers)


def capabilities(config: ModelConfig, metadata: Mapping[str, object]) -> tuple[str, ...]:
    """Tasks of a model: "completion", "chat", "embeddings", "rerank"; "decisions" where it does nothing else."""
    if config.only_decides:
        return ("decisions",)
    is_reranker = read_pooling(metadata) is Pooling.RANK
    if read_pooling(metadata) is Pooling.LATE:
        return ("embeddings", "rerank")
    if config.is_encoder:
        return ("rerank",) if is_reranker else ("embeddings",)
    return ("completion", "chat", "rerank" if is_reranker else "embeddings")


def with_context(
    config: ModelConfig, file: ModelFile, context_length: int | None, changes: ModelChanges | None
) -> ModelConfig:
    """The configuration with the requested context length. Raises: RequestError if the model cannot have it."""
    architecture = find_architecture(config)
    is_scaled = changes is not None and not changes.rope.is_empty
    rotates = config.rope.rotary_size > 0 and (not architecture.has_rope or any(architecture.has_rope))
    if is_scaled and not rotates:
        raise RequestError(f"{config.architecture!r} models do not rotate positions; leave the rope options out")
    if context_length is None:
        return config
    trained = config.context_length
    if context_length > trained:
        asked = f"context_length is {context_length}, but the model was trained for {trained}"
        if architecture.learned_positions:
            raise RequestError(f"{asked} and has a learned vector for each position; give that or less")
        if context_length > MAX_CONTEXT:
            raise RequestError(f"{asked}, and the maximum is {MAX_CONTEXT}; give less")
        if file.metadata.get(DYNAMIC_ROPE_KEY) is True and not is_scaled:
            raise RequestError(
                f"{asked}, and it uses dynamic scaling of positions, which this version does not support; give that or "
                "less, or another scaling (rope: linear, yarn or a base)"
            )
        way_out = "" if is_scaled else ", unless its positions are scaled (rope: linear, yarn or a base)"
        logger.warning("%s: %s; beyond that it may answer worse%s", file.path.name, asked, way_out)
    return replace(config, context_length=context_length)


def read_tokenizer(file: ModelFile, progress: ProgressCallback | None = None) -> Tokenizer:
    """Build the tokenizer of a model that is open. Raises: ModelFileError and below."""
    if file.tokenizer_error is not None:
        # A new one: with the frames it is raised from, the file's own would keep all of a closed model alive.
        raise type(file.tokenizer_error)(*file.tokenizer_error.args)
    told = None if progress is None else partial(progress, "reading the vocabulary")
    return Tokenizer.from_metadata(file.metadata, told)


def tokenizer_or_none(file: ModelFile, progress: ProgressCallback | None = None) -> Tokenizer | None:
    """The same, or None, with a warning, for a model of an unknown vocabulary, which still runs on token ids."""
    try:
        return read_tokenizer(file, progress)
    except TokenizerError as error:
        logger.warning("%s: %s; it runs on token ids only", file.path.name, str(error))
        return None
