"""Graphs whose rows the host gives: the parts of an encoder between two of the host's gathers.

A graph is written once, by a `RowWriter`, which finds tensors by name and reuses buffers. It is lowered for as many
rows as were ever needed, so that a small picture takes little memory. A run is one batch: all rows of one picture or
sound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.kernel_abi import activation_row_bytes
from localinfer.kernels.cpu.lower import kernels_of_graph, lower_to_cpu
from localinfer.kernels.cpu.memory import address, aligned_zeros, padded
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import is_float
from localinfer.kernels.ops import (
    Activation,
    Buffer,
    KVLayerShape,
    LinearWeight,
    Matmul,
    OpGraph,
    Projection,
    Rows,
)
from localinfer.kernels.program import Batch, Segment
from localinfer.models.load.weights import NO_POOL
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.types import FloatArray

_ROWS_AT_LEAST = 64


class KeyPages:
    """Memory for the keys and values of one picture or sound; graphs that share it see what the others stored.

    part: positions of a sequence, of which each has pages of its own and one position to spare; 0: all are one.
    """

    def __init__(self, shape: KVLayerShape, part: int = 0) -> None:
        self.layout = KVLayout("f32", [shape])
        self.part = part
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.addresses: NDArray[np.int64] = np.empty(0, np.int64)

    def reserve(self, num_positions: int) -> None:
        """Make room for so many positions; what was stored is lost where there was less."""
        count = self._count(num_positions)
        if count > len(self.addresses):
            self._memory = aligned_zeros(count * self.layout.page_bytes)
            self.addresses = address(self._memory) + self.layout.page_bytes * np.arange(count)

    def num_bytes(self, num_positions: int) -> int:
        """Bytes for so many positions."""
        return self._count(num_positions) * self.layout.page_bytes

    def of_part(self, index: int) -> NDArray[np.int64]:
        """Addresses of the pages of a sequence."""
        count = self._pages_of_part
        return self.addresses[index * count : (index + 1) * count]

    @property
    def _pages_of_part(self) -> int:
        return -(-(self.part + 1) // self.layout.page_tokens)

    def _count(self, num_positions: int) -> int:
        if self.part:
            return -(-num_positions // self.part) * self._pages_of_part
        return -(-num_positions // self.layout.page_tokens)

    def release(self) -> None:
        """Give up the memory."""
        self._memory, self.addresses = self._memory[:0].copy(), self.addresses[:0].copy()


@dataclass(frozen=True)
class Seen:
    """Rows that rows of a run see, where that is not all of them."""

    starts: NDArray[np.int64]
    """[rows]: the first."""
    ends: NDArray[np.int64]
    """[rows]: the one after the last."""


@dataclass(frozen=True)
class HostStep:
    """Something that the host computes of all rows, and no op does."""

    source: Buffer
    """Its input."""
    target: Buffer
    """Its result."""
    function: Callable[[FloatArray], FloatArray]
    """From rows of the one to rows of the other."""


@dataclass
class RowWriter:
    """A graph being written: linear layers, norms and activations by the names of their tensors."""

    weights: EncoderWeights
    """Its tensors."""
    builder: GraphBuilder
    """Its ops."""
    inputs: list[Buffer] = field(default_factory=list)
    """Buffers that the host fills, in the order in which it gives them."""
    host_steps: list[HostStep] = field(default_factory=list)
    """Steps that the host computes between two stages."""
    _named: dict[tuple[str, int], Buffer] = field(default_factory=dict)

    def input(self, name: str, width: int) -> Buffer:
        """A buffer that the host fills."""
        self.inputs.append(self.builder.buffer(name, width))
        return self.inputs[-1]

    def host_step(self, source: Buffer, out: str, width: int, function: Callable[[FloatArray], FloatArray]) -> Buffer:
        """A buffer [rows, width] that the host computes of all rows of another one."""
        target = self.buffer(out, width)
        self.builder.stage_boundary((source,), (target,))
        self.host_steps.append(HostStep(source, target, function))
        return target

    def halves(self, x: Buffer, name: str, outs: Sequence[str], width: int) -> list[Buffer]:
        """The first and the second half of a product with a matrix of twice the width, in two buffers."""
        weights, projections = self.weights, []
        bias = weights.optional(f"{name}.bias", 2 * width)
        for index, out in enumerate(outs):
            rows = slice(index * width, (index + 1) * width)
            weight = weights.linear(f"{name}.weight", 2 * width, x.width, rows)
            projections.append(Projection(weight, self.buffer(out, width), None if bias is None else bias[rows]))
        self.builder.matmul(self._bounded(x, name, "input"), projections)
        for projection in projections:
            if self._has_bounds(name, "output"):
                self.builder.bound(projection.out, projection.out, *self._bounds(name, "output"))
        return [projection.out for projection in projections]

    def buffer(self, name: str, width: int) -> Buffer:
        """A buffer for a purpose: the same one for the same name and width."""
        if (name, width) not in self._named:
            self._named[name, width] = self.builder.buffer(name, width)
        return self._named[name, width]

    def linear(
        self,
        x: Buffer,
        name: str,
        out: str,
        width: int = 0,
        *,
        residual: Buffer | None = None,
        weight: LinearWeight | None = None,
    ) -> Buffer:
        """A product with a matrix, and its bias where the file has one, in the buffer `out`.

        width: of the result, if the file must agree with it. weight: instead of the file's matrix `name`. What goes in
        and what comes out are kept within bounds where the file has some.
        """
        if weight is None:
            width = width or self.weights.width_of(f"{name}.weight")
            weight = self.weights.linear(f"{name}.weight", width, x.width)
        x = self._bounded(x, name, "input")
        target = self.buffer(out, weight.num_rows)
        bias = self.weights.optional(f"{name}.bias", weight.num_rows)
        is_bounded = self._has_bounds(name, "output")
        self.builder.matmul(x, [Projection(weight, target, bias, None if is_bounded else residual)])
        if is_bounded:
            self.builder.bound(target, target, *self._bounds(name, "output"))
            if residual is not None:
                self.builder.add(target, residual, target)
        return target

    def linears(self, x: Buffer, names: Sequence[str], outs: Sequence[str], widths: Sequence[int]) -> list[Buffer]:
        """Several products of one input; one op where no bounds come between."""
        if any(self._has_bounds(name, side) for name in names for side in ("input", "output")):
            return [self.linear(x, *one) for one in zip(names, outs, widths, strict=True)]
        targets = [self.buffer(out, width) for out, width in zip(outs, widths, strict=True)]
        self.builder.matmul(
            x,
            [
                Projection(
                    self.weights.linear(f"{name}.weight", width, x.width),
                    target,
                    self.weights.optional(f"{name}.bias", width),
                )
                for name, width, target in zip(names, widths, targets, strict=True)
            ],
        )
        return targets

    def _has_bounds(self, name: str, side: str) -> bool:
        return any(self.weights.has(f"{name}.{side}_{end}") for end in ("min", "max"))

    def _bounds(self, name: str, side: str) -> tuple[float, float]:
        infinity = float("inf")
        lowest, highest = (
            self.weights.number(f"{name}.{side}_{end}", default)
            for end, default in (("min", -infinity), ("max", infinity))
        )
        return lowest, highest

    def _bounded(self, x: Buffer, name: str, side: str) -> Buffer:
        if not self._has_bounds(name, side):
            return x
        out = self.buffer("bounded", x.width)
        self.builder.bound(out, x, *self._bounds(name, side))
        return out

    def layer_norm(self, x: Buffer, name: str, out: str, epsilon: float, group_size: int = 0) -> Buffer:
        """A layer norm with the weight `name` and its bias; over groups of columns where a size is given."""
        size, target = group_size or x.width, self.buffer(out, x.width)
        weight, bias = self.weights.values(f"{name}.weight", size), self.weights.optional(f"{name}.bias", size)
        self.builder.layer_norm(target, x, weight, bias, epsilon, group_size)
        return target

    def rms_norm(self, x: Buffer, name: str, out: str, epsilon: float, group_size: int = 0) -> Buffer:
        """The same without a mean."""
        target = self.buffer(out, x.width)
        weight = self.weights.values(f"{name}.weight", group_size or x.width) if name else None
        self.builder.rms_norm(target, x, weight, epsilon, group_size)
        return target

    def copied(self, x: Buffer, out: str) -> Buffer:
        """A copy of rows that others are written over."""
        target = self.buffer(out, x.width)
        self.builder.copy_heads(target, x, 1, x.width, x.width, x.width)
        return target

    def activation(self, x: Buffer, kind: Activation) -> Buffer:
        """An activation in place."""
        self.builder.activation(x, x, kind)
        return x

    def gated(self, x: Buffer, gate: Buffer, up: Buffer, kind: Activation, limit: float = 0.0) -> Buffer:
        """kind(gate) * up in the gate's place; limit: bounds gate from above and up on both sides before."""
        if limit:
            self.builder.clamp(gate, limit, only_above=True)
            self.builder.clamp(up, limit)
        self.builder.gated_activation(gate, gate, up, kind)
        return gate


class RowGraph:
    """A finished graph, which computes rows that the host gives it; one caller at a time.

    outputs: buffers that `run` returns. pages: of its keys and values. check: called some sixty times during a run; an
    error that it raises ends it.
    """

    def __init__(
        self, pool: ThreadPool | None, writer: RowWriter, outputs: Sequence[Buffer], pages: KeyPages | None = None
    ) -> None:
        builder = writer.builder
        # Programs return rows that were asked for, which are none here.
        unused = builder.buffer("unused", outputs[0].width, Rows.OUTPUT)
        builder.select_output(unused, outputs[0])
        self.graph: OpGraph = builder.finish(unused)
        self._pool, self.pages = pool, pages
        self._inputs, self._outputs, self._host_steps = tuple(writer.inputs), tuple(outputs), tuple(writer.host_steps)
        self._layout = KVLayout("f32", []) if pages is None else pages.layout
        self._program: CpuProgram | None = None
        self.check: Callable[[], None] | None = None
        # A row's positions are numbered, but nothing is stored where there are no keys.
        self._no_pages = np.zeros(0, np.int64)

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels that it is made of."""
        return kernels_of_graph(self.graph, self._pool or NO_POOL, self._layout)

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of buffers for so many rows, without keys and values."""
        buffers = sum(4 * padded(buffer.width) for buffer in self.graph.buffers if not buffer.is_output)
        matrices = (part.weight for op in self.graph.ops if isinstance(op, Matmul) for part in op.projections)
        quantized = (weight for weight in matrices if not is_float(weight.packed.layout))
        return _capacity(num_rows) * (
            buffers + max((activation_row_bytes(one.num_columns) for one in quantized), default=0)
        )

    def run(
        self, inputs: Sequence[FloatArray], seen: Seen | None = None, *, num_keys: int | None = None
    ) -> list[FloatArray]:
        """Compute all rows of one picture or sound: the outputs, valid until the next run.

        inputs: float32[rows, width] of each. num_keys: rows whose keys another graph stored; each row here then sees
        all of these and no other. Where pages have parts, rows see those of theirs alone; of parts that another graph
        stored, each has equally many rows here, in order.
        """
        num_rows = len(inputs[0])
        program = self._sized(num_rows)
        pages = self._no_pages
        if self.pages is not None:
            if num_keys is None:
                self.pages.reserve(num_rows)
            pages = self.pages.addresses
        if not len(pages):
            pages = np.zeros(-(-num_rows // self._layout.page_tokens), np.int64)
        if self.pages is not None and self.pages.part:
            segments = self._parts(self.pages, num_rows, num_keys)
        elif num_keys is None:
            starts, ends = (None, None) if seen is None else (seen.starts, seen.ends)
            segments = [Segment(0, num_rows, pages, key_starts=starts, key_ends=ends)]
        else:
            segments = [Segment(num_keys, 1, pages) for _ in range(num_rows)]
        for buffer, rows in zip(self._inputs, inputs, strict=True):
            program.upload(buffer, rows)
        batch = Batch(np.zeros(num_rows, np.int32), segments, np.empty(0, np.int32))
        if self._host_steps:
            self._run_stages(program, batch)
        else:
            # Between some sixty stretches of it, each can be the last.
            program.run_abortable(batch, self._check, least_rows=0)
        return [program.download(buffer, num_rows) for buffer in self._outputs]

    def _parts(self, pages: KeyPages, num_rows: int, num_keys: int | None) -> list[Segment]:
        """Rows of the sequences that a part of the pages is for."""
        part = pages.part
        if num_keys is None:
            firsts = range(0, num_rows, part)
            return [Segment(0, min(part, num_rows - first), pages.of_part(first // part)) for first in firsts]
        rows_of_part = num_rows // (num_keys // part)
        return [Segment(part, 1, pages.of_part(row // rows_of_part)) for row in range(num_rows)]

    def _run_stages(self, program: CpuProgram, batch: Batch) -> None:
        num_rows = len(batch.token_ids)
        program.begin(batch)
        program.run_stage(0)
        for stage, step in enumerate(self._host_steps, 1):
            self._check(0.0)
            program.upload(step.target, step.function(program.download(step.source, num_rows)))
            program.run_stage(stage)

    def _check(self, share: float) -> bool:
        """Let the caller end the run by an error, however much of it is done."""
        if self.check is not None:
            self.check()
        return False

    def close(self) -> None:
        """Give up the buffers."""
        self._program = None

    def _sized(self, num_rows: int) -> CpuProgram:
        """The program, for at least so many rows."""
        if self._program is None or self._program.max_batch_rows < num_rows:
            assert self._pool is not None, "a plan runs nothing"
            self._program = None
            self._program = lower_to_cpu(
                self.graph, self._pool, self._layout, max_batch_rows=_capacity(num_rows), max_output_rows=1
            )
        return self._program


def _capacity(num_rows: int) -> int:
    """Rows that a program is made for: sizes that few pictures differ in."""
    step = _ROWS_AT_LEAST
    while step * 8 < num_rows:
        step *= 2
    return -(-num_rows // step) * step


def graph_writer(weights: EncoderWeights, pages: KeyPages | None = None) -> RowWriter:
    """A writer of a new graph."""
    return RowWriter(weights, GraphBuilder(() if pages is None else pages.layout.layers))


def mean_of_parts(writer: RowWriter, x: Buffer, count: int, factor: float = 1.0) -> Buffer:
    """The mean of `count` equal parts of each row, times a factor."""
    width = x.width // count
    if width % 16 == 0 or count == 1:
        out = writer.buffer("mean", width)
        writer.builder.mix_slots(out, x, count)
    else:
        # Kernels mix whole vectors.
        out = writer.host_step(x, "mean", width, lambda rows: _sum_of_parts(rows, count))
    writer.builder.scale(out, factor / count)
    return out


def _sum_of_parts(rows: FloatArray, count: int) -> FloatArray:
    width = rows.shape[1] // count
    total = rows[:, :width].copy()
    for part in range(1, count):
        np.add(total, rows[:, part * width : (part + 1) * width], out=total)
    return total


def buffer_bytes(graphs: Sequence[tuple[RowGraph, int]]) -> int:
    """Bytes of graphs for their numbers of rows, with the keys and values that some of them share."""
    pages: dict[int, int] = {}
    for graph, num_rows in graphs:
        if graph.pages is not None:
            pages[id(graph.pages)] = max(pages.get(id(graph.pages), 0), graph.pages.num_bytes(num_rows))
    return sum(graph.num_bytes(num_rows) for graph, num_rows in graphs) + sum(pages.values())
