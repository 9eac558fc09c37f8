"""Positions in attention: tables of rotary embeddings (RoPE), and biases by the distance of two positions.

Sources: RoFormer (arXiv 2104.09864) for the frequencies; position interpolation (arXiv 2306.15595) for linear scaling;
YaRN (arXiv 2309.00071); LongRoPE (arXiv 2402.13753), of which, as of Llama 3, files carry divisors, one per pair. ALiBi
(arXiv 2108.12409). For biases by distance an op needs a bucket for every distance, and one number of each head for each
bucket: learned ones (T5's, as MPNet has them), or products with the row's query and the other's key (DeBERTa's).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import NUM_AXES, Buffer, Pairing, Relative, RopeTable
from localinfer.models.decoder.architecture import RelativeBias
from localinfer.models.decoder.block_config import RopeConfig
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.types import FloatArray

_T5_MAX_DISTANCE = 128
"""MPNet's, whatever its context: further positions share a bucket (transformers, modeling_mpnet.py)."""
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
    return powers(base, [-2.0 * pair / max(rotary_size, 1) for pair in range(rotary_size // 2)])


def powers(base: float, exponents: Sequence[float]) -> Float64Array:
    """Powers of a positive number, the same on every CPU: NumPy's own are less exact where it has AVX-512 for them."""
    return np.array([math.pow(base, exponent) for exponent in exponents], np.float64)


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


class RopeTables:
    """The RoPE tables of one model: sliding-window layers may have another base, or no scaling."""

    def __init__(self, graph: Graph, context_length: int) -> None:
        architecture = graph.architecture
        rope = replace(graph.config.rope, base=architecture.rope_base or graph.config.rope.base)
        divisors = _divisors(graph, context_length)
        windowed = replace(rope, base=architecture.windowed_rope_base or rope.base_windowed or rope.base)
        if rope.has_plain_windows or not architecture.scales_windowed_rope:
            windowed = replace(windowed, scaling="none", attention_factor=1.0)
        is_divided = architecture.divides_windowed_rope and not rope.has_plain_windows
        windowed_divisors = divisors if is_divided else None
        if architecture.full_rotary_size is not None:
            rope = replace(rope, rotary_size=architecture.full_rotary_size)
            divisors = None if divisors is None else divisors[: rope.rotary_size // 2]
        pairing, magnitude = architecture.pairing, architecture.rope_magnitude
        windowed = replace(windowed, rotary_size=windowed.rotary_size_windowed or windowed.rotary_size)
        self._full, self._windowed = (
            replace(rope_table(one, pairing, factors, magnitude), axes=_axes(graph, one))
            for one, factors in ((rope, divisors), (windowed, windowed_divisors))
        )

    def for_layer(self, windowed: bool) -> RopeTable:
        """The table of a layer with or without a sliding window."""
        return self._windowed if windowed else self._full


def _axes(graph: Graph, rope: RopeConfig) -> NDArray[np.int64] | None:
    """The axis of every pair, 0 time, 1 row, 2 column; None without sections, or where only words come."""
    if not graph.config.takes_media or not any(rope.sections[1:NUM_AXES]):
        return None
    return pair_axes(rope.sections, rope.rotary_size // 2, is_interleaved=graph.architecture.interleaves_axes)


def pair_axes(sections: Sequence[int], num_pairs: int, *, is_interleaved: bool) -> NDArray[np.int64]:
    """The axis of every pair: sections follow each other (Qwen2-VL, arXiv 2409.12191, section 2.1), or take turns as
    long as they last (Qwen3-VL, arXiv 2511.21631). Pairs of no section turn by time, as in the published code."""
    pairs = np.arange(num_pairs)
    axes = np.zeros(num_pairs, np.int64)
    if is_interleaved:
        for axis in range(1, NUM_AXES):
            axes[(pairs % NUM_AXES == axis) & (pairs < NUM_AXES * sections[axis])] = axis
        return axes
    ends = np.cumsum(sections[:NUM_AXES])
    for axis in range(1, NUM_AXES):
        axes[ends[axis - 1] : ends[axis]] = axis
    return axes


def _divisors(graph: Graph, context_length: int) -> FloatArray | None:
    """Divisors of the frequencies: LongRoPE has one set for short contexts and one for those past the original."""
    config = graph.config
    is_long = context_length > config.rope.original_context_length
    longrope = "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
    shape = (config.rope.rotary_size // 2,)
    for name in ("rope_freqs.weight", longrope):
        if graph.weights.has(name):
            return graph.weights.vector(name, shape)
    return None


def alibi_slopes(num_heads: int, max_bias: float) -> FloatArray:
    """One slope per head, float32[num_heads]: a geometric sequence, extended by odd powers to num_heads.

    Source: ALiBi (arXiv 2108.12409), section 3, and its published rule for counts that are not powers of two.
    """
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [(head + 1) / power for head in range(power)]
    exponents += [(2 * head + 1) / (2 * power) for head in range(num_heads - power)]
    return powers(2.0, [-max_bias * exponent for exponent in exponents]).astype(np.float32)


def write_relative_bias(graph: Graph, layer: int, queries: Buffer, keys: Buffer) -> Relative | None:
    """Write what attention adds to scores by distance; None for architectures without. Raises: as `write_decoder`."""
    config, kind = graph.config, graph.architecture.relative_bias
    if kind is None:
        return None
    num_heads, count = config.num_heads[layer], config.num_relative_buckets
    if kind is RelativeBias.TABLE:
        if count < 4 or count % 4:
            raise refuse(config, f"has {count} buckets of distances (attention.relative_buckets_count)")
        learned = graph.weights.vector("attn_rel_b.weight", (count, num_heads))
        buckets = t5_buckets(count, _T5_MAX_DISTANCE, _T5_MAX_DISTANCE)
        return Relative(buckets, count, table=np.ascontiguousarray(learned.T))
    span = config.max_relative_distance if count == 0 else count // 2
    if span < 1 or count % 2:
        raise refuse(config, f"tells {span} distances apart (attention.max_relative_positions)")
    reach = max(config.context_length, config.max_relative_distance)
    buckets = log_buckets(span, config.max_relative_distance, reach, is_plain=count == 0)
    parts = [
        _products(graph, f"blk.{layer}.attn_rel_{letter}", x, num_heads, 2 * span)
        for letter, x in (("k", queries), ("q", keys))
    ]
    return Relative(buckets, 2 * span, by_row=parts[0], by_key=parts[1])


def _products(graph: Graph, name: str, x: Buffer, num_heads: int, num_buckets: int) -> Buffer | None:
    """Every head of x times the vectors of all buckets, where the file has such a stack."""
    if not graph.weights.has(f"{name}.weight"):
        return None
    head_dim = x.width // num_heads
    out = graph.buffer(name.rpartition(".")[2], num_heads * num_buckets, x.rows)
    weight = graph.weights.experts(f"{name}.weight", num_heads, num_buckets, head_dim)
    graph.tape.head_matmul(out, x, weight, num_buckets, head_dim)
    return out


def t5_buckets(num_buckets: int, max_distance: int, reach: int) -> NDArray[np.int64]:
    """The bucket of every distance from -reach to reach, int64[2 * reach + 1]: half of them for positions after a row.

    Of each half, the first half is of single distances, the others of ranges that grow up to max_distance.
    Source: T5 (arXiv 1910.10683, section 2.1), as transformers rounds it.
    """
    distances = np.arange(-reach, reach + 1)
    side, far = num_buckets // 2, np.abs(distances)
    exact = side // 2
    with np.errstate(divide="ignore"):
        logs = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    large = exact + np.where(far < exact, 0.0, logs * np.float32(side - exact)).astype(np.int64)
    return np.where(distances > 0, side, 0) + np.where(far < exact, far, np.minimum(large, side - 1))


def log_buckets(span: int, max_distance: int, reach: int, *, is_plain: bool) -> NDArray[np.int64]:
    """The bucket of every distance from -reach to reach, int64[2 * reach + 1], of 2 * span: the furthest last.

    Distances up to span / 2 have buckets of their own, further ones share them by their logarithm, up to max_distance;
    is_plain: all have their own. Source: DeBERTa (arXiv 2006.03654, section 3.1) and DeBERTa V3's buckets, as
    transformers rounds them (modeling_deberta_v2.py).
    """
    behind = -np.arange(-reach, reach + 1)
    far, middle = np.abs(behind), span // 2
    if not is_plain and middle:
        steps = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(middle))
        steps /= np.log(np.float32((max_distance - 1) / middle))
        large = np.ceil(steps * np.float32(middle - 1)) + middle
        behind = np.where(far <= middle, behind, large * np.sign(behind)).astype(np.int64)
    return np.clip(behind + span, 0, 2 * span - 1)
