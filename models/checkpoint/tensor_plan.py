"""Which tensors of a checkpoint become which of GGUF's, and what happens to them on the way."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checkpoint.hyperparameters import Hyperparameters

_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "model.text_model.")
_EMBEDDING = "embed_tokens"
_HEADS = ("lm_head", "language_model.lm_head")
# What older writers saved although it follows from config.json, and the parts of models that also see.
_IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias|masked_bias)")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|vision_embed_tokens|audio_tower)\."
)
_LAYER = re.compile(r"layers\.(0|[1-9]\d{0,4})\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts\.)(0|[1-9]\d{0,4})(\..*)")

PLAIN_LEAVES = ("weight", "bias")


@dataclass(frozen=True)
class PlannedTensor:
    """One GGUF tensor: `sources` are modules of the checkpoint, several where they are stacked, `leaf` what of them.

    permuted_heads: how many heads the rows belong to, if each head's rows go from halves to adjacent pairs, else 0.
    plus_one: whether 1 is added to every value. stack_rows: the first and the distance of its rows in each matrix of a
    source that holds those of all experts; None for a source that is one matrix.
    """

    name: str
    sources: tuple[str, ...]
    leaf: str
    permuted_heads: int = 0
    plus_one: bool = False
    stack_rows: tuple[int, int] | None = None


def plan_tensors(
    parts: Mapping[str, tuple[str, str]], parameters: Hyperparameters
) -> tuple[dict[str, PlannedTensor], list[str]]:
    """Every tensor of a checkpoint by its GGUF name, and the names of other parts (vision, audio) that do not run.

    parts: by the names of tensors, the module of each and what of it the tensor is; all tensors that a quantized weight
    is made of are its `weight`.
    Raises: UnsupportedFormatError naming a tensor that has no place, CorruptFileError if a stack of experts has gaps.
    """
    prefix = _prefix({module for module, leaf in parts.values() if leaf == "weight"})
    stems: dict[str, list[str]] = {}
    for stem, module in parameters.family.blocks.items():
        stems.setdefault(module.replace("{expert}", "*"), []).append(stem)
    sources: dict[tuple[str, str], dict[int, str]] = {}
    left_out: list[str] = []
    unknown: list[str] = []
    for name, (module, leaf) in parts.items():
        if _OTHER_PARTS.match(name):
            left_out.append(name)
            continue
        places = _places(module, prefix, stems, parameters) if leaf in PLAIN_LEAVES else []
        for stem, expert in places:
            sources.setdefault((stem, leaf), {})[expert] = module
        if not places and not _IGNORED.fullmatch(name):
            unknown.append(name)
    if unknown:
        raise UnsupportedFormatError(
            f"{len(unknown)} tensors have no place in {parameters.family.architecture!r} in this version "
            f"({', '.join(sorted(unknown)[:3])}); running without them would give wrong answers. Use a GGUF file of "
            "the model, update localinfer, or choose another model."
        )
    if parameters.ties_embeddings:
        sources.pop(("output", "weight"), None)
    elif parameters.ties_embeddings is False and ("output", "weight") not in sources:
        raise CorruptFileError(
            "config.json says that lm_head is a matrix of its own (tie_word_embeddings is false), but there is no "
            "lm_head.weight. Download the folder again"
        )
    tensors = (_planned(stem, leaf, found, parameters) for (stem, leaf), found in sources.items())
    return {tensor.name: tensor for tensor in tensors}, left_out


def _prefix(modules: Collection[str]) -> str:
    """What stands before `embed_tokens` and `layers`: models that also see nest the text model."""
    for prefix in _PREFIXES:
        if f"{prefix}{_EMBEDDING}" in modules:
            return prefix
    raise CorruptFileError(
        f"the checkpoint has no {_PREFIXES[0]}{_EMBEDDING}.weight among its {len(modules)} modules; wanted a language "
        "model. Is this an adapter? Download the folder again"
    )


def _places(
    module: str, prefix: str, stems: Mapping[str, list[str]], parameters: Hyperparameters
) -> list[tuple[str, int]]:
    """GGUF's names for a module, several for one that is shared, and which expert it is (0 for what is no expert)."""
    if module in _HEADS:
        return [("output", 0)]
    if not module.startswith(prefix):
        return []
    inner = module.removeprefix(prefix)
    if inner in (_EMBEDDING, "norm"):
        return [({"norm": "output_norm", _EMBEDDING: "token_embd"}[inner], 0)]
    layer = _LAYER.fullmatch(inner)
    if layer is None or int(layer[1]) >= parameters.num_layers:
        return []
    expert = _EXPERT.fullmatch(layer[2])
    path, index = (layer[2], 0) if expert is None else (f"{expert[1]}*{expert[3]}", int(expert[2]))
    return [(f"blk.{layer[1]}.{stem}", index) for stem in stems.get(path, ())]


def _planned(stem: str, leaf: str, found: dict[int, str], parameters: Hyperparameters) -> PlannedTensor:
    family = parameters.family
    heads = {"attn_q": parameters.num_heads, "attn_k": parameters.num_kv_heads} if family.rows_permuted else {}
    kind = stem.rpartition(".")[2]
    has_experts = stem.endswith("_exps") and kind not in family.stacks
    wanted = parameters.metadata.get(f"{family.architecture}.expert_count", 1) if has_experts else 1
    if sorted(found) != list(range(len(found))) or len(found) != wanted:
        raise CorruptFileError(
            f"{found[min(found)]}.{leaf} and its like are there for {len(found)} experts; wanted all {wanted}. "
            "Download the folder again"
        )
    return PlannedTensor(
        name=f"{stem}.{leaf}",
        sources=tuple(found[index] for index in range(len(found))),
        leaf=leaf,
        permuted_heads=heads.get(kind, 0),
        plus_one=family.norms_plus_one and stem.endswith("_norm"),
        stack_rows=family.stacks.get(kind),
    )
