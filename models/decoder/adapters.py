"""Adapters (LoRA, arXiv 2106.09685) that change some rows of a batch only: those of token type 1.

Behind y = W x of an adapted matrix come t = A x, t times the row's type, and y += scale B t. Rows of type 0 add zeros,
so that texts with and without the adapter share a batch; `OpGraph.typed_ops` names these ops, for programs that leave
them out of batches without type 1. A file has `NAME.adapter_a.weight` [rank, columns], `NAME.adapter_b.weight` [rows,
rank] and `NAME.adapter_b.scale` beside `NAME.weight`, and the table of types (0, 1) as `row_types.weight`.
"""

from collections.abc import Sequence

from localinfer.kernels import ops
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, KVLayerShape, Op, Projection, Rows
from localinfer.models.decoder.checked_weights import ROW_TYPES, CheckedWeights


def down_name(name: str) -> str:
    """The name of matrix A beside `NAME.weight`."""
    return f"{name}.adapter_a.weight"


def up_name(name: str) -> str:
    """The name of matrix B beside `NAME.weight`."""
    return f"{name}.adapter_b.weight"


def scale_name(name: str) -> str:
    """The name of the factor of B A beside `NAME.weight`."""
    return f"{name}.adapter_b.scale"


class AdaptedBuilder(GraphBuilder):
    """A graph that is written with the adapters of a file behind the matrices that they change."""

    def __init__(self, kv_layers: Sequence[KVLayerShape], weights: CheckedWeights) -> None:
        super().__init__(kv_layers)
        self._weights = weights
        self._made: dict[tuple[str, int, Rows], Buffer] = {}

    def append(self, op: Op) -> None:
        """Write an op, and behind a product those of the adapters of its matrices. Raises: ShapeError."""
        super().append(op)
        if not isinstance(op, ops.Matmul):
            return
        ends: dict[str, int] = {}
        for projection in op.projections:
            # Parts of one matrix follow each other.
            name = projection.weight.name.removesuffix(".weight")
            first = ends.get(name, 0)
            ends[name] = first + projection.weight.num_rows
            if self._weights.has(down_name(name)):
                begin = len(self.ops)
                self._adapt(op.x, projection, name, slice(first, ends[name]))
                self.typed_ops.update(range(begin, len(self.ops)))

    def _adapt(self, x: Buffer, projection: Projection, name: str, part: slice) -> None:
        """Add scale B A x to rows `part` of a product, in the batch's rows of type 1."""
        weights, out = self._weights, projection.out
        num_rows, rank = weights.shape(f"{name}.weight")[0], weights.shape(down_name(name))[0]
        own = weights.optional_vector(f"{name}.scale", (1,), ())
        factor = weights.vector(scale_name(name), (1,))
        scale = projection.scale * float(factor[0]) / (1.0 if own is None else float(own.reshape(-1)[0]))
        types, between = self._types(x.rows), self._buffer("adapter", rank, x.rows)
        self.matmul(x, [Projection(weights.linear(down_name(name), rank, x.width), between)])
        self.multiply(between, between, types)
        rows = None if out.width == num_rows else part
        up = weights.linear(up_name(name), num_rows, rank, rows)
        self.matmul(between, [Projection(up, out, residual=out, scale=scale)])

    def _types(self, rows: Rows) -> Buffer:
        """Each row's factor of the adapter's part, written where it is first needed."""
        is_new = ("row_types", 1, rows) not in self._made
        found = self._buffer("row_types", 1, rows)
        if is_new and rows is Rows.BATCH:
            self.embed_types(found, self._weights.embedding(ROW_TYPES, 2, 1), adds=False)
        elif is_new:
            self.select_output(found, self._types(Rows.BATCH))
        return found

    def _buffer(self, name: str, width: int, rows: Rows) -> Buffer:
        key = (name, width, rows)
        if key not in self._made:
            self._made[key] = self.buffer(f"{name}.{rows.value}", width, rows)
        return self._made[key]
