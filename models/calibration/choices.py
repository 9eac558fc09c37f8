"""Choosing blocks of positions over a whole sequence at once, in float32: see `kernels.ops.ChooseBlocks`."""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import ChooseBlocks, SparseSelection
from localinfer.types import FloatArray


def chosen_blocks(op: ChooseBlocks, queries: FloatArray, keys: FloatArray, *weights: FloatArray) -> FloatArray:
    """The lists of every row of a sequence from position 0, float32[positions, lists * count].

    Shapes: queries float32[positions, heads * key_size], keys float32[positions, key_size], weights [positions, heads].
    """
    length = len(queries)
    scores = np.float32(op.scale) * (queries.reshape(length, op.num_heads, -1) @ keys.T)
    if weights:
        np.maximum(scores, 0, out=scores)
        scores = np.einsum("rh,rhk->rk", weights[0], scores)[:, None]
    count, size = op.chosen.count, op.chosen.block_size
    scores = np.where(np.arange(length) <= np.arange(length)[:, None, None], scores, np.float32(-np.inf))
    padded = np.pad(scores, ((0, 0), (0, 0), (0, -length % size)), constant_values=-np.inf)
    best: FloatArray = padded.reshape(length, scores.shape[1], -1, size).max(axis=-1)
    own, blocks = np.arange(length)[:, None, None] // size, np.arange(best.shape[2])
    is_local = (blocks <= own) & (blocks > own - min(op.num_local, count))
    best = np.where(is_local, np.float32(np.inf), best)
    order = np.argsort(-best, axis=-1, kind="stable")[:, :, :count]
    is_there = order <= own
    rising = np.sort(np.where(is_there, order, length), axis=-1)
    lists = np.full((length, scores.shape[1], count), -1, np.float32)
    lists[:, :, : rising.shape[2]] = np.where(rising < length, rising, -1)
    return lists.reshape(length, -1)


def choice_mask(lists: FloatArray, chosen: SparseSelection, num_positions: int) -> FloatArray:
    """0 where a row's lists hold a position and minus infinity elsewhere, float32[lists, rows, positions]."""
    rows = lists.reshape(len(lists), chosen.num_lists, -1).astype(np.int64)
    num_blocks = -(-num_positions // chosen.block_size)
    # One more for what is not there.
    is_chosen: NDArray[np.bool_] = np.zeros((*rows.shape[:2], max(num_blocks, int(rows.max()) + 1) + 1), np.bool_)
    np.put_along_axis(is_chosen, rows, True, axis=-1)
    seen = np.repeat(is_chosen[:, :, :num_blocks], chosen.block_size, axis=-1)[:, :, :num_positions]
    return np.where(seen, np.float32(0), np.float32(-np.inf)).transpose(1, 0, 2)
