"""Sampling of a token from one row of logits: the order of the filters, and their memory.

The compiled steps are in `compiled/sampling.py`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import guard
from localinfer.kernels.cpu.kernel_abi import NOT_FINITE, NOTHING_LEFT, SAMPLING_BLOCK
from localinfer.kernels.cpu.memory import address, empty, placed
from localinfer.kernels.jit.object_cache import Function

__all__ = ["NOTHING_LEFT", "NOT_FINITE", "RowSampler", "adjust", "order_key", "uniforms"]

_NUCLEUS_BLOCKS = 512
"""Blocks that top-p searches first; the nucleus is nearly always in them."""

_SAMPLE_ERROR = 0.03
"""Error of the probability above a key, estimated from one token of every block: two standard deviations for a
vocabulary of 150,000, more for a smaller one. It affects speed, not the result."""

_ROUGH_ERROR = 1e-5
_ROUGH_TEMPERATURES = (1e-30, 1e30)
"""Relative error of a rough sum, besides half a unit per token, and where it holds: float32 can hold 1 / temperature.
See `rough_masses`."""

_LOWEST_KEY = -(2**31)
_LARGEST_LOGIT = float(np.finfo(np.float32).max)
_ONE = float(2**43)

_SCAN = Function("sampling.scan", "q", "qqqqq")
_GATHER = Function("sampling.gather", "q", "qqqqqqq")
_CUT = Function("sampling.cut", "q", "qqqqqqq")
_KEEP = Function("sampling.keep", "q", "qqqqq")
_ADJUST = Function("sampling.adjust", "q", "qqqqqqqqqdddq")
_WEIGH = Function("sampling.weigh", "q", "qqqdd")
_MASS_AHEAD = Function("sampling.mass_ahead", "q", "qqqqqqdd")
_ROUGH_MASSES = Function("sampling.rough_masses", "q", "qqqqqqqqdd")
_UNIFORMS = Function("sampling.uniforms", "q", "qqqqq")
_RACE = Function("sampling.race", "q", "qqqqqqqddq")
_RACE_ROW = Function("sampling.race_row", "q", "qqqqqqqqqdqq")
KERNELS = (*(_SCAN, _GATHER, _CUT, _KEEP, _ADJUST, _WEIGH, _MASS_AHEAD, _ROUGH_MASSES, _UNIFORMS, _RACE, _RACE_ROW),)
"""Kernels of sampling, to be compiled when a model is loaded."""


class _Row(NamedTuple):
    """A row of logits and its sampling parameters."""

    logits: NDArray[np.float32]
    best_token: int
    best: float
    temperature: float
    inverse_temperature: float
    top_p: float
    least_weight: int
    seed: int
    position: int

    def least_key(self) -> int:
        """A lower bound of the keys of tokens with the least weight."""
        if self.least_weight == 0:
            return _LOWEST_KEY
        reach = self.best + math.log((self.least_weight - 0.5) / _ONE) * self.temperature
        return order_key(max(reach - 1e-3 - 1e-6 * abs(reach), -_LARGEST_LOGIT))


class RowSampler:
    """Scratch memory for rows of one vocabulary size, and the order of the steps; not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        num_blocks = -(-vocab_size // SAMPLING_BLOCK)
        self._num_blocks = num_blocks
        self._block_keys, self._block_keys_address = _room(num_blocks, np.int32)
        self._sample_keys, self._sample_keys_address = _room(num_blocks, np.int32)
        self._block_weights, self._block_weights_address = _room(num_blocks, np.int64)
        self._sample_weights, self._sample_weights_address = _room(num_blocks, np.int64)
        self._masses, self._masses_address = _room(3, np.float64)
        self._ids, self._ids_address = _room(vocab_size, np.int32)
        self._keys, self._keys_address = _room(vocab_size, np.int32)
        self._weights, self._weights_address = _room(vocab_size, np.int64)
        self._histogram, self._histogram_address = _room(2048, np.int64)
        self._uniform, self._uniform_address = _room(vocab_size, np.float64)
        self._above, self._above_address = _room(1, np.int64)

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
        """Filter a row by top-k, then top-p, then min-p, and sample a token; temperature 0: the largest logit.

        Each filter keeps the head of one order (logit descending, id ascending): `top_k` tokens (0: all); the fewest
        whose probability among those kept by top-k reaches `top_p` (1: all; at least one); those of at least `min_p`
        times the largest probability. -inf is never sampled.

        Shapes: logits float32[vocab_size], contiguous, fewer than 2^20.
        Returns: the token id, or NOT_FINITE, or NOTHING_LEFT.
        """
        assert logits.flags.c_contiguous, "kernels need contiguous arrays"
        if guard.IS_ON:
            logits = placed(logits)
        # As `address`, inlined, because it runs for every greedy token.
        place: int = logits.__array_interface__["data"][0]
        best_token: int = _SCAN.call(
            place, logits.size, self._block_keys_address, self._num_blocks, self._sample_keys_address
        )
        if best_token < 0 or temperature == 0.0 or top_k == 1 or top_p == 0.0:
            return best_token
        inverse_temperature = min(1.0 / temperature, 1e300)
        least_weight = math.ceil(min_p * _ONE)
        row = _Row(
            logits, best_token, float(logits[best_token]), temperature, inverse_temperature, top_p, least_weight,
            _signed(seed), position,
        )  # fmt: skip
        return self._choose_among_few(row, top_k) if 0 < top_k < logits.size else self._choose_from_all(row)

    def _choose_among_few(self, row: "_Row", top_k: int) -> int:
        """List the tokens kept by top-k, compute exact weights, and race within the list."""
        ids, keys, weights = self._ids_address, self._keys_address, self._weights_address
        scale = (row.best, row.inverse_temperature)
        count = _GATHER(*self._row_parameters(row), self._count_threshold(top_k), ids, keys)
        if count < top_k:
            count = _GATHER(*self._row_parameters(row), _LOWEST_KEY, ids, keys)
        if count > top_k:
            threshold, above = self._cut(keys, 0, count, top_k)
            count = _KEEP(ids, keys, count, threshold, top_k - above)
        total = _WEIGH(keys, weights, count, *scale)
        threshold, mass_at_threshold = _LOWEST_KEY, 0
        if row.top_p < 1.0:
            target = _nucleus(row.top_p, total)
            threshold, above = self._cut(keys, weights, count, target)
            mass_at_threshold = target - above
        _UNIFORMS(self._uniform_address, row.seed, row.position, ids, count)
        chosen: int = _RACE(
            ids, keys, weights, count, threshold, mass_at_threshold, row.least_weight, *scale, self._uniform_address
        )
        return chosen

    def _choose_from_all(self, row: "_Row") -> int:
        """Race the whole row; while the winner is outside the nucleus, race again among the tokens ahead of it.

        The nucleus is the head of an order, so no token behind such a winner is in it, and a winner in it would have
        won within the nucleus alone. The first race is among a head that probably contains the nucleus.
        """
        words, scale = self._row_parameters(row), (row.best, row.inverse_temperature)
        block_mass = _WEIGH(self._block_keys_address, self._block_weights_address, self._num_blocks, *scale)
        least_key = row.least_key()
        start = self._likely_start(row, block_mass) if row.top_p < 1.0 else _LOWEST_KEY
        is_proven = start <= least_key
        threshold, limit = max(start, least_key), 0
        while True:
            chosen: int = _RACE_ROW(
                *words, self._block_weights_address, threshold, limit, row.least_weight, row.best_token,
                row.inverse_temperature, row.seed, row.position,
            )  # fmt: skip
            if row.top_p == 1.0 or (is_proven and chosen == row.best_token):
                return chosen
            key = order_key(float(row.logits[chosen]))
            _ROUGH_MASSES(self._masses_address, *words, start, key, chosen, *scale)
            total, ahead_of_start, ahead_of_chosen = self._masses.tolist()
            if not is_proven and self._is_in_nucleus(row, total, ahead_of_start, start, 0):
                threshold = least_key
            elif self._is_in_nucleus(row, total, ahead_of_chosen, key, chosen):
                return chosen
            else:
                threshold, limit = key, chosen
            is_proven = True

    def _likely_start(self, row: "_Row", block_mass: int) -> int:
        """A key probably below the whole nucleus, estimated from block maxima and from one token of every block."""
        scale = (row.best, row.inverse_temperature)
        sample_mass = _WEIGH(self._sample_keys_address, self._sample_weights_address, self._num_blocks, *scale)
        total = max(block_mass, SAMPLING_BLOCK * sample_mass)
        head = self._block_threshold(_NUCLEUS_BLOCKS)
        tail = SAMPLING_BLOCK * int(self._sample_weights[self._sample_keys <= head].sum())
        if 2 * tail < (1.0 - row.top_p) * total:
            return head - 1
        outside = int((1.0 - row.top_p - _SAMPLE_ERROR) * total / SAMPLING_BLOCK)
        if outside <= 0:
            return _LOWEST_KEY
        target = max(1, sample_mass - outside)
        key, _ = self._cut(self._sample_keys_address, self._sample_weights_address, self._num_blocks, target)
        return min(head, key) - 1

    def _is_in_nucleus(self, row: "_Row", total: float, ahead: float, threshold: int, limit: int) -> bool:
        """True if the weights ahead of a position are below top-p; by exact sums if rough ones do not decide."""
        shortfall = row.top_p * total - ahead
        is_sure = abs(shortfall) > 3.0 * (_ROUGH_ERROR * total + row.logits.size / _ONE)
        if is_sure and _ROUGH_TEMPERATURES[0] <= row.temperature <= _ROUGH_TEMPERATURES[1]:
            return shortfall > 0.0
        words, scale = self._row_parameters(row), (row.best, row.inverse_temperature)
        exact_total = _MASS_AHEAD(*words, _LOWEST_KEY, 0, *scale)
        return bool(_MASS_AHEAD(*words, threshold, limit, *scale) < _nucleus(row.top_p, exact_total))

    def _row_parameters(self, row: "_Row") -> tuple[int, int, int, int]:
        return address(row.logits), row.logits.size, self._block_keys_address, self._num_blocks

    def _count_threshold(self, wanted: int) -> int:
        """A key that at least `wanted` logits reach: certain if there are enough blocks, else probable."""
        if wanted <= self._num_blocks:
            return self._block_threshold(wanted)
        wanted_samples = int(wanted / SAMPLING_BLOCK * 1.1) + 10
        if wanted_samples > self._num_blocks:
            return _LOWEST_KEY
        return self._cut(self._sample_keys_address, 0, self._num_blocks, wanted_samples)[0]

    def _block_threshold(self, wanted: int) -> int:
        """A key that at least `wanted` logits reach: the `wanted`-th largest block maximum."""
        if wanted > self._num_blocks:
            return _LOWEST_KEY
        return self._cut(self._block_keys_address, 0, self._num_blocks, wanted)[0]

    def _cut(self, keys: int, weights: int, count: int, target: int) -> tuple[int, int]:
        """The key where the largest keys together reach `target` of weight, or of count if `weights` is 0; and the sum
        above it.
        """
        threshold = _CUT(keys, weights, count, weights != 0, target, self._histogram_address, self._above_address)
        return threshold, int(self._above[0])


def _room(count: int, kind: type[np.generic]) -> tuple[NDArray[Any], int]:
    """An array, and its address for kernels."""
    array = empty(count, kind)
    return array, address(array)


def order_key(value: float) -> int:
    """The int32 key of a logit; -0.0 and 0.0 have the same."""
    bits = int(np.float32(value + 0.0).view(np.int32))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


def _nucleus(top_p: float, total: int) -> int:
    """The weight that a nucleus must reach: at least one unit, so that one token is kept."""
    return max(1, min(total, math.ceil(top_p * total)))


def _signed(seed: np.uint64 | int) -> int:
    """A seed's 64 bits as int64."""
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
    target, row, counted = placed(out), placed(logits), placed(counts)
    bias_ids, bias_values, history = placed(bias_ids), placed(bias_values), placed(history)
    _ADJUST(
        address(target), address(row), row.size, address(bias_ids), address(bias_values), bias_ids.size,
        address(history), start, stop, repetition_penalty, frequency_penalty, presence_penalty, address(counted),
    )  # fmt: skip
    if guard.IS_ON:
        out[:], counts[:] = target, counted
