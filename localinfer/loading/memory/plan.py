"""Memory of a model on the CPU, planned before it is loaded, and the largest context that fits.

Only the header of its file is read. Weights are counted as the kernels hold them, by writing the model's graph over
shapes without data; keys and values by the layout that the cache itself uses.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import field, replace

from localinfer.engine.cache.block_pool import context_bytes
from localinfer.engine.media import DEFAULT_EMBEDDING_BYTES
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu.kernel_abi import CHUNK, SPLIT_ROWS
from localinfer.kernels.cpu.lower.attention import partial_bytes
from localinfer.kernels.cpu.memory import padded
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import num_tiles, stored_row_bytes, tile_bytes
from localinfer.kernels.ops import Attention, EmbeddingTable, LinearWeight, OpGraph, Rows
from localinfer.models.decoder.checked_weights import ShapeWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes, write_decoder, write_draft_layer
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.models.load.model_changes import ModelChanges
from localinfer.models.load.programs import (
    batch_rows_of,
    draft_heads,
    has_draft_layers,
    with_draft_layers,
    write_text_graphs,
)
from localinfer.models.load.weights import named_tensor
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.pipeline.conversion import layout_of, runs_directly
from localinfer.system.machine_limits import MemoryLimits, byte_text
from localinfer.types import FloatArray, Record

_TABLE_BYTES = 32 << 20
"""Of an embedding table whose rows are read on demand: those of some thousand different tokens."""


class CountedWeights(ShapeWeights):
    """Weights without data, which count the bytes that a device's weights of the same requests take."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__({name: tensor.shape for name, tensor in file.tensors.items()})
        self._file = file
        self._matrices: dict[tuple[str, tuple[int, int] | None], LinearWeight] = {}
        self._tables: set[str] = set()
        self._vectors_by_name: dict[str, int] = {}

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """Note a matrix, or the part of it, which is packed once."""
        found = super().linear(name, rows)
        part = None if rows is None else (found.packed, found.packed + found.num_rows)
        self._matrices[name, part] = found
        return found

    def embedding(self, name: str) -> EmbeddingTable:
        """Note a table."""
        self._tables.add(name)
        return super().embedding(name)

    def vector(self, name: str) -> FloatArray:
        """Count a vector, of which kernels read a copy."""
        values = super().vector(name)
        self._vectors_by_name[name] = 2 * values.nbytes
        return values

    def num_bytes(self) -> int:
        """Bytes of all that was requested."""
        return (
            sum(self._vectors_by_name.values())
            + sum(self._matrix_bytes(name, part) for name, part in self._matrices)
            + sum(map(self._table_bytes, self._tables))
        )

    def _matrix_bytes(self, name: str, part: tuple[int, int] | None) -> int:
        weight, tensor = self._matrices[name, part], self._file.tensor(name)
        if part is not None and not part[0] and (name, None) in self._matrices and weight.num_experts == 1:
            # The first rows of a matrix that is packed whole are taken from it.
            return 0
        with named_tensor(name):
            grouped = self._file.grouped(name)
            layout = layout_of(tensor.type) if grouped is None else grouped[0].layout(*grouped[1:])
        return num_tiles(weight.num_rows) * tile_bytes(layout, weight.num_columns) * weight.num_experts

    def _table_bytes(self, name: str) -> int:
        tensor = self._file.tensor(name)
        if not runs_directly(tensor.type):
            # Converted once; a tied output matrix is packed from it, and counted beside it.
            with named_tensor(name):
                layout = layout_of(tensor.type)
            return tensor.shape[0] * stored_row_bytes(layout, tensor.shape[1])
        return min(tensor.num_bytes, _TABLE_BYTES)


logger = logging.getLogger(__name__)

LEAST_CONTEXT = 512
"""Tokens that must fit: a model with room for fewer is not worth loading."""
KV_SHARE = 0.9
"""Of the memory beside the weights, the most that the KV cache of one requested context may take."""
DEFAULT_KV_SHARE = 0.5
"""The same for a context that was not requested; as much is the cache's default budget."""
_CONVERSATION = 4096
"""Tokens of context that a conversation needs, if the model has as many."""

_OUTPUT_ROWS = 64
_BYTES_PER_TOKEN_OF_VOCABULARY = 700
"""The tokenizer: texts, ids and merges as Python objects. Measured on vocabularies of 32,000 to 152,000 tokens."""
_SEARCHED_BYTES_PER_TOKEN = 550
"""The trie of constraints. Measured on the same vocabularies."""
_USE_BYTES = 8 << 20
"""The libraries of constraints, ids and snapshots of texts, pages on their way to the disk."""
_FIXED_BYTES = 24 << 20
"""Compiled kernels, threads, tables of the chat template."""


class MemoryPlan(Record):
    """Bytes that a model takes on the CPU."""

    name: str
    """Of the model, for errors."""
    config: ModelConfig
    """As it will be loaded, but for the context length; with draft layers if those are loaded too."""
    kv_type: str
    """KV cache element type."""
    weight_bytes: int
    """Matrices as packed for the kernels, vectors and tables."""
    scratch_bytes: int
    """Buffers of a batch, the tokenizer, compiled kernels."""
    bits_per_weight: float
    """Of the file."""
    beside: "MemoryPlan | None" = field(default=None, repr=False)
    """A draft model that is loaded with it."""
    use_bytes: int = 0
    """Largest addition by use, besides keys and values: the buffers of a program that embeds texts, the vocabulary
    as constraints search it, embeddings of pictures and sounds that are kept."""
    partial_bytes: int = 0
    """Addition by attention for each chunk of positions."""
    media_bytes: int = 0
    """Weights of the encoders of pictures and sounds."""
    media_buffer_bytes: int = 0
    """Buffers of the encoders, for the largest picture."""
    kv_tokens: int | None = None
    """Most positions of a text whose keys and values are held, where it evicts some; None for all of them."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes whatever the context, without keys, values and recurrent states."""
        own = self.weight_bytes + self.scratch_bytes + self.encoder_bytes
        return own if self.beside is None else own + self.beside.fixed_bytes

    def growth_bytes(self, context_length: int) -> int:
        """Bytes that use may add at most to `fixed_bytes`, beside keys, values and recurrent states."""
        chunks = SPLIT_ROWS * (context_length // CHUNK + 2)
        own = self.use_bytes + 2 * chunks * self.partial_bytes
        return own if self.beside is None else own + self.beside.growth_bytes(self._beside_context(context_length))

    @property
    def all_weight_bytes(self) -> int:
        """Bytes of weights, with those of a draft model and of encoders."""
        return self.weight_bytes + self.media_bytes + (0 if self.beside is None else self.beside.weight_bytes)

    @property
    def encoder_bytes(self) -> int:
        """Bytes of encoders of pictures and sounds, in main memory wherever the model is."""
        return self.media_bytes + self.media_buffer_bytes

    def with_media(self, weight_bytes: int, buffer_bytes: int) -> "MemoryPlan":
        """The plan with encoders of pictures and sounds."""
        return replace(self, media_bytes=weight_bytes, media_buffer_bytes=buffer_bytes)

    def kv_layout(self, context_length: int, kv_type: str | None = None) -> KVLayout:
        """The layout that a model loaded with this context has: windows shorter than it are stored apart."""
        config = replace(self.config, context_length=context_length)
        layout = KVLayout(kv_type or self.kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))
        return with_draft_layers(config, layout) if config.num_draft_layers else layout

    def kv_bytes(self, context_length: int, kv_type: str | None = None) -> int:
        """Bytes that a text of `context_length` tokens takes of the KV cache, with recurrent states and snapshots."""
        layout = self.kv_layout(context_length, kv_type)
        kept = context_length if self.kv_tokens is None else min(context_length, self.kv_tokens)
        own = context_bytes(layout, kept, batch_rows_of(self.config))
        if self.beside is None:
            return own
        return own + self.beside.kv_bytes(self._beside_context(context_length), kv_type)

    def total_bytes(self, context_length: int, kv_type: str | None = None) -> int:
        """Bytes of everything."""
        return self.fixed_bytes + self.kv_bytes(context_length, kv_type)

    def _beside_context(self, context_length: int) -> int:
        """Tokens of a text that its draft model keeps: up to the context that it was trained on."""
        return context_length if self.beside is None else min(context_length, self.beside.config.context_length)

    def largest_context(self, kv_bytes: int, most: int | None = None, kv_type: str | None = None) -> int:
        """The longest context, up to `most` (None: as trained), whose keys and values take at most so many bytes.

        It is all of `most`, or a multiple of 32; 0 if not even LEAST_CONTEXT tokens fit.
        """
        most = self.config.context_length if most is None else most
        if self.kv_bytes(most, kv_type) <= kv_bytes:
            return most
        # More tokens never take less memory, so a bisection over whole pages finds the last that fits.
        page = self.kv_layout(most, kv_type).page_tokens
        fits, too_many = 0, -(-most // page)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.kv_bytes(middle * page, kv_type) <= kv_bytes:
                fits = middle
            else:
                too_many = middle
        return fits * page if fits * page >= min(LEAST_CONTEXT, most) else 0

    def largest_loadable(self, memory: MemoryLimits, kv_type: str | None = None, most: int | None = None) -> int:
        """The longest context that can be requested on a machine with this memory; 0 if the model does not fit."""
        room = memory.most_bytes - self.fixed_bytes
        return 0 if room < 0 else self.largest_context(int(KV_SHARE * room), most, kv_type)

    def default_context(self, memory: MemoryLimits, most: int | None = None) -> int:
        """The context that a model is loaded with if none is requested; 0 if it does not fit.

        Half of the memory that is free beside the weights may be taken; where that is too little for a conversation,
        all that can be requested.
        """
        most = self.config.context_length if most is None else most
        room = memory.available_bytes - self.fixed_bytes
        found = self.largest_context(int(DEFAULT_KV_SHARE * room), most) if room > 0 else 0
        if found < min(most, _CONVERSATION):
            found = self.largest_loadable(memory, most=min(most, _CONVERSATION))
        return found if found == most or found < 2048 else found // 1024 * 1024


def plan_memory(
    file: ModelFile,
    config: ModelConfig | None = None,
    *,
    kv_type: str = "f16",
    draft_layers: bool = False,
    assistant: str | os.PathLike[str] | None = None,
    changes: ModelChanges | None = None,
) -> MemoryPlan:
    """Count what a model that is open takes.

    config: as read from the file; None reads it. draft_layers: the layers for next-token prediction are loaded too.
    assistant: the draft model at this path, which reads the model's cache, in place of them; changes: see
    `open_assistant`. Raises: ModelFileError or a subclass for a model that cannot be run; as `open_assistant`.
    """
    if config is None:
        config = read_config(file)
    if draft_layers and assistant is None and has_draft_layers(file) and not config.is_encoder:
        with_drafts = read_config(file, with_draft_layers=True)
        config = replace(with_drafts, context_length=config.context_length)
    weights = CountedWeights(file)
    layout = KVLayout(kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))
    graph = write_decoder(config, weights, config.context_length, shows_states=assistant is not None)
    weight_bytes = 0
    drafting = [*_draft_graphs(config, weights)]
    if assistant is not None:
        from localinfer.models.decoder.gemma_blocks import write_assistant
        from localinfer.models.load.assistant import Target, open_assistant

        drafter = open_assistant(assistant, Target(file, config, layout), changes)
        with closing(drafter.file):
            own = CountedWeights(drafter.file)
            drafting = [write_assistant(drafter.config, own, config, weights, layout.layers)]
            weight_bytes = own.num_bytes()
    write_text_graphs(config, file, weights)
    num_tokens = config.vocab_size if "tokenizer.ggml.tokens" in file.metadata else 0
    num_parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    embedding_bytes = DEFAULT_EMBEDDING_BYTES if config.takes_media else 0
    buffers = _buffer_bytes(graph, batch_rows_of(config), _OUTPUT_ROWS)
    return MemoryPlan(
        name=file.path.name,
        config=config,
        kv_type=kv_type,
        weight_bytes=weights.num_bytes() + weight_bytes,
        scratch_bytes=buffers
        + sum(_buffer_bytes(one, 1, 1) for one in drafting)
        + _BYTES_PER_TOKEN_OF_VOCABULARY * num_tokens
        + _FIXED_BYTES,
        bits_per_weight=8 * file.num_bytes / max(1, num_parameters),
        use_bytes=buffers + _SEARCHED_BYTES_PER_TOKEN * num_tokens + _USE_BYTES + embedding_bytes,
        partial_bytes=max(
            (partial_bytes(layout, op.layer, op.shape) for op in graph.ops if isinstance(op, Attention)), default=0
        ),
    )


def _draft_graphs(config: ModelConfig, weights: CountedWeights) -> Iterator[OpGraph]:
    """Those of a model's own draft layers, with each output head that they are loaded with."""
    for num_tokens in draft_heads(config):
        for layer in range(config.num_main_layers, config.num_layers):
            yield write_draft_layer(config, weights, layer, config.context_length, num_tokens=num_tokens)


def plan_file(
    path: str | os.PathLike[str],
    *,
    kv_type: str = "f16",
    changes: ModelChanges | None = None,
    context_length: int | None = None,
    draft_layers: bool = False,
) -> MemoryPlan:
    """Count what the model at a path takes; see `plan_memory`. context_length: None for its own.

    Raises: ModelFileError and below; RequestError for changes without meaning.
    """
    file = open_model_file(path, changes, context_length)
    try:
        plan = plan_memory(file, kv_type=kv_type, draft_layers=draft_layers)
        return (
            plan
            if context_length is None
            else replace(plan, config=replace(plan.config, context_length=context_length))
        )
    finally:
        file.close()


def choose_context(
    plan: MemoryPlan,
    requested: int | None,
    memory: MemoryLimits,
    *,
    kv_memory: int | None = None,
) -> int:
    """The context length to load a model with: as requested, or as trained, reduced with a notice to what fits.

    kv_memory: as in `load`; it bounds the cache whatever the context, as a window in the plan does.
    Raises: OutOfMemoryError if the model, or the requested context, cannot fit.
    """
    trained = plan.config.context_length
    if requested is not None:
        check_fits(plan, requested, memory, kv_memory)
        return requested
    if kv_memory is not None or plan.kv_tokens is not None:
        whole = plan.kv_bytes(trained)
        bounded = whole if kv_memory is None else min(whole, kv_memory)
        if bounded <= KV_SHARE * (memory.most_bytes - plan.fixed_bytes):
            return trained
    found = plan.default_context(memory)
    if not found:
        check_fits(plan, min(trained, LEAST_CONTEXT), memory)
        return min(trained, LEAST_CONTEXT)
    if found < trained:
        most = plan.largest_loadable(memory)
        more = f"; up to {most} can be given as context_length" if most > found else ""
        logger.warning(
            "%s: the context is %d tokens, not the %d it was trained for, which take %s of keys and values beside %s, "
            "and %s%s",
            plan.name,
            found,
            trained,
            byte_text(plan.kv_bytes(trained)),
            byte_text(plan.fixed_bytes),
            memory.describe(),
            more,
        )
    return found


def check_fits(plan: MemoryPlan, context_length: int, memory: MemoryLimits, kv_bytes: int | None = None) -> None:
    """Raise OutOfMemoryError, with the figures and the ways out, if a model and a context cannot fit.

    kv_bytes: what the KV cache may take at most, if it was bounded.
    """
    kv = plan.kv_bytes(context_length)
    if kv_bytes is not None:
        kv = min(kv, kv_bytes)
    room = memory.most_bytes - plan.fixed_bytes
    if kv <= max(0, room) * KV_SHARE or (kv == 0 and room >= 0):
        return
    found = (
        f"{plan.name} needs {byte_text(plan.fixed_bytes + kv)} of memory for a context of {context_length} tokens "
        f"({byte_text(plan.all_weight_bytes)} for weights, {byte_text(kv)} for keys and values as {plan.kv_type}, "
        f"{byte_text(plan.fixed_bytes - plan.all_weight_bytes)} for buffers{_encoders(plan)}), and {memory.describe()}"
    )
    ways = [*_smaller_contexts(plan, context_length, memory)] or [_smaller_model(plan, memory)]
    if plan.media_bytes and plan.with_media(0, 0).largest_loadable(memory, most=context_length) == context_length:
        ways.append('take mmproj "off", with which it reads text only and fits')
    raise OutOfMemoryError(f"{found}; {', or '.join(ways)}")


def _encoders(plan: MemoryPlan) -> str:
    """The part of encoders in what was counted, as a clause; empty if there are none."""
    return f", {byte_text(plan.encoder_bytes)} of it for pictures" if plan.media_bytes else ""


def _smaller_contexts(plan: MemoryPlan, wanted: int, memory: MemoryLimits) -> Sequence[str]:
    fits = plan.largest_loadable(memory, most=wanted)
    with_q8 = plan.largest_loadable(memory, "q8_0", most=wanted) if plan.kv_type in ("f16", "f32") else 0
    ways = []
    if fits:
        ways.append(f"the largest that fits is context_length {fits}")
    if with_q8 == wanted:
        ways.append("take kv_type q8_0, with which it fits")
    elif with_q8 > fits:
        ways.append(f"{with_q8} with kv_type q8_0")
    return [*ways, "take a smaller quantization"] if ways else ways


def _smaller_model(plan: MemoryPlan, memory: MemoryLimits) -> str:
    room = memory.most_bytes - (plan.fixed_bytes - plan.all_weight_bytes)
    room -= int(plan.kv_bytes(min(LEAST_CONTEXT, plan.config.context_length)) / KV_SHARE)
    bits = plan.bits_per_weight * room / max(1, plan.all_weight_bytes)
    closing = "close other programs" if not memory.limited_by else f"raise the limit of {memory.limited_by}"
    if bits < 2:
        return f"take a smaller model: whatever the context, this one does not fit; or {closing}"
    return (
        f"take a smaller quantization: it has {plan.bits_per_weight:.1f} bits per weight, and {bits:.1f} would fit; or "
        f"{closing}"
    )


def _buffer_bytes(graph: OpGraph, batch_rows: int, output_rows: int) -> int:
    """Buffers of a batch, each once more at most as quantized activations."""
    rows = {Rows.BATCH: batch_rows, Rows.OUTPUT: output_rows}
    buffers = sum(4 * rows[buffer.rows] * padded(buffer.width) for buffer in graph.buffers)
    widest = max((buffer.width for buffer in graph.buffers if buffer.rows is Rows.BATCH), default=0)
    return buffers + 2 * batch_rows * widest
