"""The launches of a graph in order while it is lowered, and what is known of the buffers between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localinfer.kernels.cuda.attention import FreshRows, HeadRotation
from localinfer.kernels.cuda.device import CudaDevice, Step
from localinfer.kernels.cuda.gemm import Builder, Quantized, Shape, Slot, column_launch
from localinfer.kernels.cuda.memory import DeviceMemory, SharedMemory
from localinfer.kernels.cuda.page_sums import PageSums
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Buffer, OpGraph, Projection, Rows


@dataclass
class RecordedOp:
    """An op that may still be joined with the next one."""

    build: Builder
    source: Buffer | None = None
    """The buffer whose rows it leaves quantized if `quantized` is set."""
    can_quantize: bool = False
    quantized: Quantized | None = None
    projections: Sequence[Projection] = ()
    """Of a product."""
    slots: Sequence[Slot] = ()
    """Of a product."""
    activation: int | None = None
    fresh: FreshRows | None = None
    """Rows that a store writes, which the attention of one row does instead if `is_left` is set."""
    is_left: bool = False


class CudaTape:
    """Ops in order. Work deferred to the next op that reads a buffer is done here at the latest.

    page_sums: where attention is summed by page; None if it is not. quantized: where the codes of buffers are, by their
    index. angles: cosines and sines by the RoPE table they are of. stage_starts: number of the first op of each stage,
    see `ops.StageBoundary`. embeddings: address and row stride of the batch's; None as long as no op reads any.
    """

    def __init__(
        self,
        graph: OpGraph,
        device: CudaDevice,
        kv_layout: KVLayout,
        max_rows: dict[Rows, int],
        shared: SharedMemory | None = None,
    ) -> None:
        self.device = device
        self.kv_layout = kv_layout
        self.max_rows = max_rows
        self.memory = DeviceMemory(device, max_rows, graph.buffers, shared)
        self.page_sums: PageSums | None = None
        self.ops: list[RecordedOp] = []
        self.quantized: dict[int, Quantized] = {}
        self.angles: dict[tuple[bytes, float, bytes | None], int] = {}
        self.stage_starts = [0]
        self.embeddings: tuple[int, int] | None = None
        self._media_width = graph.media_width
        self._ropes: dict[int, HeadRotation] = {}
        self._unwritten: dict[int, int] = {}

    @property
    def last(self) -> RecordedOp | None:
        """The op before the one that is being lowered."""
        return self.ops[-1] if self.ops else None

    def addresses_of(self, *buffers: Buffer) -> tuple[int, ...]:
        """Address and row stride of each buffer."""
        return tuple(word for buffer in buffers for word in self.memory.address_of(buffer))

    def add(self, build: Builder, *writes: Buffer) -> RecordedOp:
        """Record an op and the buffers it writes."""
        op = RecordedOp(build)
        self.ops.append(op)
        for buffer in writes:
            self.written(buffer)
        return op

    def leave_out(self, first: int, quantized: dict[int, Quantized]) -> None:
        """Let ops from one on be left out of batches whose rows are all of type 0, so that none is joined with them.

        quantized: what lay quantized before them.
        """

        def typed(build: Builder) -> Builder:
            return lambda shape: build(shape) if shape.is_typed else iter(())

        self.ops[first:] = [RecordedOp(typed(op.build)) for op in self.ops[first:]]
        self.quantized = {index: place for index, place in self.quantized.items() if quantized.get(index) is place}

    def simple(
        self,
        kernel: str,
        constants: tuple[int, ...],
        rows: Rows,
        width: int,
        values: tuple[float | str, ...],
        *writes: Buffer,
    ) -> None:
        """An op of one launch, a thread to a column of every row; a value that is a name is that field of the shape."""

        def build(shape: Shape) -> Iterator[Step]:
            count = shape.rows(rows)
            if count:
                given = tuple(getattr(shape, value) if isinstance(value, str) else value for value in values)
                yield column_launch(kernel, constants, width, count, given)

        self.add(build, *writes)

    def reserve_embeddings(self) -> None:
        """Make room for the embeddings of a batch, which an op reads."""
        if self.embeddings is None:
            buffer = self.memory.buffer("embeddings of media", self._media_width, Rows.BATCH)
            self.embeddings = self.memory.address_of(buffer)

    def written(self, buffer: Buffer) -> None:
        """Forget what was known of a buffer before it was written."""
        self.quantized.pop(buffer.index, None)
        self._ropes.pop(buffer.index, None)
        self._unwritten.pop(buffer.index, None)

    def write_part(self, buffer: Buffer, num_columns: int) -> None:
        """Note that the next op writes so many columns of a buffer, while the others hold what they held.

        Where a buffer was left unwritten, nothing may read it until ops have written all of its columns.
        """
        missing = self._unwritten.get(buffer.index, 0) - num_columns
        if buffer.index not in self._unwritten:
            self.read(buffer)
        self.written(buffer)
        if missing > 0:
            self._unwritten[buffer.index] = missing

    def leave_unwritten(self, buffer: Buffer) -> None:
        """Note that a buffer, which was joined with another, is not written: nothing may read it."""
        self._unwritten[buffer.index] = buffer.width

    def put_off(self, buffer: Buffer, rope: HeadRotation) -> None:
        """Leave a rotation to the op that reads the buffer next."""
        self.written(buffer)
        self._ropes[buffer.index] = rope

    def take_rope(self, x: Buffer, head_size: int) -> HeadRotation:
        """The rotation that was put off for x, to be done by its reader, which leaves x without it."""
        rope = self._ropes.get(x.index)
        if rope is None or rope.head_size != head_size:
            self.read(x)
            return HeadRotation(0, 0, 0, head_size, 0)
        del self._ropes[x.index]
        self.leave_unwritten(x)
        return rope

    def read(self, *buffers: Buffer) -> None:
        """Make sure that buffers hold what their ops said, whatever was put off."""
        for buffer in buffers:
            name = buffer.name
            assert buffer.index not in self._unwritten, f"{name} was never written: it was joined with another"
            rope = self._ropes.pop(buffer.index, None)
            if rope is not None:
                heads = buffer.width // rope.head_size
                rotation = (rope.angles, heads, rope.head_size, rope.num_pairs, rope.halves, rope.offset)
                values = (*self.memory.address_of(buffer), *rotation)
                self.simple("rows.rope", (), Rows.BATCH, heads * rope.num_pairs, values, buffer)
