"""Ternary weights of BitNet b1.58 (arXiv 2402.17764): a matrix of -1, 0 and 1 with one factor for all of it.

Packed, the bytes of `weight` hold four rows each, which lie a quarter of the matrix apart, the first in the lowest
bits, as 0, 1 and 2; `weight_scale` is beside it. Of its linear classes, transformers' older one divides by that number
and its newer one multiplies by it. In "online" mode `weight` holds the numbers that training used: they are
divided by their mean magnitude and rounded when the model is loaded.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import UnsupportedFormatError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import grouped_matrix
from localinfer.quant.checkpoint.module_reader import (
    AGAIN,
    ModuleReader,
    StoredMatrix,
    floats_of,
    scalar_of,
    wrong_shape,
    wrong_type,
)
from localinfer.quant.formats.types import bfloat16_values

_ROWS_PER_BYTE = 4
_LEAST_MAGNITUDE = 1e-5
_HEADS = ("lm_head", "embed_tokens")


class BitNetReader(ModuleReader):
    """Reads the ternary modules of a BitNet checkpoint."""

    leaves = ("weight", "weight_scale")
    notices = ("activations are rounded in blocks of 32 here, row by row in the model's own library",)

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        """Raises: UnsupportedFormatError for models that norm what every linear layer reads."""
        super().__init__(folder, settings)
        if settings.get("use_rms_norm"):
            raise UnsupportedFormatError(
                "config.json: quantization_config.use_rms_norm is true; this version runs BitNet models without a norm "
                "in every linear layer. Choose another copy of the model."
            )
        self._multiplies = settings.get("linear_class") == "autobitlinear"
        self._is_online = self._multiplies and settings.get("quantization_mode") == "online"
        skipped = settings.get("modules_to_not_convert")
        self._skipped = tuple(str(name) for name in skipped) if isinstance(skipped, list) else ()
        self._factors: dict[str, float] = {}

    def codes_leaf(self, module: str) -> str | None:
        """Return `weight` for ternary modules: those in bytes, with a factor, or rounded when loaded."""
        tensor = self._folder.tensors.get(f"{module}.weight")
        if tensor is None or len(tensor.shape) != 2:
            return None
        if tensor.dtype == "U8" or f"{module}.weight_scale" in self._folder.tensors:
            return "weight"
        is_left = module.endswith(_HEADS) or any(
            module.startswith(name) or module.endswith(name) for name in self._skipped
        )
        return "weight" if self._is_online and not is_left else None

    def shape(self, module: str) -> tuple[int, int]:
        tensor = self._folder.tensor(f"{module}.weight")
        if len(tensor.shape) != 2:
            raise wrong_shape(tensor.name, tensor.shape, (0, 0), " of two dimensions")
        rows, columns = tensor.shape
        return (rows * _ROWS_PER_BYTE if tensor.dtype == "U8" else rows), columns

    def matrix(self, module: str) -> StoredMatrix:
        num_rows, num_columns = self.shape(module)
        name = f"{module}.weight"
        is_packed = self._folder.tensor(name).dtype == "U8"
        is_bfloat16 = self._folder.tensor(name).dtype == "BF16"
        factor = self._factor(module)
        values = self._folder.array(name)

        def unpacked(rows: NDArray[np.intp]) -> NDArray[np.uint8]:
            step = num_rows // _ROWS_PER_BYTE
            shifts = (2 * (rows // step)).astype(np.uint8)[:, None]
            return np.asarray(values[rows % step] >> shifts & 3, np.uint8)

        def rounded(rows: NDArray[np.intp]) -> NDArray[np.uint8]:
            found = bfloat16_values(values[rows]) if is_bfloat16 else values[rows]
            codes = np.clip(np.rint(found / np.float32(factor) if self._is_online else found), -1, 1)
            if not self._is_online and (codes != found).any():
                raise wrong_type(self._folder, name, "weights of -1, 0 and 1, with a weight_scale beside them")
            return np.asarray(codes + 1, np.uint8)

        if is_packed and (values & values >> 1 & 0b01010101).any():
            raise wrong_type(self._folder, name, "bytes of four codes of 0, 1 and 2")
        scales = np.full((num_rows, 1), factor, np.float32)
        groups = np.zeros(num_columns, np.int32)
        zeros = np.ones((num_rows, 1), np.int16)
        return grouped_matrix(module, 2, scales, zeros, groups, unpacked if is_packed else rounded)

    def _factor(self, module: str) -> float:
        """Factor of the ternary numbers of a module."""
        if module not in self._factors:
            name = f"{module}.weight_scale"
            if name in self._folder.tensors:
                stored = scalar_of(self._folder, name)
                if not np.isfinite(stored) or stored <= 0:
                    raise wrong_type(self._folder, name, f"one positive number; it is {stored}. {AGAIN}")
                found = stored if self._multiplies else 1.0 / stored
            elif self._is_online:
                values = floats_of(self._folder, f"{module}.weight")
                found = max(float(np.abs(values).mean(dtype=np.float64)), _LEAST_MAGNITUDE)
            else:
                raise wrong_type(self._folder, f"{module}.weight", "a weight_scale beside it")
            self._factors[module] = found
        return self._factors[module]
