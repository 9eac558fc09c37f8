"""Loading a model: file, configuration, tokenizer, device, weights, program."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
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
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes
from localinfer.models.decoder.metadata_keys import DYNAMIC_ROPE_KEY
from localinfer.models.decoder.sparse_attention import index_layers
from localinfer.models.load.device_request import DeviceRequest, cached_tokens, cpu_only, looks_for_gpus, stay_on_cpu
from localinfer.models.load.model_changes import ModelChanges, apply_changes, note_unknown_settings
from localinfer.models.load.programs import (
    GpuModel,
    Parts,
    compile_text_kernels,
    has_draft_layers,
    prepare_text_programs,
    text_writer,
    with_draft_layers,
    write_draft_programs,
    write_on_cpu,
)
from localinfer.models.load.threads import available_threads, checked_threads
from localinfer.models.load.weights import CpuWeights
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import TOKEN_TYPES_KEY
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.gguf.reader import GGUFFile, read_gguf
from localinfer.system.machine_limits import processor_limits
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.kernels.cuda.device import CudaDevice
    from localinfer.models.checkpoint.model import CheckpointModel
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


@dataclass(frozen=True)
class Model:
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
    batch_rows: int = MAX_BATCH_ROWS,
    changes: ModelChanges | None = None,
    choose_context: Callable[[ModelFile, ModelConfig], int] | None = None,
    check_placement: "Callable[[ModelFile, ModelConfig, DevicePlacement], None] | None" = None,
    priority: Priority = "normal",
    measure_again: bool = False,
    may_measure: bool = True,
    verify: bool = True,
    progress: ProgressCallback | None = None,
) -> Model:
    """Load a GGUF file or a Hugging Face folder and compile its kernels.

    threads: None for the physical cores, of which as many decode as is fastest.
    context_length: maximum tokens of a sequence; more than the model was trained for logs a warning. None: trained.
    kv_window: sequences evict pages by attention scores, and keep this many positions between batches.
    device: a kind of devices, GPUs by number, or a request. The part that fits GPUs is computed with a KV cache of
        `context_length` tokens, or 8,192 if it is None.
    beside: a model whose threads to share; only one of both runs at a time, and closing either ends both.
    draft_layers: load the layers for next-token prediction too, if the file has some and the model runs on the CPU.
    assistant: file of a draft model that attends to this model's cache (`assistant.is_assistant`), in place of those
        layers; it is left out, with a warning, if the model runs on a GPU.
    takes_media: its batches may have embeddings of pictures or sounds in place of tokens, on the CPU.
    batch_rows: of a batch on the CPU, at most; the rows of a picture that see each other have to fit in one.
    changes: settings in place of the file's.
    choose_context: called before anything large is read of a model that runs on the CPU; returns the context length to
        load it with, from the open file and the configuration with `context_length`. check_placement: called instead
        of a model of which GPUs have a part; raises if what is left does not fit main memory.
    priority: of the threads. measure_again: how many threads decode fastest, whatever earlier loads have found;
        may_measure: it otherwise, where they have not.
    verify: check the file (`models.verification`): what is likely wrong is logged, what cannot work is refused.
    Raises: ModelFileError or a subclass, RequestError for an invalid option, OutOfMemoryError.
    """
    request = device if isinstance(device, DeviceRequest) else DeviceRequest(device=device)
    request.check()
    if assistant is not None:
        # Few models have a draft model of this kind.
        from localinfer.models.load.assistant import Target, check_device, open_assistant

        check_device(request)
    file = open_model_file(path, changes, context_length, progress)
    pool = drafter = None
    gpus: list[CudaDevice] = []
    try:
        own_config = read_config(file)
        config = replace(with_context(own_config, file, context_length, changes), takes_media=takes_media)
        note_unknown_settings(file, "which may change the model's answers")
        tokenizer = tokenizer_or_none(file, progress)
        if tokenizer is None and changes is not None and changes.chat_template is not None:
            raise RequestError("a chat template needs a tokenizer, and this model has none; leave chat_template out")
        kv_layout = KVLayout(kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))
        if assistant is not None:
            drafter = open_assistant(assistant, Target(file, config, kv_layout), changes)
        if kv_window is not None:
            without = reason_without_window(kv_window, file.path.name, config, kv_layout)
            if without is not None:
                logger.warning(without)
                kv_window = None
        reason = cpu_only(config, kv_layout)
        if reason is not None:
            stay_on_cpu(request, reason)
        if request.cpu_moe and config.experts is None:
            logger.warning("cpu_moe has no effect: %s has no experts", file.path.name)
            request = replace(request, cpu_moe=None)
        placed = None
        if reason is None and looks_for_gpus(request):
            # Most machines have no GPU.
            from localinfer.models.load.devices import open_devices
            from localinfer.models.load.placement import memory_needs

            kv_tokens = cached_tokens(config, context_length, kv_window)
            needs = partial(memory_needs, file, config, kv_layout, kv_tokens)
            placed = open_devices(request, needs, progress, reserved=None if beside is None else beside.reserved_bytes)
        placement: DevicePlacement | None = None
        if placed is not None:
            from localinfer.models.load.pipeline import write_on_gpus

            gpus, placement = placed
            if check_placement is not None:
                check_placement(file, config, placement)
        if placed is None and choose_context is not None:
            config, kv_layout = _in_context(config, kv_layout, choose_context(file, config))
        needed = SHARED_KERNELS
        if placed is None and not all(kernel.is_cached for kernel in needed):
            # A first start: the tape's kernels too, in the same processes. Else they wait until the program is written.
            needed = _all_kernels(file, config, kv_layout, draft_layers, kv_window is not None, assistant, changes)
        compile_ahead(needed, progress)
        if beside is None:
            pool = ThreadPool(
                available_threads() if threads is None else checked_threads(threads),
                priority=priority,
                performance_cores=processor_limits().performance_cores,
            )
        shared_pool = pool if beside is None else beside.pool
        assert shared_pool is not None, "made here or by the model beside"
        parts = Parts(
            config, file, shared_pool, kv_type, progress, threads is None, measure_again, may_measure, kv_window
        )
        on_gpus = None if placed is None else write_on_gpus(parts, *placed, is_required=request.is_required)
        used, weights = "cuda", None
        drafts: tuple[tuple[HiddenProgram, ...], ...] = ()
        if on_gpus is not None:
            program, kv_layout = on_gpus.program, on_gpus.kv_layout
            prepare_text_programs(config, file, on_gpus)
        else:
            held = parts.summed_tokens(batch_rows, kv_layout.page_tokens)
            used, weights, placement = "cpu", CpuWeights(file, shared_pool, progress), None
            if placed is not None and choose_context is not None:
                config, kv_layout = _in_context(config, kv_layout, choose_context(file, config))
                parts = replace(parts, config=config)
            if draft_layers:
                found = read_config(file, with_draft_layers=True)
                found = replace(found, context_length=config.context_length, takes_media=takes_media)
                if found.num_draft_layers:
                    config, kv_layout = found, with_draft_layers(found, kv_layout)
                parts = replace(parts, config=config)
            program = on_cpu = write_on_cpu(
                parts, weights, kv_layout, held, shows_states=drafter is not None, batch_rows=batch_rows
            )
            compile_text_kernels(config, file, weights, shared_pool, kv_layout, progress)
            if drafter is None:
                drafts = write_draft_programs(config, weights, on_cpu, shared_pool, kv_layout, progress)
            else:
                drafts = ((drafter.write(Target(file, config, kv_layout), weights, on_cpu, progress),),)
        if on_gpus is not None and drafter is not None:
            logger.warning("%s drafts on the CPU only, so the GPU decodes without it", drafter.file.path.name)
            drafter.file.close()
            drafter = None
        elif on_gpus is not None and draft_layers and has_draft_layers(file):
            logger.warning("%s: its layers for next-token prediction draft on the CPU only", file.path.name)
        findings = _verified(file, own_config, config, tokenizer) if verify else ()
        if file.has_changed:
            # The file may have been read in two versions.
            raise CorruptFileError(
                f"{file.path} was changed while it was being loaded; load it again when it is complete"
            )
        drafter_file = None if drafter is None else drafter.file
        return Model(
            config,
            tokenizer,
            program,
            kv_layout,
            file,
            shared_pool,
            used,
            weights,
            drafts,
            drafter_file,
            findings,
            placement,
            on_gpus,
        )
    except BaseException as error:
        for gpu in gpus:
            gpu.close()
        if pool is not None:
            pool.close()
        file.close()
        if drafter is not None:
            drafter.file.close()
        if address_space.is_shortage(error):
            raise address_space.shortage(file.num_bytes, f"loading {file.path.name}") from error
        if isinstance(error, ShapeError):
            raise UnsupportedFormatError(
                f"{file.path.name} has sizes that no kernel of this version computes: {error}. Choose another model."
            ) from error
        raise


def _all_kernels(
    file: ModelFile,
    config: ModelConfig,
    kv_layout: KVLayout,
    has_draft_layers: bool,
    has_kv_window: bool,
    assistant: str | os.PathLike[str] | None,
    changes: ModelChanges | None,
) -> Sequence[Kernel]:
    """The kernels that a model on the CPU will need."""
    from localinfer.models.load.needed_kernels import kernels_of_file

    if has_draft_layers:
        found = read_config(file, with_draft_layers=True)
        found = replace(found, context_length=config.context_length, takes_media=config.takes_media)
        if found.num_draft_layers:
            config, kv_layout = found, with_draft_layers(found, kv_layout)
    return kernels_of_file(file, config, kv_layout, has_kv_window=has_kv_window, assistant=assistant, changes=changes)


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
    """Tasks of a model: "completion", "chat", "embeddings", "rerank"."""
    is_reranker = read_pooling(metadata) is Pooling.RANK
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


def _in_context(config: ModelConfig, kv_layout: KVLayout, context_length: int) -> tuple[ModelConfig, KVLayout]:
    """The same with another context length, beside which other windows may be short."""
    if context_length == config.context_length:
        return config, kv_layout
    config = replace(config, context_length=context_length)
    return config, replace(kv_layout, layers=kv_layer_shapes(config, parts_windows=True))


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
