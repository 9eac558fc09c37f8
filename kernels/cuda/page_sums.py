"""The launches that sum attention by page, for a cache that keeps the pages with most of it."""

from collections.abc import Iterator, Sequence

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.cpu.kernel_abi import SUMMED_ROWS
from localinfer.kernels.cuda.attention import AttentionLaunches
from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.gemm import THREADS, Shape, column_launch
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.program import Segment


class PageSums:
    """float32[segments, pages] on a device, where attention ops add what the last rows of each segment attend to."""

    def __init__(self, memory: DeviceMemory, num_segments: int, num_pages: int) -> None:
        """num_segments: of a batch, and num_pages: of a sequence, at most."""
        self._memory = memory
        self._num_pages = num_pages
        self._address = memory.device.allocate(4 * num_segments * num_pages)

    def begin(self, segments: Sequence[Segment]) -> list[int]:
        """Set the sums of a batch to zero; returns the address of each segment's, 0 where none are wanted.

        Raises: RequestError for a segment of more pages than there is room for.
        """
        for index, segment in enumerate(segments):
            found = len(segment.page_addresses)
            if found > self._num_pages:
                raise RequestError(f"segment {index} has {found} pages, but attention is summed for {self._num_pages}")
        if not any(segment.attention_sums is not None for segment in segments):
            return [0] * len(segments)
        self._memory.device.write(self._address, np.zeros((len(segments), self._num_pages), np.float32))
        return [
            0 if segment.attention_sums is None else self._address + 4 * index * self._num_pages
            for index, segment in enumerate(segments)
        ]

    def add_to(self, segments: Sequence[Segment]) -> None:
        """Wait for the batch, and add its sums to those of its segments."""
        if all(segment.attention_sums is None for segment in segments):
            return
        found = np.empty((len(segments), self._num_pages), np.float32)
        self._memory.device.read(self._address, found)
        for segment, sums in zip(segments, found, strict=True):
            if segment.attention_sums is not None:
                segment.attention_sums[:] += sums[: segment.attention_sums.size]

    def steps(self, run: Shape, attention: AttentionLaunches) -> Iterator[Step]:
        """The launches of one attention op, whose keys are in the cache already."""
        if run.batch_rows <= SMALL_ROWS:
            yield from self._rows(run, attention, 0, run.batch_rows)
            return
        end = 0
        for rows in run.segment_rows:
            end += rows
            yield from self._rows(run, attention, end - min(rows, SUMMED_ROWS), end)

    def _rows(self, run: Shape, attention: AttentionLaunches, first: int, end: int) -> Iterator[Step]:
        shape, layout, rope, rows = attention.shape, attention.layout, attention.rope, end - first
        head = layout.head(attention.layer)
        scratch = self._memory.shared("shares of pages", 8 * SMALL_ROWS * shape.num_heads * self._num_pages)
        queries, stride = attention.queries
        positions, tables, targets = (start + 8 * first for start in (run.kept, run.page_tables, run.sum_targets))
        places = (queries + first * stride, stride, positions, tables, targets, scratch, self._num_pages)
        cache = (attention.group, head.num_bytes, layout.layer_offset(attention.layer), head.key_scales)
        mask = attention.mask
        rotation = (rope.angles + 8 * first * rope.num_pairs, rope.num_pairs, rope.halves, rope.offset)
        words = (*places, shape.num_heads, *cache, *mask, attention.slopes, *rotation, shape.scale, shape.softcap)
        constants = (attention.kinds[0], shape.key_size)
        yield Launch("page_sums.page_shares", constants, (shape.num_heads, rows, 1), THREADS, words)
        sums = (positions, targets, scratch, self._num_pages, shape.num_heads, *mask, rows)
        yield column_launch("page_sums.add_shares", (), self._num_pages, rows, sums)
