"""Activations of the feed-forward block, by their number, and the functions they are made of."""

from numba import float32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import inline
from localinfer.kernels.ops.elementwise import Activation

SILU, GELU_TANH, GELU_ERF, GELU_QUICK, RELU, RELU_SQUARED, SWIGLU_CLAMPED, SOFTPLUS, SIGMOID, TANH = range(
    len(Activation)
)


@inline
def exponential(x):
    """e to the power of x."""
    return ptx.exp2(x * float32(1.4426950408889634))


@inline
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return ptx.divide(float32(1.0), float32(1.0) + exponential(-x))


@inline
def hyperbolic_tangent(x):
    """tanh x, as 1 - 2 / (e^2x + 1): exact limits at both ends."""
    return float32(1.0) - ptx.divide(float32(2.0), exponential(float32(2.0) * x) + float32(1.0))


@inline
def error_function(x):
    """erf x to 1.5e-7. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
    size = ptx.maximum(x, -x)
    t = ptx.divide(float32(1.0), float32(1.0) + float32(0.3275911) * size)
    series = float32(1.061405429) * t + float32(-1.453152027)
    series = series * t + float32(1.421413741)
    series = series * t + float32(-0.284496736)
    series = series * t + float32(0.254829592)
    value = float32(1.0) - series * t * exponential(-size * size)
    return value if x >= float32(0.0) else -value


@inline
def softplus(x):
    """ln(1 + e^x)."""
    one_more = float32(1.0) + exponential(-ptx.maximum(x, -x))
    return ptx.maximum(x, float32(0.0)) + float32(0.6931471805599453) * ptx.log2(one_more)


@inline
def activate(number, x):
    """The activation of this number, of those that need no second input."""
    result = x
    if number == SILU:
        result = x * sigmoid(x)
    elif number == GELU_TANH:
        inner = float32(0.7978845608028654) * (x + float32(0.044715) * x * x * x)
        result = float32(0.5) * x * (float32(1.0) + hyperbolic_tangent(inner))
    elif number == GELU_ERF:
        result = float32(0.5) * x * (float32(1.0) + error_function(x * float32(0.7071067811865476)))
    elif number == GELU_QUICK:
        result = x * sigmoid(float32(1.702) * x)
    elif number == RELU:
        result = ptx.maximum(x, float32(0.0))
    elif number == RELU_SQUARED:
        result = ptx.maximum(x, float32(0.0)) * ptx.maximum(x, float32(0.0))
    elif number == SIGMOID:
        result = sigmoid(x)
    elif number == TANH:
        result = hyperbolic_tangent(x)
    elif number == SOFTPLUS and x <= float32(20.0):
        result = softplus(x)
    return result


@inline
def expm1_less_x(x):
    """e^x - 1 - x of x <= 0; near 0 by Taylor's series, which has no cancellation."""
    series = float32(2.7557319e-07) * x + float32(2.7557319e-06)
    series = series * x + float32(2.4801587e-05)
    series = series * x + float32(1.984127e-04)
    series = series * x + float32(1.3888889e-03)
    series = series * x + float32(8.3333333e-03)
    series = series * x + float32(4.1666667e-02)
    series = series * x + float32(1.6666667e-01)
    series = series * x + float32(0.5)
    value = x * x * series
    if x <= float32(-0.5):
        value = exponential(x) - float32(1.0) - x
    return value


@inline
def xielu_of(x, positive, negative, beta, epsilon):
    """xIELU of x, see `ops.Xielu`."""
    low = ptx.minimum(x, epsilon)
    value = (expm1_less_x(low) + (low - x)) * negative
    if x > float32(0.0):
        value = positive * (x * x)
    return value + beta * x


@inline
def activate_limited(gate, up, limit):
    """min(silu(gate), limit) * clamp(up, -limit, limit)."""
    gate = ptx.minimum(gate * sigmoid(gate), limit)
    return gate * ptx.minimum(ptx.maximum(up, -limit), limit)


@inline
def activate_gate(number, gate, up):
    """activation(gate) * up."""
    result = activate(number, gate) * up
    if number == SWIGLU_CLAMPED:
        gate = ptx.minimum(gate, float32(7.0))
        up = ptx.maximum(ptx.minimum(up, float32(7.0)), float32(-7.0))
        result = gate * sigmoid(float32(1.702) * gate) * (up + float32(1.0))
    return result
