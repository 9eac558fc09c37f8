"""Rotary position embeddings: the table of a layer.

Sources: RoFormer (arXiv 2104.09864) for the frequencies; position interpolation (arXiv 2306.15595) for linear scaling;
YaRN (arXiv 2309.00071); LongRoPE (arXiv 2402.13753). Llama 3 and LongRoPE files carry divisors, one per pair.
"""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import Pairing, RopeTable
from localinfer.models.decoder.block_config import RopeConfig

Float64Array = NDArray[np.float64]


def rope_table(
    rope: RopeConfig, pairing: Pairing, divisors: NDArray[np.float32] | None = None, magnitude: float | None = None
) -> RopeTable:
    """The table of layers with these settings.

    divisors: float32[rotary_size / 2] from `rope_freqs.weight` (Llama 3) or `rope_factors_*.weight` (LongRoPE).
    magnitude: replaces the scaling's own factor on sine and cosine.
    Raises: CorruptFileError if divisors have the wrong length, or are zero or not finite.
    """
    frequencies = plain_frequencies(rope.rotary_size, rope.base)
    if divisors is not None:
        _check_divisors(divisors, rope.rotary_size // 2)
        frequencies = frequencies / divisors.astype(np.float64)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "yarn":
        frequencies = yarn_frequencies(frequencies, rope)
    return RopeTable(frequencies, pairing, own_magnitude(rope) if magnitude is None else magnitude)


def own_magnitude(rope: RopeConfig) -> float:
    """The factor on sine and cosine of a file's scaling: 1, or the file's, times YaRN's temperature.

    With a log multiplier m, the temperature is the ratio of those for 1 and for m: the model applies the rest to its
    scores (DeepSeek-V2's `mscale` and `mscale_all_dim`).
    """
    if rope.scaling != "yarn" or not rope.extrapolation_factor:
        return rope.attention_factor
    return rope.attention_factor * yarn_magnitude(rope.factor) / yarn_magnitude(rope.factor, rope.log_multiplier)


def plain_frequencies(rotary_size: int, base: float) -> Float64Array:
    """base^(-2i / rotary_size) for pair i: RoFormer, section 3.2.2. float64[rotary_size / 2]."""
    pairs = np.arange(rotary_size // 2, dtype=np.float64)
    return np.asarray(base ** (-2.0 * pairs / max(rotary_size, 1)), dtype=np.float64)


def yarn_frequencies(frequencies: Float64Array, rope: RopeConfig) -> Float64Array:
    """Interpolate slow pairs, keep fast ones, blend between: YaRN, section 3.2 ("NTK-by-parts").

    A pair is fast if it rotates more than beta_fast times within the original context, slow if fewer than beta_slow.
    """

    def pair_of(rotations: float) -> float:
        of_first_pair = rope.original_context_length / (2.0 * math.pi * rotations)
        return rope.rotary_size * math.log(of_first_pair) / (2.0 * math.log(rope.base))

    first = max(0.0, math.floor(pair_of(rope.beta_fast)))
    last = min(rope.rotary_size - 1.0, math.ceil(pair_of(rope.beta_slow)))
    pairs = np.arange(len(frequencies), dtype=np.float64)
    kept = 1.0 - np.clip((pairs - first) / max(0.001, last - first), 0.0, 1.0)
    kept *= rope.extrapolation_factor
    return frequencies / rope.factor * (1.0 - kept) + frequencies * kept


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's temperature on the scores, applied to queries and keys alike: section 3.4, 0.1 ln(s) + 1."""
    return 1.0 + 0.1 * multiplier * math.log(max(factor, 1.0))


def _check_divisors(divisors: NDArray[np.float32], num_pairs: int) -> None:
    complaint = ""
    if divisors.shape != (num_pairs,):
        complaint = f"have shape {divisors.shape}; wanted ({num_pairs},), half of rope.dimension_count"
    elif not np.all(np.isfinite(divisors)) or not np.all(divisors != 0.0):
        complaint = "contain zero or a value that is not finite; wanted finite numbers"
    if complaint:
        raise CorruptFileError(f"rope divisors {complaint}. Convert the model again or download another copy.")
