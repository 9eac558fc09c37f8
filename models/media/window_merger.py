"""The merger inside MiniCPM-V 4.6's encoder: rows of 2 x 2 patches see each other, and become one row."""

import numpy as np

from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.ops import Activation
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import PictureConfig
from localinfer.models.media.row_graph import KeyPages, RowGraph, Seen, graph_writer, mean_of_parts
from localinfer.models.media.vision_blocks import BlockShape, norm, write_attention
from localinfer.types import FloatArray

_COUNT = 4
"""Rows of a window."""


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
