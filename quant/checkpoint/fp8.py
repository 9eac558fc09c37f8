"""FP8 checkpoints of three writers, which differ in the names of their settings and scales only.

`fp8` (DeepSeek-V3, arXiv 2412.19437, section 3.3, and Qwen's): weight [R, K], weight_scale_inv per block of
weight_block_size, or weight_scale per tensor. `fbgemm_fp8`: weight_scale [R, 1]. Both kinds of scale multiply. NVIDIA's
`modelopt`: FP8 with weight_scale per tensor, row or block; NVFP4 with bytes of two codes in weight, weight_scale E4M3
[R, K / 16] and weight_scale_2, which multiplies; MXFP8 and MXFP4 with powers of two in weight_scale. With AWQ
(arXiv 2306.00978) pre_quant_scale [K] multiplies the input, which the weight's columns can do as well.
AutoRound's `auto_round:fp8_static` and `auto_round:llm_compressor` are among these, and compressed-tensors' tensors.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.quant.checkpoint import fp4
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.module_reader import ModuleReader
from localinfer.quant.checkpoint.module_tensors import bytes_of, floats_of, scalar_of, wrong_shape
from localinfer.quant.checkpoint.scaled import EXPONENT_DTYPES, USUAL_BLOCK, block_of, is_scaled, scaled_matrix
from localinfer.quant.checkpoint.stored_matrix import DecodedMatrix, StoredMatrix

_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"),
    *("NVFP4_AWQ", "MXFP8", "MXFP4", "W4A8_MXFP4_FP8", "MIXED_PRECISION"),
)


class Fp8Reader(ModuleReader):
    """Reads modules whose `weight` holds bytes of floating point, and has scales beside it.

    Raises: UnsupportedFormatError if the settings name an algorithm that is not read, CorruptFileError if the size of
    blocks has no meaning.
    """

    leaves = ("weight", "weight_scale_inv", "weight_scale", "weight_scale_2", "pre_quant_scale")

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)
        algorithm = settings.get("quant_algo")
        if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
            raise UnsupportedFormatError(
                f"quantization_config: quant_algo is {algorithm!r:.40}; of modelopt's algorithms this version reads "
                f"{', '.join(_ALGORITHMS)}. Choose another copy of the model."
            )
        block = settings.get("weight_block_size")
        self._block = USUAL_BLOCK if block is None else block_of(block)

    def codes_leaf(self, module: str) -> str | None:
        """Return `weight` for a quantized module, None for one of plain numbers."""
        tensor = self._folder.tensors.get(f"{module}.weight")
        is_quantized = tensor is not None and (tensor.dtype == "U8" or is_scaled(self._folder, module))
        return "weight" if is_quantized else None

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""
        return self._stored_matrix(module).shape

    def matrix(self, module: str) -> StoredMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other."""
        matrix, name = self._stored_matrix(module), f"{module}.pre_quant_scale"
        if name not in self._folder.tensors:
            return matrix
        factors = floats_of(self._folder, name).reshape(-1)
        if factors.shape != matrix.shape[1:] or not np.isfinite(factors).all():
            raise wrong_shape(name, factors.shape, matrix.shape[1:], " finite numbers")
        found = matrix.dequantize_rows(np.arange(min(matrix.shape[0], 16))) * factors
        return DecodedMatrix(
            module,
            f"{matrix.description}, scaled columns",
            matrix.shape,
            lambda rows: matrix.dequantize_rows(rows) * factors,
            float(np.abs(found).max()),
        )

    def _stored_matrix(self, module: str) -> StoredMatrix:
        folder = self._folder
        if folder.tensor(f"{module}.weight").dtype != "U8":
            scale = "weight_scale_inv" if f"{module}.weight_scale_inv" in folder.tensors else "weight_scale"
            return scaled_matrix(folder, module, scale, block=self._block)
        data = bytes_of(folder, f"{module}.weight", ("U8",))
        scales = bytes_of(folder, f"{module}.weight_scale", (*EXPONENT_DTYPES, "F8_E4M3"))
        if folder.tensor(f"{module}.weight_scale").dtype != "F8_E4M3":
            return fp4.mx_matrix(module, data, scales)
        return fp4.nvfp4_matrix(module, data, scales, scalar_of(folder, f"{module}.weight_scale_2"))
