"""Matrices of GPTQ and AWQ: integers of a few bits in 32-bit words, with a scale and a zero point per group.

For K inputs, R outputs, b bits and G groups: qweight int32[K * b / 32, R], codes of consecutive inputs in a word,
lowest bits first; qzeros int32[G, R * b / 32], packed along outputs; scales [G, R]; g_idx int32[K], the group of each
input.

Three bits have 32 codes in three words, some of them in two.

Version 1 stores zero points less one, version 2 as they are, and files with the wrong label exist. Where all words are
those of a symmetric matrix, the words themselves tell; else the label does. Version 1 is undone on whole words: a zero
point of 0 borrowed from its neighbour when it was stored (of three bits, it became 7).

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
from localinfer.quant.checkpoint.module_patterns import ModulePattern
from localinfer.quant.checkpoint.module_reader import (
    AGAIN,
    ModuleReader,
    even_groups,
    group_numbers,
    scales_of,
    span_of,
    unpack_words,
    words_of,
    wrong_shape,
)

GPTQ_LEAVES = ("qweight", "qzeros", "scales", "g_idx")

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
_SYMMETRIC = {2: 0xAAAAAAAA, 4: 0x88888888, 8: 0x80808080}
_WIDTHS = (2, 3, 4, 8)
_MAX_PATTERNS = 1000
_FORMATS = {"gptq": 1, "gptq_v2": 2}


class GptqReader(ModuleReader):
    """Reads the quantized modules of a GPTQ checkpoint.

    Raises: UnsupportedFormatError if its settings name a packing or width that is not read.
    """

    leaves = GPTQ_LEAVES

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, settings)
        self._settings = settings
        label = settings.get("checkpoint_format") or "gptq"
        if settings.get("is_marlin_format") or not isinstance(label, str) or label not in _FORMATS:
            found = "marlin" if settings.get("is_marlin_format") else label
            raise UnsupportedFormatError(
                f"quantize_config: checkpoint_format is {found!r:.40}; this version reads {' and '.join(_FORMATS)}. "
                "Save the model in one of these, or choose another copy."
            )
        self._version = _FORMATS[label]
        self._overrides = _overrides(settings.get("dynamic"))

    def shape(self, module: str) -> tuple[int, int]:
        words, zeros = self._words(module)
        bits = self._bits(module, words, zeros)
        return words.shape[1], words.shape[0] * 32 // bits

    def matrix(self, module: str) -> GroupedMatrix:
        words, packed_zeros = self._words(module)
        bits = self._bits(module, words, packed_zeros)
        num_rows, num_columns = words.shape[1], words.shape[0] * 32 // bits
        scales = scales_of(self._folder, f"{module}.scales")
        if scales.shape != (len(packed_zeros), num_rows):
            raise wrong_shape(f"{module}.scales", scales.shape, (len(packed_zeros), num_rows))
        group_size = self._setting(module, "group_size", -1)
        size = num_columns if group_size in (-1, None) else group_size
        if type(size) is not int or size < 1 or -(-num_columns // size) != len(scales):
            raise CorruptFileError(
                f"{module}: {len(scales)} groups for {num_columns} columns do not fit group_size {group_size!r:.20}; "
                f"wanted one scale per group. {AGAIN}"
            )
        regular = even_groups(num_columns, len(scales), size)
        return grouped_matrix(
            module,
            bits,
            scales.T,
            self._true_zeros(packed_zeros, bits).T,
            group_numbers(self._folder, f"{module}.g_idx", regular),
            lambda rows: unpack_words(words[:, span_of(rows)].T, bits),
        )

    def _words(self, module: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        words, zeros = (words_of(self._folder, f"{module}.{leaf}", 2) for leaf in ("qweight", "qzeros"))
        return words, zeros

    def _bits(self, module: str, words: NDArray[np.int32], zeros: NDArray[np.int32]) -> int:
        bits = self._setting(module, "bits", 4)
        if type(bits) is not int or bits not in _WIDTHS:
            raise UnsupportedFormatError(
                f"{module} has {bits!r:.20} bits; this version reads GPTQ of 2, 3, 4 and 8. Choose another copy."
            )
        if bits == 3 and words.shape[0] % 3:
            raise wrong_shape(f"{module}.qweight", words.shape, (words.shape[0] // 3 * 3 + 3, words.shape[1]))
        if not zeros.size or zeros.shape[1] * 32 != words.shape[1] * bits:
            wanted = (zeros.shape[0] or 1, words.shape[1] * bits // 32)
            raise wrong_shape(f"{module}.qzeros", zeros.shape, wanted, f" for {bits} bits")
        return int(bits)

    def _setting(self, module: str, key: str, default: object) -> Any:
        """The setting of a module: that of the first pattern that fits its name, else the checkpoint's."""
        for pattern, changes in self._overrides:
            if pattern.matches(module):
                return changes.get(key, self._settings.get(key, default))
        return self._settings.get(key, default)

    def _true_zeros(self, words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
        """Zero points of the formula, uint8[groups, rows]."""
        if bits == 3:
            zeros = unpack_words(words, bits)
            first = int(zeros[0, 0])
            version = {4: 2, 3: 1}.get(first, self._version) if (zeros == first).all() else self._version
            return zeros + np.uint8(1) & np.uint8(7) if version == 1 else zeros
        unsigned = words.view(np.uint32)
        first = int(unsigned[0, 0])
        version = self._version
        if (unsigned == first).all():
            version = {_SYMMETRIC[bits]: 2, _SYMMETRIC[bits] - _ONES[bits]: 1}.get(first, version)
        return unpack_words((unsigned + np.uint32(_ONES[bits])).view(np.int32) if version == 1 else words, bits)


def _overrides(dynamic: object) -> list[tuple[ModulePattern, Mapping[str, Any]]]:
    """Patterns of module names and what differs there; a leading `-:` marks modules that are not quantized."""
    if not dynamic:
        return []
    if not isinstance(dynamic, dict) or len(dynamic) > _MAX_PATTERNS:
        raise CorruptFileError(
            f"quantize_config: dynamic is {dynamic!r:.60}; wanted at most {_MAX_PATTERNS} patterns and settings"
        )
    return [
        (ModulePattern(text.removeprefix("+:").removeprefix("-:")), changes if isinstance(changes, dict) else {})
        for text, changes in dynamic.items()
    ]


AWQ_LEAVES = ("qweight", "qzeros", "scales")

_NIBBLES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
_PER_WORD = 8


class AwqReader(ModuleReader):
    """Reads the quantized modules of an AWQ checkpoint.

    Raises: UnsupportedFormatError if its settings name a packing or width that is not read.
    """

    leaves = AWQ_LEAVES

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, settings)
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
        rows, columns = words_of(self._folder, f"{module}.qweight", 2).shape
        return (columns * _PER_WORD, rows) if self._version == "gemm" else (rows, columns * _PER_WORD)

    def matrix(self, module: str) -> GroupedMatrix:
        words = words_of(self._folder, f"{module}.qweight", 2)
        packed_zeros = words_of(self._folder, f"{module}.qzeros", 2)
        scales = scales_of(self._folder, f"{module}.scales")
        num_rows, num_columns = self.shape(module)
        size = num_columns if self._group_size == -1 else self._group_size
        if type(size) is not int or size < 1 or not num_columns or num_columns % size:
            raise CorruptFileError(f"{module}: {num_columns} columns do not split into groups of {size!r:.20}. {AGAIN}")
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
