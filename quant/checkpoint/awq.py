"""AWQ matrices (arXiv 2306.00978) in the two packings that checkpoints use, each of 4 bits.

GEMM, the usual one, for K inputs, R outputs and G groups: qweight int32[K, R / 8] packed along outputs, qzeros
int32[G, R / 8] alike, scales [G, R]; output 8p + j of word p lies in nibble 0 4 1 5 2 6 3 7 of j. GEMV: qweight
int32[R, K / 8] in natural order along inputs, qzeros int32[R, Z], scales [R, 8Z], of which the first G columns count.
Zero points are stored as they are. The scales of activations are already folded into the model's other weights.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import GroupedMatrix, grouped_matrix
from localinfer.quant.checkpoint.module_reader import ModuleReader
from localinfer.quant.checkpoint.module_tensors import (
    even_groups,
    scales_of,
    span_of,
    unpack_words,
    words_of,
    wrong_shape,
)

LEAVES = ("qweight", "qzeros", "scales")

_NIBBLES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
_PER_WORD = 8


class AwqReader(ModuleReader):
    """Reads the quantized modules of an AWQ checkpoint.

    Raises: UnsupportedFormatError if its settings name a packing or width that is not read.
    """

    leaves = LEAVES

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._version = str(settings.get("version") or "gemm").lower()
        if self._version not in ("gemm", "gemv"):
            raise UnsupportedFormatError(
                f"the AWQ version is {self._version!r:.40}, a layout made for one kind of GPU; this version reads gemm "
                "and gemv. Choose such a copy of the model."
            )
        bits = settings.get("bits", settings.get("w_bit", 4))
        if bits != 4:
            raise UnsupportedFormatError(f"AWQ of {bits!r:.20} bits; this version reads 4. Choose another copy.")
        self._group_size = settings.get("group_size", settings.get("q_group_size", 128))

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""
        rows, columns = words_of(self._folder, f"{module}.qweight", 2).shape
        return (columns * _PER_WORD, rows) if self._version == "gemm" else (rows, columns * _PER_WORD)

    def matrix(self, module: str) -> GroupedMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other or the settings."""
        words = words_of(self._folder, f"{module}.qweight", 2)
        packed_zeros = words_of(self._folder, f"{module}.qzeros", 2)
        scales = scales_of(self._folder, f"{module}.scales")
        num_rows, num_columns = self.shape(module)
        size = num_columns if self._group_size == -1 else self._group_size
        if type(size) is not int or size < 1 or not num_columns or num_columns % size:
            raise CorruptFileError(
                f"{module}: {num_columns} columns do not split into groups of {size!r:.20}. Download the checkpoint "
                "again, or another one"
            )
        num_groups = num_columns // size
        if self._version == "gemm":
            wanted = ((num_groups, num_rows), (num_groups, num_rows // _PER_WORD))
            zeros, scales_by_row = _outputs(packed_zeros, np.arange(packed_zeros.shape[1] * _PER_WORD)), scales.T
        else:
            padded = _padded_groups(num_groups, size)
            wanted = ((num_rows, padded * _PER_WORD), (num_rows, padded))
            zeros = unpack_words(packed_zeros, 4)[:, :num_groups]
            scales_by_row = scales[:, :num_groups]
        if scales.shape != wanted[0]:
            raise wrong_shape(f"{module}.scales", scales.shape, wanted[0], f" for groups of {size}")
        if packed_zeros.shape != wanted[1]:
            raise wrong_shape(f"{module}.qzeros", packed_zeros.shape, wanted[1], f" for groups of {size}")
        is_gemm = self._version == "gemm"
        return grouped_matrix(
            module,
            4,
            scales_by_row,
            zeros,
            even_groups(num_columns, num_groups, size),
            lambda rows: _outputs(words, rows) if is_gemm else unpack_words(words[span_of(rows)], 4),
        )


def _outputs(words: NDArray[np.int32], rows: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Codes of some outputs from words that hold eight outputs of one input each: uint8[rows, inputs]."""
    span = span_of(rows)
    if isinstance(span, slice) and span.start % _PER_WORD == span.stop % _PER_WORD == 0:
        chosen = np.ascontiguousarray(words[:, span.start // _PER_WORD : span.stop // _PER_WORD].T)
        data = chosen.view(np.uint8).reshape(*chosen.shape, 4)
        result = np.empty((len(chosen), _PER_WORD, chosen.shape[1]), np.uint8)
        for output, nibble in enumerate(_NIBBLES):
            byte = data[:, :, nibble // 2]
            result[:, output] = byte >> 4 if nibble % 2 else byte & 15
        return result.reshape(len(rows), -1)
    shifts = (4 * _NIBBLES[rows % _PER_WORD]).astype(np.uint32)
    codes: NDArray[np.uint32] = words.view(np.uint32)[:, rows // _PER_WORD] >> shifts & np.uint32(15)
    return np.ascontiguousarray(codes.T).astype(np.uint8)


def _padded_groups(num_groups: int, group_size: int) -> int:
    """Words of zero points per row in the GEMV packing, whose kernel reads several at a time for small groups."""
    multiple = 1 if group_size >= 128 else 2 if group_size == 64 else 4
    words = -(-num_groups // _PER_WORD)
    return -(-words // multiple) * multiple
