"""Llamas of random weights on a GPU, in the shapes of models that people run."""

import numpy as np

from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.memory import DeviceKVLayout
from localinfer.kernels.cuda.program import CudaProgram
from localinfer.kernels.cuda.weights import DeviceWeight, array_offsets
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import EmbeddingTable, LinearWeight
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, write_decoder
from localinfer.types import FloatArray

# Layers, hidden, heads, KV heads, head size, feed-forward, vocabulary, whether the output is the embedding.
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "8B": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "3B": (28, 3072, 24, 8, 128, 8192, 128256, True),
    "1B": (16, 2048, 32, 8, 64, 8192, 128256, True),
}

_RANDOM_BYTES = 4 << 20


class RandomWeights:
    """A `WeightSource` of a llama's shape in one layout, made where it is used."""

    def __init__(self, device: CudaDevice, layout: Layout, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        self._device, self._layout, self._shapes = device, layout, shapes
        self._random = np.random.default_rng(seed)
        self._made: dict[str, DeviceWeight] = {}
        self._read: dict[str, int] = {}

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token reads: every matrix of a product, and one row of the embeddings."""
        return sum(self._read.values())

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        assert rows is None, "nothing is fused in these"
        num_rows, num_columns = self._shapes[name]
        self._read[name] = array_offsets(self._layout, num_rows, num_columns)[-1]
        return LinearWeight(name, num_rows, num_columns, self._planes(name))

    def embedding(self, name: str) -> EmbeddingTable:
        num_rows, num_columns = self._shapes[name]
        row = array_offsets(self._layout, num_rows, num_columns)[-1] // num_rows
        self._read.setdefault(name, row)
        return EmbeddingTable(name, num_rows, num_columns, self._planes(name))

    def vector(self, name: str) -> FloatArray:
        return np.ones(self._shapes[name], np.float32)

    def _planes(self, name: str) -> DeviceWeight:
        if name not in self._made:
            self._made[name] = random_planes(self._device, self._layout, *self._shapes[name], self._random)
        return self._made[name]


def random_planes(
    device: CudaDevice, layout: Layout, num_rows: int, num_columns: int, random: np.random.Generator
) -> DeviceWeight:
    """Random codes, the same in every few megabytes, with equal scales."""
    offsets = array_offsets(layout, num_rows, num_columns)
    address = device.allocate(offsets[-1])
    codes = random.integers(0, 256, min(offsets[-1], _RANDOM_BYTES), np.uint8)
    data = np.resize(codes, offsets[-1])
    scales = data[offsets[1] : offsets[2]].view(np.uint16)
    # float16 0.01, and of layouts with a zero point that is 8.
    scales.fill(0x211F)
    if layout in (Layout.INT4_32, Layout.INT4_64, Layout.INT4_128):
        scales[1::2] = 8
    device.write(address, data)
    return DeviceWeight(layout, num_rows, num_columns, 1, address)


def make_program(
    device: CudaDevice, name: str, layout: Layout, kv_type: str, *, seed: int = 1, num_layers: int = 0
) -> tuple[CudaProgram, DeviceKVLayout, int]:
    """A model of this shape, of fewer layers if asked, and the bytes of weights that a token reads."""
    layers, hidden, heads, kv_heads, head, inner, vocab, is_tied = SHAPES[name]
    layers = num_layers or layers
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 8192,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": head,
        "llama.attention.value_length": head,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": head,
        "llama.vocab_size": vocab,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not is_tied:
        shapes["output.weight"] = (vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}."
        for part, shape in (
            ("attn_norm", (hidden,)),
            ("ffn_norm", (hidden,)),
            ("attn_q", (heads * head, hidden)),
            ("attn_k", (kv_heads * head, hidden)),
            ("attn_v", (kv_heads * head, hidden)),
            ("attn_output", (hidden, heads * head)),
            ("ffn_gate", (inner, hidden)),
            ("ffn_up", (inner, hidden)),
            ("ffn_down", (hidden, inner)),
        ):
            shapes[f"{block}{part}.weight"] = shape
    config = ModelConfig.from_metadata(metadata, shapes)
    kv_layout = DeviceKVLayout(kv_type, kv_layer_shapes(config), device=device)
    weights = RandomWeights(device, layout, shapes, seed)
    graph = write_decoder(config, weights, config.context_length, kv_layers=kv_layout.layers)
    program = lower_to_cuda(graph, device, kv_layout)
    return program, kv_layout, weights.bytes_per_token
