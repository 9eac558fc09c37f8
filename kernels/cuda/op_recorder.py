"""The ops of a CUDA tape while it is written, and what is known of the buffers between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from localinfer.kernels.cpu.memory import check
from localinfer.kernels.cuda.attention import Rope, rope_steps
from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.gemm import THREADS, Builder, Quantized, Shape, Slot
from localinfer.kernels.cuda.memory import DeviceMemory
from localinfer.kernels.ops import Buffer, Projection, Rows


@dataclass
class RecordedOp:
    """An op that may still be joined with the next one.

    source: the buffer whose rows it leaves quantized if `quantized` is set. slots and x: of a product.
    """

    build: Builder
    source: Buffer | None = None
    can_quantize: bool = False
    quantized: Quantized | None = None
    projections: Sequence[Projection] = ()
    slots: Sequence[Slot] = ()
    activation: int | None = None


@dataclass
class _BufferStates:
    """What is known of the buffers while ops are written."""

    quantized: dict[int, Quantized] = field(default_factory=dict)
    ropes: dict[int, Rope] = field(default_factory=dict)
    unwritten: set[int] = field(default_factory=set)


class OpRecorder:
    """Ops in order. What was put off, to be done by whoever reads a buffer next, is done here at the latest."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.ops: list[RecordedOp] = []
        self.states = _BufferStates()

    def add(self, build: Builder, *writes: Buffer) -> RecordedOp:
        """Record an op and the buffers it writes."""
        op = RecordedOp(build)
        self.ops.append(op)
        for buffer in writes:
            self.written(buffer)
        return op

    def written(self, buffer: Buffer) -> None:
        """Forget what was known of a buffer before it was written."""
        self.states.quantized.pop(buffer.index, None)
        self.states.ropes.pop(buffer.index, None)
        self.states.unwritten.discard(buffer.index)

    def read(self, *buffers: Buffer) -> None:
        """Make sure that buffers hold what their ops said, whatever was put off."""
        for buffer in buffers:
            assert buffer.index not in self.states.unwritten, (
                f"{buffer.name} was never written: it was joined with another"
            )
            rope = self.states.ropes.pop(buffer.index, None)
            if rope is not None:
                self.add(rope_steps(self._memory.place(buffer), buffer.width // rope.head_size, rope), buffer)

    def simple(
        self,
        kernel: str,
        constants: tuple[int, ...],
        rows: Rows,
        width: int,
        values: tuple[float, ...],
        *writes: Buffer,
    ) -> None:
        """An op of one launch, a thread to a column of every row."""

        def build(shape: Shape) -> Iterator[Step]:
            count = shape.rows(rows)
            if count:
                yield Launch(kernel, constants, (-(-width // THREADS), count, 1), THREADS, values)

        self.add(build, *writes)

    def same_shape(self, *buffers: Buffer) -> None:
        """Raise ShapeError unless these hold the same rows and are as wide as each other."""
        first = buffers[0]
        for other in buffers[1:]:
            check(
                (first.width, first.rows) == (other.width, other.rows),
                f"{other.name} is {other.rows.value} x {other.width}, {first.name} {first.rows.value} x {first.width}",
            )
