"""The tape that threads execute: kernels and their parameter blocks in order, and the memory that blocks point to."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.memory import TapeMemory, address, placed, zeros
from localinfer.kernels.cpu.parameters import ELEMENTWISE, GATHER, Words
from localinfer.kernels.graph_builder import check
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Buffer, OpGraph, Rows
from localinfer.kernels.program import BatchLimits, OpCost
from localinfer.types import FloatArray

if TYPE_CHECKING:
    from localinfer.kernels.cpu.program import ThreadPool


class CpuTape:
    """Kernels in order, each with a block int64[...] of parameters, and what lowering has to know of those before.

    partial_bytes: what one row's attention to one chunk may have to keep until all chunks are merged.
    attention_sums: float32[segments, KV heads, pages] that the ops add up attention in; None if they do not.
    stage_starts: number of the first kernel of each stage, see `ops.StageBoundary`.
    descriptions: of each kernel, with its tensors and shapes, for reports of crashes.
    calls: kernels that kernels call themselves: a block, the index of the word that takes the address, and which.
    angles: cosines and sines by the RoPE table they are of. expert_groups: rows by expert, by the buffer of ids.
    inner_buffers: between kernels of one op, by name.
    ranged_kernels: kernels of batches that say which positions rows see, by the numbers of those whose place they take.
    typed_kernels: numbers of those that batches of token type 0 leave out.
    recurrent_kernels: numbers of the kernels that carry states.
    quantized_source: rows, buffer and columns that were quantized last, to quantized_place.
    """

    def __init__(
        self,
        graph: OpGraph,
        pool: "ThreadPool",
        kv_layout: KVLayout,
        max_batch_rows: int,
        max_output_rows: int,
        max_summed_tokens: int,
    ) -> None:
        self.pool = pool
        self.kv_layout = kv_layout
        self.limits = BatchLimits(
            max_batch_rows,
            max_output_rows,
            graph.num_tokens,
            graph.num_positions,
            kv_layout.page_tokens,
            bool(graph.states),
            graph.num_token_types,
            graph.needs_whole_texts,
            graph.media_width,
            graph.takes_ranges,
        )
        self.max_rows = {Rows.BATCH: max_batch_rows, Rows.OUTPUT: max_output_rows}
        self.memory = TapeMemory(self.max_rows, graph.buffers)
        self.logits = self.memory.rows(graph.output)
        self.hidden = None if graph.hidden is None else self.memory.rows(graph.hidden)
        self.kernels: list[Kernel] = []
        self.parameters: list[NDArray[np.int64]] = []
        self.operations: list[OpCost] = []
        self.descriptions: list[str] = []
        self.calls: list[tuple[NDArray[np.int64], int, Kernel]] = []
        self.ranged_kernels: dict[int, Kernel] = {}
        self.typed_kernels: set[int] = set()
        self.partial_bytes = 0
        self.recurrent_kernels: list[int] = []
        self.inner_buffers: dict[str, Buffer] = {}
        self.attention_sums: FloatArray | None = None
        self.stage_starts = [0]
        if max_summed_tokens:
            heads = max((shape.num_kv_heads for shape in kv_layout.layers), default=1)
            pages = -(-max_summed_tokens // kv_layout.page_tokens)
            self.attention_sums = zeros((max_batch_rows, heads, pages), np.float32)
        self.angles: dict[tuple[bytes, float, bytes | None], NDArray[np.uint8]] = {}
        self.expert_groups: dict[int, NDArray[np.int64]] = {}
        self.quantized_place = 0
        self.quantized_source: tuple[Rows, int, int] | None = None
        self._ordered: dict[tuple[Rows, int], Buffer] = {}
        self._ordered_source: tuple[int, bytes] | None = None

    def release(self) -> None:
        """Give up all memory; the tape can no longer be run."""
        self.memory.release()
        self.logits = self.logits[:0].copy()
        self.hidden = self.attention_sums = None
        self.parameters.clear()
        self.angles.clear()
        self.expert_groups.clear()

    def address_of(self, buffer: Buffer) -> tuple[int, int]:
        """Address and row stride of a buffer."""
        return self.memory.address_of(buffer)

    def addresses_of(self, **buffers: Buffer) -> dict[str, int]:
        """The words NAME and NAME_stride of each buffer."""
        words = {}
        for name, buffer in buffers.items():
            words[name], words[f"{name}_stride"] = self.address_of(buffer)
        return words

    def add(
        self,
        kernel: str,
        *blocks: Words,
        writes: Buffer | None = None,
        cost: OpCost | None = None,
        calls: dict[int, Kernel] | None = None,
        about: str = "",
    ) -> None:
        """Record a kernel. calls: kernels that it calls itself, by the index of the word that takes their address.

        about: its tensors with their shapes, or what else tells it from others of its kind.
        """
        block = placed(np.concatenate(blocks))
        self.kernels.append(Kernel(kernel))
        self.parameters.append(block)
        self.calls.extend((block, index, called) for index, called in (calls or {}).items())
        self.operations.append(cost or OpCost(kernel))
        out = "" if writes is None else f" -> {writes.name}, {writes.width} columns"
        self.descriptions.append(f"{kernel}{' of ' if about else ''}{about}{out}")
        if writes is not None:
            self.forget_copies(writes)

    def elementwise(self, kernel: str, out: Buffer, a: Buffer, b: Buffer, scalar: float = 0.0) -> None:
        """Record a kernel that reads two rows and writes one."""
        words = ELEMENTWISE.pack(
            **self.addresses_of(out=out, a=a, b=b), scalar=scalar, columns=out.width, is_output=out.is_output
        )
        self.add(f"elementwise.{kernel}", words, writes=out, about=a.name if a is b else f"{a.name}, {b.name}")

    def forget_copies(self, written: Buffer) -> None:
        """Quantize and gather a buffer again after it changed."""
        if self.quantized_source is not None and self.quantized_source[1] == written.index:
            self.quantized_source = None
        if self._ordered_source is not None and self._ordered_source[0] == written.index:
            self._ordered_source = None

    def in_order(self, x: Buffer, columns: NDArray[np.int32] | None) -> Buffer:
        """x with its columns as a weight wants them: int32[width of x], which column comes where; None for as they are.

        Weights of one order that follow each other share one gather. Raises: ShapeError if one is not a column of x.
        """
        if columns is None:
            return x
        check(columns.size == x.width, f"an order of {columns.size} columns does not fit {x.name}, {x.width} wide")
        check(int(columns.min()) >= 0 and int(columns.max()) < x.width, f"an order leaves the columns of {x.name}")
        key = (x.rows, x.width)
        if key not in self._ordered:
            self._ordered[key] = self.memory.buffer(f"ordered {x.width}", x.width, x.rows)
        out, source = self._ordered[key], (x.index, columns.tobytes())
        if self._ordered_source != source:
            offsets = placed(4 * columns.astype(np.int64))
            self.memory.keep(offsets)
            places = self.addresses_of(out=out, x=x)
            words = GATHER.pack(**places, offsets=address(offsets), columns=x.width, is_output=x.is_output)
            self.add("elementwise.gather_columns", words, writes=out, about=x.name)
            self._ordered_source = source
        return out
