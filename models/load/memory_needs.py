"""The bytes that the parts of a model need on a GPU, computed from its file before it is loaded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import CUDA_LAYOUTS, SIZES
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.types import TensorRecord
from localinfer.quant.pipeline.conversion import layout_of

_BATCH_ROWS = 1024
_OUTPUT_ROWS = 64
_LIBRARY_BYTES = 128 << 20
"""Dequantized weights for prompts."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that devices need for the parts of a model.

    layers: weights, keys and values of each. output: the norm and the matrix after the last layer. embedding: the
    table, 0 if it is tied to that matrix. working: buffers, for any number of layers, on each GPU. experts: of `layers`
    what the routed experts take, and cache: the keys and values; empty for none. active_share: of an expert's bytes,
    what decoding one token reads. tied: of `output`, what an embedding on another GPU takes once more.
    """

    layers: Sequence[int]
    output: int
    embedding: int
    working: int
    experts: Sequence[int] = ()
    cache: Sequence[int] = ()
    active_share: float = 1.0
    tied: int = 0

    @property
    def has_experts(self) -> bool:
        """Whether any layer has routed experts."""
        return any(self.experts)

    def expert_bytes(self, layer: int) -> int:
        """Bytes of a layer's routed experts."""
        return self.experts[layer] if self.experts else 0

    def cache_bytes(self, first: int, end: int) -> int:
        """Bytes of the keys and values of some layers."""
        return sum(self.cache[first:end])

    def on_gpu(self, layer: int, cpu_experts: int) -> int:
        """Bytes of a layer on a GPU, where the experts of the first `cpu_experts` layers stay on the CPU."""
        return self.layers[layer] - (self.expert_bytes(layer) if layer < cpu_experts else 0)

    def bytes_of(self, num_layers: int, cpu_experts: int = 0) -> int:
        """Bytes of the last `num_layers` layers, the output head and buffers on one GPU, without embeddings."""
        first = len(self.layers) - num_layers
        layers = sum(self.on_gpu(layer, cpu_experts) for layer in range(first, len(self.layers)))
        return self.working + self.output + layers

    def read_by_cpu(self, num_gpu_layers: int, cpu_experts: int) -> int:
        """Bytes of main memory that decoding one token reads, about."""
        first = len(self.layers) - num_gpu_layers
        total = 0.0
        for layer, num_bytes in enumerate(self.layers):
            experts = self.expert_bytes(layer)
            if layer < first:
                total += num_bytes - experts - self.cache_bytes(layer, layer + 1) + self.active_share * experts
            elif layer < cpu_experts:
                total += self.active_share * experts
        return int(total)


def memory_needs(file: ModelFile, config: ModelConfig, kv_layout: KVLayout, num_tokens: int) -> MemoryNeeds:
    """The bytes of each part of a model, with a KV cache of `num_tokens` positions."""
    weights, experts = [0] * config.num_layers, [0] * config.num_layers
    output = embedding = 0
    widest = config.hidden_size
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None:
            # Further layers are for next-token prediction, which is not run.
            if int(block[1]) < config.num_layers:
                weights[int(block[1])] += num_bytes
                widest = max(widest, *tensor.shape[-2:])
                if "_exps." in name:
                    experts[int(block[1])] += num_bytes
        elif name in ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight"):
            embedding += num_bytes
        elif name.startswith(("output", "per_layer_", "altup_", "cls", "dense_")):
            output += num_bytes
    is_tied = "output.weight" not in file.tensors
    tied = embedding if is_tied else 0
    if is_tied:
        output, embedding = output + embedding, 0
    num_pages = -(-num_tokens // kv_layout.page_tokens)
    cache = [
        num_pages * shape.num_kv_heads * kv_layout.head(layer).num_bytes
        for layer, shape in enumerate(kv_layout.layers[: config.num_layers])
    ]
    # All layers of an encoder take turns in the memory of one, on each GPU.
    shared_cache = sum(cache) if config.is_encoder else 0
    if config.is_encoder:
        cache = [0] * config.num_layers
    layers = [num_bytes + kept for num_bytes, kept in zip(weights, cache, strict=True)]
    slots = 1 if config.experts is None else config.experts.num_selected
    # Texts of an encoder are computed whole.
    batch_rows = max(_BATCH_ROWS, num_tokens) if config.is_encoder else _BATCH_ROWS
    rows = batch_rows * 4 * (8 * config.hidden_size + (3 + slots) * widest)
    working = shared_cache + rows + _OUTPUT_ROWS * 4 * config.vocab_size + _LIBRARY_BYTES
    share = 1.0 if config.experts is None else config.experts.num_selected / config.experts.num_experts
    return MemoryNeeds(layers, output, embedding, working, experts, cache, share, tied)


def bytes_per_token(file: ModelFile, config: ModelConfig) -> int:
    """Bytes of weights that decoding one token reads on a device: of experts the selected ones, of tables one row."""
    total = 0
    is_tied = "output.weight" not in file.tensors
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None and int(block[1]) >= config.num_layers:
            continue
        if name.endswith("_embd.weight") and not (is_tied and name == "token_embd.weight"):
            num_bytes //= tensor.shape[0]
        elif "_exps." in name and config.experts is not None:
            num_bytes = num_bytes * config.experts.num_selected // config.experts.num_experts
        total += num_bytes
    return total


def _device_bytes(file: ModelFile, tensor: TensorRecord) -> int:
    """Bytes of a tensor in its layout on a GPU; vectors are float32."""
    if file.grouped(tensor.name) is not None:
        return tensor.num_bytes
    if len(tensor.shape) < 2:
        return 4 * prod(tensor.shape)
    sizes = SIZES[layout_of(tensor.type, CUDA_LAYOUTS)]
    return prod(tensor.shape) // sizes.unit * sizes.file_bytes
