"""Activations of the feed-forward block, by their number, and the functions they are made of."""

from numba import float32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import inline
from localinfer.kernels.ops import Activation

SILU, GELU_TANH, GELU_ERF, GELU_QUICK, RELU, RELU_SQUARED, SWIGLU_CLAMPED, TANH = range(len(Activation))


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
    elif number == TANH:
        result = hyperbolic_tangent(x)
    return result


@inline
def activate_gate(number, gate, up):
    """activation(gate) * up."""
    result = activate(number, gate) * up
    if number == SWIGLU_CLAMPED:
        gate = ptx.minimum(gate, float32(7.0))
        up = ptx.maximum(ptx.minimum(up, float32(7.0)), float32(-7.0))
        result = gate * sigmoid(float32(1.702) * gate) * (up + float32(1.0))
    return result
