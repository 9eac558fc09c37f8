"""Mergers in which rows become fewer by attention: those of MiniCPM-V, and SigLIP's head.

After the encoder, or inside it: learned queries that attend to all rows of a picture, or windows of four rows that see
each other and become one.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.ops import Activation, AttentionShape, Buffer, KVLayerShape, Projection
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import PictureConfig
from localinfer.models.media.patch_positions import Grid
from localinfer.models.media.row_graph import KeyPages, RowGraph, RowWriter, Seen, graph_writer, mean_of_parts
from localinfer.models.media.vision_blocks import BlockShape, norm, write_attention
from localinfer.types import FloatArray

_HEAD_SIZE = 128
"""Columns of a head of a resampler, whatever the file says of the encoder's."""
_COUNT = 4
"""Rows of a window."""


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


class PoolingHead:
    """One learned query that attends to all rows of a picture, and a small network behind it (SigLIP)."""

    def __init__(
        self, config: PictureConfig, shape: BlockShape, weights: EncoderWeights, pool: ThreadPool | None
    ) -> None:
        width, name = config.hidden_size, "v.head"
        self._pages = KeyPages(shape.keys)
        self._query = weights.values(f"{name}.probe", 1, width)
        writer = graph_writer(weights, self._pages)
        keys, values = _parts_of_fused(writer, writer.input("rows", width), f"{name}.attn_qkv", ("keys", "values"), 1)
        writer.builder.store_kv(0, keys, values)
        self._keys = RowGraph(pool, writer, [keys], self._pages)
        writer = graph_writer(weights, self._pages)
        (query,) = _parts_of_fused(writer, writer.input("query", width), f"{name}.attn_qkv", ("projected query",), 0)
        attended = writer.buffer("attended", width)
        writer.builder.attention(attended, query, 0, replace(shape.attention, bidirectional=False, excludes_own=True))
        pooled = writer.linear(attended, f"{name}.attn_out", "pooled", width)
        inner = writer.layer_norm(pooled, f"{name}.ln", "normed", shape.norm_epsilon)
        inner = writer.activation(writer.linear(inner, f"{name}.ffn_up", "inner"), shape.activation)
        out = writer.linear(inner, f"{name}.ffn_down", "embeddings", width, residual=pooled)
        self._result = RowGraph(pool, writer, [out], self._pages)
        self.graphs = [self._keys, self._result]

    def run(self, rows: FloatArray, grid: Grid) -> FloatArray:
        """The row [1, width] of a picture's rows."""
        self._pages.reserve(len(rows) + 1)
        self._keys.run([rows])
        return self._result.run([self._query], num_keys=len(rows))[0].copy()


def _parts_of_fused(writer: RowWriter, x: Buffer, name: str, outs: Sequence[str], first: int) -> list[Buffer]:
    """Products with some of the three parts, from `first` on, of one matrix of queries, keys and values."""
    width, weights, projections = x.width, writer.weights, []
    bias = weights.optional(f"{name}.bias", 3 * width)
    for index, out in enumerate(outs, first):
        rows = slice(index * width, (index + 1) * width)
        weight = weights.linear(f"{name}.weight", 3 * width, width, rows)
        projections.append(Projection(weight, writer.buffer(out, width), None if bias is None else bias[rows]))
    writer.builder.matmul(x, projections)
    return [projection.out for projection in projections]


class WindowMerger:
    """Attention inside windows of four consecutive rows, then their mean and what a small network adds to it."""

    def __init__(
        self,
        config: PictureConfig,
        shape: BlockShape,
        weights: EncoderWeights,
        pool: ThreadPool | None,
        pages: KeyPages,
    ) -> None:
        width, name = config.hidden_size, "v.vit_merger"
        writer = graph_writer(weights, pages)
        rows = writer.input("rows", width)
        normed = norm(writer, shape, rows, f"{name}.ln1", "normed")
        attended = write_attention(writer, shape, normed, name, [], is_windowed=True)
        self._attention = RowGraph(
            pool, writer, [writer.linear(attended, f"{name}.attn_out", "out", width, residual=rows)], pages
        )
        writer = graph_writer(weights)
        joined = writer.input("joined rows", _COUNT * width)
        mean = mean_of_parts(writer, joined, _COUNT)
        inner = writer.layer_norm(joined, f"{name}.ds_ln", "normed", shape.norm_epsilon)
        inner = writer.activation(writer.linear(inner, f"{name}.ds_ffn_up", "inner"), Activation.GELU_TANH)
        self._network = RowGraph(
            pool, writer, [writer.linear(inner, f"{name}.ds_ffn_down", "merged", width, residual=mean)]
        )
        self.graphs = [self._attention, self._network]

    def run(self, rows: FloatArray) -> FloatArray:
        """Rows [windows, width] of rows whose windows are four that follow each other."""
        starts = np.arange(len(rows)) // _COUNT * _COUNT
        attended = self._attention.run([rows], Seen(starts, starts + _COUNT))[0]
        return self._network.run([np.ascontiguousarray(attended).reshape(len(rows) // _COUNT, -1)])[0]
