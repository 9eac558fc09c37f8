"""Settings of a model's blocks, read and checked: rotary embedding, experts, latent and sparse attention, activations,
recurrent layers, pooling, and the sizes of blocks that few architectures have.

GGUF keys appear here and in config.py only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING

from localinfer.errors import UnsupportedFormatError
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.models.decoder.metadata import MetadataReader


MAX_LAYERS = 4096
MAX_WIDTH = 1 << 22
MAX_CONTEXT = 1 << 28
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
"""Bounds of factors on activations, scores and positions, which in known models are from 0.001 to 100."""
MIN_BASE, MAX_BASE = 1.0 + 1e-6, 1e18


class RopeConfig(Record, kw_only=True):
    """Rotary position embedding of a file; YaRN is that of arXiv 2309.00071."""

    rotary_size: int
    """Elements of each head that rotate."""
    rotary_size_windowed: int = 0
    """The same in sliding-window layers, 0 for as many."""
    has_plain_windows: bool = False
    """Sliding-window layers rotate without the scaling of the others (a key that is not GGUF's)."""
    base: float = 10000.0
    base_windowed: float = 0.0
    """Base of sliding-window layers, 0 if the file has none."""
    scaling: str = "none"
    """none, linear, yarn or longrope."""
    factor: float = 1.0
    original_context_length: int = 0
    attention_factor: float = 1.0
    """Setting of YaRN, as are the next four."""
    extrapolation_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0
    sections: tuple[int, ...] = ()
    """Sizes of multimodal sections (equal positions for text)."""
    alpha: float = 0.0
    """NTK-aware scaling of the base, in Hunyuan's models; 0 if the file has none."""
    is_used: bool = True
    """False in a few Granite models without positions."""


class ExpertConfig(Record, kw_only=True):
    """Mixture-of-experts sizes; None if the file leaves the choice to the architecture."""

    num_experts: int
    num_selected: int
    intermediate_size: int | None = None
    scale: float = 1.0
    normalise: bool | None = None
    gating: int | None = None
    """1 softmax, 2 sigmoid, 3 softmax over the selected experts."""
    num_groups: int = 1
    num_selected_groups: int = 1
    num_group_values: int = 2
    """See `ops.Routing`."""
    margin: float | None = None
    """SparseMixer's margin, None for the other ways."""


class LatentConfig(Record, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one decompressed head, and the latents.

    is_absorbed: whether the latent is what is cached; else every head has keys and values of its own, made from it.
    norm_epsilon: of the latents' norms, None for the model's.
    """

    key_size: int
    value_size: int
    kv_rank: int
    query_rank: int = 0
    is_absorbed: bool = True
    norm_epsilon: float | None = None


class XieluConfig(Record, kw_only=True):
    """One layer's learned activation (arXiv 2411.13010), as a file has it."""

    alpha_positive: float
    alpha_negative: float
    beta: float
    epsilon: float


def read_clamps(reader: MetadataReader, key: str, num_layers: int) -> tuple[float, ...]:
    """Limits per layer; those of at most a millionth are none."""
    found = reader.numbers(key, num_layers, low=0.0, high=MAX_SCALE)
    return tuple(limit if limit > MIN_SCALE else 0.0 for limit in found)


def read_xielu(metadata: Mapping[str, object], num_layers: int) -> tuple[XieluConfig, ...]:
    """xIELU's parameters of every layer: keys without an architecture's name."""
    from localinfer.models.decoder.metadata import MetadataReader

    reader = MetadataReader(metadata, prefix="xielu")
    names = ("alpha_p", "alpha_n", "beta", "eps")
    if not any(name in reader for name in names):
        return ()
    columns = [reader.numbers(name, num_layers, low=-MAX_SCALE, high=MAX_SCALE) for name in names]
    for name, column in zip(names, columns, strict=True):
        if not column:
            raise reader.contradiction(name, "missing", f"one number per layer, {num_layers}")
    return tuple(
        XieluConfig(alpha_positive=positive, alpha_negative=negative, beta=beta, epsilon=epsilon)
        for positive, negative, beta, epsilon in zip(*columns, strict=True)
    )


def read_scale(reader: MetadataReader, key: str, default: float = 0.0, *, low: float = -MAX_SCALE) -> float:
    """A factor or limit: 0, or within the bounds of float32 arithmetic."""
    value = reader.number(key, default, low=low, high=MAX_SCALE)
    if 0.0 < abs(value) < MIN_SCALE:
        raise reader.contradiction(key, value, f"0, or a magnitude from {MIN_SCALE:g} to {MAX_SCALE:g}")
    return value


def read_rope(reader: MetadataReader, head_dim: int, context_length: int) -> RopeConfig:
    """The rotary embedding of a file with heads of this size."""
    rotary_size = reader.integer("rope.dimension_count", head_dim, low=0, high=MAX_WIDTH)
    if rotary_size > head_dim or rotary_size % 2:
        raise reader.contradiction("rope.dimension_count", rotary_size, f"an even number of at most {head_dim}")
    scaling = reader.text("rope.scaling.type", "")
    factor = read_scale(reader, "rope.scaling.factor", read_scale(reader, "rope.scale_linear", 1.0, low=0.0), low=0.0)
    if scaling not in ("", "none", "linear", "yarn", "longrope"):
        raise UnsupportedFormatError(
            f"{reader.full_key('rope.scaling.type')} is {scaling!r}; this version supports none, linear, yarn and "
            "longrope. Update localinfer or choose another model."
        )
    extrapolation_factor = reader.number("rope.scaling.yarn_ext_factor", -1.0, low=-1.0, high=100.0)
    base_windowed = reader.number("rope.freq_base_swa", 0.0, low=0.0, high=MAX_BASE)
    alpha = read_scale(reader, "rope.scaling.alpha", low=0.0)
    if 0.0 < alpha < 1.0:
        raise reader.contradiction("rope.scaling.alpha", alpha, "0 or a number from 1")
    if 0.0 < base_windowed < MIN_BASE:
        raise reader.contradiction("rope.freq_base_swa", base_windowed, f"0 or a number from {MIN_BASE:g}")
    return RopeConfig(
        rotary_size=rotary_size,
        base=reader.number("rope.freq_base", 10000.0, low=MIN_BASE, high=MAX_BASE),
        base_windowed=base_windowed,
        has_plain_windows=reader.optional_boolean("rope.scaling.plain_windows") is True,
        scaling=scaling or ("linear" if factor not in (0.0, 1.0) else "none"),
        factor=factor or 1.0,
        original_context_length=reader.integer(
            "rope.scaling.original_context_length", context_length, low=1, high=MAX_CONTEXT
        ),
        attention_factor=read_scale(reader, "rope.scaling.attn_factor", 1.0, low=0.0),
        extrapolation_factor=1.0 if extrapolation_factor < 0.0 else extrapolation_factor,
        beta_fast=reader.number("rope.scaling.yarn_beta_fast", 32.0, low=MIN_SCALE, high=MAX_SCALE),
        beta_slow=reader.number("rope.scaling.yarn_beta_slow", 1.0, low=MIN_SCALE, high=MAX_SCALE),
        log_multiplier=reader.number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0, high=100.0),
        alpha=alpha,
        sections=reader.list_of_integers("rope.dimension_sections"),
        is_used=reader.optional_boolean("rope.scaling.finetuned") is not False,
    )


def read_experts(reader: MetadataReader) -> ExpertConfig | None:
    """Sizes and routing of experts; None without them."""
    num_experts = reader.integer("expert_count", 0, low=0, high=MAX_WIDTH)
    if num_experts == 0:
        return None
    num_selected = reader.integer("expert_used_count", low=1, high=MAX_WIDTH)
    if num_selected > num_experts:
        raise reader.contradiction("expert_used_count", num_selected, f"at most expert_count {num_experts}")
    num_groups = reader.integer("expert_group_count", 1, low=0, high=num_experts) or 1
    num_selected_groups = reader.integer("expert_group_used_count", num_groups, low=0, high=num_experts) or num_groups
    if num_experts % num_groups or num_selected_groups > num_groups:
        raise reader.contradiction("expert_group_count", num_groups, f"a divisor of expert_count {num_experts}")
    has_margin = "expert_gating_margin" in reader
    gating = reader.integer("expert_gating_func", 0, low=0, high=255)
    if gating > 3:
        raise UnsupportedFormatError(
            f"{reader.full_key('expert_gating_func')} is {gating}; this version supports 1 (softmax), 2 (sigmoid) and "
            "3 (softmax over the selected). Update localinfer or choose another model."
        )
    return ExpertConfig(
        num_experts=num_experts,
        num_selected=num_selected,
        intermediate_size=reader.integer("expert_feed_forward_length", 0, low=0, high=MAX_WIDTH) or None,
        scale=read_scale(reader, "expert_weights_scale") or 1.0,
        normalise=reader.optional_boolean("expert_weights_norm"),
        gating=gating or None,
        num_groups=num_groups,
        num_selected_groups=num_selected_groups,
        num_group_values=reader.integer("expert_group_score_count", 2, low=1, high=2),
        margin=reader.number("expert_gating_margin", low=0.0, high=MAX_SCALE) if has_margin else None,
    )


def read_latent(reader: MetadataReader, rope: RopeConfig, head_dim: int, value_head_dim: int) -> LatentConfig | None:
    """Sizes of latent attention; None without it."""
    kv_rank = reader.integer("attention.kv_lora_rank", 0, low=0, high=MAX_WIDTH)
    if not kv_rank:
        return None
    query_rank = reader.integer("attention.q_lora_rank", 0, low=0, high=MAX_WIDTH)
    key = "attention.latent_norm_epsilon"
    norm_epsilon = reader.number(key, low=0.0, high=1.0) if key in reader else None
    if "attention.key_length_mla" not in reader:
        if head_dim <= rope.rotary_size:
            wanted = f"more than rope.dimension_count {rope.rotary_size}"
            raise reader.contradiction("attention.key_length", head_dim, wanted)
        return LatentConfig(
            key_size=head_dim,
            value_size=value_head_dim,
            kv_rank=kv_rank,
            query_rank=query_rank,
            is_absorbed=False,
            norm_epsilon=norm_epsilon,
        )
    if head_dim != kv_rank + rope.rotary_size:
        wanted = f"attention.kv_lora_rank + rope.dimension_count, {kv_rank} + {rope.rotary_size}"
        raise reader.contradiction("attention.key_length", head_dim, wanted)
    if value_head_dim != kv_rank:
        raise reader.contradiction("attention.value_length", value_head_dim, f"attention.kv_lora_rank {kv_rank}")
    return LatentConfig(
        key_size=reader.integer("attention.key_length_mla", low=rope.rotary_size + 1, high=MAX_WIDTH),
        value_size=reader.integer("attention.value_length_mla", low=1, high=MAX_WIDTH),
        kv_rank=kv_rank,
        query_rank=query_rank,
        norm_epsilon=norm_epsilon,
    )


Shape = tuple[int, ...]

OF_ANOTHER_CACHE = {"gemma4-assistant": "gemma4"}
"""Draft models whose layers have no keys and values, and the architecture of the target whose they attend to."""
_SPARSE_LAYERS, _SPARSE_DEVIATIONS = 10, 1.6448533535
"""Defaults: of a normal distribution, one value in twenty exceeds so many deviations."""
_MOST_DEVIATIONS = 100.0
_MOST_SELECTED = 1 << 16
TWO_HEAD_SIZES = ("gemma4", "gemma-embedding2", *OF_ANOTHER_CACHE)
_TWO_ROTARY_SIZES = ("laguna", "mimo2")
_SHARED_KEYS = ("gemma3n", *TWO_HEAD_SIZES)
_WITHOUT_LOOKUP = ("gemma-embedding2",)
"""Architectures whose layers' own inputs follow from the embedding alone."""
_INDEXED = ("deepseek32", "glm-dsa", "minimax-m3")


class IndexerConfig(Record, kw_only=True):
    """Sparse attention: an indexer chooses positions or blocks of them (DeepSeek-V3.2, arXiv 2512.02556, section 2)."""

    layers: tuple[bool, ...]
    """Layers that choose by keys of their own."""
    num_heads: int
    key_size: int
    num_selected: int
    """Number of positions or blocks that are chosen."""
    block_size: int = 1
    """Positions of a block, 1 where single positions are chosen."""
    num_local: int = 0
    """Blocks up to a row's own that are always chosen."""


def windowed_sizes(
    reader: MetadataReader, head_dim: int, value_head_dim: int, rotary_size: int
) -> tuple[int, int, int]:
    """Sizes of key and value heads and of their rotation in sliding-window layers; zeros if as in the others."""
    sizes = {
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": value_head_dim,
        "rope.dimension_count_swa": rotary_size,
    }
    key, value, rotary = (reader.integer(name, size, low=0, high=MAX_WIDTH) for name, size in sizes.items())
    if (key, value, rotary) == (head_dim, value_head_dim, rotary_size):
        return 0, 0, 0
    turns_otherwise = reader.prefix in _TWO_ROTARY_SIZES and (key, value) == (head_dim, value_head_dim)
    if reader.prefix not in TWO_HEAD_SIZES and not turns_otherwise:
        found = dict(zip(sizes, (key, value, rotary), strict=True))
        name = next(name for name, size in sizes.items() if found[name] != size)
        raise UnsupportedFormatError(
            f"{reader.full_key(name)} is {found[name]} where other layers have {sizes[name]}; "
            f"this version runs one head size per {reader.prefix} model. Choose another model."
        )
    if not key or not value:
        raise reader.contradiction("attention.key_length_swa", key, "the size of a head, as value_length_swa")
    if rotary > key or rotary % 2:
        raise reader.contradiction("rope.dimension_count_swa", rotary, f"an even number of at most {key}")
    return key, value, rotary


def num_shared_layers(reader: MetadataReader, num_layers: int) -> int:
    """Number of the last layers that attend to the keys and values of earlier ones."""
    if reader.prefix not in _SHARED_KEYS:
        return 0
    # A draft model has no keys and values at all.
    most = num_layers if reader.prefix in OF_ANOTHER_CACHE else num_layers - 1
    return reader.integer("attention.shared_kv_layers", 0, low=0, high=most)


def target_hidden_size(reader: MetadataReader, tensor_shapes: Mapping[str, Shape]) -> int:
    """The width of the states that a draft model reads of its target; 0 for other models."""
    if reader.prefix not in OF_ANOTHER_CACHE:
        return 0
    key, width = "embedding_length_out", (*tensor_shapes.get("nextn.post_projection.weight", ()), 0)[0]
    size = reader.integer(key, width, low=1, high=MAX_WIDTH)
    if size != width:
        raise reader.contradiction(key, size, f"the {width} rows of nextn.post_projection.weight")
    return size


def per_layer_size(reader: MetadataReader, tensor_shapes: Mapping[str, Shape], num_layers: int) -> int:
    """The width of each layer's own input, 0 without."""
    key = "embedding_length_per_layer_input"
    size = reader.integer(key, 0, low=0, high=MAX_WIDTH) if reader.prefix in _SHARED_KEYS else 0
    looks_up = reader.prefix not in _WITHOUT_LOOKUP
    name = "per_layer_token_embd.weight" if looks_up else "per_layer_model_proj.weight"
    shape = tensor_shapes.get(name, ())
    if size and (shape[1:] if looks_up else shape[:1]) != (num_layers * size,):
        raise reader.contradiction(key, size, f"{num_layers} times that {'columns' if looks_up else 'rows'} of {name}")
    return size


def activation_sparsity(reader: MetadataReader, num_layers: int) -> tuple[float, ...]:
    """Gemma 3n's deviations above the mean that a layer's gates keep, -inf for layers that keep all; else empty."""
    if reader.prefix != "gemma3n":
        return ()
    if reader.integer("altup.active_idx", 0, low=0, high=MAX_WIDTH) != 0:
        raise reader.contradiction("altup.active_idx", 1, "0, the first stream")
    key = "activation_sparsity_scale"
    if key not in reader:
        return tuple(_SPARSE_DEVIATIONS if layer < _SPARSE_LAYERS else float("-inf") for layer in range(num_layers))
    found = reader.per_layer_numbers(key, num_layers)
    if any(not -float("inf") <= deviations <= _MOST_DEVIATIONS for deviations in found):
        raise reader.contradiction(key, list(found), f"numbers up to {_MOST_DEVIATIONS}, or -inf")
    return found


def read_indexer(reader: MetadataReader, tensor_shapes: Mapping[str, Shape], num_layers: int) -> IndexerConfig | None:
    """The indexer that chooses positions for sparse attention; None without."""
    if reader.prefix not in _INDEXED:
        return None
    names = ("attn_k", "k_proj")
    layers = tuple(
        any(f"blk.{layer}.indexer.{name}.weight" in tensor_shapes for name in names) for layer in range(num_layers)
    )
    key, present = "attention.indexer.types", tuple(map(int, layers))
    if reader.prefix == "minimax-m3":
        # Its first layers attend to all positions.
        if not any(layers):
            return None
    elif not layers[0] or present != reader.integers(key, num_layers, _default_types(reader, present), low=0, high=1):
        raise reader.contradiction(key, list(present), "1 in layer 0 and wherever there are tensors of an indexer")
    found = IndexerConfig(
        layers=layers,
        num_heads=reader.integer("attention.indexer.head_count", low=1, high=MAX_WIDTH),
        key_size=reader.integer("attention.indexer.key_length", low=1, high=MAX_WIDTH),
        num_selected=reader.integer("attention.indexer.top_k", low=1, high=_MOST_SELECTED),
        block_size=reader.integer("attention.indexer.block_size", 1, low=1, high=MAX_CONTEXT),
        num_local=reader.integer("attention.indexer.local_blocks", 0, low=0, high=MAX_CONTEXT),
    )
    for layer in range(num_layers):
        for name in names:
            rows = (*tensor_shapes.get(f"blk.{layer}.indexer.{name}.weight", ()), found.key_size)[0]
            if rows != found.key_size:
                wanted = f"the {rows} rows of blk.{layer}.indexer.{name}.weight"
                raise reader.contradiction("attention.indexer.key_length", found.key_size, wanted)
    return found


def _default_types(reader: MetadataReader, present: tuple[int, ...]) -> tuple[int, ...]:
    """Layers with an indexer where a file does not say: all, or in GLM's models those with tensors."""
    return present if reader.prefix == "glm-dsa" else (1,) * len(present)


class Pooling(Enum):
    """Hidden states of a text that make its embedding."""

    NONE = "none"
    """All of them: one vector per token."""
    MEAN = "mean"
    FIRST = "first"
    LAST = "last"
    LATE = "late"
    """All of them, through the matrices behind: many vectors of a text, compared late."""
    RANK = "rank"
    """One row, or the mean, through a classifier: scores in place of a vector."""


_BY_NUMBER = {0: Pooling.MEAN, 1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST, 4: Pooling.RANK}
"""GGUF's numbers: none, mean, cls, last, rank. A model without pooling gets the mean."""


def read_pooling(metadata: Mapping[str, object]) -> Pooling:
    """Read the pooling from GGUF metadata. Raises: UnsupportedFormatError for an unsupported one."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    found = metadata.get(key, 0)
    if metadata.get(f"{metadata.get('general.architecture')}.late_interaction") is True:
        return Pooling.LATE
    if isinstance(found, Integral) and int(found) in _BY_NUMBER:
        return _BY_NUMBER[int(found)]
    from localinfer.models.decoder.metadata import shown

    raise UnsupportedFormatError(
        f"{key} is {shown(found)}; this version pools by the mean, the first or the last token, or ranks (0 to 4). Use "
        "another model."
    )


def classified_rows(metadata: Mapping[str, object], *, is_encoder: bool) -> Pooling:
    """Rows that a reranker's classifier reads: the mean, the first, or of a decoder the last.

    Raises: UnsupportedFormatError for another kind.
    """
    key = f"{metadata.get('general.architecture')}.classifier.pooling_type"
    found = metadata.get(key, 0)
    found = int(found) if isinstance(found, Integral) else found
    if type(found) is int and found in (0, 2):
        return Pooling.FIRST if is_encoder else Pooling.LAST
    if type(found) is int and found == 1 and is_encoder:
        return Pooling.MEAN
    from localinfer.models.decoder.metadata import shown

    wanted = "1 (mean) or 2 (first)" if is_encoder else "none, the last token"
    raise UnsupportedFormatError(f"{key} is {shown(found)}; this version classifies by {wanted}. Use another model.")


EITHER_WAY = ("lfm2",)
"""Architectures that are decoders, or encoders where their file says so."""


def num_decision_layers(reader: MetadataReader, num_layers: int) -> int:
    """Last layers that are a head's for decisions, in encoders that have one."""
    if reader.prefix not in ("modern-bert", *EITHER_WAY):
        return 0
    found = reader.integer("decision.block_count", 0, low=0, high=num_layers - 1)
    if found and reader.prefix in EITHER_WAY and reader.optional_boolean("attention.causal") is not False:
        raise reader.contradiction("decision.block_count", found, "0 beside attention.causal that is not false")
    return found


_MAX_KERNEL = 64
_MAX_BETA_SCALE = 2.0
"""More than 2 would let a state grow without end."""

ALL_LAYERS = ("mamba", "mamba2", "rwkv7")
"""Architectures without attention."""
BY_INTERVAL = {"clef": 4, "minimax-01": 8, "olmo-hybrid": 4, "qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""Architectures where every few layers one has attention, and the default number of those few."""
BY_KV_HEADS = (
    "bailingmoe3",
    "granitehybrid",
    "jamba",
    "kimi-linear",
    "lfm2",
    "lfm2moe",
    "lfm3",
    "nemotron_h",
    "nemotron_h_moe",
    "plamo2",
)
"""Architectures where layers without heads of keys and values are recurrent."""

BESIDE_ATTENTION = ("falcon-h1", "zamba2")
"""Architectures where every layer has a recurrent block, and attention beside or before it."""

STATE_SPACE = (
    "mamba",
    "jamba",
    "mamba2",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "falcon-h1",
    "plamo2",
    "zamba2",
)
"""Architectures with Mamba's blocks; the first two with those of Mamba 1."""
SHORT_CONVOLUTION = ("lfm2", "lfm2moe", "lfm3")
"""Architectures with short convolutions."""
KIMI_DELTA = ("bailingmoe3", "kimi-linear")
"""Architectures with Kimi delta attention."""


class RecurrentConfig(Record, kw_only=True):
    """Sizes of recurrent layers; 0 for what a model's kind of layer does not have."""

    layers: tuple[bool, ...]
    """Layers that are recurrent."""
    kernel_size: int = 0
    """Rows of the short convolution."""
    num_heads: int = 0
    """Heads of values."""
    num_key_heads: int = 0
    """Heads of keys and queries."""
    head_dim: int = 0
    """Size of one head's keys, and of its values where no value_size is named."""
    value_size: int = 0
    beta_scale: float = 1.0
    """Factor on what a delta rule adds."""
    inner_size: int = 0
    """Size of all heads' values."""
    gate_lower_bound: float = 0.0
    """Lower bound of the logarithm of a decay, where a sigmoid bounds it."""
    num_states: int = 0
    """Mamba's states per channel."""
    num_groups: int = 0
    """Mamba's groups of heads that read and write states alike."""
    time_step_rank: int = 0
    """Width that Mamba 1's step sizes are made of."""
    norms_inputs: bool = False
    """Mamba 1's step sizes and the inputs and outputs of states are normed."""
    inputs_epsilon: float | None = None
    """Epsilon of those norms, None for the model's."""
    norms_before_gate: bool = False
    """The norm of Mamba 2's result, if there is one, is before its gate."""
    length_epsilon: float | None = None
    """Epsilon of the lengths that delta nets divide keys and queries by, None for the norms'."""
    least_step: float = 0.0
    """Least size of Mamba 2's steps."""
    num_shared_blocks: int = 0
    """Blocks of attention that the layers with attention use in turn (Zamba 2)."""


def has_recurrent_layers(architecture: str) -> bool:
    """Return whether models of this architecture may have recurrent layers."""
    return architecture in (*ALL_LAYERS, *BY_INTERVAL, *BY_KV_HEADS, *BESIDE_ATTENTION)


def read_recurrent(
    reader: MetadataReader,
    architecture: str,
    num_layers: int,
    num_draft_layers: int,
    num_heads: Sequence[int],
    num_kv_heads: Sequence[int],
) -> RecurrentConfig | None:
    """The recurrent layers of a file, None for other architectures; none of the last num_draft_layers is one.

    Raises: CorruptFileError.
    """
    if not has_recurrent_layers(architecture):
        return None
    found = _recurrent_layers(reader, architecture, num_layers, num_kv_heads)
    layers = (*found[: num_layers - num_draft_layers], *(False,) * num_draft_layers)
    if architecture in SHORT_CONVOLUTION:
        return RecurrentConfig(layers=layers, kernel_size=reader.integer("shortconv.l_cache", low=2, high=_MAX_KERNEL))
    if architecture == "rwkv7":
        return RecurrentConfig(layers=layers, head_dim=reader.integer("wkv.head_size", low=1, high=MAX_WIDTH))
    if architecture == "minimax-01":
        return _lightning(reader, layers, max(num_heads))
    if architecture in BY_INTERVAL:
        return _delta_net(reader, layers, may_differ=architecture == "olmo-hybrid")
    if architecture in STATE_SPACE:
        return _state_space(reader, layers, has_heads=architecture not in STATE_SPACE[:2])
    if architecture in KIMI_DELTA:
        return _kimi_delta(reader, layers, max(num_heads))
    raise AssertionError(f"{architecture} has recurrent layers of a kind that is not read")


def _delta_net(reader: MetadataReader, layers: tuple[bool, ...], *, may_differ: bool) -> RecurrentConfig:
    """Sizes of delta nets; may_differ: whether heads of values may have another size than those of keys."""
    num_heads = reader.integer("ssm.time_step_rank", low=1, high=MAX_WIDTH)
    num_key_heads = reader.integer("ssm.group_count", low=1, high=MAX_WIDTH)
    head_dim = reader.integer("ssm.state_size", low=1, high=MAX_WIDTH)
    inner_size = reader.integer("ssm.inner_size", low=1, high=MAX_WIDTH)
    if num_heads % num_key_heads:
        raise reader.contradiction("ssm.group_count", num_key_heads, f"a divisor of ssm.time_step_rank {num_heads}")
    if inner_size % num_heads if may_differ else inner_size != num_heads * head_dim:
        wanted = f"ssm.time_step_rank * ssm.state_size, {num_heads} * {head_dim}"
        raise reader.contradiction("ssm.inner_size", inner_size, wanted)
    return RecurrentConfig(
        layers=layers,
        kernel_size=reader.integer("ssm.conv_kernel", low=2, high=_MAX_KERNEL),
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        head_dim=head_dim,
        value_size=inner_size // num_heads,
        beta_scale=reader.number("ssm.beta_scale", 1.0, low=MIN_SCALE, high=_MAX_BETA_SCALE),
        inner_size=inner_size,
        length_epsilon=_optional_epsilon(reader, "ssm.length_epsilon"),
    )


def _lightning(reader: MetadataReader, layers: tuple[bool, ...], num_heads: int) -> RecurrentConfig:
    """Heads of lightning attention are as many as attention has of queries, and as large."""
    hidden_size = reader.integer("embedding_length", low=1, high=MAX_WIDTH)
    head_dim = reader.integer("attention.key_length", hidden_size // max(num_heads, 1), low=1, high=MAX_WIDTH)
    return RecurrentConfig(
        layers=layers, num_heads=num_heads, num_key_heads=num_heads, head_dim=head_dim, inner_size=num_heads * head_dim
    )


def _optional_epsilon(reader: MetadataReader, key: str) -> float | None:
    return reader.number(key, low=0.0, high=1.0) if key in reader else None


def _kimi_delta(reader: MetadataReader, layers: tuple[bool, ...], num_heads: int) -> RecurrentConfig:
    head_dim = reader.integer("kda.head_dim", low=1, high=MAX_WIDTH)
    bound = reader.number("kda.gate_lower_bound", 0.0, low=-80.0, high=0.0)
    if (reader.optional_boolean("kda.safe_gate") is True) != (bound < 0.0):
        raise reader.contradiction("kda.gate_lower_bound", bound, "a negative number with kda.safe_gate, or neither")
    return RecurrentConfig(
        layers=layers,
        kernel_size=reader.integer("ssm.conv_kernel", low=2, high=_MAX_KERNEL),
        num_heads=num_heads,
        num_key_heads=num_heads,
        head_dim=head_dim,
        inner_size=num_heads * head_dim,
        gate_lower_bound=bound,
        length_epsilon=_optional_epsilon(reader, "ssm.length_epsilon"),
    )


def _state_space(reader: MetadataReader, layers: tuple[bool, ...], *, has_heads: bool) -> RecurrentConfig:
    """Sizes of Mamba's blocks; has_heads: of the second."""
    inner_size = reader.integer("ssm.inner_size", low=1, high=MAX_WIDTH)
    rank = reader.integer("ssm.time_step_rank", low=1, high=MAX_WIDTH)
    num_groups = reader.integer("ssm.group_count", 1, low=0, high=MAX_WIDTH) or 1 if has_heads else 1
    if has_heads and inner_size % rank:
        raise reader.contradiction("ssm.time_step_rank", rank, f"a divisor of ssm.inner_size {inner_size}")
    if has_heads and rank % num_groups:
        raise reader.contradiction("ssm.group_count", num_groups, f"a divisor of ssm.time_step_rank {rank}")
    return RecurrentConfig(
        layers=layers,
        kernel_size=reader.integer("ssm.conv_kernel", low=2, high=_MAX_KERNEL),
        num_heads=rank if has_heads else 1,
        inner_size=inner_size,
        num_states=reader.integer("ssm.state_size", low=1, high=MAX_WIDTH),
        num_groups=num_groups,
        time_step_rank=0 if has_heads else rank,
        norms_inputs=reader.optional_boolean("ssm.dt_b_c_rms") is True,
        inputs_epsilon=_optional_epsilon(reader, "ssm.dt_b_c_epsilon"),
        norms_before_gate=reader.optional_boolean("ssm.norm_before_gate") is True,
        least_step=reader.number("ssm.least_time_step", 0.0, low=0.0, high=1.0),
        num_shared_blocks=reader.integer("shared_block_count", 0, low=0, high=MAX_WIDTH),
    )


def _recurrent_layers(
    reader: MetadataReader, architecture: str, num_layers: int, num_kv_heads: Sequence[int]
) -> tuple[bool, ...]:
    named = reader.integers("attention.recurrent_layers", num_layers, (), low=0, high=1)
    if architecture in ALL_LAYERS:
        if named and not all(named):
            raise reader.contradiction("attention.recurrent_layers", list(named), "1 for every layer")
        return (True,) * num_layers
    if architecture in BESIDE_ATTENTION:
        return (False,) * num_layers
    if architecture in BY_KV_HEADS:
        # Nemotron-H has layers of a feed-forward block alone.
        sizes = (0,) * num_layers
        if architecture.startswith("nemotron"):
            sizes = reader.integers("feed_forward_length", num_layers, sizes, low=0, high=MAX_WIDTH)
        layers = tuple(count == 0 and size == 0 for count, size in zip(num_kv_heads, sizes, strict=True))
        if named and tuple(map(bool, named)) != layers:
            wanted = "1 for the layers whose attention.head_count_kv is 0"
            raise reader.contradiction("attention.recurrent_layers", list(named), wanted)
        return layers
    if named:
        return tuple(map(bool, named))
    interval = reader.integer("full_attention_interval", BY_INTERVAL[architecture], low=1, high=num_layers + 1)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
