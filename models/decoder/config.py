"""Model hyperparameters under their Hugging Face names, read and checked from GGUF metadata.

GGUF keys appear only here (glossary in models/README.md).
Keys and defaults: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.decoder.metadata import MetadataReader

Shape = tuple[int, ...]

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 22
MAX_CONTEXT = 1 << 28
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
"""Bounds of factors on activations, scores and positions, which in known models are from 0.001 to 100."""
MIN_BASE, MAX_BASE = 1.0 + 1e-6, 1e18
BIDIRECTIONAL = frozenset(
    "bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 modern-bert neo-bert nomic-bert nomic-bert-moe".split()
)
"""Architectures whose positions see later ones: encoders."""
_DENSE_FIRST = ("modern-bert",)
"""Of the layers in a period of the window's pattern the first has full attention, not the last."""
_MAX_VOCABULARY = 1 << 20
"""Sampling weights of tokens are multiples of 2^-43, summed in 63 bits."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of a file.

    rotary_size: elements of each head that rotate. base_windowed: base of sliding-window layers, 0 if the file has
    none.
    scaling: none, linear, yarn or longrope. sections: sizes of multimodal sections (equal positions for text).
    alpha: NTK-aware scaling of the base, in Hunyuan's models; 0 if the file has none.
    is_used: false in a few Granite models without positions.
    attention_factor, extrapolation_factor, beta_fast, beta_slow, log_multiplier: of YaRN (arXiv 2309.00071).
    """

    rotary_size: int
    base: float = 10000.0
    base_windowed: float = 0.0
    scaling: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    attention_factor: float = 1.0
    extrapolation_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0
    sections: tuple[int, ...] = ()
    alpha: float = 0.0
    is_used: bool = True


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture-of-experts sizes; None if the file leaves the choice to the architecture.

    gating: 1 softmax, 2 sigmoid, 3 softmax over the selected experts.
    """

    num_experts: int
    num_selected: int
    intermediate_size: int | None = None
    scale: float = 1.0
    normalise: bool | None = None
    gating: int | None = None
    num_groups: int = 1
    num_selected_groups: int = 1


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one decompressed head, and the latents."""

    key_size: int
    value_size: int
    kv_rank: int
    query_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hyperparameters of a model.

    Tuples have one entry per layer. head_dim: size of a query or key head; value_head_dim: of a value head.
    intermediate_size: from the metadata; the decoder uses the tensors' shapes. windowed_layers: empty if the file
    leaves the pattern to the architecture. A scale of None is not in the file. block_tensors: names of the tensors of
    the first block, without `blk.0.`, which distinguish variants of some architectures.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    context_length: int
    num_heads: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    intermediate_size: tuple[int, ...]
    head_dim: int
    value_head_dim: int
    norm_epsilon: float
    rope: RopeConfig
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    sliding_window: int = 0
    windowed_layers: tuple[bool, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    parallel_residual: bool | None = None
    max_alibi_bias: float = 0.0
    temperature_scale: float = 0.0
    temperature_length: int = 0
    hidden_activation: str = ""
    block_tensors: frozenset[str] = frozenset()

    @property
    def is_encoder(self) -> bool:
        """Whether positions see later ones, so that a text is computed in one batch and continues nothing."""
        return self.architecture in BIDIRECTIONAL

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], tensor_shapes: Mapping[str, Shape]) -> "ModelConfig":
        """Read and check the hyperparameters of a GGUF file.

        tensor_shapes: every tensor of the file, rows first. Values of `metadata` are numbers, strings or sequences.
        Raises: CorruptFileError if values contradict each other or the tensors; UnsupportedFormatError if they
        describe a model this version cannot run. Both name the key.
        """
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise CorruptFileError(
                f"general.architecture is {architecture!r}; a model file names its architecture there. "
                "Is this a tokenizer or an adapter rather than a model?"
            )
        reader = MetadataReader(metadata, prefix=architecture)
        hidden_size = reader.integer("embedding_length", low=1, high=MAX_WIDTH)
        vocab_size = _vocab_size(reader, tensor_shapes, hidden_size)
        extra_layers = reader.integer("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
        num_layers = _count_layers(reader, tensor_shapes) - extra_layers
        if num_layers < 1:
            raise reader.contradiction("nextn_predict_layers", extra_layers, "fewer than block_count")
        num_heads = reader.integers("attention.head_count", num_layers, low=1, high=MAX_WIDTH)
        num_kv_heads = reader.integers("attention.head_count_kv", num_layers, num_heads, low=1, high=MAX_WIDTH)
        for layer in range(num_layers):
            if num_heads[layer] % num_kv_heads[layer]:
                raise reader.contradiction(
                    "attention.head_count_kv", num_kv_heads[layer], f"a divisor of {num_heads[layer]} heads"
                )
        head_dim = _head_dim(reader, hidden_size, num_heads)
        value_head_dim = reader.integer("attention.value_length", head_dim, low=1, high=MAX_WIDTH)
        context_length = reader.integer("context_length", low=1, high=MAX_CONTEXT)
        sliding_window = reader.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
        rope = _rope(reader, head_dim, context_length)
        _check_windowed_sizes(reader, rotary_size=rope.rotary_size, head_dim=head_dim, value_head_dim=value_head_dim)
        _check_causal(reader, architecture)
        config = cls(
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=num_layers,
            vocab_size=vocab_size,
            context_length=context_length,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=reader.integers(
                "feed_forward_length", num_layers, (0,) * num_layers, low=0, high=MAX_WIDTH
            ),
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            norm_epsilon=_norm_epsilon(reader),
            rope=rope,
            experts=_experts(reader),
            latent=_latent(reader, rope, head_dim, value_head_dim),
            sliding_window=sliding_window,
            windowed_layers=_windowed_layers(reader, num_layers),
            attention_scale=_scale(reader, "attention.scale") or None,
            attention_softcap=_scale(reader, "attn_logit_softcapping", low=0.0),
            logit_softcap=_scale(reader, "final_logit_softcapping", low=0.0),
            embedding_scale=_scale(reader, "embedding_scale") or None,
            residual_scale=_scale(reader, "residual_scale") or None,
            logit_scale=_scale(reader, "logit_scale") or None,
            parallel_residual=reader.optional_boolean("use_parallel_residual"),
            max_alibi_bias=_scale(reader, "attention.max_alibi_bias", low=0.0),
            temperature_scale=_scale(reader, "attention.temperature_scale"),
            temperature_length=reader.integer("attention.temperature_length", 0, low=0, high=MAX_CONTEXT),
            hidden_activation=reader.text("hidden_activation", "") if architecture == "modern-bert" else "",
            block_tensors=frozenset(name.removeprefix("blk.0.") for name in tensor_shapes if name.startswith("blk.0.")),
        )
        _check_tensor_shapes(reader, config, tensor_shapes)
        return config


def _check_causal(reader: MetadataReader, architecture: str) -> None:
    """Refuse a decoder whose file wants an encoder's attention, and an encoder whose file wants a decoder's."""
    is_encoder = architecture in BIDIRECTIONAL
    causal = reader.optional_boolean("attention.causal")
    if causal is is_encoder:
        wanted = "without a causal mask only" if is_encoder else "with causal attention only"
        raise UnsupportedFormatError(
            f"{reader.full_key('attention.causal')} is {str(causal).lower()}; this version runs models of the "
            f"architecture {architecture!r} {wanted}. Choose another model."
        )


def _count_layers(reader: MetadataReader, tensor_shapes: Mapping[str, Shape]) -> int:
    num_layers = reader.integer("block_count", low=1, high=MAX_LAYERS)
    found = {name.split(".", 2)[1] for name in tensor_shapes if name.startswith("blk.")}
    if any(str(layer) not in found for layer in range(num_layers)):
        raise reader.contradiction("block_count", num_layers, f"the {len(found)} blocks that the tensors form")
    return num_layers


def _head_dim(reader: MetadataReader, hidden_size: int, num_heads: tuple[int, ...]) -> int:
    if "attention.key_length" in reader:
        return reader.integer("attention.key_length", low=1, high=MAX_WIDTH)
    if hidden_size % num_heads[0]:
        raise reader.contradiction(
            "attention.head_count", num_heads[0], f"a divisor of embedding_length {hidden_size} (no key_length given)"
        )
    return hidden_size // num_heads[0]


def _scale(reader: MetadataReader, key: str, default: float = 0.0, *, low: float = -MAX_SCALE) -> float:
    """A factor or limit: 0, or within the bounds of float32 arithmetic."""
    value = reader.number(key, default, low=low, high=MAX_SCALE)
    if 0.0 < abs(value) < MIN_SCALE:
        raise reader.contradiction(key, value, f"0, or a magnitude from {MIN_SCALE:g} to {MAX_SCALE:g}")
    return value


def _check_windowed_sizes(reader: MetadataReader, *, rotary_size: int, head_dim: int, value_head_dim: int) -> None:
    sizes = {
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": value_head_dim,
        "rope.dimension_count_swa": rotary_size,
    }
    for key, size in sizes.items():
        found = reader.integer(key, size, low=0, high=MAX_WIDTH)
        if found != size:
            raise UnsupportedFormatError(
                f"{reader.full_key(key)} is {found} where other layers have {size}; "
                "this version runs one head size per model. Choose another model."
            )


def _vocab_size(reader: MetadataReader, tensor_shapes: Mapping[str, Shape], hidden_size: int) -> int:
    shape = tensor_shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise CorruptFileError(
            f"token_embd.weight has shape {shape}; a model has one row per vocabulary entry there. "
            "Is this file complete? Split files are opened by their first part."
        )
    if shape[1] != hidden_size:
        raise reader.contradiction("embedding_length", hidden_size, f"the {shape[1]} columns of token_embd.weight")
    if shape[0] >= _MAX_VOCABULARY:
        raise UnsupportedFormatError(
            f"token_embd.weight has {shape[0]} rows, one per token; this version samples from fewer than "
            f"{_MAX_VOCABULARY}. Use a model with a smaller vocabulary."
        )
    declared = reader.integer("vocab_size", shape[0], low=1, high=MAX_CONTEXT)
    if declared != shape[0]:
        raise reader.contradiction("vocab_size", declared, f"the {shape[0]} rows of token_embd.weight")
    num_tokens = reader.length_of("tokenizer.ggml.tokens")
    if num_tokens is not None and num_tokens != shape[0]:
        raise CorruptFileError(
            f"tokenizer.ggml.tokens has {num_tokens} entries; wanted the {shape[0]} rows of token_embd.weight. "
            "Convert the model again or download another copy."
        )
    return declared


def _norm_epsilon(reader: MetadataReader) -> float:
    key = "attention.layer_norm_rms_epsilon"
    if key not in reader and "attention.layer_norm_epsilon" in reader:
        key = "attention.layer_norm_epsilon"
    return reader.number(key, low=0.0, high=1.0)


def _rope(reader: MetadataReader, head_dim: int, context_length: int) -> RopeConfig:
    rotary_size = reader.integer("rope.dimension_count", head_dim, low=0, high=MAX_WIDTH)
    if rotary_size > head_dim or rotary_size % 2:
        raise reader.contradiction("rope.dimension_count", rotary_size, f"an even number of at most {head_dim}")
    scaling = reader.text("rope.scaling.type", "")
    factor = _scale(reader, "rope.scaling.factor", _scale(reader, "rope.scale_linear", 1.0, low=0.0), low=0.0)
    if scaling not in ("", "none", "linear", "yarn", "longrope"):
        raise UnsupportedFormatError(
            f"{reader.full_key('rope.scaling.type')} is {scaling!r}; this version supports none, linear, yarn and "
            "longrope. Update localinfer or choose another model."
        )
    extrapolation_factor = reader.number("rope.scaling.yarn_ext_factor", -1.0, low=-1.0, high=100.0)
    base_windowed = reader.number("rope.freq_base_swa", 0.0, low=0.0, high=MAX_BASE)
    alpha = _scale(reader, "rope.scaling.alpha", low=0.0)
    if 0.0 < alpha < 1.0:
        raise reader.contradiction("rope.scaling.alpha", alpha, "0 or a number from 1")
    if 0.0 < base_windowed < MIN_BASE:
        raise reader.contradiction("rope.freq_base_swa", base_windowed, f"0 or a number from {MIN_BASE:g}")
    return RopeConfig(
        rotary_size=rotary_size,
        base=reader.number("rope.freq_base", 10000.0, low=MIN_BASE, high=MAX_BASE),
        base_windowed=base_windowed,
        scaling=scaling or ("linear" if factor not in (0.0, 1.0) else "none"),
        factor=factor or 1.0,
        original_context_length=reader.integer(
            "rope.scaling.original_context_length", context_length, low=1, high=MAX_CONTEXT
        ),
        attention_factor=_scale(reader, "rope.scaling.attn_factor", 1.0, low=0.0),
        extrapolation_factor=1.0 if extrapolation_factor < 0.0 else extrapolation_factor,
        beta_fast=reader.number("rope.scaling.yarn_beta_fast", 32.0, low=MIN_SCALE, high=MAX_SCALE),
        beta_slow=reader.number("rope.scaling.yarn_beta_slow", 1.0, low=MIN_SCALE, high=MAX_SCALE),
        log_multiplier=reader.number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0, high=100.0),
        alpha=alpha,
        sections=reader.list_of_integers("rope.dimension_sections"),
        is_used=reader.optional_boolean("rope.scaling.finetuned") is not False,
    )


def _experts(reader: MetadataReader) -> ExpertConfig | None:
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
        scale=_scale(reader, "expert_weights_scale") or 1.0,
        normalise=reader.optional_boolean("expert_weights_norm"),
        gating=gating or None,
        num_groups=num_groups,
        num_selected_groups=num_selected_groups,
    )


def _latent(reader: MetadataReader, rope: RopeConfig, head_dim: int, value_head_dim: int) -> LatentConfig | None:
    """Sizes of latent attention; None without it, and in old files that store it in its unabsorbed form."""
    if "attention.kv_lora_rank" not in reader or "attention.key_length_mla" not in reader:
        return None
    kv_rank = reader.integer("attention.kv_lora_rank", low=1, high=MAX_WIDTH)
    if head_dim != kv_rank + rope.rotary_size:
        wanted = f"attention.kv_lora_rank + rope.dimension_count, {kv_rank} + {rope.rotary_size}"
        raise reader.contradiction("attention.key_length", head_dim, wanted)
    if value_head_dim != kv_rank:
        raise reader.contradiction("attention.value_length", value_head_dim, f"attention.kv_lora_rank {kv_rank}")
    return LatentConfig(
        key_size=reader.integer("attention.key_length_mla", low=rope.rotary_size + 1, high=MAX_WIDTH),
        value_size=reader.integer("attention.value_length_mla", low=1, high=MAX_WIDTH),
        kv_rank=kv_rank,
        query_rank=reader.integer("attention.q_lora_rank", 0, low=0, high=MAX_WIDTH),
    )


def _windowed_layers(reader: MetadataReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers have a sliding window: a list, or a period n, of which one layer has full attention."""
    key = "attention.sliding_window_pattern"
    if key not in reader:
        return ()
    if reader.is_sequence(key):
        return tuple(bool(value) for value in reader.integers(key, num_layers, low=0, high=1))
    period = reader.integer(key, low=0, high=MAX_LAYERS)
    full = 0 if reader.prefix in _DENSE_FIRST else period - 1
    return tuple(period == 0 or layer % period != full for layer in range(num_layers))


def _check_tensor_shapes(reader: MetadataReader, config: ModelConfig, tensor_shapes: Mapping[str, Shape]) -> None:
    """Compare heads, sizes and experts with the shapes of every layer's tensors.

    Raises: CorruptFileError naming the key and the contradicting or missing tensor.
    """
    check = _Check(reader, tensor_shapes)
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        if config.latent is None:
            _check_heads(check, block, config, layer)
        else:
            _check_latent(check, block, config.latent, config, layer)
        if config.experts is not None:
            count = config.experts.num_experts
            # Stacks of experts; a stack of one may be a plain matrix.
            for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"):
                axis = -2 if name == "ffn_gate_inp" else -3
                check.equal(f"{block}{name}.weight", axis, count, "expert_count", str(count), optional=True)


class _Check:
    """Compares one axis of one tensor with a product of metadata."""

    def __init__(self, reader: MetadataReader, tensor_shapes: Mapping[str, Shape]) -> None:
        self._reader, self._shapes = reader, tensor_shapes

    def has(self, name: str) -> bool:
        return name in self._shapes

    def equal(self, name: str, axis: int, wanted: int, key: str, found: str, *, optional: bool = False) -> None:
        shape = self._shapes.get(name)
        if shape is None:
            if optional:
                return
            raise CorruptFileError(
                f"{name} is not in the file; wanted a complete model of this architecture. Convert the model again or "
                "download another copy."
            )
        size = shape[axis] if -len(shape) <= axis < len(shape) else 1
        if size != wanted:
            kind = ("rows" if axis == -2 else "columns") if len(shape) == 2 else f"in {shape}"
            raise self._reader.contradiction(key, found, f"the {size} {kind} of {name}")


def _check_heads(check: _Check, block: str, config: ModelConfig, layer: int) -> None:
    num_heads, num_kv_heads = config.num_heads[layer], config.num_kv_heads[layer]
    head, value = config.head_dim, config.value_head_dim
    columns = num_heads * value
    found = f"{num_heads} and the size of a head {value}, together {columns}"
    check.equal(f"{block}attn_output.weight", -1, columns, "attention.head_count", found)
    fused = f"{block}attn_qkv.weight"
    if check.has(fused):
        rows = num_heads * head + num_kv_heads * (head + value)
        found = f"{num_heads}, with {num_kv_heads} of keys and values and sizes {head} and {value} together {rows}"
        check.equal(fused, -2, rows, "attention.head_count", found)
        return
    for letter, count, size, key in (
        ("q", num_heads, head, "attention.key_length"),
        ("k", num_kv_heads, head, "attention.head_count_kv"),
        ("v", num_kv_heads, value, "attention.head_count_kv"),
    ):
        number = size if key == "attention.key_length" else count
        other = f"{count} heads" if number == size else f"the size of a head {size}"
        found = f"{number}, with {other} together {count * size}"
        # Old files of latent attention have other tensors; `write_latent_attention` refuses them.
        is_old_form = check.has(f"{block}attn_kv_b.weight")
        check.equal(f"{block}attn_{letter}.weight", -2, count * size, key, found, optional=is_old_form)


def _check_latent(check: _Check, block: str, latent: LatentConfig, config: ModelConfig, layer: int) -> None:
    num_heads, rotary_size = config.num_heads[layer], config.rope.rotary_size
    queries = num_heads * latent.key_size
    name = f"{block}attn_q_b.weight" if latent.query_rank else f"{block}attn_q.weight"
    found = f"{num_heads} and attention.key_length_mla {latent.key_size}, together {queries}"
    check.equal(name, -2, queries, "attention.head_count", found)
    if latent.query_rank:
        check.equal(name, -1, latent.query_rank, "attention.q_lora_rank", str(latent.query_rank))
    keys = latent.kv_rank + rotary_size
    found = f"{latent.kv_rank} and rope.dimension_count {rotary_size}, together {keys}"
    check.equal(f"{block}attn_kv_a_mqa.weight", -2, keys, "attention.kv_lora_rank", found)
    values = num_heads * latent.value_size
    found = f"{latent.value_size} and {num_heads} heads, together {values}"
    check.equal(f"{block}attn_output.weight", -1, values, "attention.value_length_mla", found)
