"""Ops of recurrent layers: each keeps a state per sequence in place of keys and values, of one size at any length.

A state is what a row needs of all rows before it. Rows enter one after another in one fixed order, alone or many in a
batch, so their bits do not depend on how a text is cut. A log keeps what some rows did to a state, so that any number
of them can be repeated after a rejected draft, with the same bits and without the products that led to them.
"""

from localinfer.kernels.ops import Buffer, RecurrentOp, StateShape
from localinfer.types import FloatArray


def whole_vectors(width: int) -> int:
    """Values of a row of a state or log: whole vectors of sixteen."""
    return -(-width // 16) * 16


def short_convolution_state(width: int, kernel_size: int) -> StateShape:
    """What a convolution over kernel_size rows of this width keeps."""
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
