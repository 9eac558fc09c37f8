"""Small Llama models whose matrices hold any tensor type, and what the weights in them are as plain numbers."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import localinfer
from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.layouts import GGUF_LAYOUTS, Layout
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.decoder import write_decoder
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorRecord, TensorType, block_bytes, block_dtype, block_size
from localinfer.quant.gguf.reader import GGUFFile
from localinfer.quant.gguf.writer import EncodedValue, GGUFWriter, copy_values, encode_value
from localinfer.quant.pipeline.conversion import convert, layout_of, runs_directly
from localinfer.types import FloatArray
from tests.models.arch_models import read_config
from tests.support.oracle import NumpyProgram, NumpyWeights

ACTIVATION_TYPES = (TensorType.Q8_1, TensorType.Q8_K)
WEIGHT_TYPES = [type for type in TensorType if type not in ACTIVATION_TYPES]
VOCAB = 77
TOKEN_IDS = np.random.default_rng(4).integers(0, VOCAB, 9).astype(np.int32)
INT8_ERROR = 4e-2
"""Of logits: activations are rounded to int8 in every product with blocks, and weights to Q8_0 where no kernel reads
their type."""
FLOAT_ERROR = 1e-5

_BYTE_SCALES = {TensorType.MXFP4: "e", TensorType.NVFP4: "d"}
_F = TensorType.F32


@dataclass(frozen=True)
class Weight:
    """A tensor as a file stores it: uint8 blocks, row after row."""

    type: TensorType
    shape: tuple[int, ...]
    blocks: NDArray[np.uint8]

    def as_float(self) -> "Weight":
        """The numbers that the blocks stand for."""
        values = dequantize(self.blocks, self.type, self.shape)
        return Weight(_F, self.shape, values.reshape(-1).view(np.uint8))

    def as_converted(self, layouts: Collection[Layout] = GGUF_LAYOUTS) -> "Weight":
        """The blocks of the type that a loader of these layouts runs this one as."""
        if len(self.shape) < 2:
            return self
        layout, blocks = convert(self.blocks, self.type, self.shape, layouts=layouts)
        return Weight(TensorType[layout.name], self.shape, blocks)


@dataclass(frozen=True)
class TypedModel:
    """Tensors and metadata of a model, to be written as they are or in other types."""

    metadata: dict[str, EncodedValue]
    weights: dict[str, Weight]

    def as_float(self) -> "TypedModel":
        return TypedModel(self.metadata, {name: weight.as_float() for name, weight in self.weights.items()})

    def as_converted(self, layouts: Collection[Layout] = GGUF_LAYOUTS) -> "TypedModel":
        return TypedModel(self.metadata, {name: weight.as_converted(layouts) for name, weight in self.weights.items()})

    def write(self, path: Path, num_parts: int = 1) -> Path:
        """Write one file, or parts named as split models are; return the path of the (first) file."""
        if num_parts == 1:
            return _write_file(path, self.metadata, self.weights)
        names = list(self.weights)
        paths = [path.with_name(f"{path.stem}-{n + 1:05}-of-{num_parts:05}.gguf") for n in range(num_parts)]
        for number, part in enumerate(paths):
            split = {
                "split.no": encode_value(number),
                "split.count": encode_value(num_parts),
                "split.tensors.count": encode_value(len(names)),
            }
            weights = {name: self.weights[name] for name in names[number::num_parts]}
            _write_file(part, (self.metadata if number == 0 else {}) | split, weights)
        return paths[0]


def make_weight(type: TensorType, shape: tuple[int, ...], seed: int) -> Weight:
    """Random weights of about unit gain: encoded where there is an encoder, else random blocks with fitting scales."""
    return Weight(type, shape, _made(type, shape, seed).copy())


@cache
def _made(type: TensorType, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    generator = np.random.default_rng([seed, int(type)])
    wanted = 1 / np.sqrt(shape[-1])
    values = (generator.standard_normal(shape) * wanted).astype(np.float32)
    try:
        return quantize(values, type).reshape(-1)
    except UnsupportedFormatError:
        blocks = _random_blocks(type, values.size // block_size(type), generator)
    if type in _BYTE_SCALES:
        return blocks
    fields = blocks.view(block_dtype(type))
    if block_size(type) > 1 and type is not TensorType.IQ1_M:
        spread = float(np.sqrt(np.mean(np.square(dequantize(blocks, type, shape), dtype=np.float64))))
        fields["d"] = (fields["d"].astype(np.float32) * (wanted / spread)).astype(np.float16)
    return blocks


def _random_blocks(type: TensorType, num_blocks: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Random bytes in every field but the scales."""
    raw = generator.integers(0, 256, num_blocks * block_bytes(type), dtype=np.uint8)
    fields = raw.view(block_dtype(type))
    if block_size(type) == 1:
        # Small integers, or few enough bits that float32 holds them.
        fields["value"] = generator.integers(-3, 4, num_blocks)
    elif type is TensorType.MXFP4:
        fields["e"] = generator.integers(121, 125, num_blocks)
    elif type is TensorType.NVFP4:
        fields["d"] = generator.integers(8, 25, fields["d"].shape)
    elif type is TensorType.IQ1_M:
        # The upper four bits of its words are one float16 scale: 0x2000 is 1 / 128.
        fields["scales"] = fields["scales"] & 0x0FFF | np.array([0, 0, 0, 2], np.uint16) << 12
    else:
        fields["d"] = generator.uniform(0.5, 1, num_blocks)
    return raw


def make_model(
    type: TensorType,
    *,
    num_experts: int = 0,
    is_tied: bool = True,
    embedding: TensorType | None = None,
    output: TensorType | None = None,
    unit: int = 1,
    seed: int = 1,
) -> TypedModel:
    """A Llama of one layer whose matrices are all of one type, as narrow as its blocks allow, with odd numbers of rows.

    num_experts: of its feed forward, all of them chosen, as a near tie would make logits jump; 0 for a dense one.
    embedding, output: their own types. unit: what the numbers of columns are a multiple of, where blocks are smaller.
    """
    unit = max(unit, block_size(type), block_size(embedding or type), block_size(output or type))
    hidden, intermediate = (36, 51) if unit == 1 else (3 * unit if unit < 256 else unit, unit)
    head = 32 if unit > 1 else 18
    heads = max(unit // 32, 3) if unit != 64 else 4
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": intermediate,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": head,
        "llama.attention.value_length": head,
        "llama.rope.dimension_count": head,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": VOCAB,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, hidden)}
    if not is_tied:
        shapes["output"] = (VOCAB, hidden)
    shapes |= {
        "blk.0.attn_q": (heads * head, hidden),
        "blk.0.attn_k": (head, hidden),
        "blk.0.attn_v": (head, hidden),
        "blk.0.attn_output": (hidden, heads * head),
    }
    stack: tuple[int, ...] = (num_experts,) if num_experts else ()
    suffix = "_exps" if num_experts else ""
    for name, shape in (
        ("gate", (intermediate, hidden)),
        ("up", (intermediate, hidden)),
        ("down", (hidden, intermediate)),
    ):
        shapes[f"blk.0.ffn_{name}{suffix}"] = (*stack, *shape)
    types = {"token_embd": embedding or type, "output": output or type}
    weights = {
        f"{name}.weight": make_weight(types.get(name, type), shape, seed + number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    if num_experts:
        metadata |= {"llama.expert_count": num_experts, "llama.expert_used_count": num_experts}
        weights["blk.0.ffn_gate_inp.weight"] = make_weight(_F, (num_experts, hidden), seed)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        weights[f"{name}.weight"] = Weight(
            _F, (hidden,), np.linspace(0.5, 1.5, hidden, dtype=np.float32).view(np.uint8)
        )
    return TypedModel({key: encode_value(value) for key, value in metadata.items()}, weights)


def read_model(file: GGUFFile) -> TypedModel:
    """Metadata and weights of a file, copied."""
    weights = {
        name: Weight(info.type, info.shape, file.tensor_bytes(name).copy()) for name, info in file.tensors.items()
    }
    return TypedModel(copy_values(file.metadata), weights)


def _write_file(path: Path, metadata: dict[str, EncodedValue], weights: dict[str, Weight]) -> Path:
    specs = [TensorRecord(name, weight.type, weight.shape) for name, weight in weights.items()]
    with GGUFWriter(path, metadata, specs) as writer:
        for weight in weights.values():
            writer.write(weight.blocks)
    return path


def run(path: Path, threads: int = 1) -> FloatArray:
    with localinfer.load(path, threads=threads, kv_type="f32", device="cpu") as llm:
        return llm.logits(TOKEN_IDS)


def oracle_logits(path: Path) -> FloatArray:
    """What a file of plain numbers gives with exact activations."""
    program = NumpyProgram(write_decoder(read_config(path), NumpyWeights(path)))
    rows = np.arange(len(TOKEN_IDS), dtype=np.int32)
    return program.run(Batch(TOKEN_IDS, [Segment(0, len(TOKEN_IDS), np.arange(1, 5))], rows))


def check_model(
    model: TypedModel,
    folder: Path,
    num_parts: int = 1,
    wanted: TypedModel | None = None,
    layouts: Collection[Layout] = GGUF_LAYOUTS,
) -> None:
    """Prove that its logits are the bits that the converted weights give, and near those of the numbers they are.

    wanted: the model whose numbers they are nearly; None for this one. layouts: those that are loaded.
    """
    found = run(model.write(folder / "model.gguf", num_parts))
    if any(not runs_directly(weight.type, layouts) for weight in model.weights.values()):
        np.testing.assert_array_equal(found, run(model.as_converted(layouts).write(folder / "converted.gguf")))
    exact = oracle_logits((wanted or model).as_float().write(folder / "float.gguf"))
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    is_float = all(layout_of(weight.type).name in ("F32", "F16", "BF16") for weight in model.weights.values())
    assert error <= (FLOAT_ERROR if is_float else INT8_ERROR)
