"""How many layers of a model a device's memory holds, worked out from the file before anything is loaded.

Counted are the weights as they will lie there, keys and values of the context that is wanted, and what computing needs.
The last layers go to the device, with the output head, so that tokens are chosen there; embeddings go along where all
layers do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from localinfer.errors import RequestError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import SIZES
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile, TensorRecord
from localinfer.quant.pipeline.conversion import layout_of

USUAL_TOKENS = 8192
"""Positions that keys and values are given room for, where nobody asks for a context."""

MARGIN_BYTES = 256 << 20
"""For what nobody counts: the library's workspace, captured graphs, other programs that come and go."""

_BATCH_ROWS = 1024
_OUTPUT_ROWS = 64
_LIBRARY_BYTES = 128 << 20
"""A piece of weights as plain numbers, for prompts."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a device needs for the parts of a model.

    layers: weights, keys and values of each. output: the norm and the matrix after the last layer. embedding: the
    table, 0 where it is that matrix too. working: buffers, whatever is on the device.
    """

    layers: Sequence[int]
    output: int
    embedding: int
    working: int

    def bytes_of(self, num_layers: int) -> int:
        """What the last `num_layers` layers need with all that goes along, embeddings apart."""
        return self.working + self.output + sum(self.layers[len(self.layers) - num_layers :])


@dataclass(frozen=True)
class Placement:
    """What of a model goes to a device: its last layers, and the embeddings too or not."""

    num_gpu_layers: int
    num_layers: int
    has_embedding: bool
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left for the CPU."""
        return self.has_embedding and self.num_gpu_layers == self.num_layers

    def describe(self, device_name: str, free_bytes: int) -> str:
        """One line: what runs where, and why not more."""
        counts = f"{self.num_gpu_layers} of {self.num_layers} layers on the GPU"
        memory = f"{self.num_bytes / 1e9:.1f} GB of the {free_bytes / 1e9:.1f} GB free on {device_name}"
        if self.is_whole:
            return f"{counts}: they need {memory}"
        rest = "embeddings" if self.num_gpu_layers == self.num_layers else "the others"
        return f"{counts}: they need {memory}; {rest} on the CPU"


def memory_needs(file: ModelFile, config: ModelConfig, kv_layout: KVLayout, num_tokens: int) -> MemoryNeeds:
    """Count what each part of a model needs, with keys and values of `num_tokens` positions."""
    weights = [0] * config.num_layers
    output = embedding = 0
    widest = config.hidden_size
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None:
            # Layers beyond the last draft tokens, and are not run.
            if int(block[1]) < config.num_layers:
                weights[int(block[1])] += num_bytes
                widest = max(widest, *tensor.shape[-2:])
        elif name.startswith("output"):
            output += num_bytes
        elif name in ("token_embd.weight", "position_embd.weight"):
            embedding += num_bytes
    is_tied = "output.weight" not in file.tensors
    if is_tied:
        output, embedding = output + embedding, 0
    num_pages = -(-num_tokens // kv_layout.page_tokens)
    layers = [
        num_bytes + num_pages * shape.num_kv_heads * kv_layout.head(layer).num_bytes
        for layer, (num_bytes, shape) in enumerate(zip(weights, kv_layout.layers, strict=True))
    ]
    slots = 1 if config.experts is None else config.experts.num_selected
    rows = _BATCH_ROWS * 4 * (8 * config.hidden_size + (3 + slots) * widest)
    working = rows + _OUTPUT_ROWS * 4 * config.vocab_size + _LIBRARY_BYTES
    return MemoryNeeds(layers, output, embedding, working)


def bytes_per_token(file: ModelFile, config: ModelConfig) -> int:
    """Bytes of weights on a device that decoding a single token reads: of experts the chosen ones, of tables a row."""
    total = 0
    is_tied = "output.weight" not in file.tensors
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None and int(block[1]) >= config.num_layers:
            continue
        if name.endswith("_embd.weight") and not (is_tied and name == "token_embd.weight"):
            num_bytes //= tensor.shape[0]
        elif len(tensor.shape) == 3 and config.experts is not None:
            num_bytes = num_bytes * config.experts.num_selected // config.experts.num_experts
        total += num_bytes
    return total


def choose_placement(needs: MemoryNeeds, free_bytes: int, wanted: int | None) -> Placement | None:
    """The most layers that fit, or as many as are wanted if they do; None if not one fits.

    Where nobody says how many, MARGIN_BYTES stay free. More are wanted than there are: all of them.
    Raises: RequestError if those that are wanted do not fit.
    """
    num_layers = len(needs.layers)
    room = free_bytes - MARGIN_BYTES
    fitting = max((count for count in range(1, num_layers + 1) if needs.bytes_of(count) <= room), default=0)
    if wanted is None:
        count = fitting
    else:
        count, room = min(wanted, num_layers), free_bytes
        if needs.bytes_of(count) > room:
            raise RequestError(
                f"gpu_layers is {wanted}, and {count} layers need {needs.bytes_of(count) / 1e9:.1f} GB of a GPU that "
                f"has {free_bytes / 1e9:.1f} GB free, where {fitting} of {num_layers} fit; ask for that or less, for a "
                "smaller context_length, or leave gpu_layers out"
            )
    if not count:
        return None
    total = needs.bytes_of(count)
    has_embedding = count == num_layers and total + needs.embedding <= room
    return Placement(count, num_layers, has_embedding, total + (needs.embedding if has_embedding else 0))


def _device_bytes(file: ModelFile, tensor: TensorRecord) -> int:
    """Bytes of a tensor in the layout it runs in on a device; vectors are float32."""
    if file.grouped(tensor.name) is not None:
        return tensor.num_bytes
    if len(tensor.shape) < 2:
        return 4 * prod(tensor.shape)
    sizes = SIZES[layout_of(tensor.type)]
    return prod(tensor.shape) // sizes.unit * sizes.file_bytes
