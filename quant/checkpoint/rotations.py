"""Rotations that a compressed-tensors checkpoint leaves to the running model (its `transform_config`).

SpinQuant (arXiv 2405.16406) and QuIP (arXiv 2307.13304) multiply weights by orthogonal matrices. Most are undone by a
neighbouring weight, and are in the stored numbers already (`weight_input`, `weight_output`). The others are for the
running model: x V before a module (`input`: SpinQuant's R4), y U after it (`output`). A product with a rotated input
is also one with another weight, (x V) W^T = x (W V^T)^T, so it is the weight that is rotated back here, when it is
read: no step is added to the model, and the weight is rounded again, to a type with room to spare. `q_attn` and
`k_cache` (R3) rotate queries and keys alike, which changes no score: they serve a quantized KV cache only.

A matrix may be stored beside a module, NAME_LOCATION.weight, not yet divided by the square root of its size; that of
type `hadamard` otherwise is Sylvester's. One of a smaller size than the module is repeated along the diagonal.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.module_patterns import ModulePattern
from localinfer.quant.checkpoint.module_reader import DecodedMatrix, StoredMatrix
from localinfer.quant.checkpoint.module_tensors import AGAIN, scales_of
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

    Raises: UnsupportedFormatError for a type or place of rotation that is not known, CorruptFileError for settings
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
        """Whether a tensor is a rotation of queries or keys."""
        return self._parts_of_the_cache.fullmatch(tensor) is not None

    def notices(self) -> list[str]:
        """Say what is done about rotations."""
        places = sorted({f"{one.name} ({one.location})" for one in self._online})
        notes = [f"the rotations {', '.join(places)} are folded into the weights they belong to"] if places else []
        if self._serves_the_cache:
            notes.append(
                "a rotation of queries and keys is left aside: it changes no score, and serves a quantized KV cache of "
                "another kind"
            )
        return notes

    def apply_to(self, module: str) -> bool:
        """Whether a module has rotations that are not in the stored numbers."""
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
    """Whether a module is one of those named: by `re:` and a pattern, by its name, or by its class."""
    return any(
        ModulePattern(target.removeprefix("re:")).matches(module)
        if target.startswith("re:")
        else target in (module, "Linear") or module.endswith(f".{target}")
        for target in targets
    )
