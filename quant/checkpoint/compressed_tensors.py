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
Several schemes may be in one folder: a module's tensors tell its scheme. Scales of activations are not used.

Rotations are in `transform_config`. SpinQuant (arXiv 2405.16406) and QuIP (arXiv 2307.13304) multiply weights by
orthogonal matrices. Most are undone by a neighbouring weight, and are in the stored numbers already (`weight_input`,
`weight_output`). The others are left to the running model: x V before a module (`input`: SpinQuant's R4), y U after it
(`output`). A product with a rotated input is also one with another weight, (x V) W^T = x (W V^T)^T, so it is the weight
that is rotated back here, when it is read: no step is added to the model, and the weight is rounded again, to a type
with room to spare. `q_attn` and `k_cache` (R3) rotate queries and keys alike, which changes no score: they serve a
quantized KV cache only.

A matrix may be stored beside a module, NAME_LOCATION.weight, not yet divided by the square root of its size; that of
type `hadamard` otherwise is Sylvester's. One of a smaller size than the module is repeated along the diagonal.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.float_formats import (
    EXPONENT_DTYPES,
    USUAL_BLOCK,
    block_of,
    is_scaled,
    mx_matrix,
    nvfp4_factor,
    nvfp4_matrix,
    scaled_matrix,
)
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import GroupedMatrix, grouped_matrix
from localinfer.quant.checkpoint.module_patterns import ModulePattern
from localinfer.quant.checkpoint.module_reader import (
    AGAIN,
    DecodedMatrix,
    ModuleReader,
    StoredMatrix,
    bytes_of,
    even_groups,
    group_numbers,
    scalar_of,
    scales_of,
    sizes_of,
    span_of,
    unpack_padded_words,
    unpack_words,
    words_of,
    wrong_shape,
)
from localinfer.types import FloatArray

_OFFLINE = ("weight_input", "weight_output")
_OF_THE_CACHE = ("q_attn", "k_cache")
_LOCATIONS = ("input", "output", *_OFFLINE, *_OF_THE_CACHE)
_KINDS = ("hadamard", "random-hadamard")


@dataclass(frozen=True)
class _Rotation:
    """One use of a matrix at some modules; size: 0 for that of the module."""

    name: str
    kind: str
    location: str
    targets: tuple[str, ...]
    ignored: tuple[str, ...]
    is_inverse: bool
    size: int

    def applies_to(self, module: str) -> bool:
        return _is_any(module, self.targets) and not _is_any(module, self.ignored)


class Rotations:
    """The rotations of a checkpoint, from its `transform_config`.

    Raises: UnsupportedFormatError for a type or location of rotation that is not known, CorruptFileError for settings
        without meaning.
    """

    def __init__(self, folder: CheckpointFolder, settings: object) -> None:
        self._folder = folder
        groups = settings.get("config_groups") if isinstance(settings, dict) else None
        if not isinstance(groups, dict):
            raise CorruptFileError(f"transform_config is {settings!r:.60}; wanted groups of rotations. {AGAIN}")
        found = [one for name, group in groups.items() for one in _rotations(name, group)]
        self._online = [one for one in found if one.location in ("input", "output")]
        of_the_cache = sorted(one.location for one in found if one.location in _OF_THE_CACHE)
        if of_the_cache and of_the_cache.count("q_attn") != of_the_cache.count("k_cache"):
            raise UnsupportedFormatError(
                f"transform_config rotates {' and '.join(of_the_cache)}; wanted queries and keys both, so that no "
                "score changes. Choose another copy of the model."
            )
        self._serves_the_cache = bool(of_the_cache)
        self._parts = _tensors_of(one for one in found if one.location not in _OF_THE_CACHE)
        self._parts_of_the_cache = _tensors_of(one for one in found if one.location in _OF_THE_CACHE)

    def module_of(self, tensor: str) -> str | None:
        """Return the module that a tensor is a rotation of; None for other tensors."""
        found = self._parts.fullmatch(tensor)
        return None if found is None else found[1]

    def is_of_the_cache(self, tensor: str) -> bool:
        """True if a tensor is a rotation of queries or keys."""
        return self._parts_of_the_cache.fullmatch(tensor) is not None

    def notices(self) -> list[str]:
        """Describe the treatment of rotations."""
        places = sorted({f"{one.name} ({one.location})" for one in self._online})
        notes = [f"the rotations {', '.join(places)} are folded into the weights they belong to"] if places else []
        if self._serves_the_cache:
            notes.append(
                "a rotation of queries and keys is left aside: it changes no score, and serves a quantized KV cache of "
                "another kind"
            )
        return notes

    def apply_to(self, module: str) -> bool:
        """True if a module has rotations that are not in the stored numbers."""
        return any(one.applies_to(module) for one in self._online)

    def folded(self, module: str, matrix: StoredMatrix, has_bias: bool) -> StoredMatrix:
        """Return the weight with which a module gives the same result without its rotations.

        Raises: UnsupportedFormatError if it has a bias that is rotated too; CorruptFileError if a matrix does not fit.
        """
        for rotation in (one for one in self._online if one.applies_to(module)):
            if rotation.location == "output" and has_bias:
                raise UnsupportedFormatError(
                    f"{module} has a bias, and a rotation after it ({rotation.name}); this version reads rotated "
                    "outputs without a bias. Choose another copy of the model."
                )
            whole = matrix.shape[rotation.location == "input"]
            size = rotation.size or whole
            if whole % size:
                raise CorruptFileError(f"{module}: {whole} elements do not split into rotations of {size}. {AGAIN}")
            matrix = _fold(matrix, rotation, self._matrix(rotation, module, size), size)
        return matrix

    def _matrix(self, rotation: _Rotation, module: str, size: int) -> FloatArray | None:
        """float32[size, size] of a rotation, orthogonal; None for Sylvester's."""
        leaf = f"{rotation.name}_{rotation.location}.weight"
        shared = (name for name in self._folder.tensors if name.endswith(f".{leaf}"))
        name = next((name for name in (f"{module}.{leaf}", *shared) if self._is_square(name, size)), None)
        is_sylvester = rotation.kind == "hadamard" and size & (size - 1) == 0
        if name is None and is_sylvester:
            return None
        if name is None:
            raise CorruptFileError(f"{module}.{leaf} is missing, {size} x {size}; wanted the rotation itself. {AGAIN}")
        values = scales_of(self._folder, name)
        if is_sylvester and np.array_equal(values, _sylvester(size)):
            return None
        scaled: FloatArray = values / np.float32(math.sqrt(size))
        if not np.allclose(scaled @ scaled.T, np.eye(size), atol=1e-2):
            raise CorruptFileError(f"{name}: its rows are not orthogonal and of length {math.sqrt(size):.4g}. {AGAIN}")
        return scaled.T if rotation.is_inverse else scaled

    def _is_square(self, name: str, size: int) -> bool:
        tensor = self._folder.tensors.get(name)
        return tensor is not None and tensor.shape == (size, size)


def _fold(matrix: StoredMatrix, rotation: _Rotation, values: FloatArray | None, size: int) -> DecodedMatrix:
    """W V^T in blocks of columns for x V before the product, U^T W in blocks of rows for y U after it."""
    num_rows, num_columns = matrix.shape

    def before(rows: NDArray[np.intp]) -> FloatArray:
        blocks = matrix.dequantize_rows(rows).reshape(-1, size)
        return (_hadamard(blocks) if values is None else blocks @ values.T).reshape(len(rows), num_columns)

    def after(rows: NDArray[np.intp]) -> FloatArray:
        found = np.empty((len(rows), num_columns), np.float32)
        for block in np.unique(rows // size):
            columns = matrix.dequantize_rows(np.arange(block * size, (block + 1) * size)).T
            own = rows // size == block
            rotated = _hadamard(columns) if values is None else columns @ values
            found[own] = rotated[:, rows[own] % size].T
        return found

    read = before if rotation.location == "input" else after
    # Plain numbers stay as wide as they are.
    is_plain = isinstance(matrix, DecodedMatrix) and not matrix.reach
    reach = 0.0 if is_plain else float(np.abs(read(np.arange(min(num_rows, 16)))).max())
    description = f"{matrix.description}, rotated ({rotation.name})"
    return DecodedMatrix(matrix.name, description, matrix.shape, read, reach)


def _hadamard(rows: FloatArray) -> FloatArray:
    """Return each row of float32[n, size] times Sylvester's matrix over the square root of its size."""
    size = rows.shape[1]
    result = np.array(rows, np.float32)
    half = 1
    while half < size:
        pairs = result.reshape(-1, 2, half)
        result = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return result.reshape(-1, size) / np.float32(math.sqrt(size))


def _sylvester(size: int) -> FloatArray:
    """float32[size, size] of ones and minus ones: Sylvester's construction, sizes powers of two."""
    numbers = np.arange(size)
    shared = numbers[:, None] & numbers
    parity = np.zeros_like(shared)
    while shared.any():
        parity ^= shared & 1
        shared >>= 1
    return (1 - 2 * parity).astype(np.float32)


def _rotations(name: str, group: object) -> Iterable[_Rotation]:
    if not isinstance(group, dict) or group.get("type") not in _KINDS:
        kind = group.get("type") if isinstance(group, dict) else group
        raise UnsupportedFormatError(
            f"transform_config: {name} is of type {kind!r:.40}; this version reads {', '.join(_KINDS)}. Choose another "
            "copy of the model."
        )
    size = group.get("head_dim") or 0
    uses = group.get("apply") or []
    if type(size) is not int or size < 0 or not isinstance(uses, list):
        raise CorruptFileError(f"transform_config: {name} has head_dim {size!r:.20}; wanted a size. {AGAIN}")
    for use in uses:
        location = use.get("location") if isinstance(use, dict) else use
        if not isinstance(use, dict) or location not in _LOCATIONS:
            raise UnsupportedFormatError(
                f"transform_config: {name} applies at {location!r:.40}; this version reads {', '.join(_LOCATIONS)}. "
                "Choose another copy of the model."
            )
        if group.get("randomize") and location not in _OFFLINE:
            raise UnsupportedFormatError(
                f"transform_config: {name} is permuted at random (randomize); this version reads one matrix per "
                "rotation. Choose another copy of the model."
            )
        yield _Rotation(
            name=name,
            kind=group["type"],
            location=location,
            targets=_names(use, "targets"),
            ignored=_names(use, "ignore"),
            is_inverse=bool(use.get("inverse")),
            size=size,
        )


def _tensors_of(rotations: Iterable[_Rotation]) -> re.Pattern[str]:
    """A pattern of the tensors of some rotations, whose first group is the module."""
    names = sorted({re.escape(f"{one.name}_{one.location}") for one in rotations})
    return re.compile(rf"(.+)\.(?:{'|'.join(names)})\.(?:weight|perm)") if names else re.compile(r"(?!)")


def _names(use: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = use.get(key) or []
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise CorruptFileError(f"transform_config: {key} is {found!r:.60}; wanted names of modules. {AGAIN}")
    return tuple(found)


def _is_any(module: str, targets: tuple[str, ...]) -> bool:
    """True if a module is one of those named: by `re:` and a pattern, by its name, or by its class."""
    return any(
        ModulePattern(target.removeprefix("re:")).matches(module)
        if target.startswith("re:")
        else target in (module, "Linear") or module.endswith(f".{target}")
        for target in targets
    )


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
        super().__init__(folder, settings)
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
        """True if a tensor is a rotation of a quantized KV cache."""
        return self._rotations is not None and self._rotations.is_of_the_cache(name)

    def shape(self, module: str) -> tuple[int, int]:
        packed = self._folder.tensors.get(f"{module}.weight_packed")
        if packed is None or packed.dtype == "U8":
            return self._stored_matrix(module).shape
        return sizes_of(self._folder, f"{module}.weight_shape")

    def matrix(self, module: str) -> StoredMatrix:
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
            factor = nvfp4_factor(scalar_of(self._folder, divisor_name), divisor_name)
            return nvfp4_matrix(module, data, scales, factor)
        return mx_matrix(module, data, scales)


@dataclass(frozen=True)
class _Packing:
    """Packing of codes in words. num_words: of so many codes of so many bits; unpack: words [n, m] to codes [n, k]."""

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
