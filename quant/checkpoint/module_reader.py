"""What the reader of each quantization method offers, and the tensors of checkpoints that no method of ours uses."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.stored_matrix import StoredMatrix

_ACTIVATION_LEAVES = frozenset(
    (
        *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"),
        *("output_scale", "output_zero_point", "act_scale", "input_scale_2"),
    )
)
_CACHE_LEAVES = frozenset(
    (
        *("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point", "prob_scale"),
        *("k_global_scale", "v_global_scale", "q_global_scale", "prob_output_scale", "kv_cache_scale"),
    )
)
_CACHE_SETTINGS = ("kv_cache_scheme", "kv_cache_quant_algo")
_PROJECTIONS_OF_THE_CACHE = ("k_proj", "v_proj", "qkv_proj")


class ModuleReader(ABC):
    """Reads the quantized modules of a checkpoint.

    leaves: names of the tensors that together are a module's weight; usually the first holds its codes. notices: what
    is to be said about the whole checkpoint.
    """

    leaves: tuple[str, ...]
    notices: Sequence[str] = ()

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and what of it the tensor is."""
        module, _, leaf = name.rpartition(".")
        return module, leaf

    def codes_leaf(self, module: str) -> str | None:
        """Return which of a module's tensors holds its codes, None for a module of plain numbers."""
        return self.leaves[0] if f"{module}.{self.leaves[0]}" in self._folder.tensors else None

    def is_unused(self, name: str) -> bool:
        """Whether a tensor changes nothing here; `notices` say so."""
        return False

    @abstractmethod
    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""

    @abstractmethod
    def matrix(self, module: str) -> StoredMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other or the settings."""


def left_aside(names: Iterable[str], settings: Mapping[str, Any] | None) -> tuple[set[str], list[str]]:
    """Return the tensors of a checkpoint that describe activations and a KV cache, and what is to be said about them.

    settings: how the checkpoint says it is quantized; without them it has no such tensors.

    Activations are rounded in blocks of 32 by scales of their own here, or not at all, and the KV cache has types of
    its own, so that none of these scales applies.
    """
    if settings is None:
        return set(), []
    kinds = {name: kind for name in names if (kind := _kind(name)) is not None}
    counts = Counter(kinds.values())
    notes = []
    if counts["activations"]:
        notes.append(
            f"{counts['activations']} scales of activations are left aside: activations run in this program's own "
            "arithmetic, int8 in blocks of 32 or float32"
        )
    wants_cache = any(settings.get(key) for key in _CACHE_SETTINGS)
    if counts["cache"] or wants_cache:
        found = f"{counts['cache']} scales" if counts["cache"] else "settings"
        notes.append(f"{found} of a quantized KV cache are left aside: the cache is stored as the option kv_type says")
    return set(kinds), notes


def _kind(name: str) -> str | None:
    module, _, leaf = name.rpartition(".")
    is_of_the_cache = leaf.startswith("output_") and module.endswith(_PROJECTIONS_OF_THE_CACHE)
    if leaf in _CACHE_LEAVES or is_of_the_cache:
        return "cache"
    return "activations" if leaf in _ACTIVATION_LEAVES else None
