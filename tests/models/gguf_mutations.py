"""Model files that are wrong in what they say, not in their bytes at random: sizes, types, names, numbers, scales."""

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localinfer.errors import ShapeError
from localinfer.quant.formats.types import TensorType, block_size, row_bytes
from localinfer.quant.gguf.header import ValueType
from localinfer.quant.gguf.writer import EncodedValue, encode_value
from tests.support.typed_models import VOCAB, TypedModel, Weight, make_model

NUMBERS = [0, 1, 2, 3, 7, 31, 32, 33, 64, 96, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
FLOATS = [0.0, -1.0, 1e-40, 1e30, float("inf"), float("-inf"), float("nan")]
HALVES = [0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x8000, 0x0001]
"""float16: infinities, NaN, the largest, minus zero, the smallest."""

Mutation = Callable[[TypedModel, np.random.Generator], TypedModel]


def with_tokenizer(model: TypedModel) -> TypedModel:
    """The same model with a SentencePiece vocabulary."""
    words = [chr(ord("a") + index % 26) * (1 + index // 26) for index in range(VOCAB - 3)]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *words],
        "scores": np.linspace(0, -1, VOCAB, dtype=np.float32),
        "token_type": np.array([2, 3, 3, *[1] * len(words)], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    encoded = {f"tokenizer.ggml.{key}": encode_value(value) for key, value in values.items()}
    return replace(model, metadata=model.metadata | encoded)


def sound_models() -> list[TypedModel]:
    """Dense models and mixtures in types that are converted, beside one that no conversion touches."""
    types = [TensorType.Q1_0, TensorType.MXFP4, TensorType.NVFP4, TensorType.IQ4_NL, TensorType.F64, TensorType.I8]
    models = [make_model(type, num_experts=2 * (number % 2)) for number, type in enumerate(types)]
    models += [make_model(type, is_tied=False, num_experts=2) for type in (TensorType.Q2_0, TensorType.Q8_0)]
    models += [make_model(TensorType.IQ1_M), make_model(TensorType.Q3_K), make_model(TensorType.Q2_K)]
    return [with_tokenizer(model) for model in models]


def mutate(model: TypedModel, generator: np.random.Generator) -> TypedModel:
    """One to three changes."""
    for _ in range(int(generator.integers(1, 4))):
        model = MUTATIONS[int(generator.integers(len(MUTATIONS)))](model, generator)
    return model


def injure_header(content: bytes, generator: np.random.Generator) -> bytes:
    """Overwrite a number somewhere in the first two KiB, or cut the file off."""
    changed = bytearray(content)
    if generator.random() < 0.1:
        return bytes(changed[: int(generator.integers(len(changed)))])
    where = int(generator.integers(min(len(changed), 2048)))
    width = int(generator.choice([1, 4, 8]))
    changed[where : where + width] = (choose(NUMBERS, generator) % 256**width).to_bytes(width, "little")
    return bytes(changed)


def choose(options: list, generator: np.random.Generator):
    """One of them."""
    return options[int(generator.integers(len(options)))]


def _refit(weight: Weight, type: TensorType, shape: tuple[int, ...], generator: np.random.Generator) -> Weight:
    """A weight of another type or shape with as many bytes as that takes, so that the file is sound again."""
    size = int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes(type, shape[-1])
    filler = np.resize(weight.blocks, size) if generator.random() < 0.7 else generator.integers(0, 256, size, np.uint8)
    return Weight(type, shape, filler.astype(np.uint8))


def _replaced(model: TypedModel, name: str, weight: Weight) -> TypedModel:
    return replace(model, weights=model.weights | {name: weight})


def _other_type(model: TypedModel, generator: np.random.Generator) -> TypedModel:
    name = choose(list(model.weights), generator)
    weight, type = model.weights[name], choose(list(TensorType), generator)
    if weight.shape[-1] % block_size(type):
        return model
    return _replaced(model, name, _refit(weight, type, weight.shape, generator))


def _other_shape(model: TypedModel, generator: np.random.Generator) -> TypedModel:
    name = choose(list(model.weights), generator)
    weight = model.weights[name]
    sizes = list(weight.shape)
    axis, unit = int(generator.integers(len(sizes))), block_size(weight.type)
    change = int(generator.integers(8))
    if change < 4:
        step = unit if axis == len(sizes) - 1 else 1
        sizes[axis] = max(step, sizes[axis] + (step, -step, sizes[axis], step - sizes[axis])[change])
    elif change == 4 and len(sizes) < 4:
        sizes.insert(0, int(generator.integers(1, 4)))
    elif change == 5 and len(sizes) > 1:
        del sizes[0]
    elif change == 6:
        sizes[0], sizes[-1] = sizes[-1], sizes[0]
    elif len(sizes) > 1:
        sizes = [1] * (4 - len(sizes)) + sizes
    try:
        return _replaced(model, name, _refit(weight, weight.type, tuple(sizes), generator))
    except ShapeError:
        return model


def _other_numbers(model: TypedModel, generator: np.random.Generator) -> TypedModel:
    """Infinite, NaN and extreme scales."""
    name = choose(list(model.weights), generator)
    weight = model.weights[name]
    halves = weight.blocks[: weight.blocks.size // 2 * 2].copy().view(np.uint16)
    places = generator.integers(0, max(1, halves.size), int(generator.choice([1, 8, 200])))
    if halves.size:
        halves[places] = choose(HALVES, generator)
    blocks = np.concatenate([halves.view(np.uint8), weight.blocks[halves.size * 2 :]])
    return _replaced(model, name, replace(weight, blocks=blocks))


def _missing_or_renamed(model: TypedModel, generator: np.random.Generator) -> TypedModel:
    weights = dict(model.weights)
    name = choose(list(weights), generator)
    weight = weights.pop(name)
    if generator.random() < 0.5:
        weights[
            choose(["output.weight", "blk.0.ffn_up.weight", "blk.0.attn_q.bias", "rope_freqs.weight"], generator)
        ] = weight
    return replace(model, weights=weights) if weights else model


def _other_value(model: TypedModel, generator: np.random.Generator) -> TypedModel:
    """A key with another number, of another type, in an array, or gone."""
    key = choose([key for key in model.metadata if key != "general.architecture"], generator)
    values = dict(model.metadata)
    change = generator.integers(6)
    if change == 0:
        del values[key]
    elif change == 1:
        values[key] = encode_value(choose(["", "llama", "x" * 300], generator))
    elif change == 2:
        values[key] = encode_value(choose(FLOATS, generator))
    elif change == 3:
        numbers = np.array([choose(NUMBERS, generator) for _ in range(int(generator.integers(4)))], np.uint64)
        values[key] = encode_value(numbers)
    elif change == 4:
        values[key] = EncodedValue(struct.pack("<i", ValueType.INT32) + generator.bytes(4))
    else:
        values[key] = encode_value(choose(NUMBERS, generator))
    return replace(model, metadata=values)


def _further_value(model: TypedModel, generator: np.random.Generator) -> TypedModel:
    """A key that the model does without, with any number."""
    if not any(key.endswith(".block_count") for key in model.metadata):
        return model
    keys = ["rope.freq_base", "rope.scaling.factor", "rope.scaling.type", "attention.sliding_window", "expert_count"]
    keys += [
        "expert_used_count",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "vocab_size",
    ]
    number = choose([*NUMBERS, *FLOATS], generator)
    architecture = next(key for key in model.metadata if key.endswith(".block_count")).split(".")[0]
    return replace(model, metadata=model.metadata | {f"{architecture}.{choose(keys, generator)}": encode_value(number)})


MUTATIONS: list[Mutation] = [
    *(_other_type, _other_shape, _other_shape, _other_numbers, _missing_or_renamed, _other_value, _further_value),
]
