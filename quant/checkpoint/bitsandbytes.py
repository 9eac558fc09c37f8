"""Weights of bitsandbytes checkpoints: NF4 and FP4 (QLoRA, arXiv 2305.14314), and int8 (LLM.int8(), arXiv 2208.07339).

Four bits: `weight` holds the codes of the flattened matrix, two to a byte, the first in the upper half. Beside it lie
weight.quant_map float32[16], what a code stands for; weight.absmax, the scale of each block of codes; and
weight.quant_state.bitsandbytes__nf4 (or fp4), JSON with the matrix's shape and the size of blocks. With double
quantization absmax is uint8, codes of weight.nested_quant_map float32[256], scaled per block by weight.nested_absmax,
plus `nested_offset`. Int8: `weight` int8[R, K] and SCB float32[R], 127 times the scale of each row.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.groups import grouped_matrix
from localinfer.quant.checkpoint.module_reader import (
    AGAIN,
    DecodedMatrix,
    ModuleReader,
    StoredMatrix,
    bytes_of,
    floats_of,
    span_of,
    wrong_shape,
    wrong_type,
)
from localinfer.types import FloatArray

_STATE = "quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *(f"{_STATE}{kind}" for kind in _KINDS))
_MAX_STATE_BYTES = 1 << 16


class BitsAndBytesReader(ModuleReader):
    """Reads the quantized modules of a bitsandbytes checkpoint."""

    leaves = ("weight", "SCB", "weight_format")

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and what of it the tensor is: `weight` for all that describes its codes."""
        module, separator, part = name.partition(".weight.")
        return (module, "weight") if separator and part in _PARTS else super().split_name(name)

    def codes_leaf(self, module: str) -> str | None:
        """Return `weight` for a quantized module, None for one of plain numbers."""
        found = [f"{module}.SCB", *(f"{module}.weight.{_STATE}{kind}" for kind in _KINDS)]
        return "weight" if any(name in self._folder.tensors for name in found) else None

    def matrix(self, module: str) -> StoredMatrix:
        if f"{module}.SCB" in self._folder.tensors:
            return self._int8(module)
        kind = next(kind for kind in _KINDS if f"{module}.weight.{_STATE}{kind}" in self._folder.tensors)
        state = self._state(f"{module}.weight.{_STATE}{kind}")
        num_rows, num_columns = state["shape"]
        size = state["blocksize"]
        weights = num_rows * num_columns
        data = self._folder.tensor_bytes(f"{module}.weight")
        if num_columns % 2 or 2 * data.size != weights:
            raise wrong_shape(
                f"{module}.weight", (data.size,), (weights // 2,), f" bytes for {num_rows} x {num_columns}"
            )
        levels = floats_of(self._folder, f"{module}.weight.quant_map").reshape(-1)
        if levels.size != 16 or not np.isfinite(levels).all():
            raise wrong_shape(f"{module}.weight.quant_map", levels.shape, (16,), " of finite numbers")
        scales = self._scales(f"{module}.weight", state, -(-weights // size))

        def read(rows: NDArray[np.intp]) -> FloatArray:
            chosen = data.reshape(num_rows, -1)[span_of(rows)]
            codes = np.empty((*chosen.shape, 2), np.uint8)
            np.right_shift(chosen, 4, out=codes[..., 0])
            np.bitwise_and(chosen, 15, out=codes[..., 1])
            blocks = (rows[:, None] * num_columns + np.arange(num_columns)) // size
            values: FloatArray = levels[codes.reshape(len(rows), -1)] * scales[blocks]
            return values

        reach = float(np.abs(levels).max() * np.abs(scales).max())
        return DecodedMatrix(module, f"{kind.upper()}, blocks of {size}", (num_rows, num_columns), read, reach)

    def _state(self, name: str) -> dict[str, Any]:
        raw = self._folder.tensor_bytes(name)
        try:
            state = json.loads(raw[:_MAX_STATE_BYTES].tobytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"{name} is not sound JSON ({str(error)[:100]}). {AGAIN}") from error
        shape, size = (state.get("shape"), state.get("blocksize")) if isinstance(state, dict) else (None, None)
        is_shape = (
            isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
        )
        if not is_shape or type(size) is not int or not 0 < size <= 1 << 16:
            raise CorruptFileError(
                f"{name} is {state!r:.80}; wanted a shape of rows and columns, and a blocksize. {AGAIN}"
            )
        return dict(state)

    def _scales(self, name: str, state: Mapping[str, Any], num_blocks: int) -> FloatArray:
        """float32[blocks], the scale of each block of codes."""
        if self._folder.tensor(f"{name}.absmax").dtype != "U8":
            scales = floats_of(self._folder, f"{name}.absmax").reshape(-1)
        else:
            codes = self._folder.tensor_bytes(f"{name}.absmax")
            levels = floats_of(self._folder, f"{name}.nested_quant_map").reshape(-1)
            outer = floats_of(self._folder, f"{name}.nested_absmax").reshape(-1)
            size, offset = state.get("nested_blocksize"), state.get("nested_offset")
            if type(size) is not int or size < 1 or not isinstance(offset, int | float) or not math.isfinite(offset):
                raise CorruptFileError(
                    f"{name}: nested_blocksize is {size!r:.20}, nested_offset {offset!r:.20}; wanted numbers. {AGAIN}"
                )
            if levels.size != 256 or outer.size != -(-codes.size // size):
                found = (levels.size, outer.size)
                raise wrong_shape(f"{name}.absmax", found, (256, -(-codes.size // size)), " for double quantization")
            inner: FloatArray = levels[codes]
            scales = inner * outer[np.arange(codes.size) // size] + np.float32(offset)
        if scales.size != num_blocks:
            raise wrong_shape(f"{name}.absmax", scales.shape, (num_blocks,))
        if not np.isfinite(scales).all():
            raise CorruptFileError(f"{name}.absmax: a scale is infinite or NaN. {AGAIN}")
        return scales

    def _int8(self, module: str) -> StoredMatrix:
        data = bytes_of(self._folder, f"{module}.weight", ("I8",))
        name = f"{module}.weight_format"
        if name in self._folder.tensors and self._folder.tensor_bytes(name).any():
            raise UnsupportedFormatError(
                f"{name} is not 0: its rows lie in tiles made for one kind of GPU; this version reads plain rows. "
                "Choose another copy."
            )
        scales = floats_of(self._folder, f"{module}.SCB").reshape(-1, 1) / np.float32(127)
        if self._folder.tensor(f"{module}.SCB").dtype != "F32":
            raise wrong_type(self._folder, f"{module}.SCB", "F32")
        if len(scales) != len(data):
            raise wrong_shape(f"{module}.SCB", scales.shape, (len(data),))
        return grouped_matrix(
            module,
            8,
            scales,
            np.full(scales.shape, 128, np.int16),
            np.zeros(data.shape[1], np.int32),
            lambda rows: data[span_of(rows)] ^ np.uint8(128),
        )
