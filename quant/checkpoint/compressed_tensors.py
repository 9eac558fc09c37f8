"""Weights of compressed-tensors checkpoints, in the formats that its version 0.20 and those before it write.

| format | tensors of a module, for R outputs, K inputs, b bits, G groups |
|---|---|
| pack-quantized | weight_packed int32[R, ceil(K * b / 32)], weight_scale [R, G], weight_shape |
| int-quantized, float-quantized, naive-quantized | weight int8 or FP8 [R, K], weight_scale; weight_zero_point |
| mxfp8-quantized | weight FP8 [R, K], weight_scale uint8[R, K / 32] |
| mxfp4-pack-quantized, mxfp6-pack-quantized | weight_packed uint8[R, K * b / 8], weight_scale uint8[R, K / 32] |
| nvfp4-pack-quantized | weight_packed uint8[R, K / 2], weight_scale E4M3 [R, K / 16], weight_global_scale |

Asymmetric ones have weight_zero_point; activation ordering by group has weight_g_idx int32[K].
Integer codes are packed in natural order along inputs, zero points int32[ceil(R * b / 32), G] along outputs, both plus
2^(b-1). Codes of 3, 5, 6 and 7 bits run on from word to word; older versions put 32 // b whole ones into each.
Several schemes may be in one folder: a module's tensors say which it has. Scales of activations are not used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint import fp4
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.fp8 import EXPONENT_DTYPES, USUAL_BLOCK, block_of, is_scaled, scaled_matrix
from localinfer.quant.checkpoint.groups import GroupedMatrix, grouped_matrix
from localinfer.quant.checkpoint.module_reader import DecodedMatrix, ModuleReader, StoredMatrix
from localinfer.quant.checkpoint.module_tensors import (
    AGAIN,
    bytes_of,
    even_groups,
    group_numbers,
    scalar_of,
    scales_of,
    span_of,
    unpack_padded_words,
    unpack_words,
    words_of,
    wrong_shape,
)
from localinfer.quant.checkpoint.rotations import Rotations

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("mxfp4-pack-quantized", "mxfp6-pack-quantized", "nvfp4-pack-quantized", "dense", "mixed-precision"),
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_INTEGER_WIDTHS, _FLOAT_WIDTHS = (2, 3, 4, 5, 6, 7, 8), (4, 6, 8)


class CompressedTensorsReader(ModuleReader):
    """Reads the quantized modules of a compressed-tensors checkpoint.

    Raises: UnsupportedFormatError if its settings name a format, width or scheme that is not read.
    """

    leaves = (
        *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        "weight_global_scale",
    )

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)
        schemes = settings.get("config_groups")
        if not isinstance(schemes, dict) or not (schemes or settings.get("kv_cache_scheme")):
            raise CorruptFileError(f"quantization_config: config_groups is {schemes!r:.60}; wanted schemes. {AGAIN}")
        sparsity = settings.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise _unsupported("sparsity_config", sparsity, "dense weights")
        self._integer_widths: set[int] = set()
        self._group_sizes: set[int] = set()
        self._block = USUAL_BLOCK
        transforms = settings.get("transform_config")
        self._rotations = Rotations(folder, transforms) if transforms else None
        if self._rotations is not None:
            self.notices = self._rotations.notices()
        for name, scheme in schemes.items():
            self._read_scheme(name, scheme, settings.get("format"))

    def codes_leaf(self, module: str) -> str | None:
        """Return which of a module's tensors holds its codes, None for a module of plain numbers."""
        if f"{module}.weight_packed" in self._folder.tensors:
            return "weight_packed"
        is_rotated = self._rotations is not None and self._rotations.apply_to(module)
        return "weight" if is_rotated or is_scaled(self._folder, module) else None

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and what of it the tensor is; a rotation belongs to its module's weight."""
        module = None if self._rotations is None else self._rotations.module_of(name)
        return super().split_name(name) if module is None else (module, "weight")

    def is_unused(self, name: str) -> bool:
        """Whether a tensor is a rotation of a quantized KV cache."""
        return self._rotations is not None and self._rotations.is_of_the_cache(name)

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""
        packed = self._folder.tensors.get(f"{module}.weight_packed")
        if packed is None or packed.dtype == "U8":
            return self._stored_matrix(module).shape
        shape = self._folder.array(f"{module}.weight_shape")
        if shape.dtype.kind not in "iu" or shape.size != 2 or not (shape > 0).all() or (shape >= 1 << 31).any():
            raise CorruptFileError(f"{module}.weight_shape is {shape.tolist()!r:.60}; wanted rows and columns. {AGAIN}")
        rows, columns = shape.reshape(-1).tolist()
        return rows, columns

    def matrix(self, module: str) -> StoredMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other or the settings."""
        matrix = self._stored_matrix(module)
        if self._rotations is None:
            return matrix
        return self._rotations.folded(module, matrix, f"{module}.bias" in self._folder.tensors)

    def _stored_matrix(self, module: str) -> StoredMatrix:
        packed = self._folder.tensors.get(f"{module}.weight_packed")
        if packed is None and not is_scaled(self._folder, module):
            values = scales_of(self._folder, f"{module}.weight")
            return DecodedMatrix(
                module, "plain numbers", (values.shape[0], values.shape[1]), lambda rows: values[rows], 0.0
            )
        if packed is None:
            bits = 8 if 8 in self._integer_widths else max(self._integer_widths, default=8)
            return scaled_matrix(
                self._folder,
                module,
                "weight_scale",
                integer_bits=bits,
                group_sizes=self._group_sizes,
                block=self._block,
            )
        return self._packed_floats(module) if packed.dtype == "U8" else self._packed_integers(module)

    def _read_scheme(self, name: str, scheme: object, whole_format: object) -> None:
        """Note one scheme's widths and sizes. Raises: UnsupportedFormatError for what would need other arithmetic."""
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if not isinstance(scheme, dict) or not isinstance(weights, dict):
            raise CorruptFileError(
                f"quantization_config: {name} is {scheme!r:.60}; wanted a scheme with weights. {AGAIN}"
            )
        packing = scheme.get("format") or whole_format
        if packing not in _FORMATS:
            raise _unsupported("format", packing, ", ".join(_FORMATS))
        kind, bits = weights.get("type", "int"), weights.get("num_bits")
        widths = {"int": _INTEGER_WIDTHS, "float": _FLOAT_WIDTHS}.get(kind if isinstance(kind, str) else "", ())
        if type(bits) is not int or bits not in widths:
            raise _unsupported("weights", f"{kind} of {bits} bits", "int of 2 to 8 bits, and float of 4, 6 or 8")
        if weights.get("strategy", "group") not in _STRATEGIES:
            raise _unsupported("strategy", weights.get("strategy"), ", ".join(_STRATEGIES))
        if kind == "int":
            self._integer_widths.add(bits)
        size, block = weights.get("group_size"), weights.get("block_structure")
        if type(size) is int and size > 0:
            self._group_sizes.add(size)
        if block is not None:
            self._block = block_of(block)

    def _packed_integers(self, module: str) -> GroupedMatrix:
        num_rows, num_columns = self.shape(module)
        words = words_of(self._folder, f"{module}.weight_packed", 2)
        widths = sorted(self._integer_widths) or [4]
        packings = [(bits, packing) for packing in _PACKINGS for bits in widths]
        is_right = (packing.num_words(num_columns, bits) == words.shape[1] for bits, packing in packings)
        bits, packing = next((one for one, is_it in zip(packings, is_right, strict=True) if is_it), (0, _PACKINGS[0]))
        if not bits or len(words) != num_rows:
            wanted = (num_rows, _PACKINGS[0].num_words(num_columns, widths[0]))
            raise wrong_shape(f"{module}.weight_packed", words.shape, wanted)
        scales = scales_of(self._folder, f"{module}.weight_scale")
        num_groups = scales.shape[1]
        if len(scales) != num_rows or num_columns % num_groups:
            raise wrong_shape(f"{module}.weight_scale", scales.shape, (num_rows, num_groups), " of whole groups")
        regular = even_groups(num_columns, num_groups, num_columns // num_groups)
        return grouped_matrix(
            module,
            bits,
            scales,
            self._zeros(module, bits, packing, num_rows, num_groups),
            group_numbers(self._folder, f"{module}.weight_g_idx", regular),
            lambda rows: packing.unpack(words[span_of(rows)], bits)[:, :num_columns],
        )

    def _zeros(
        self, module: str, bits: int, packing: "_Packing", num_rows: int, num_groups: int
    ) -> NDArray[np.integer[Any]]:
        name = f"{module}.weight_zero_point"
        if name not in self._folder.tensors:
            return np.full((num_rows, num_groups), 1 << (bits - 1), np.int16)
        words = words_of(self._folder, name, 2)
        wanted = (packing.num_words(num_rows, bits), num_groups)
        if words.shape != wanted:
            raise wrong_shape(name, words.shape, wanted)
        return packing.unpack(words.T, bits).T[:num_rows]

    def _packed_floats(self, module: str) -> StoredMatrix:
        name, scale_name = f"{module}.weight_packed", f"{module}.weight_scale"
        data = bytes_of(self._folder, name, ("U8",))
        scales = bytes_of(self._folder, scale_name, (*EXPONENT_DTYPES, "F8_E4M3"))
        if self._folder.tensor(scale_name).dtype == "F8_E4M3":
            divisor_name = f"{module}.weight_global_scale"
            factor = fp4.nvfp4_factor(scalar_of(self._folder, divisor_name), divisor_name)
            return fp4.nvfp4_matrix(module, data, scales, factor)
        return fp4.mx_matrix(module, data, scales)


@dataclass(frozen=True)
class _Packing:
    """How codes lie in words. num_words: of so many codes of so many bits; unpack: words [n, m] to codes [n, k]."""

    num_words: Callable[[int, int], int]
    unpack: Callable[[NDArray[np.int32], int], NDArray[np.uint8]]


_PACKINGS = (
    _Packing(lambda count, bits: -(-count * bits // 32), unpack_words),
    _Packing(lambda count, bits: -(-count // (32 // bits)), unpack_padded_words),
)
"""Codes that run on from word to word, and whole codes in every word."""


def _unsupported(key: str, found: object, wanted: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"quantization_config: {key} is {found!r:.60}; this version reads {wanted}. Choose another copy of the model."
    )
