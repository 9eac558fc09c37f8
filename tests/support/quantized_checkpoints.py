"""Writes matrices as GPTQ, AWQ and compressed-tensors checkpoints do: loops over words, obvious and slow."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.checkpoint_files import Array, Stored, bfloat16


@dataclass(frozen=True)
class Codes:
    """codes uint8[R, K]; scales float32[R, G] that float16 holds; zeros int[R, G]; groups int32[K]."""

    bits: int
    codes: Array
    scales: Array
    zeros: Array
    groups: Array

    @property
    def weights(self) -> Array:
        """float64[R, K]: what the numbers mean."""
        steps = self.codes.astype(np.float64) - self.zeros[:, self.groups]
        return self.scales[:, self.groups].astype(np.float64) * steps

    @property
    def weights32(self) -> Array:
        """The same as float32, which holds all of them."""
        assert (self.weights.astype(np.float32) == self.weights).all()
        return self.weights.astype(np.float32)


def random_codes(
    generator: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group_size: int = 32,
    is_symmetric: bool = False,
    is_act_order: bool = False,
) -> Codes:
    """Random codes with every zero point, 0 and the largest included, unless symmetric."""
    rows, columns = shape
    size = columns if group_size == -1 else group_size
    num_groups = -(-columns // size)
    scales = (generator.uniform(0.5, 2.0, (rows, num_groups)) / (1 << bits) / np.sqrt(columns)).astype(np.float16)
    zeros = generator.integers(0, 1 << bits, (rows, num_groups))
    zeros.reshape(-1)[:2] = (0, (1 << bits) - 1)
    if is_symmetric:
        zeros[:] = 1 << (bits - 1)
    groups = (np.arange(columns) // size).astype(np.int32)
    if is_act_order:
        groups = generator.permutation(groups)
    return Codes(bits, generator.integers(0, 1 << bits, shape), scales.astype(np.float32), zeros, groups)


def pack_words(codes: Array, bits: int) -> Array:
    """Codes along the last axis into 32-bit words, lowest bits first; the last word is filled with zeros."""
    per_word = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word)), np.uint32)
    for index in range(codes.shape[-1]):
        words[..., index // per_word] |= codes[..., index].astype(np.uint32) << np.uint32(bits * (index % per_word))
    return words.view(np.int32)


def gptq_tensors(matrix: Codes, version: int = 1, *, has_groups: bool = True) -> dict[str, Stored]:
    """A GPTQ module. Version 1 takes one from every zero point, on whole words, as current writers do."""
    words = pack_words(matrix.zeros.T, matrix.bits)
    if version == 1:
        one = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[matrix.bits]
        words = (words.view(np.uint32) - np.uint32(one)).view(np.int32)
    tensors: dict[str, Stored] = {
        "qweight": pack_words(matrix.codes, matrix.bits).T,
        "qzeros": words,
        "scales": matrix.scales.T.astype(np.float16),
    }
    return {**tensors, "g_idx": matrix.groups} if has_groups else tensors


def awq_tensors(matrix: Codes, version: str = "gemm") -> dict[str, Stored]:
    """An AWQ module in one of the two packings that are read."""
    scales = matrix.scales.astype(np.float16)
    if version == "gemm":
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def interleaved(values: Array) -> Array:
            blocks = values.T.reshape(values.shape[1], -1, 8)
            return pack_words(blocks[:, :, order].reshape(values.shape[1], -1), 4)

        return {"qweight": interleaved(matrix.codes), "qzeros": interleaved(matrix.zeros), "scales": scales.T}
    size = matrix.codes.shape[1] // scales.shape[1]
    multiple = 1 if size >= 128 else 2 if size == 64 else 4
    columns = -(-scales.shape[1] // (8 * multiple)) * 8 * multiple
    padding = ((0, 0), (0, columns - scales.shape[1]))
    return {
        "qweight": pack_words(matrix.codes, 4),
        "qzeros": pack_words(np.pad(matrix.zeros, padding), 4),
        "scales": np.pad(scales, padding),
    }


def packed_tensors(matrix: Codes, *, is_symmetric: bool, has_groups: bool = False) -> dict[str, Stored]:
    """A compressed-tensors module of format pack-quantized, its scales in bfloat16."""
    tensors: dict[str, Stored] = {
        "weight_packed": pack_words(matrix.codes, matrix.bits),
        "weight_scale": bfloat16(matrix.scales),
        "weight_shape": np.array(matrix.codes.shape, np.int64),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(matrix.zeros.T, matrix.bits).T)
    return {**tensors, "weight_g_idx": matrix.groups} if has_groups else tensors


def packed_settings(bits: int, group_size: int, is_symmetric: bool) -> dict[str, Any]:
    """The quantization_config of such modules."""
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, **strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def in_module(module: str, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The same tensors under a module's name."""
    return {f"{module}.{leaf}": stored for leaf, stored in tensors.items()}
