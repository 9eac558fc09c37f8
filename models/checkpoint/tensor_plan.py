"""The plan from tensors of a checkpoint to GGUF's, with their changes."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checkpoint.changes import PLUS_ONE, Change, RowOrder, pairs_adjacent
from localinfer.models.checkpoint.family import Family, Part, Source
from localinfer.models.checkpoint.hyperparameters import Hyperparameters

_PREFIXES = (
    *("model.", "", "language_model.model.", "model.language_model.", "model.text_model.", "language_model."),
    *(
        "model.language_model.model.",
        "thinker.model.",
        "thinker.model.language_model.",
        "thinker.language_model.model.",
        "language_model.backbone.",
    ),
    *("backbone.", "transformer.", "gpt_neox.", "bert.", "roberta.", "mpnet.", "distilbert.", "electra.", "albert."),
    *("deberta.", "gte.", "new.", "text_model."),
)
_HEADS = (
    *("lm_head", "language_model.lm_head", "model.language_model.lm_head"),
    *("thinker.lm_head", "thinker.language_model.lm_head", "embed_out", "output"),
)
# What older writers saved although it follows from config.json.
_IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|masked_bias)")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|vision_embed_tokens|audio_tower|embed_vision"
    r"|embed_audio|mm_projector|vision_encoder|audio_encoder|image_newline|patch_merge_mlp|view_seperator)(\..*|)"
)
"""Parts that see or hear, beside the text model or under its prefix, as in flat models."""
_OTHER_HEADS = re.compile(r"(model\.)?(score|classifier|v_head|value_head|custom_text_proj|embedding_proj_layer)\..*")
"""Results of a model that are no logits of tokens."""
_DRAFTER = re.compile(r"(model\.)?mtp\.")
_OLD_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names of the norms' tensors in the first BERT models."""
_NUMBER = r"(0|[1-9]\d{0,4})"
_NUMBERED = re.compile(rf"(.*(?:\b(?:experts|norms)|_projections)\.){_NUMBER}(\..*)")

PLAIN_LEAVES = ("weight", "bias")

_Target = tuple[str, Change | None]
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
    """Every tensor by its GGUF name, and the names of those that do not run."""

    tensors: dict[str, PlannedTensor]
    other_parts: list[str]
    """Tensors of parts that see, hear or speak."""
    drafters: list[str]
    """Tensors of layers that predict further tokens."""
    is_head_untied: bool = False
    """The output matrix runs as it is although config.json says that it is the embedding."""


def plan_tensors(
    parts: Mapping[str, tuple[str, str]],
    parameters: Hyperparameters,
    are_equal: Callable[[str, str], bool] = lambda first, second: True,
) -> TensorPlan:
    """Find the target of every tensor of a checkpoint.

    parts: by the names of tensors, the module of each and what of it the tensor is; all tensors that a quantized weight
    is made of are its `weight`. are_equal: whether two modules have the same weights; it is asked of the output matrix
    and the embedding if config.json says that they are one.
    Raises: UnsupportedFormatError naming a tensor without one, CorruptFileError if a stack of experts has gaps.
    """
    targets = _Targets({module for module, leaf in parts.values() if leaf == "weight"}, parameters)
    sources: dict[str, dict[int, tuple[str, str]]] = {}
    changes: dict[str, Change | None] = {}
    plan = TensorPlan({}, [], [])
    unknown: list[str] = []
    stacked: set[str] = set()
    for name, (module, leaf) in parts.items():
        if targets.is_of_another_part(name):
            plan.other_parts.append(name)
            continue
        if _DRAFTER.match(name) or targets.is_of_a_drafter(name):
            plan.drafters.append(name)
            continue
        found, index = targets.find(_current(f"{module}.{leaf}"))
        for target, change in found:
            sources.setdefault(target, {})[max(index, 0)] = module, leaf
            changes[target] = change
            if index >= 0:
                stacked.add(target)
        is_needless = _IGNORED.fullmatch(name) or targets.is_unused(name) or leaf in parameters.family.left_out
        if not found and not is_needless:
            unknown.append(name)
    if unknown:
        raise UnsupportedFormatError(
            f"{len(unknown)} tensors have no place in {parameters.family.architecture!r} in this version "
            f"({', '.join(sorted(unknown)[:3])}); running without them would give wrong answers. Use a GGUF file of "
            "the model, update localinfer, or choose another model."
        )
    head = sources.get("output.weight")
    if parameters.ties_embeddings and head is not None:
        if are_equal(head[0][0], sources["token_embd.weight"][0][0]):
            sources.pop("output.weight")
        else:
            plan = replace(plan, is_head_untied=True)
    elif parameters.ties_embeddings is False and "output.weight" not in sources:
        raise CorruptFileError(
            "config.json says that lm_head is a matrix of its own (tie_word_embeddings is false), but there is no "
            "lm_head.weight. Download the folder again"
        )
    for target, modules in sources.items():
        change = changes[target] or _change(target, parameters)
        plan.tensors[target] = _planned(target, modules, change, target in stacked, parameters)
    return plan


def has_head(names: Collection[str]) -> bool:
    """Return whether some tensor of a checkpoint is of its output matrix."""
    return any(name.startswith(tuple(f"{head}." for head in _HEADS)) for name in names)


class _Targets:
    """GGUF's names, by those of one checkpoint."""

    def __init__(self, modules: Collection[str], parameters: Hyperparameters) -> None:
        family = parameters.family
        embedding = family.outside["token_embd"]
        assert isinstance(embedding, str), "one name"
        self._prefix = _prefix(modules, embedding)
        self._has_other_parts = parameters.has_other_parts
        self._roots = self._text_roots(family)
        self._num_layers, self._num_drafters = parameters.num_layers, parameters.num_drafters
        words = "|".join(re.escape(word) for word in (family.layers, *parameters.misnamed_layers))
        self._layer = re.compile(rf"{re.escape(self._prefix)}(?:{words})\.{_NUMBER}\.(.+)")
        self._outside = {f"{self._prefix}{name}": targets for name, targets in _by_source(family.outside, {}).items()}
        for head in _HEADS:
            for leaf in PLAIN_LEAVES:
                self._outside[f"{head}.{leaf}"] = [(f"output.{leaf}", None)]
        self._outside |= _by_source(family.heads, {})
        self._unused = re.compile(family.unused or r"(?!)")
        self._inside = _by_source(family.blocks, family.parameters)

    def _text_roots(self, family: Family) -> tuple[str, ...]:
        """Beginnings of the names of the text model's tensors and of its output matrix."""
        named = [name for name, _ in (pair for sources in family.heads.values() for pair in _names(sources))]
        heads = tuple(f"{head}." for head in (*_HEADS, *named))
        if self._prefix:
            # A model of its own inside the wrapper has its head beside its layers.
            whole = re.sub(r"(?<=language_model\.)(model|backbone)\.$", "", self._prefix)
            return (whole, *heads)
        outside = [name for name, _ in (pair for sources in family.outside.values() for pair in _names(sources))]
        return (*(f"{name}." for name in (family.layers, *outside)), *heads)

    def find(self, name: str) -> tuple[list[_Target], int]:
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
        return [(f"blk.{layer[1]}.{target}", change) for target, change in self._inside.get(path, [])], index

    def is_unused(self, name: str) -> bool:
        """Return whether nothing goes through a tensor."""
        return self._unused.fullmatch(name) is not None

    def is_of_another_part(self, name: str) -> bool:
        """Return whether a tensor is of a part that sees, hears or speaks.

        In a model with such parts that is all that is neither the text model's, which its prefix tells, nor one of the
        heads behind it.
        """
        if _OTHER_PARTS.fullmatch(name):
            return True
        if not self._has_other_parts or _DRAFTER.match(name) or _OTHER_HEADS.fullmatch(name):
            return False
        return not name.startswith(self._roots) and not self.is_unused(name)

    def is_of_a_drafter(self, name: str) -> bool:
        """Return whether a tensor is of the layers behind the last that config.json says predict further tokens."""
        layer = self._layer.fullmatch(name)
        return layer is not None and 0 <= int(layer[1]) - self._num_layers < self._num_drafters


def _numbered(path: str) -> tuple[str, int]:
    """A name with a mark in place of the number of what is stacked, and that number; -1 for what is not."""
    found = _NUMBERED.fullmatch(path)
    return (path, -1) if found is None else (f"{found[1]}*{found[3]}", int(found[2]))


def part_names(names: Collection[str]) -> dict[str, int]:
    """The parts that tensors belong to, by the first words of their names, and how many each has."""
    found = Counter(
        match[0].removesuffix(".") for name in names if (match := re.match(r"(thinker\.)?(model\.)?[^.]+", name))
    )
    return dict(found)


def _current(name: str) -> str:
    """The name of a tensor as it is saved today."""
    for old, new in _OLD_LEAVES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _by_source(modules: Mapping[str, Source], parameters: Mapping[str, Source]) -> dict[str, list[_Target]]:
    found: dict[str, list[_Target]] = {}
    for stem, sources in modules.items():
        for module, change in _names(sources):
            for leaf in PLAIN_LEAVES:
                found.setdefault(f"{module}.{leaf}", []).append((f"{stem}.{leaf}", change))
    for target, sources in parameters.items():
        for name, change in _names(sources):
            found.setdefault(name, []).append((target, change))
    return found


def _names(sources: Source) -> list[tuple[str, Change | None]]:
    found = sources if isinstance(sources, tuple) else (sources,)
    parts = [(part.source, part.change) if isinstance(part, Part) else (part, None) for part in found]
    return [(name.replace("{expert}", "*"), change) for name, change in parts]


def _prefix(modules: Collection[str], embedding: str) -> str:
    """The text before the names of the embedding and the layers: models that also see nest the text model."""
    # Models over one that sees nest that in turn.
    for prefix in (*_PREFIXES, *(f"vlm.{prefix}" for prefix in _PREFIXES)):
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
    """The change of one of GGUF's tensors by the settings of the family."""
    family = parameters.family
    whole_name = re.sub(r"^blk\.\d+\.", "", name)
    stem = whole_name.removesuffix(".weight").removesuffix(".bias")
    is_weight = name.endswith(".weight")
    for key in (whole_name, stem):
        change = parameters.changes.get(key)
        if change is not None and (key == whole_name or is_weight or isinstance(change, RowOrder)):
            return change
    heads = {"attn_q": parameters.num_heads, "attn_k": parameters.num_kv_heads}
    if family.rows_permuted and stem in heads:
        return pairs_adjacent(heads[stem])
    is_norm = stem.endswith("_norm") and stem not in family.plain_norms
    return PLUS_ONE if family.norms_plus_one and is_norm and is_weight else None
