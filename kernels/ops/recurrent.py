"""Recurrent layers: each op keeps a state per sequence in place of keys and values, of one size at any length.

A state is what a row needs of all rows before it. Rows enter one after another in one fixed order, alone or many in a
batch, so their bits do not depend on how a text is cut. A log keeps what some rows did to a state, so that any number
of them can be repeated after a rejected draft, with the same bits and without the products that led to them.
"""

from localinfer.kernels.ops.records import Buffer, OpRecord
from localinfer.types import FloatArray, Record


class StateShape(Record):
    """Memory of one recurrent op per sequence, whatever its length."""

    num_values: int
    """float32 of the state."""
    log_values: int
    """float32 per row of the log, from which the op can repeat a row's update of the state without its inputs."""


class RecurrentOp(OpRecord):
    """An op that carries a state from row to row of a sequence."""

    state: int
    """Number of its state among the graph's."""

    @property
    def state_shape(self) -> StateShape:
        """Sizes of that state and of a row of its log."""
        raise NotImplementedError


def whole_vectors(width: int) -> int:
    """Values of a row of a state or log: whole vectors of sixteen."""
    return -(-width // 16) * 16


def short_convolution_state(width: int, kernel_size: int) -> StateShape:
    """State of a convolution over kernel_size rows of this width."""
    padded = whole_vectors(width)
    return StateShape((kernel_size - 1) * padded, padded)


class ShortConvolution(RecurrentOp):
    """out[t, c] = sum over i of weight[c, i] * x[t - K + 1 + i, c], plus bias; rows before the sequence are 0.

    weight: float32[width, K]; its last column meets the row itself. bias: float32[width]. has_silu: out = silu of that.
    The state holds the last K - 1 rows of x, oldest first; the log rows of x.
    """

    out: Buffer
    x: Buffer
    weight: FloatArray
    bias: FloatArray | None = None
    has_silu: bool = True

    @property
    def state_shape(self) -> StateShape:
        """K - 1 rows; one per logged row."""
        return short_convolution_state(*self.weight.shape)


class CentredConvolution(OpRecord):
    """out[t, c] = sum over i of weight[c, i] * x[t - K // 2 + i, c]; rows outside the segment, a whole text, are 0.

    weight: float32[width, K], K odd; its middle column meets the row itself.
    """

    out: Buffer
    x: Buffer
    weight: FloatArray


def delta_rule_state(num_heads: int, num_key_heads: int, key_size: int, value_size: int, decays: int) -> StateShape:
    """State of a delta rule with this many decays per row."""
    keys, values = num_key_heads * key_size, num_heads * value_size
    return StateShape(key_size * values, whole_vectors(keys) + whole_vectors(values) + whole_vectors(decays))


class GatedDeltaRule(RecurrentOp):
    """The gated delta rule of every head (arXiv 2412.06464), its state S of key_size x value_size, from 0.

    S = diag(e^g) S; u = sigmoid(beta) (v - S^T k); S = S + k u^T; out = scale S^T q.
    g = factor * softplus(decay + bias), one per head or, as decay is wide, per key channel (Kimi Linear, arXiv
    2510.26692); with lower_bound < 0, g = lower_bound * sigmoid(factor * (decay + bias)). bias has a
    number per decay, factor per decay or head; g is at most 0.
    Queries and keys have num_key_heads heads. is_tiled: head h of values uses h % num_key_heads of them, otherwise each
    is for consecutive heads. beta has one value per head.
    A state lies as panels of up to 32 columns of a head, [key_size][columns] each; a log has k, u and e^g of a row.
    """

    out: Buffer
    queries: Buffer
    keys: Buffer
    values: Buffer
    decay: Buffer
    beta: Buffer
    factor: FloatArray
    bias: FloatArray | None
    num_key_heads: int
    scale: float = 1.0
    lower_bound: float = 0.0
    is_tiled: bool = False

    @property
    def num_heads(self) -> int:
        """Heads of values."""
        return self.beta.width

    @property
    def key_size(self) -> int:
        """Channels of a head of keys."""
        return self.keys.width // self.num_key_heads

    @property
    def value_size(self) -> int:
        """Columns of a head of values."""
        return self.values.width // self.num_heads

    @property
    def is_by_channel(self) -> bool:
        """True if every key channel has its own decay."""
        return self.decay.width != self.num_heads

    @property
    def state_shape(self) -> StateShape:
        """All heads' S; a row of a log has what was added to it."""
        return delta_rule_state(self.num_heads, self.num_key_heads, self.key_size, self.value_size, self.decay.width)


def selective_scan_state(
    num_heads: int, head_size: int, num_states: int, num_groups: int, *, is_by_channel: bool
) -> StateShape:
    """State of a `SelectiveScan` of these sizes."""
    channels = num_heads * head_size
    num_values = num_heads * whole_vectors(head_size) * num_states
    return StateShape(num_values, channels + (channels if is_by_channel else num_heads) + num_groups * num_states)


class SelectiveScan(RecurrentOp):
    """State-space recurrence: S = exp(dt a) S + dt x b for channels x and states b; out = S c + d x.

    x, from x_offset on, and out: num_heads heads of head_size channels. b and c, from their offsets on: num_groups runs
    of num_states, of which group g is that of heads g * num_heads / num_groups and following. dt, at least 0, a and d:
    float32 per head, or of one head per channel, with rates a[channel, state]. Without dt all steps are 1: linear
    attention of queries c to keys b, with a fixed decay (Lightning Attention-2, arXiv 2401.04658). The state is
    [head][channels in whole vectors][num_states] in sixteens of channels; the log rows of x, dt and b. Sources: Mamba,
    arXiv 2312.00752, section 3; Mamba-2, 2405.21060, section 7.
    """

    out: Buffer
    x: Buffer
    dt: Buffer | None
    b: Buffer
    c: Buffer
    a: FloatArray
    d: FloatArray
    num_heads: int
    head_size: int
    num_states: int
    num_groups: int = 1
    x_offset: int = 0
    b_offset: int = 0
    c_offset: int = 0

    @property
    def is_by_channel(self) -> bool:
        """True if each channel has its own step size, and each of its states its own rate of decay."""
        return self.a.ndim == 2

    @property
    def state_shape(self) -> StateShape:
        """Per channel all states; per logged row x, dt and b."""
        return selective_scan_state(
            self.num_heads, self.head_size, self.num_states, self.num_groups, is_by_channel=self.is_by_channel
        )


def wkv_state(width: int, head_size: int) -> StateShape:
    """State of the recurrence of RWKV-7."""
    return StateShape(width * head_size, 5 * whole_vectors(width))


class Wkv(RecurrentOp):
    """The recurrence of RWKV-7 (arXiv 2503.14456) of every head, its state S of keys x values, from 0.

    With w = e^(-e^-0.5 sigmoid(decay)), a = sigmoid(rate), n = keys * key_scale at unit length and k = keys * (1 +
    (a - 1) * rate_scale): S = diag(w) S + k values^T - (n a) (S^T n)^T, the last with the old S; out = S^T receptance;
    bonus = sum(receptance * k * bonus_scale) * values. Scales: float32[width].
    A state lies as the delta rule's; a log has w, k, -(n a), values and S^T n of a row.
    """

    out: Buffer
    bonus: Buffer
    receptance: Buffer
    decay: Buffer
    keys: Buffer
    values: Buffer
    rate: Buffer
    key_scale: FloatArray
    rate_scale: FloatArray
    bonus_scale: FloatArray
    head_size: int

    @property
    def state_shape(self) -> StateShape:
        """All heads' S; a row of a log has what was done to it."""
        return wkv_state(self.out.width, self.head_size)


class PreviousRow(OpRecord):
    """out[r] = x[r - 1] of the same sequence; of a segment's first row what the segment carries, or zeros.

    The segment also says where x of its last row goes. x: None where segments have one row each.
    """

    out: Buffer
    x: Buffer | None = None
