"""Which tensors of a checkpoint become which of GGUF's, and what happens to them on the way."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checkpoint.changes import PLUS_ONE, Change, Rows, pairs_adjacent
from localinfer.models.checkpoint.family import Part, Source
from localinfer.models.checkpoint.hyperparameters import Hyperparameters

_PREFIXES = (
    *("model.", "", "language_model.model.", "model.language_model.", "model.text_model.", "backbone."),
    *("transformer.", "gpt_neox.", "bert.", "roberta.", "mpnet.", "distilbert.", "electra.", "albert.", "deberta."),
    *("gte.", "new."),
)
_HEADS = ("lm_head", "language_model.lm_head", "embed_out", "output")
# What older writers saved although it follows from config.json, and the parts of models that also see.
_IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|masked_bias)")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|vision_embed_tokens|audio_tower|embed_vision"
    r"|embed_audio|patch_merge_mlp)\."
)
_DRAFTER = re.compile(r"(model\.)?mtp\.")
_OLD_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""What norms of the first BERT models call their tensors."""
_NUMBER = r"(0|[1-9]\d{0,4})"
_NUMBERED = re.compile(rf"(.*(?:\b(?:experts|norms)|_projections)\.){_NUMBER}(\..*)")

PLAIN_LEAVES = ("weight", "bias")

_Place = tuple[str, Change | None]
"""One of GGUF's names, and what happens to the source on the way."""


@dataclass(frozen=True)
class PlannedTensor:
    """One GGUF tensor: `sources` are modules of the checkpoint, several where they are stacked, `leaf` what of them.

    change: what happens to each source, None for nothing. is_stacked: whether the sources are rows of a further
    dimension.
    """

    name: str
    sources: tuple[str, ...]
    leaf: str
    change: Change | None = None
    is_stacked: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """Every tensor by its GGUF name, and the names of those that do not run.

    other_parts: of vision and audio. drafters: of layers that predict further tokens.
    """

    tensors: dict[str, PlannedTensor]
    other_parts: list[str]
    drafters: list[str]


def plan_tensors(parts: Mapping[str, tuple[str, str]], parameters: Hyperparameters) -> TensorPlan:
    """Find a place for every tensor of a checkpoint.

    parts: by the names of tensors, the module of each and what of it the tensor is; all tensors that a quantized weight
    is made of are its `weight`.
    Raises: UnsupportedFormatError naming a tensor that has no place, CorruptFileError if a stack of experts has gaps.
    """
    places = _Places({module for module, leaf in parts.values() if leaf == "weight"}, parameters)
    sources: dict[str, dict[int, tuple[str, str]]] = {}
    changes: dict[str, Change | None] = {}
    plan = TensorPlan({}, [], [])
    unknown: list[str] = []
    stacked: set[str] = set()
    for name, (module, leaf) in parts.items():
        if _OTHER_PARTS.match(name):
            plan.other_parts.append(name)
            continue
        if _DRAFTER.match(name) or places.is_of_a_drafter(name):
            plan.drafters.append(name)
            continue
        found, index = places.find(_current(f"{module}.{leaf}"))
        for place, change in found:
            sources.setdefault(place, {})[max(index, 0)] = module, leaf
            changes[place] = change
            if index >= 0:
                stacked.add(place)
        is_needless = _IGNORED.fullmatch(name) or places.is_unused(name) or leaf in parameters.family.left_out
        if not found and not is_needless:
            unknown.append(name)
    if unknown:
        raise UnsupportedFormatError(
            f"{len(unknown)} tensors have no place in {parameters.family.architecture!r} in this version "
            f"({', '.join(sorted(unknown)[:3])}); running without them would give wrong answers. Use a GGUF file of "
            "the model, update localinfer, or choose another model."
        )
    if parameters.ties_embeddings:
        sources.pop("output.weight", None)
    elif parameters.ties_embeddings is False and "output.weight" not in sources:
        raise CorruptFileError(
            "config.json says that lm_head is a matrix of its own (tie_word_embeddings is false), but there is no "
            "lm_head.weight. Download the folder again"
        )
    for place, modules in sources.items():
        change = changes[place] or _change(place, parameters)
        plan.tensors[place] = _planned(place, modules, change, place in stacked, parameters)
    return plan


def has_head(names: Collection[str]) -> bool:
    """Whether some tensor of a checkpoint is of its output matrix."""
    return any(name.startswith(tuple(f"{head}." for head in _HEADS)) for name in names)


class _Places:
    """GGUF's names, by those of one checkpoint."""

    def __init__(self, modules: Collection[str], parameters: Hyperparameters) -> None:
        family = parameters.family
        embedding = family.outside["token_embd"]
        assert isinstance(embedding, str), "one name"
        self._prefix = _prefix(modules, embedding)
        self._num_layers, self._num_drafters = parameters.num_layers, parameters.num_drafters
        self._layer = re.compile(rf"{re.escape(self._prefix + family.layers)}\.{_NUMBER}\.(.+)")
        self._outside = {f"{self._prefix}{name}": places for name, places in _by_source(family.outside, {}).items()}
        for head in _HEADS:
            for leaf in PLAIN_LEAVES:
                self._outside[f"{head}.{leaf}"] = [(f"output.{leaf}", None)]
        self._outside |= _by_source(family.heads, {})
        self._unused = re.compile(family.unused or r"(?!)")
        self._inside = _by_source(family.blocks, family.parameters)

    def find(self, name: str) -> tuple[list[_Place], int]:
        """GGUF's names for what is made of a tensor, and which expert it is (-1 for what is no expert)."""
        if name in self._outside and not self.is_unused(name):
            return self._outside[name], -1
        layer = self._layer.fullmatch(name)
        if layer is None:
            path, index = _numbered(name)
            return self._outside.get(path, []), index
        if int(layer[1]) >= self._num_layers:
            return [], -1
        path, index = _numbered(layer[2])
        return [(f"blk.{layer[1]}.{place}", change) for place, change in self._inside.get(path, [])], index

    def is_unused(self, name: str) -> bool:
        """Whether nothing goes through a tensor."""
        return self._unused.fullmatch(name) is not None

    def is_of_a_drafter(self, name: str) -> bool:
        """Whether a tensor is of the layers behind the last that config.json says predict further tokens."""
        layer = self._layer.fullmatch(name)
        return layer is not None and 0 <= int(layer[1]) - self._num_layers < self._num_drafters


def _numbered(path: str) -> tuple[str, int]:
    """A name with a mark in place of the number of what is stacked, and that number; -1 for what is not."""
    found = _NUMBERED.fullmatch(path)
    return (path, -1) if found is None else (f"{found[1]}*{found[3]}", int(found[2]))


def _current(name: str) -> str:
    """The name of a tensor as it is saved today."""
    for old, new in _OLD_LEAVES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _by_source(modules: Mapping[str, Source], parameters: Mapping[str, Source]) -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = {}
    for stem, sources in modules.items():
        for module, change in _names(sources):
            for leaf in PLAIN_LEAVES:
                found.setdefault(f"{module}.{leaf}", []).append((f"{stem}.{leaf}", change))
    for place, sources in parameters.items():
        for name, change in _names(sources):
            found.setdefault(name, []).append((place, change))
    return found


def _names(sources: Source) -> list[tuple[str, Change | None]]:
    found = sources if isinstance(sources, tuple) else (sources,)
    parts = [(part.source, part.change) if isinstance(part, Part) else (part, None) for part in found]
    return [(name.replace("{expert}", "*"), change) for name, change in parts]


def _prefix(modules: Collection[str], embedding: str) -> str:
    """What stands before the embedding and the layers: models that also see nest the text model."""
    for prefix in _PREFIXES:
        if f"{prefix}{embedding}" in modules:
            return prefix
    raise CorruptFileError(
        f"the checkpoint has no {_PREFIXES[0]}{embedding}.weight among its {len(modules)} modules; wanted a language "
        "model. Is this an adapter? Download the folder again"
    )


def _planned(
    name: str, found: dict[int, tuple[str, str]], change: Change | None, is_stacked: bool, parameters: Hyperparameters
) -> PlannedTensor:
    is_expert = is_stacked and name.endswith("_exps.weight")
    wanted = parameters.metadata.get(f"{parameters.family.architecture}.expert_count", 1) if is_expert else len(found)
    first, leaf = found[min(found)]
    if sorted(found) != list(range(len(found))) or len(found) != wanted:
        raise CorruptFileError(
            f"{first}.{leaf} and its like are there for {len(found)} experts; wanted all {wanted}. "
            "Download the folder again"
        )
    sources = tuple(found[index][0] for index in range(len(found)))
    return PlannedTensor(name, sources, leaf, change, is_stacked)


def _change(name: str, parameters: Hyperparameters) -> Change | None:
    """What the settings of the family say of one of GGUF's tensors."""
    family = parameters.family
    whole_name = re.sub(r"^blk\.\d+\.", "", name)
    stem = whole_name.removesuffix(".weight").removesuffix(".bias")
    is_weight = name.endswith(".weight")
    for key in (whole_name, stem):
        change = parameters.changes.get(key)
        if change is not None and (key == whole_name or is_weight or isinstance(change, Rows)):
            return change
    heads = {"attn_q": parameters.num_heads, "attn_k": parameters.num_kv_heads}
    if family.rows_permuted and stem in heads:
        return pairs_adjacent(heads[stem])
    is_norm = stem.endswith("_norm") and stem not in family.plain_norms
    return PLUS_ONE if family.norms_plus_one and is_norm and is_weight else None
