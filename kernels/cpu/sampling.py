"""Choose a token from one row of logits: the order of the filters, and the memory they share.

The steps themselves, and why they are exact, are in `compiled/sampling.py`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.arrays import address
from localinfer.kernels.cpu.protocol import NOT_FINITE, NOTHING_LEFT, SAMPLING_BLOCK
from localinfer.kernels.object_cache import Function

__all__ = ["NOTHING_LEFT", "NOT_FINITE", "RowSampler", "adjust", "order_key", "uniforms"]

_NUCLEUS_BLOCKS = 512
"""Blocks that top-p looks at first; a real distribution's nucleus nearly always lies in them."""

_LOWEST_KEY = -(2**31)
_ONE = float(2**43)

_SCAN = Function("sampling.scan", "q", "qqqq")
_GATHER = Function("sampling.gather", "q", "qqqqqqq")
_CUT = Function("sampling.cut", "q", "qqqqqqq")
_KEEP = Function("sampling.keep", "q", "qqqqq")
_WEIGH = Function("sampling.weigh", "q", "qqqdd")
_MASS = Function("sampling.mass", "q", "qqdd")
_UNIFORMS = Function("sampling.uniforms", "q", "qqqqq")
_RACE = Function("sampling.race", "q", "qqqqqqqddq")
_ADJUST = Function("sampling.adjust", "q", "qqqqqqqqqdddq")
KERNELS = (_SCAN, _GATHER, _CUT, _KEEP, _WEIGH, _MASS, _UNIFORMS, _RACE, _ADJUST)
"""What sampling may call, so that a loader can compile it all before the first token."""


class RowSampler:
    """Scratch memory for rows of one vocabulary size, and the order in which the steps run; one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        num_blocks = -(-vocab_size // SAMPLING_BLOCK)
        self._block_keys = np.empty(num_blocks, np.int32)
        self._ids = np.empty(vocab_size, np.int32)
        self._keys = np.empty(vocab_size, np.int32)
        self._weights = np.empty(vocab_size, np.int64)
        self._histogram = np.empty(2048, np.int64)
        self._uniform = np.empty(vocab_size, np.float64)
        self._above = np.empty(1, np.int64)
        self._block_keys_address = address(self._block_keys)
        self._ids_address = address(self._ids)
        self._keys_address = address(self._keys)
        self._weights_address = address(self._weights)
        self._histogram_address = address(self._histogram)
        self._uniform_address = address(self._uniform)
        self._above_address = address(self._above)

    def choose(
        self,
        logits: NDArray[np.float32],
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: np.uint64,
        position: int,
    ) -> int:
        """Filter a row by top-k, then top-p, then min-p, and draw a token; temperature 0 takes the largest logit.

        Each filter keeps the head of one order (logit descending, id ascending): `top_k` tokens (0: all); the fewest
        whose probability among what top-k kept reaches `top_p` (1: all; never none); those of at least `min_p` times
        the probability of the best. -inf is never chosen.

        Shapes: logits float32[vocab_size], contiguous, fewer than 2^20.
        Returns: the token id, or NOT_FINITE, or NOTHING_LEFT.
        """
        ids, keys, weights = self._ids_address, self._keys_address, self._weights_address
        row = address(logits)
        row_words = (row, logits.size, self._block_keys_address, self._block_keys.size)
        winner: int = _SCAN(*row_words)
        if winner < 0 or temperature == 0.0 or top_k == 1:
            return winner
        best = float(logits[winner])
        inverse_temperature = min(1.0 / temperature, 1e300)
        limited = 0 < top_k < logits.size
        total = 0
        threshold = _LOWEST_KEY
        if limited:
            threshold = self._block_threshold(top_k)
        elif top_p < 1.0:
            total = _MASS(row, logits.size, best, inverse_temperature)
            threshold = self._block_threshold(_NUCLEUS_BLOCKS)
        elif min_p > 0.0:
            reach = best + math.log(min_p) * temperature
            threshold = order_key(reach - 1e-3 - 1e-6 * abs(reach))
        count = _GATHER(*row_words, threshold, ids, keys)
        if limited and count > top_k:
            threshold, above = self._cut(keys, count, False, top_k)
            count = _KEEP(ids, keys, count, threshold, top_k - above)
        gathered = _WEIGH(keys, weights, count, best, inverse_temperature)

        threshold, mass_at_threshold = _LOWEST_KEY, 0
        if top_p < 1.0:
            total = total or gathered
            target = max(1, min(total, math.ceil(top_p * total)))
            if gathered < target:
                count = _GATHER(*row_words, _LOWEST_KEY, ids, keys)
                _WEIGH(keys, weights, count, best, inverse_temperature)
            threshold, above = self._cut(keys, count, True, target)
            mass_at_threshold = target - above
        least = math.ceil(min_p * _ONE)
        _UNIFORMS(self._uniform_address, _signed(seed), position, ids, count)
        chosen: int = _RACE(
            ids, keys, weights, count, threshold, mass_at_threshold, least,
            best, inverse_temperature, self._uniform_address,
        )  # fmt: skip
        return chosen

    def _block_threshold(self, wanted: int) -> int:
        """A key that at least `wanted` logits reach: the `wanted`-th largest block maximum."""
        num_blocks = self._block_keys.size
        if wanted >= num_blocks:
            return _LOWEST_KEY
        return self._cut(self._block_keys_address, num_blocks, False, wanted)[0]

    def _cut(self, keys: int, count: int, by_weight: bool, target: int) -> tuple[int, int]:
        """The key where the largest keys together reach `target`, and the sum above it."""
        threshold = _CUT(
            keys, self._weights_address, count, by_weight, target, self._histogram_address, self._above_address
        )
        return threshold, int(self._above[0])


def order_key(value: float) -> int:
    """The int32 key of a logit, in plain Python."""
    bits = int(np.float32(value).view(np.int32))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


def _signed(seed: np.uint64 | int) -> int:
    """The int64 with a seed's 64 bits."""
    value = int(seed) & (2**64 - 1)
    return value - 2**64 if value >= 2**63 else value


def uniforms(
    out: NDArray[np.float64], seed: np.uint64 | int, position: int, tokens: NDArray[np.int32], count: int
) -> None:
    """Write the u in (0, 1) that each of the first `count` tokens has at a position; out float64[count]."""
    assert out.dtype == np.float64 and tokens.dtype == np.int32 and min(out.size, tokens.size) >= count
    _UNIFORMS(address(out), _signed(seed), position, address(tokens), count)


def adjust(
    out: NDArray[np.float32],
    logits: NDArray[np.float32],
    bias_ids: NDArray[np.int32],
    bias_values: NDArray[np.float64],
    history: NDArray[np.int32],
    start: int,
    stop: int,
    repetition_penalty: float,
    frequency_penalty: float,
    presence_penalty: float,
    counts: NDArray[np.int32],
) -> None:
    """Copy a row of logits, add the bias, then penalise every token of history[start:stop].

    Shapes: out and logits float32[V]; bias_ids int32[B], distinct, bias_values float64[B]; history int32[>= stop];
        counts int32[V], all zero, and zero again afterwards.
    """
    assert history.size >= stop and bias_ids.size == bias_values.size, "shapes as documented"
    assert out.size == logits.size == counts.size, "one vocabulary"
    _ADJUST(
        address(out), address(logits), logits.size, address(bias_ids), address(bias_values), bias_ids.size,
        address(history), start, stop, repetition_penalty, frequency_penalty, presence_penalty, address(counts),
    )  # fmt: skip
