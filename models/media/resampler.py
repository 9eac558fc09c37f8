"""The resampler of MiniCPM-V: a fixed number of learned queries attends to all rows of a picture."""

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.ops import AttentionShape, KVLayerShape
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import PictureConfig
from localinfer.models.media.patch_positions import Grid
from localinfer.models.media.row_graph import KeyPages, RowGraph, graph_writer
from localinfer.types import FloatArray

_HEAD_SIZE = 128
"""Columns of a head, whatever the file says of the encoder's."""


class Resampler:
    """Rows of a picture as keys and values, and what the queries make of them."""

    def __init__(self, config: PictureConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._width = width = config.output_size
        if width % _HEAD_SIZE:
            raise UnsupportedFormatError(
                f"a resampler of {width} columns was found; wanted heads of {_HEAD_SIZE}: choose another model"
            )
        heads = width // _HEAD_SIZE
        self._pages = KeyPages(KVLayerShape(heads, _HEAD_SIZE, _HEAD_SIZE))
        self._queries = weights.values("resampler.query", config.num_queries, width)
        epsilon = config.norm_epsilon
        writer = graph_writer(weights, self._pages)
        rows, positions = writer.input("rows", config.hidden_size), writer.input("positions", width)
        values = writer.linear(rows, "resampler.kv", "rows of the text's width", width)
        values = writer.layer_norm(values, "resampler.ln_kv", "normed", epsilon)
        keys = writer.buffer("keys", width)
        writer.builder.add(keys, values, positions)
        keys = writer.linear(keys, "resampler.attn.k", "projected keys", width)
        values = writer.linear(values, "resampler.attn.v", "projected values", width)
        writer.builder.store_kv(0, keys, values)
        self._keys = RowGraph(pool, writer, [keys], self._pages)
        writer = graph_writer(weights, self._pages)
        queries = writer.layer_norm(writer.input("queries", width), "resampler.ln_q", "normed", epsilon)
        queries = writer.linear(queries, "resampler.attn.q", "projected queries", width)
        attended = writer.buffer("attended", width)
        shape = AttentionShape(heads, heads, _HEAD_SIZE, _HEAD_SIZE, _HEAD_SIZE**-0.5, excludes_own=True)
        writer.builder.attention(attended, queries, 0, shape)
        out = writer.linear(attended, "resampler.attn.out", "out", width)
        out = writer.layer_norm(out, "resampler.ln_post", "normed", epsilon)
        out = writer.linear(out, "resampler.proj", "embeddings", width)
        self._result = RowGraph(pool, writer, [out], self._pages)
        self.graphs = [self._keys, self._result]

    def run(self, rows: FloatArray, grid: Grid) -> FloatArray:
        """Embeddings of the queries for the encoder's rows of a picture."""
        self._pages.reserve(len(rows) + 1)
        self._keys.run([rows, _sines(grid, self._width)])
        return self._result.run([self._queries], num_keys=len(rows))[0].copy()


def _sines(grid: Grid, width: int) -> FloatArray:
    """Positions [rows * columns, width]: sines and cosines of the column, then of the row."""
    quarter = width // 4
    frequencies = 10000.0 ** (-np.arange(quarter) / quarter)
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    parts = [part(axis[:, None] * frequencies) for axis in (columns, rows) for part in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)
