"""Projectors in which learned queries read windows of a sound's rows, as a Q-Former does (arXiv 2301.12597).

Each window has queries of its own, all alike at first. They see each other, then the rows of their window; what
becomes of them are the embeddings. Windows, and the queries of one, are sequences with keys and values of their own.
"""

import numpy as np

from localinfer.errors import CorruptFileError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.ops import AttentionShape, Buffer, KVLayerShape
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import SoundConfig
from localinfer.models.media.row_graph import KeyPages, RowGraph, RowWriter, graph_writer
from localinfer.models.media.vision_blocks import ACTIVATIONS
from localinfer.types import FloatArray


class QueryProjector:
    """Embeddings of windows of rows."""

    def __init__(self, config: SoundConfig, input_width: int, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        assert config.queries is not None, "families with queries say how many"
        self._config, self._settings, self._input_width = config, config.queries, input_width
        self._weights, self._pool = weights, pool
        self._width = weights.shape("mm.a.query.weight")[-1]
        num_heads = self._settings.num_heads
        self._size, rest = divmod(self._width, num_heads)
        if rest:
            raise CorruptFileError(
                f"{num_heads} heads of queries of {self._width} columns were found; wanted a divisor of these: "
                "download the model again"
            )
        kept = KVLayerShape(num_heads, self._size, self._size)
        self._own = KeyPages(kept, part=self._settings.num_queries)
        self._window = KeyPages(kept, part=self._settings.size)
        self._queries = weights.values("mm.a.query.weight", self._settings.num_queries, self._width)
        self._steps: list[tuple[RowGraph | None, RowGraph]] = []
        for layer in range(self._settings.num_layers):
            self._write_layer(layer)
        self.graphs = [graph for step in self._steps for graph in step if graph is not None]

    def run(self, rows: FloatArray) -> FloatArray:
        """Embeddings of rows [rows, width]; those that the last window lacks are zeros."""
        size = self._settings.size
        count = -(-len(rows) // size)
        padded = np.zeros((count * size, rows.shape[1]), np.float32)
        padded[: len(rows)] = rows
        found: FloatArray = np.tile(self._queries, (count, 1))
        for keys, graph in self._steps:
            if keys is not None:
                keys.run([padded])
            found = graph.run([found], num_keys=None if keys is None else len(padded))[0].copy()
        return found

    def _write_layer(self, layer: int) -> None:
        """Graphs of queries among themselves, and over their windows in layers that read these."""
        settings, name = self._settings, f"mm.a.blk.{layer}"
        writer = graph_writer(self._weights, self._own)
        x = writer.input("queries of windows", self._width)
        if layer == 0:
            x = writer.layer_norm(x, "mm.a.query_norm", "x", settings.norm_epsilon)
        keys, pages = None, self._own
        self._store(writer, x, f"{name}.attn")
        x = self._attended(writer, x, f"{name}.attn", is_own=True)
        if layer % settings.frequency == 0:
            self._steps.append((None, RowGraph(self._pool, writer, [x], pages)))
            pages = self._window
            writer = graph_writer(self._weights, pages)
            stored = self._store(writer, writer.input("window", self._input_width), f"{name}.cross")
            keys = RowGraph(self._pool, writer, [stored], pages)
            writer = graph_writer(self._weights, pages)
            x = self._attended(writer, writer.input("queries of windows", self._width), f"{name}.cross", is_own=False)
        inner = writer.activation(writer.linear(x, f"{name}.ffn_up", "inner"), ACTIVATIONS[settings.activation])
        x = self._added(writer, x, inner, f"{name}.ffn_down", f"{name}.ffn_norm")
        if layer == settings.num_layers - 1:
            x = writer.linear(x, "mm.a.fc", "embeddings", self._config.output_size)
        self._steps.append((keys, RowGraph(self._pool, writer, [x], pages)))

    def _store(self, writer: RowWriter, x: Buffer, name: str) -> Buffer:
        keys, values = writer.linears(x, [f"{name}_k", f"{name}_v"], ["keys", "values"], [self._width] * 2)
        writer.builder.store_kv(0, keys, values)
        return keys

    def _attended(self, writer: RowWriter, x: Buffer, name: str, *, is_own: bool) -> Buffer:
        """Queries plus what they see. is_own: they see each other, and not what another graph stored."""
        queries, heads, size = (
            writer.linear(x, f"{name}_q", "queries", self._width),
            self._settings.num_heads,
            self._size,
        )
        out = writer.buffer("attended", self._width)
        shape = AttentionShape(heads, heads, size, size, size**-0.5, bidirectional=is_own, excludes_own=not is_own)
        writer.builder.attention(out, queries, 0, shape)
        return self._added(writer, x, out, f"{name}_out", f"{name}_norm")

    def _added(self, writer: RowWriter, x: Buffer, inner: Buffer, name: str, norm: str) -> Buffer:
        total = writer.linear(inner, name, "total", self._width, residual=x)
        return writer.layer_norm(total, norm, "x", self._settings.norm_epsilon)
