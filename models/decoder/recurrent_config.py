"""Hyperparameters of recurrent layers, read and checked from GGUF metadata."""

from collections.abc import Sequence
from dataclasses import dataclass

from localinfer.models.decoder.metadata import MetadataReader

MAX_KERNEL = 64
MAX_SIZE = 1 << 22
MIN_SCALE, MAX_BETA_SCALE = 1e-6, 2.0
"""More than 2 would let a state grow without end."""

ALL_LAYERS = ("mamba", "mamba2", "rwkv7")
"""Architectures without attention."""
BY_INTERVAL = {"minimax-01": 8, "olmo-hybrid": 4, "qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""Those where every few layers one has attention, and how many layers that are where a file does not say."""
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
"""Those where layers without heads of keys and values are recurrent."""

BESIDE_ATTENTION = ("falcon-h1", "zamba2")
"""Those where every layer has a recurrent block, and attention beside or before it."""

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
"""Those with Mamba's blocks; the first two with those of Mamba 1."""
SHORT_CONVOLUTION = ("lfm2", "lfm2moe", "lfm3")
"""Those with short convolutions."""
KIMI_DELTA = ("bailingmoe3", "kimi-linear")
"""Those with Kimi delta attention."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
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
    """Of one head's keys, and of its values where no value_size is named."""
    value_size: int = 0
    beta_scale: float = 1.0
    """Factor on what a delta rule adds."""
    inner_size: int = 0
    """Of all heads' values."""
    gate_lower_bound: float = 0.0
    """Of the logarithm of a decay, where a sigmoid bounds it."""
    num_states: int = 0
    """Of Mamba, states per channel."""
    num_groups: int = 0
    """Of Mamba, groups of heads that read and write states alike."""
    time_step_rank: int = 0
    """Of Mamba 1, the width that step sizes are made of."""
    norms_inputs: bool = False
    """Of Mamba 1: step sizes and the inputs and outputs of states are normed."""
    inputs_epsilon: float | None = None
    """Of those norms, None for the model's."""
    norms_before_gate: bool = False
    """The norm of Mamba 2's result, if there is one, is before its gate."""
    length_epsilon: float | None = None
    """Of the lengths that delta nets divide keys and queries by, None for the norms'."""
    least_step: float = 0.0
    """Of Mamba 2, the least size of a step."""
    num_shared_blocks: int = 0
    """Blocks of attention that the layers with attention use in turn (Zamba 2)."""


def has_recurrent_layers(architecture: str) -> bool:
    """Whether models of this architecture may have recurrent layers."""
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
        return RecurrentConfig(layers=layers, kernel_size=reader.integer("shortconv.l_cache", low=2, high=MAX_KERNEL))
    if architecture == "rwkv7":
        return RecurrentConfig(layers=layers, head_dim=reader.integer("wkv.head_size", low=1, high=MAX_SIZE))
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
    num_heads = reader.integer("ssm.time_step_rank", low=1, high=MAX_SIZE)
    num_key_heads = reader.integer("ssm.group_count", low=1, high=MAX_SIZE)
    head_dim = reader.integer("ssm.state_size", low=1, high=MAX_SIZE)
    inner_size = reader.integer("ssm.inner_size", low=1, high=MAX_SIZE)
    if num_heads % num_key_heads:
        raise reader.contradiction("ssm.group_count", num_key_heads, f"a divisor of ssm.time_step_rank {num_heads}")
    if inner_size % num_heads if may_differ else inner_size != num_heads * head_dim:
        wanted = f"ssm.time_step_rank * ssm.state_size, {num_heads} * {head_dim}"
        raise reader.contradiction("ssm.inner_size", inner_size, wanted)
    return RecurrentConfig(
        layers=layers,
        kernel_size=reader.integer("ssm.conv_kernel", low=2, high=MAX_KERNEL),
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        head_dim=head_dim,
        value_size=inner_size // num_heads,
        beta_scale=reader.number("ssm.beta_scale", 1.0, low=MIN_SCALE, high=MAX_BETA_SCALE),
        inner_size=inner_size,
        length_epsilon=_optional_epsilon(reader, "ssm.length_epsilon"),
    )


def _lightning(reader: MetadataReader, layers: tuple[bool, ...], num_heads: int) -> RecurrentConfig:
    """Heads of lightning attention are as many as attention has of queries, and as large."""
    hidden_size = reader.integer("embedding_length", low=1, high=MAX_SIZE)
    head_dim = reader.integer("attention.key_length", hidden_size // max(num_heads, 1), low=1, high=MAX_SIZE)
    return RecurrentConfig(
        layers=layers, num_heads=num_heads, num_key_heads=num_heads, head_dim=head_dim, inner_size=num_heads * head_dim
    )


def _optional_epsilon(reader: MetadataReader, key: str) -> float | None:
    return reader.number(key, low=0.0, high=1.0) if key in reader else None


def _kimi_delta(reader: MetadataReader, layers: tuple[bool, ...], num_heads: int) -> RecurrentConfig:
    head_dim = reader.integer("kda.head_dim", low=1, high=MAX_SIZE)
    bound = reader.number("kda.gate_lower_bound", 0.0, low=-80.0, high=0.0)
    if (reader.optional_boolean("kda.safe_gate") is True) != (bound < 0.0):
        raise reader.contradiction("kda.gate_lower_bound", bound, "a negative number with kda.safe_gate, or neither")
    return RecurrentConfig(
        layers=layers,
        kernel_size=reader.integer("ssm.conv_kernel", low=2, high=MAX_KERNEL),
        num_heads=num_heads,
        num_key_heads=num_heads,
        head_dim=head_dim,
        inner_size=num_heads * head_dim,
        gate_lower_bound=bound,
        length_epsilon=_optional_epsilon(reader, "ssm.length_epsilon"),
    )


def _state_space(reader: MetadataReader, layers: tuple[bool, ...], *, has_heads: bool) -> RecurrentConfig:
    """Sizes of Mamba's blocks; has_heads: of the second."""
    inner_size = reader.integer("ssm.inner_size", low=1, high=MAX_SIZE)
    rank = reader.integer("ssm.time_step_rank", low=1, high=MAX_SIZE)
    num_groups = reader.integer("ssm.group_count", 1, low=0, high=MAX_SIZE) or 1 if has_heads else 1
    if has_heads and inner_size % rank:
        raise reader.contradiction("ssm.time_step_rank", rank, f"a divisor of ssm.inner_size {inner_size}")
    if has_heads and rank % num_groups:
        raise reader.contradiction("ssm.group_count", num_groups, f"a divisor of ssm.time_step_rank {rank}")
    return RecurrentConfig(
        layers=layers,
        kernel_size=reader.integer("ssm.conv_kernel", low=2, high=MAX_KERNEL),
        num_heads=rank if has_heads else 1,
        inner_size=inner_size,
        num_states=reader.integer("ssm.state_size", low=1, high=MAX_SIZE),
        num_groups=num_groups,
        time_step_rank=0 if has_heads else rank,
        norms_inputs=reader.optional_boolean("ssm.dt_b_c_rms") is True,
        inputs_epsilon=_optional_epsilon(reader, "ssm.dt_b_c_epsilon"),
        norms_before_gate=reader.optional_boolean("ssm.norm_before_gate") is True,
        least_step=reader.number("ssm.least_time_step", 0.0, low=0.0, high=1.0),
        num_shared_blocks=reader.integer("shared_block_count", 0, low=0, high=MAX_SIZE),
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
            sizes = reader.integers("feed_forward_length", num_layers, sizes, low=0, high=MAX_SIZE)
        layers = tuple(count == 0 and size == 0 for count, size in zip(num_kv_heads, sizes, strict=True))
        if named and tuple(map(bool, named)) != layers:
            wanted = "1 for the layers whose attention.head_count_kv is 0"
            raise reader.contradiction("attention.recurrent_layers", list(named), wanted)
        return layers
    if named:
        return tuple(map(bool, named))
    interval = reader.integer("full_attention_interval", BY_INTERVAL[architecture], low=1, high=num_layers + 1)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
