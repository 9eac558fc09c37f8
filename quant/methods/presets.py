"""Choice of a type for each tensor of a model to be quantized: the presets of llama.cpp, rule by rule.

A preset names one type for most matrices and spends more bits where they buy most: on the output, on values and on
what leaves the feed-forward, more so in the first and last layers. A row that does not fill whole blocks falls back to
a type with smaller ones. The result equals llama-quantize's, tensor by tensor (tests/golden/preset_types.json).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from localinfer.errors import CorruptFileError, RequestError
from localinfer.quant.formats.encoding import can_hold
from localinfer.quant.formats.types import TensorRecord, TensorType

_T = TensorType


@dataclass(frozen=True)
class Preset:
    """A preset's name, its id in `general.file_type`, and the type of most matrices."""

    name: str
    file_type: int
    default: TensorType

    @property
    def is_plain(self) -> bool:
        """True if all matrices become plain numbers, so that nothing is to be fitted."""
        return self.default in (TensorType.F16, TensorType.BF16)


_FILE_TYPES = {
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "BF16": 32,
    "MXFP4_MOE": 38,
}
_DEFAULTS = {"MXFP4_MOE": _T.Q8_0}
"""Types of most matrices of presets that are not named after them."""
PRESETS = {
    name: Preset(name, file_type, _DEFAULTS.get(name) or TensorType[re.sub("_[SML]$", "", name)])
    for name, file_type in _FILE_TYPES.items()
}

_SMALLER_BLOCKS = {
    _T.Q2_K: _T.Q4_0,
    _T.Q3_K: _T.Q4_0,
    _T.Q4_K: _T.Q5_0,
    _T.Q5_K: _T.Q5_1,
    _T.Q6_K: _T.Q8_0,
    _T.IQ4_XS: _T.IQ4_NL,
}
"""Types of rows that are not a multiple of 256. Rows that 32 does not divide either become F16."""

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")

_NEVER = re.compile(
    r"_norm\.weight$|ffn_gate_inp|position_embd\.weight$|token_types\.weight$|ssm_conv1d|shortconv\.conv|altup|laurel"
    r"|per_layer_model_proj|rope_f|attn_rel_b"
)
"""Small tensors that decide much: they stay as they are."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that the rules depend on."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "ModelFacts":
        """Read the facts.

        Raises: RequestError if the architecture or the number of layers is missing, CorruptFileError if another of them
            is no number.
        """
        architecture = metadata.get("general.architecture")
        layers = metadata.get(f"{architecture}.block_count")
        if not isinstance(architecture, str) or not isinstance(layers, int):
            raise RequestError(
                "the metadata names no architecture and number of layers; wanted a language model as GGUF or a Hugging "
                "Face folder"
            )

        def number(key: str, default: int) -> int:
            value = metadata.get(f"{architecture}.{key}", default)
            counts = np.asarray(value)
            if counts.dtype.kind not in "iu":
                raise CorruptFileError(
                    f"{architecture}.{key} is {value!r:.60}; wanted a whole number, or one for each layer. Convert the "
                    "model again with a current converter"
                )
            return int(counts.max(initial=0)) if counts.size else default

        heads = number("attention.head_count", 1)
        return cls(
            architecture=architecture,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=number("attention.head_count_kv", heads),
            num_experts=number("expert_count", 0),
        )

    @property
    def shares_values(self) -> bool:
        """True if four or more query heads share one value head: each bit of it then counts more."""
        return self.num_kv_heads > 0 and self.num_heads // self.num_kv_heads >= 4

    @property
    def is_70b(self) -> bool:
        return self.architecture == "llama" and self.num_layers == 80 and self.num_heads != self.num_kv_heads


@dataclass(frozen=True)
class TypeChoice:
    """The type that a tensor gets. `wanted` is the preset's type, whose blocks a row of this length may not fill."""

    type: TensorType
    wanted: TensorType

    @property
    def is_fallback(self) -> bool:
        return self.type is not self.wanted


def find_preset(name: str) -> Preset:
    """Return a preset by its name, in any case. Raises: RequestError."""
    found = PRESETS.get(name.upper())
    if found is None:
        raise RequestError(f"there is no type {name!r}; wanted one of {', '.join(PRESETS)}")
    return found


def is_quantized(record: TensorRecord) -> bool:
    """True if presets touch this tensor at all: matrices of weights, but for the small ones that decide much."""
    is_matrix = len(record.shape) >= 2 and record.shape[-2] * record.shape[-1] > record.shape[-1]
    return is_matrix and record.name.endswith("weight") and _NEVER.search(record.name) is None


def choose_types(
    preset: Preset, tensors: Mapping[str, TensorRecord], facts: ModelFacts, *, has_importance: bool
) -> dict[str, TypeChoice]:
    """Choose the type of every tensor; those that presets do not touch keep theirs, but for vectors of halves.

    Vectors (norms, biases) become F32, which is all that other GGUF runtimes read.
    """
    value_layers = sorted(_layer(name) for name in tensors if _role(name) in ("attn_v", "attn_qkv"))
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    choices = {}
    for name, record in tensors.items():
        if not is_quantized(record):
            kept = _T.F32 if len(record.shape) == 1 and record.type in (_T.F16, _T.BF16) else record.type
            choices[name] = TypeChoice(kept, kept)
            continue
        if preset.is_plain:
            wanted = preset.default
        elif name == head:
            wanted = _T.Q8_0 if preset.default is _T.Q8_0 else _T.Q6_K
        elif preset.name == "MXFP4_MOE":
            wanted = _T.MXFP4 if len(record.shape) == 3 and record.shape[0] > 1 else _T.Q8_0
        else:
            wanted = _wanted(preset, name, facts, value_layers, has_importance)
        choices[name] = TypeChoice(_that_holds(wanted, record.shape[-1]), wanted)
    return choices


def _that_holds(wanted: TensorType, columns: int) -> TensorType:
    if can_hold(wanted, columns):
        return wanted
    smaller = _SMALLER_BLOCKS.get(wanted, wanted)
    return smaller if can_hold(smaller, columns) else _T.F16


def _role(name: str) -> str:
    match = _LAYER.fullmatch(name)
    return match[2] if match else ""


def _layer(name: str) -> int:
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else 0


def _wanted(preset: Preset, name: str, facts: ModelFacts, value_layers: list[int], has_importance: bool) -> TensorType:
    role, layer = _role(name), _layer(name)
    if role in ("attn_v", "attn_qkv"):
        return _values(preset, facts, value_layers.index(layer), len(value_layers))
    if role == "attn_k" and facts.num_experts == 8:
        return _T.Q8_0
    if role == "attn_output":
        return _attention_output(preset, facts)
    if role.startswith("ffn_down"):
        return _down(preset, layer, facts.num_layers, has_importance)
    return preset.default


def _gets_more(index: int, count: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _values(preset: Preset, facts: ModelFacts, index: int, count: int) -> TensorType:
    if facts.num_experts == 8:
        return _T.Q8_0
    wanted = preset.default
    if preset.name == "Q2_K":
        wanted = _T.Q4_K if facts.shares_values else _T.Q3_K
    elif preset.name == "Q3_K_M":
        wanted = _T.Q5_K if index < 2 else _T.Q4_K
    elif preset.name == "Q3_K_L":
        wanted = _T.Q5_K
    elif preset.name == "Q4_K_S":
        wanted = _T.Q5_K if index < 4 else wanted
    elif preset.name in ("Q4_K_M", "Q5_K_M"):
        wanted = _T.Q6_K if _gets_more(index, count) else wanted
    elif preset.default in (_T.IQ4_NL, _T.IQ4_XS):
        wanted = _T.Q5_K if facts.shares_values else wanted
    if facts.is_70b and wanted in (_T.Q3_K, _T.Q4_K):
        return _T.Q5_K
    return wanted


def _attention_output(preset: Preset, facts: ModelFacts) -> TensorType:
    if facts.num_experts == 8:
        has_few_bits = preset.name in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")
        return _T.Q5_K if has_few_bits else preset.default
    return {"Q2_K": _T.Q3_K, "Q3_K_M": _T.Q4_K, "Q3_K_L": _T.Q5_K}.get(preset.name, preset.default)


def _down(preset: Preset, layer: int, num_layers: int, has_importance: bool) -> TensorType:
    is_early = layer < num_layers // 8
    if preset.name == "Q2_K":
        return _T.Q3_K
    if preset.name == "Q3_K_M":
        return _T.Q5_K if layer < num_layers // 16 else _T.Q4_K
    if preset.name == "Q3_K_L":
        return _T.Q5_K
    if preset.name == "Q4_K_S":
        return _T.Q5_K if is_early else _T.Q4_K
    if preset.name in ("Q4_K_M", "Q5_K_M"):
        return _T.Q6_K if _gets_more(layer, num_layers) else preset.default
    if preset.name in ("IQ4_NL", "IQ4_XS"):
        return _T.Q5_K if is_early and not has_importance else preset.default
    if preset.name in ("Q4_0", "Q5_0") and has_importance and is_early:
        return _T.Q4_1 if preset.name == "Q4_0" else _T.Q5_1
    return preset.default
