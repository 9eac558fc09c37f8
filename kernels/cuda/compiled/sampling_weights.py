"""The weight of a logit and its noise: those of `sampling_weights.py` and `philox.py` of the CPU, bit for bit.

Every step is one rounding in float64, or whole numbers. Only the logarithm differs from the CPU's, in its last bits, so
two tokens whose scores agree to fifteen digits may win in another order.

No measurement on a GPU has justified this file yet: what the first run shows to be no gain is to be deleted.
"""

from numba import float64, int64

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import inline

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = float(3 << 51)
_ROUNDING_BITS = 0x4338000000000000
_LN2 = 0.6931471805599453
_ROOT_2 = 1.4142135623730951
_EXP_FIRST = 1.0 / 479001600.0
_EXP_OTHERS = (
    1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0,
    1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0,
)  # fmt: skip
_LOG_SERIES = tuple(1.0 / odd for odd in range(23, 1, -2))
_MANTISSA = (1 << 52) - 1
_ONE_BITS = 1023 << 52
_LOW_WORD = 0xFFFFFFFF


@inline
def weight_of(x):
    """exp(x) for x <= 0 in units of 2^-43, to the nearest, as int64; the CPU's steps in the CPU's order."""
    if x < float64(-64.0):
        x = float64(-64.0)
    shifted = ptx.multiply_f64(x, float64(_LOG2_E)) + float64(_ROUNDING)
    exponent = shifted - float64(_ROUNDING)
    rest = (x - ptx.multiply_f64(exponent, float64(_LN2_HIGH))) - ptx.multiply_f64(exponent, float64(_LN2_LOW))
    sum = float64(_EXP_FIRST)
    for coefficient in _EXP_OTHERS:
        sum = ptx.multiply_f64(sum, rest) + coefficient
    scale = ptx.bits_f64((ptx.f64_bits(shifted) + int64(1023 + 43)) << 52)
    return ptx.f64_bits(ptx.multiply_f64(sum, scale) + float64(_ROUNDING)) - int64(_ROUNDING_BITS)


@inline
def natural_log(value):
    """Of a normal float64 above zero, to about two units of the last digit.

    With m in [sqrt(1/2), sqrt(2)) and s = (m - 1) / (m + 1): log m = 2 (s + s^3 / 3 + s^5 / 5 + ...).
    """
    bits = ptx.f64_bits(value)
    exponent = (bits >> 52) - 1023
    mantissa = ptx.bits_f64((bits & int64(_MANTISSA)) | int64(_ONE_BITS))
    if mantissa > float64(_ROOT_2):
        mantissa = mantissa * float64(0.5)
        exponent = exponent + 1
    s = ptx.divide_f64(mantissa - float64(1.0), mantissa + float64(1.0))
    square = s * s
    sum = float64(0.0)
    for coefficient in _LOG_SERIES:
        sum = (sum + coefficient) * square
    return ptx.to_f64(exponent) * float64(_LN2) + float64(2.0) * (s + s * sum)


@inline
def uniform_of(token, seed, position):
    """The u in (0, 1) of a token at a position: Philox4x32-10, see `cpu/compiled/sampling.py`."""
    c0 = (token >> 6) * 32 + (token & 31)
    c1 = position & int64(_LOW_WORD)
    c2 = (position >> 32) & int64(_LOW_WORD)
    c3 = int64(0)
    key0 = seed & int64(_LOW_WORD)
    key1 = (seed >> 32) & int64(_LOW_WORD)
    for _ in range(10):
        product0 = c0 * int64(0xD2511F53)
        product1 = c2 * int64(0xCD9E8D57)
        c0 = ((product1 >> 32) & int64(_LOW_WORD)) ^ c1 ^ key0
        c1 = product1 & int64(_LOW_WORD)
        c2 = ((product0 >> 32) & int64(_LOW_WORD)) ^ c3 ^ key1
        c3 = product0 & int64(_LOW_WORD)
        key0 = (key0 + int64(0x9E3779B9)) & int64(_LOW_WORD)
        key1 = (key1 + int64(0xBB67AE85)) & int64(_LOW_WORD)
    low = c0
    high = c1
    if token & 32 != 0:
        low = c2
        high = c3
    word = (high << 20) | (low >> 12)
    return (ptx.to_f64(word) + float64(0.5)) * float64(2.0**-52)


@inline
def score_of(x, token, seed, position):
    """x with the token's Gumbel noise: the largest score is drawn."""
    return x - natural_log(-natural_log(uniform_of(token, seed, position)))
