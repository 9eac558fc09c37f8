"""The adapter of a folder whose text model is changed where there is sound (LoRA, arXiv 2106.09685), as peft saves it.

`adapter_config.json` says how strong it is, `adapter_model.safetensors` has its matrices under the names of the modules
that they change. Which modules those are, the tensors tell; a list of them in the settings has to agree. Everything of
peft's that is not a sum of a matrix and a low-rank product is refused by its name.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checkpoint.changes import RowOrder
from localinfer.models.checkpoint.tensor_plan import PlannedTensor
from localinfer.models.decoder.adapters import down_name, scale_name, up_name
from localinfer.models.decoder.checked_weights import ROW_TYPES
from localinfer.quant.checkpoint.folder import CheckpointFolder, StoredTensor
from localinfer.types import FloatArray, is_finite_number

ADAPTED_TYPES = ("granite_speech", "granite_speech_plus")
"""`model_type` of models that run with their folder's adapter where there is sound, and without it elsewhere."""
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"

ADAPTER_KEY = "checkpoint.adapter"
"""Metadata that holds its settings, which is not GGUF's."""
_AGAIN = "Download the folder again, or choose a copy of the model with a plain LoRA."
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_LITERAL = re.compile(r"[\w.]+")
_ABSENT: tuple[object, ...] = (None, False, [], {}, "", "none")
_OTHERWISE = (
    *("use_dora", "lora_bias", "bias", "modules_to_save", "fan_in_fan_out", "trainable_token_indices"),
    *("layer_replication", "target_parameters", "alora_invocation_tokens", "use_qalora", "arrow_config"),
    *("use_bdlora", "velora_config", "monteclora_config", "kasa_config"),
)
"""Settings of variants that compute something else."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` that take from a matrix what its adapter begins with."""


@dataclass(frozen=True)
class Adapter:
    """An adapter as GGUF would have it beside the matrices that it changes."""

    tensors: dict[str, PlannedTensor]
    """Its matrices, by the names that they get."""
    made: dict[str, FloatArray]
    """Small tensors that no file has: factors, and the table of row types."""
    metadata: dict[str, object]
    """Its settings, upon which results depend."""
    description: str
    """Its rank and modules, and the texts that it is applied to, in words."""


def read_adapter(folder: CheckpointFolder, plan: Mapping[str, PlannedTensor]) -> Adapter | None:
    """Open the adapter of a folder of such a model; None without one. plan: the text model's tensors.

    Raises: UnsupportedFormatError, CorruptFileError, on one line, naming the setting or tensor.
    """
    if folder.config.get("model_type") not in ADAPTED_TYPES:
        return None
    settings = folder.json(ADAPTER_CONFIG)
    if settings is None:
        return None
    _check_kind(settings)
    if not (folder.path / ADAPTER_FILE).exists():
        raise CorruptFileError(
            f"{folder.path.name} has {ADAPTER_CONFIG} and no {ADAPTER_FILE}; wanted both. Download the folder again"
        )
    pairs = _pairs(folder.open_beside(ADAPTER_FILE))
    modules = {source: planned for planned in plan.values() if planned.leaf == "weight" for source in planned.sources}
    tails = {_tail(source): source for source in modules}
    tensors: dict[str, PlannedTensor] = {}
    made: dict[str, FloatArray] = {ROW_TYPES: np.array([[0], [1]], np.float32)}
    for module, pair in pairs.items():
        base = modules.get(module) or modules.get(tails.get(_tail(module), ""))
        if base is None or len(base.sources) > 1 or not (base.change is None or isinstance(base.change, RowOrder)):
            raise UnsupportedFormatError(
                f"{ADAPTER_FILE}: it changes {module:.80}, which is no matrix of the text model that this version "
                f"adapts. {_AGAIN}"
            )
        name, rank = base.name.removesuffix(".weight"), pair["A"].shape[0]
        made[scale_name(name)] = np.array([_scale(settings, module, rank)], np.float32)
        for planned_name, letter, change in ((down_name(name), "A", None), (up_name(name), "B", base.change)):
            source = pair[letter].name.removesuffix(".weight")
            tensors[planned_name] = PlannedTensor(planned_name, (source,), "weight", change)
    num_bytes = sum(one.end - one.start for pair in pairs.values() for one in pair.values())
    ranks = sorted({pair["A"].shape[0] for pair in pairs.values()})
    leaves = sorted({module.rpartition(".")[2] for module in pairs})
    description = (
        f"LoRA of rank {', '.join(map(str, ranks))} on {', '.join(leaves)} ({len(pairs)} matrices, "
        f"{num_bytes / 1e6:,.1f} MB), applied to texts with sound and to no others"
    )
    return Adapter(tensors, made, {ADAPTER_KEY: json.dumps(settings, sort_keys=True)}, description)


def _check_kind(settings: Mapping[str, Any]) -> None:
    """Refuse what is no plain LoRA, by the name of the setting."""
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedFormatError(f"{ADAPTER_CONFIG}: peft_type is {kind!r:.40}; this version runs LORA. {_AGAIN}")
    for key in _OTHERWISE:
        if not any(settings.get(key) is one or settings.get(key) == one for one in _ABSENT):
            raise UnsupportedFormatError(
                f"{ADAPTER_CONFIG}: {key} is {str(settings[key])[:60]!r}, which this version does not run. {_AGAIN}"
            )

    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGE_BASE):
        raise UnsupportedFormatError(
            f"{ADAPTER_CONFIG}: init_lora_weights is {start!r:.40}, which changes the weights below the adapter too. "
            f"{_AGAIN}"
        )


def _pairs(stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Matrices A and B by the module that they change."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        found = _MATRIX.fullmatch(name)
        if found is None or tensor.dtype not in ("F16", "BF16", "F32"):
            raise UnsupportedFormatError(
                f"{ADAPTER_FILE}: {name:.80} ({tensor.dtype}) is no matrix of a plain LoRA in F16, BF16 or F32. "
                f"{_AGAIN}"
            )
        pairs.setdefault(found[1], {})[found[2]] = tensor
    for module, pair in pairs.items():
        shapes = [pair[letter].shape for letter in "AB" if letter in pair]
        if len(shapes) < 2 or any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
            raise CorruptFileError(
                f"{ADAPTER_FILE}: {module:.80} has {' and '.join(map(str, shapes))}; wanted lora_A [rank, columns] and "
                "lora_B [rows, rank]. Download the folder again"
            )
    if not pairs:
        raise CorruptFileError(f"{ADAPTER_FILE} has no tensors; wanted lora_A and lora_B. Download the folder again")
    return pairs


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of a module's product, from its alpha and rank."""
    targets = settings.get("target_modules")
    # A pattern is not run: peft saves just the modules that it fits.
    if isinstance(targets, list) and not any(_names(target, module) for target in targets):
        raise UnsupportedFormatError(
            f"{ADAPTER_CONFIG}: target_modules does not name {module:.80}, which {ADAPTER_FILE} changes. {_AGAIN}"
        )
    wanted, alpha = (
        _of_module(settings, "rank_pattern", "r", module),
        _of_module(settings, "alpha_pattern", "lora_alpha", module),
    )
    if wanted != rank:
        raise CorruptFileError(
            f"{ADAPTER_FILE}: {module:.80} has rank {rank}; {ADAPTER_CONFIG} says {wanted}. Download the folder again"
        )
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _of_module(settings: Mapping[str, Any], patterns_key: str, key: str, module: str) -> float:
    """A number of a module: of the first pattern that names it, else the common one."""
    value, patterns = settings.get(key), settings.get(patterns_key) or {}
    for pattern, given in patterns.items() if isinstance(patterns, dict) else ():
        if not _LITERAL.fullmatch(pattern):
            raise UnsupportedFormatError(
                f"{ADAPTER_CONFIG}: {patterns_key} has the pattern {pattern!r:.60}; this version reads names. {_AGAIN}"
            )
        if _names(pattern, module):
            value = given
            break
    if not is_finite_number(value) or not 0 < value < 1e6:
        raise CorruptFileError(f"{ADAPTER_CONFIG}: {key} is {value!r:.40}; wanted a number above 0. {_AGAIN}")
    return float(value)


def _names(target: object, module: str) -> bool:
    """Return whether a name stands for a module, or for its last parts."""
    return isinstance(target, str) and (module == target or module.endswith(f".{target}"))


def _tail(module: str) -> str:
    """The part of a module's name from the text model's layers on, which writers put under different prefixes."""
    found = re.fullmatch(r"(?:model\.|language_model\.)*(layers\.\d+\..+)", module)
    return module if found is None else found[1]
