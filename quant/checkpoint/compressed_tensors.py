"""Integer weights of compressed-tensors checkpoints, format "pack-quantized" (W4A16 and W8A16).

For R outputs, K inputs, b bits and G groups: weight_packed int32[R, ceil(K * b / 32)], natural order along inputs,
weight_scale [R, G], weight_shape [R, K]; asymmetric ones weight_zero_point int32[ceil(R * b / 32), G], packed along
outputs. Codes and zero points are stored plus 2^(b-1). weight_g_idx int32[K] is there for activation ordering by group.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint import groups
from localinfer.quant.checkpoint.folder import CheckpointFolder

LEAVES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

_FORMAT = "pack-quantized"
_WIDTHS = (4, 8)


class CompressedTensorsReader:
    """Reads the quantized modules of a compressed-tensors checkpoint.

    Raises: UnsupportedFormatError if its settings name a format, width or scheme that is not read.
    """

    leaves = LEAVES

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        schemes = settings.get("config_groups")
        if not isinstance(schemes, dict) or not schemes:
            raise CorruptFileError(
                f"quantization_config: config_groups is {schemes!r:.60}; wanted schemes. {groups.AGAIN}"
            )
        sparsity = settings.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise _unsupported("sparsity_config", sparsity, "dense weights")
        if settings.get("transform_config"):
            raise _unsupported(
                "transform_config", settings["transform_config"], "weights without rotations around them"
            )
        self._widths: set[int] = set()
        for name, scheme in schemes.items():
            self._widths.add(_width(name, scheme, settings.get("format")))

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""
        shape = self._folder.array(f"{module}.weight_shape")
        if shape.dtype.kind not in "iu" or shape.size != 2 or not (shape > 0).all() or (shape >= 1 << 31).any():
            raise CorruptFileError(
                f"{module}.weight_shape is {shape.tolist()!r:.60}; wanted rows and columns. {groups.AGAIN}"
            )
        rows, columns = shape.reshape(-1).tolist()
        return rows, columns

    def matrix(self, module: str) -> groups.GroupedMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other or the settings."""
        num_rows, num_columns = self.shape(module)
        words = groups.words_of(self._folder, f"{module}.weight_packed", 2)
        bits = next((bits for bits in sorted(self._widths) if -(-num_columns * bits // 32) == words.shape[1]), None)
        if bits is None or len(words) != num_rows:
            wanted = (num_rows, -(-num_columns * min(self._widths) // 32))
            raise groups.wrong_shape(f"{module}.weight_packed", words.shape, wanted)
        scales = groups.scales_of(self._folder, f"{module}.weight_scale")
        num_groups = scales.shape[1]
        if len(scales) != num_rows or num_columns % num_groups:
            raise groups.wrong_shape(f"{module}.weight_scale", scales.shape, (num_rows, num_groups), " of whole groups")
        regular = groups.even_groups(num_columns, num_groups, num_columns // num_groups)
        return groups.grouped_matrix(
            module,
            bits,
            scales,
            self._zeros(module, bits, num_rows, num_groups),
            groups.group_numbers(self._folder, f"{module}.weight_g_idx", regular),
            lambda rows: groups.unpack_words(words[groups.span_of(rows)], bits)[:, :num_columns],
        )

    def _zeros(self, module: str, bits: int, num_rows: int, num_groups: int) -> NDArray[np.integer[Any]]:
        name = f"{module}.weight_zero_point"
        if name not in self._folder.tensors:
            return np.full((num_rows, num_groups), 1 << (bits - 1), np.int16)
        words = groups.words_of(self._folder, name, 2)
        wanted = (-(-num_rows * bits // 32), num_groups)
        if words.shape != wanted:
            raise groups.wrong_shape(name, words.shape, wanted)
        return groups.unpack_words(words.T, bits).T[:num_rows]


def _width(name: str, scheme: object, whole_format: object) -> int:
    """Bits of one scheme's weights, after refusing what would need other arithmetic."""
    weights = scheme.get("weights") if isinstance(scheme, dict) else None
    if not isinstance(scheme, dict) or not isinstance(weights, dict):
        raise CorruptFileError(
            f"quantization_config: {name} is {scheme!r:.60}; wanted a scheme with weights. {groups.AGAIN}"
        )
    packing = scheme.get("format") or whole_format
    if packing != _FORMAT:
        raise _unsupported("format", packing, _FORMAT)
    if scheme.get("input_activations") is not None:
        raise _unsupported("input_activations", scheme["input_activations"], "weights quantized alone")
    bits = weights.get("num_bits")
    if weights.get("type", "int") != "int" or type(bits) is not int or bits not in _WIDTHS:
        found = f"{weights.get('type')} of {bits} bits"
        raise _unsupported("weights", found, "integers of 4 or 8 bits")
    if weights.get("strategy", "group") not in ("group", "channel"):
        raise _unsupported("strategy", weights.get("strategy"), "group and channel")
    return bits


def _unsupported(key: str, found: object, wanted: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"quantization_config: {key} is {found!r:.60}; this version reads {wanted}. Choose another copy of the model."
    )
