"""Model hyperparameters under their Hugging Face names, read and checked from GGUF metadata.

GGUF keys appear only here and in `block_config.py` (glossary in models/README.md).
Keys and defaults: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from collections.abc import Mapping
from dataclasses import replace

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.decoder import block_config as blocks
from localinfer.models.decoder.block_config import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH
from localinfer.models.decoder.metadata import MetadataReader, shown
from localinfer.types import Record

BIDIRECTIONAL = frozenset(
    "bert clip-text colpali colqwen2 deberta-v2 eurobert gemma-embedding gemma-embedding2 gte jina-bert-v2"
    " jina-bert-v3 modern-bert mpnet neo-bert nomic-bert nomic-bert-moe siglip-text".split()
)
"""Encoders: architectures whose positions see later ones, or that have no next token."""
_WITH_ACTIVATION = ("bitnet", "clip-text", "modern-bert", "modern-bert-decoder")
"""Their files say which activation they have."""
_DENSE_FIRST = ("cohere2moe", "laguna", "modern-bert", "modern-bert-decoder", "smallthinker")
"""Architectures whose window's pattern has full attention in the first layer of a period, not in the last."""
_MAX_VOCABULARY = 1 << 20
"""Sampling weights of tokens are multiples of 2^-43, summed in 63 bits."""


class ModelConfig(Record, kw_only=True):
    """The hyperparameters of a model. Tuples have one entry per layer; a scale of None is not in the file."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_draft_layers: int = 0
    """Number of the last layers that are for next-token prediction."""
    vocab_size: int
    context_length: int
    num_heads: tuple[int, ...]
    """Zero for a layer without attention."""
    num_kv_heads: tuple[int, ...]
    """Zero for a layer with only the output projection; keys and values that it caches are another kind's."""
    intermediate_size: tuple[int, ...]
    """From the metadata; the decoder uses the tensors' shapes."""
    head_dim: int
    """Size of a query or key head."""
    value_head_dim: int
    """Size of a value head."""
    norm_epsilon: float
    layer_norm_epsilon: float = 0.0
    """Epsilon of layer norms, 0 where the file has norm_epsilon alone."""
    rope: blocks.RopeConfig
    experts: blocks.ExpertConfig | None = None
    latent: blocks.LatentConfig | None = None
    recurrent: blocks.RecurrentConfig | None = None
    sliding_window: int = 0
    windowed_layers: tuple[bool, ...] = ()
    """Empty if the file leaves the pattern to the architecture."""
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
    projection_clamp: float = 0.0
    """Limit of queries, keys and values, 0 for none."""
    value_scale: float = 0.0
    """Factor on attention's results."""
    expert_clamps: tuple[float, ...] = ()
    """Limits of the gated activation in routed experts; 0 for none, empty if the file has none."""
    dense_clamps: tuple[float, ...] = ()
    """The same in shared experts and dense blocks."""
    xielu: tuple[blocks.XieluConfig, ...] = ()
    """Empty if the file has none."""
    has_learned_positions: bool = False
    num_dense_layers: int = 0
    """The first layers, which have no experts."""
    rope_pattern: tuple[bool, ...] = ()
    """Layers that have RoPE, empty if the file leaves it to the architecture."""
    attention_output_scale: float | None = None
    """Grok's factor on scores."""
    num_loops: int = 1
    """Number of times that all layers run."""
    is_layer_norm: bool = False
    """The file has the epsilon of layer norms alone."""
    hidden_activation: str = ""
    full_layers_see_pictures: bool = False
    """True if rows of one picture see each other in both directions in layers without a window too."""
    has_exact_gelu: bool = False
    """GELU is of the error function, where encoders' files else mean its tanh form."""
    classifier_activation: str = ""
    sees_both_sides: bool = False
    """Positions see later ones, of an architecture whose files may say so."""
    num_decision_layers: int = 0
    """Last layers that are those of a head for decisions."""
    """Empty for the architecture's."""
    num_relative_buckets: int = 0
    """Buckets of attention's biases by distance."""
    max_relative_distance: int = 0
    """Largest distance that attention's biases tell apart."""
    block_tensors: frozenset[str] = frozenset()
    """Names of the tensors of the first block, without `blk.0.`, which distinguish variants of some
    architectures."""
    windowed_head_dim: int = 0
    """Size of a key head in sliding-window layers, 0 for that of the others."""
    windowed_value_head_dim: int = 0
    """Size of a value head in sliding-window layers, 0 for that of the others."""
    num_shared_layers: int = 0
    """Number of the last layers that attend to the keys and values of earlier ones."""
    per_layer_size: int = 0
    """Width of the input that each layer has for itself (Gemma 3n), 0 without."""
    target_hidden_size: int = 0
    """Width of the states that a draft model reads of its target, 0 for other models."""
    activation_sparsity: tuple[float, ...] = ()
    """See `block_config.activation_sparsity`."""
    num_picture_tokens: int = 0
    """Rows of a picture in a prompt that sees itself, as far as the model says."""
    num_deepstack_layers: int = 0
    """Number of the first layers after which a further part of a picture's embeddings is added."""
    takes_media: bool = False
    """It is loaded to take embeddings of pictures or sounds in place of tokens; no file says so."""
    indexer: blocks.IndexerConfig | None = None

    def head_sizes(self, layer: int) -> tuple[int, int]:
        """Sizes of a key head and of a value head of one layer."""
        if self.windowed_head_dim and self.windowed_layers and self.windowed_layers[layer]:
            return self.windowed_head_dim, self.windowed_value_head_dim
        return self.head_dim, self.value_head_dim

    @property
    def cached_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Heads of keys, and sizes of a key and of a value, of an encoder's layers, which share what they cache."""
        every = zip(self.num_kv_heads, map(self.head_sizes, range(self.num_layers)), strict=True)
        return tuple(dict.fromkeys((num_heads, *sizes) for num_heads, sizes in every))

    def cached_layer(self, layer: int) -> int:
        """The layer of the cache that a layer stores to: in an encoder that of all like it, else its own."""
        shape = self.num_kv_heads[layer], *self.head_sizes(layer)
        return self.cached_shapes.index(shape) if self.is_encoder else layer

    @property
    def num_main_layers(self) -> int:
        """Layers that logits come from: all but those for next-token prediction."""
        return self.num_layers - self.num_draft_layers

    @property
    def is_encoder(self) -> bool:
        """Return whether positions see later ones, so that a text is computed in one batch and continues nothing."""
        return self.sees_both_sides or self.architecture in BIDIRECTIONAL

    @property
    def only_decides(self) -> bool:
        """True if a head for decisions takes the place of an output matrix, so that nothing else can be asked."""
        return self.architecture == "clef" or self.num_decision_layers > 0

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, object],
        tensor_shapes: Mapping[str, blocks.Shape],
        *,
        with_draft_layers: bool = False,
    ) -> "ModelConfig":
        """Read and check the hyperparameters of a GGUF file.

        tensor_shapes: every tensor of the file, rows first. Values of `metadata` are numbers, strings or sequences.
        with_draft_layers: count the layers for next-token prediction, if the file has their tensors, as last layers.
        Raises: CorruptFileError if values contradict each other or the tensors; UnsupportedFormatError if they
        describe a model this version cannot run. Both name the key.
        """
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise CorruptFileError(
                f"general.architecture is {shown(architecture)}; a model file names its architecture there. "
                "Is this a tokenizer or an adapter rather than a model?"
            )
        reader = MetadataReader(metadata, prefix=architecture)
        hidden_size = reader.integer("embedding_length", low=1, high=MAX_WIDTH)
        vocab_size = _vocab_size(reader, tensor_shapes, hidden_size)
        num_main_layers, num_draft_layers = _count_layers(
            reader, tensor_shapes, is_draft_model=architecture in blocks.OF_ANOTHER_CACHE
        )
        if not with_draft_layers:
            num_draft_layers = 0
        num_layers = num_main_layers + num_draft_layers
        num_heads, num_kv_heads = _head_counts(reader, num_layers, may_lack=blocks.has_recurrent_layers(architecture))
        recurrent = blocks.read_recurrent(reader, architecture, num_layers, num_draft_layers, num_heads, num_kv_heads)
        if recurrent is not None:
            num_kv_heads = tuple(
                0 if is_one else count for is_one, count in zip(recurrent.layers, num_kv_heads, strict=True)
            )
        head_dim = _head_dim(reader, hidden_size, num_heads)
        value_head_dim = reader.integer("attention.value_length", head_dim, low=min(1, head_dim), high=MAX_WIDTH)
        context_length = reader.integer("context_length", low=1, high=MAX_CONTEXT)
        sliding_window = reader.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
        rope = blocks.read_rope(reader, head_dim, context_length)
        windowed = blocks.windowed_sizes(reader, head_dim, value_head_dim, rope.rotary_size)
        rope = replace(rope, rotary_size_windowed=windowed[2])
        config = cls(
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_draft_layers=num_draft_layers,
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
            layer_norm_epsilon=reader.number("attention.layer_norm_epsilon", 0.0, low=0.0, high=1.0),
            rope=rope,
            experts=blocks.read_experts(reader),
            recurrent=recurrent,
            latent=blocks.read_latent(reader, rope, head_dim, value_head_dim),
            sliding_window=sliding_window,
            windowed_layers=_windowed_layers(reader, num_layers),
            attention_scale=blocks.read_scale(reader, "attention.scale") or None,
            attention_softcap=blocks.read_scale(reader, "attn_logit_softcapping", low=0.0),
            logit_softcap=blocks.read_scale(reader, "final_logit_softcapping", low=0.0),
            embedding_scale=blocks.read_scale(reader, "embedding_scale") or None,
            residual_scale=blocks.read_scale(reader, "residual_scale") or None,
            logit_scale=blocks.read_scale(reader, "logit_scale") or None,
            parallel_residual=reader.optional_boolean("use_parallel_residual"),
            max_alibi_bias=blocks.read_scale(reader, "attention.max_alibi_bias", low=0.0),
            temperature_scale=blocks.read_scale(reader, "attention.temperature_scale"),
            temperature_length=reader.integer("attention.temperature_length", 0, low=0, high=MAX_CONTEXT),
            projection_clamp=blocks.read_scale(reader, "attention.clamp_kqv", low=0.0),
            value_scale=blocks.read_scale(reader, "attention.value_scale"),
            expert_clamps=blocks.read_clamps(reader, "swiglu_clamp_exp", num_layers),
            dense_clamps=blocks.read_clamps(reader, "swiglu_clamp_shexp", num_layers),
            xielu=blocks.read_xielu(metadata, num_layers),
            num_dense_layers=reader.integer("leading_dense_block_count", 0, low=0, high=MAX_LAYERS),
            rope_pattern=_booleans(reader, "attention.rope_pattern", num_layers),
            attention_output_scale=blocks.read_scale(reader, "attention.output_scale") or None,
            is_layer_norm="attention.layer_norm_rms_epsilon" not in reader,
            num_loops=reader.integer("num_loops", 1, low=1, high=MAX_LAYERS),
            has_learned_positions="position_embd.weight" in tensor_shapes,
            hidden_activation=reader.text("hidden_activation", "") if architecture in _WITH_ACTIVATION else "",
            full_layers_see_pictures=bool(reader.optional_boolean("attention.full_layers_see_pictures")),
            sees_both_sides=_sees_both_sides(reader, architecture),
            num_decision_layers=blocks.num_decision_layers(reader, num_layers),
            has_exact_gelu=bool(reader.optional_boolean("exact_gelu")),
            classifier_activation=reader.text("classifier.activation", ""),
            num_relative_buckets=reader.integer("attention.relative_buckets_count", 0, low=0, high=MAX_WIDTH),
            max_relative_distance=reader.integer("attention.max_relative_positions", 0, low=0, high=MAX_CONTEXT),
            block_tensors=frozenset(name.removeprefix("blk.0.") for name in tensor_shapes if name.startswith("blk.0.")),
            windowed_head_dim=windowed[0],
            windowed_value_head_dim=windowed[1],
            num_shared_layers=blocks.num_shared_layers(reader, num_layers),
            num_picture_tokens=reader.integer("num_picture_tokens", 0, low=0, high=MAX_CONTEXT),
            num_deepstack_layers=reader.integer("n_deepstack_layers", 0, low=0, high=num_layers),
            per_layer_size=blocks.per_layer_size(reader, tensor_shapes, num_layers),
            target_hidden_size=blocks.target_hidden_size(reader, tensor_shapes),
            activation_sparsity=blocks.activation_sparsity(reader, num_layers),
            indexer=blocks.read_indexer(reader, tensor_shapes, num_main_layers),
        )
        _check_tensor_shapes(reader, config, tensor_shapes)
        return config


def _sees_both_sides(reader: MetadataReader, architecture: str) -> bool:
    """True for a model of `EITHER_WAY` whose file wants an encoder's attention.

    Raises: UnsupportedFormatError for another decoder whose file does, and an encoder whose file wants a decoder's.
    """
    is_encoder = architecture in BIDIRECTIONAL
    causal = reader.optional_boolean("attention.causal")
    if architecture in blocks.EITHER_WAY:
        return causal is False
    if causal is is_encoder:
        wanted = "without a causal mask only" if is_encoder else "with causal attention only"
        raise UnsupportedFormatError(
            f"{reader.full_key('attention.causal')} is {str(causal).lower()}; this version runs models of the "
            f"architecture {architecture!r} {wanted}. Choose another model."
        )
    return False


def _count_layers(
    reader: MetadataReader, tensor_shapes: Mapping[str, blocks.Shape], *, is_draft_model: bool
) -> tuple[int, int]:
    """Layers of the model, and those for next-token prediction that follow them; a file may lack the latter.

    is_draft_model: its file counts every layer as one for next-token prediction; they are its layers.
    """
    num_blocks = reader.integer("block_count", low=1, high=MAX_LAYERS)
    num_extra = 0 if is_draft_model else reader.integer("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    if num_blocks <= num_extra:
        raise reader.contradiction("nextn_predict_layers", num_extra, "fewer than block_count")
    num_layers = num_blocks - num_extra
    found = {name.split(".", 2)[1] for name in tensor_shapes if name.startswith("blk.")}
    if any(str(layer) not in found for layer in range(num_layers)):
        raise reader.contradiction("block_count", num_blocks, f"the {len(found)} blocks that the tensors form")
    has_extra = all(f"blk.{layer}.nextn.eh_proj.weight" in tensor_shapes for layer in range(num_layers, num_blocks))
    return num_layers, num_extra if has_extra else 0


def _booleans(reader: MetadataReader, key: str, num_layers: int) -> tuple[bool, ...]:
    """One truth value per layer; empty if the file has no array of them."""
    if not reader.is_sequence(key):
        return ()
    return tuple(bool(value) for value in reader.integers(key, num_layers, low=0, high=1))


def _head_counts(reader: MetadataReader, num_layers: int, *, may_lack: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Heads of queries, and of keys and values, per layer; single layers may have none, with may_lack all of them."""
    num_heads = reader.integers("attention.head_count", num_layers, low=0, high=MAX_WIDTH)
    num_kv_heads = reader.integers("attention.head_count_kv", num_layers, num_heads, low=0, high=MAX_WIDTH)
    for key, counts in (("attention.head_count", num_heads), ("attention.head_count_kv", num_kv_heads)):
        if not any(counts) and not may_lack:
            raise reader.contradiction(key, 0, "at least 1 in some layer")
    for heads, kv_heads in zip(num_heads, num_kv_heads, strict=True):
        if kv_heads and heads % kv_heads:
            raise reader.contradiction("attention.head_count_kv", kv_heads, f"a divisor of {heads} heads")
    return num_heads, tuple(min(pair) for pair in zip(num_heads, num_kv_heads, strict=True))


def _head_dim(reader: MetadataReader, hidden_size: int, num_heads: tuple[int, ...]) -> int:
    if "attention.key_length" in reader:
        return reader.integer("attention.key_length", low=1, high=MAX_WIDTH)
    most = max(num_heads)
    if not most:
        return 0
    if hidden_size % most:
        raise reader.contradiction(
            "attention.head_count", most, f"a divisor of embedding_length {hidden_size} (no key_length given)"
        )
    return hidden_size // most


def _vocab_size(reader: MetadataReader, tensor_shapes: Mapping[str, blocks.Shape], hidden_size: int) -> int:
    shape = tensor_shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise CorruptFileError(
            f"token_embd.weight has shape {shape}; a model has one row per vocabulary entry there. "
            "Is this file complete? Split files are opened by their first part."
        )
    if shape[1] != hidden_size and tensor_shapes.get("token_embd_proj.weight") != (hidden_size, shape[1]):
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


def _windowed_layers(reader: MetadataReader, num_layers: int) -> tuple[bool, ...]:
    """Layers with a sliding window: a list, or a period n, of which one layer has full attention."""
    key = "attention.sliding_window_pattern"
    if key not in reader or reader.is_sequence(key):
        return _booleans(reader, key, num_layers)
    period = reader.integer(key, low=0, high=MAX_LAYERS)
    full = 0 if reader.prefix in _DENSE_FIRST else period - 1
    return tuple(period == 0 or layer % period != full for layer in range(num_layers))


def _check_tensor_shapes(
    reader: MetadataReader, config: ModelConfig, tensor_shapes: Mapping[str, blocks.Shape]
) -> None:
    """Compare heads, sizes and experts with the shapes of every layer's tensors.

    Raises: CorruptFileError naming the key and the contradicting or missing tensor.
    """
    check = _Check(reader, tensor_shapes)
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        recurrent = config.recurrent
        # Recurrent blocks check what they read.
        if recurrent is None or not (recurrent.layers[layer] or recurrent.num_shared_blocks):
            if config.latent is not None:
                _check_latent(check, block, config.latent, config, layer)
            elif config.num_kv_heads[layer] or not config.num_heads[layer]:
                _check_heads(check, block, config, layer)
        if config.experts is not None:
            count = config.experts.num_experts
            # Stacks of experts; a stack of one may be a plain matrix.
            for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"):
                axis = -2 if name == "ffn_gate_inp" else -3
                check.equal(f"{block}{name}.weight", axis, count, "expert_count", str(count), optional=True)


class _Check:
    """Compares one axis of one tensor with a product of metadata."""

    def __init__(self, reader: MetadataReader, tensor_shapes: Mapping[str, blocks.Shape]) -> None:
        self.reader, self.shapes = reader, tensor_shapes

    def equal(self, name: str, axis: int, wanted: int, key: str, found: str, *, optional: bool = False) -> None:
        shape = self.shapes.get(name)
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
            raise self.reader.contradiction(key, found, f"the {size} {kind} of {name}")


_GATED_ATTENTION = ("clef", "qwen3next", "qwen35", "qwen35moe")
"""Architectures whose queries come with a gate of the same size for each head."""


def _check_heads(check: _Check, block: str, config: ModelConfig, layer: int) -> None:
    num_heads, num_kv_heads = config.num_heads[layer], config.num_kv_heads[layer]
    head, value = config.head_sizes(layer)
    columns = num_heads * value
    found = f"{num_heads} and the size of a head {value}, together {columns}"
    check.equal(f"{block}attn_output.weight", -1, columns, "attention.head_count", found, optional=not num_heads)
    if not num_heads:
        return
    fused = f"{block}attn_qkv.weight"
    if fused in check.shapes:
        rows = num_heads * head + num_kv_heads * (head + value)
        found = f"{num_heads}, with {num_kv_heads} of keys and values and sizes {head} and {value} together {rows}"
        check.equal(fused, -2, rows, "attention.head_count", found)
        return
    for letter, count, size, key in (
        ("q", num_heads, 2 * head if config.architecture in _GATED_ATTENTION else head, "attention.key_length"),
        ("k", num_kv_heads, head, "attention.head_count_kv"),
        ("v", num_kv_heads, value, "attention.head_count_kv"),
    ):
        number = size if key == "attention.key_length" else count
        other = f"{count} heads" if number == size else f"the size of a head {size}"
        found = f"{number}, with {other} together {count * size}"
        # Layers that attend to another's keys and values have queries only, and values may be the keys' projection.
        is_optional = letter == "v" and config.architecture in blocks.TWO_HEAD_SIZES
        is_optional |= letter != "q" and layer >= config.num_layers - config.num_shared_layers
        check.equal(f"{block}attn_{letter}.weight", -2, count * size, key, found, optional=is_optional)


def _check_latent(check: _Check, block: str, latent: blocks.LatentConfig, config: ModelConfig, layer: int) -> None:
    num_heads, rotary_size = config.num_heads[layer], config.rope.rotary_size
    queries = num_heads * latent.key_size
    name = f"{block}attn_q_b.weight" if latent.query_rank else f"{block}attn_q.weight"
    found = f"{num_heads} and attention.key_length_mla {latent.key_size}, together {queries}"
    check.equal(name, -2, queries, "attention.head_count", found)
    if latent.query_rank:
        check.equal(name, -1, latent.query_rank, "attention.q_lora_rank", str(latent.query_rank))
    if not latent.is_absorbed:
        plain_size, kv_heads = latent.key_size - rotary_size, config.num_kv_heads[layer]
        if kv_heads != num_heads:
            wanted = f"as many as attention.head_count {num_heads}"
            raise check.reader.contradiction("attention.head_count_kv", kv_heads, wanted)
        rows = num_heads * (plain_size + latent.value_size)
        found = f"{num_heads}, with keys of {plain_size} and values of {latent.value_size} together {rows}"
        check.equal(f"{block}attn_kv_b.weight", -2, rows, "attention.head_count", found)
    keys = latent.kv_rank + rotary_size
    found = f"{latent.kv_rank} and rope.dimension_count {rotary_size}, together {keys}"
    check.equal(f"{block}attn_kv_a_mqa.weight", -2, keys, "attention.kv_lora_rank", found)
    values = num_heads * latent.value_size
    found = f"{latent.value_size} and {num_heads} heads, together {values}"
    check.equal(f"{block}attn_output.weight", -1, values, "attention.value_length_mla", found)
