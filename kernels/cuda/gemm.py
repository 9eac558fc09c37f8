"""GEMM launches: own kernels for a few rows of activations, a library for more; and `Shape`, the shape of a batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from localinfer.kernels.cuda.device import F32, CudaDevice, Gemm, Launch, Step
from localinfer.kernels.cuda.media import MediaShape
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.cuda.weights import DeviceWeight
from localinfer.kernels.layouts import Layout, is_float
from localinfer.kernels.ops import Rows

THREADS = 128
PLAIN, GATED, EXPERTS, GATED_CODES = range(4)
"""Kinds of `compiled.matmul`."""

_NO_WEIGHT = (*[0] * 10, 0.0)
_MAX_SLOTS = 3
_SCRATCH_ELEMENTS = 32 << 20
"""Weights dequantized at a time: 64 MB in 16 bits, which a GPU's cache partly holds."""

_MAX_GRID = 32768
"""Maximum rows of a launch: a grid's second axis is limited to 65535."""

TENSOR_CORES = (8, 0)
"""Minimum compute capability of tiles: that of `mma.m16n8k16` and `m16n8k32`."""

_TILE_THREADS, _TILE = 256, 16
_TILED_ROWS = 8
"""Minimum rows of activations for tiles: dp4a takes 98 instructions for 1,024 columns of a weight and four rows, tiles
take 192, and on an H200 took 2.1 times as long as one row does."""
_ENOUGH_BLOCKS = 264
"""Two per multiprocessor of a large GPU: with more, a block computes two tiles, which share reads of inputs."""

_ENOUGH_WARPS = 2048
"""Warps that saturate a large GPU's memory (16 on each of 132 multiprocessors); with fewer rows, warps share rows."""


Place = tuple[int, int]
"""Address and row stride of a buffer."""


@dataclass(frozen=True)
class Shape:
    """The shape of a batch: rows, context length, and addresses of int64[rows]."""

    batch_rows: int
    output_rows: int
    num_chunks: int
    """Chunks of positions up to the last one of the batch."""
    token_ids: int
    positions: int
    page_tables: int
    """Address of each row's page table; 0 for padding."""
    output_row_numbers: int
    segment_rows: tuple[int, ...] = ()
    """Rows of each segment."""
    cache_positions: int = 0
    """Positions of rows among those that were kept in the cache; 0 where all were."""
    sum_targets: int = 0
    """Addresses to which the attention of rows is added (`page_sums.py`)."""
    last_positions: int = 0
    """The last position in the cache of each row's segment in the batch."""
    token_types: int = 0
    """For models that have some."""
    is_typed: bool = True
    """True if some row's type is not 0."""
    media: MediaShape | None = None
    """Pictures and sounds; None for words at their own positions."""

    @property
    def kept(self) -> int:
        """Address of the rows' positions in the cache."""
        return self.cache_positions or self.positions

    def rows(self, kind: Rows) -> int:
        """Rows of the buffers of a kind."""
        return self.batch_rows if kind is Rows.BATCH else self.output_rows


Builder = Callable[[Shape], Iterator[Step]]
"""An op of a tape: its steps for a batch of some shape."""


@dataclass(frozen=True)
class Slot:
    """One weight of a GEMM, with its output, bias and residual."""

    weight: DeviceWeight
    out: int
    out_stride: int
    bias: int = 0
    residual: int = 0
    residual_stride: int = 0
    scale: float = 1.0

    @property
    def parameters(self) -> tuple[float, ...]:
        """The slot as `compiled.matmul.SLOTS` lists it."""
        place = (*self.weight.arrays, self.weight.num_rows, self.out, self.out_stride)
        return (*place, self.bias, self.residual, self.residual_stride, self.scale)


@dataclass(frozen=True)
class Quantized:
    """Addresses and strides of the int8 codes and records of a buffer's rows.

    counters: of the blocks of a product that quantizes its result, see `compiled.last_block`.
    """

    codes: int
    codes_stride: int
    records: int
    records_stride: int
    counters: int = 0

    def after(self, rows: int) -> "Quantized":
        """The addresses after the first rows."""
        return replace(
            self, codes=self.codes + rows * self.codes_stride, records=self.records + rows * self.records_stride
        )

    @property
    def parameters(self) -> tuple[int, int, int, int]:
        return self.codes, self.codes_stride, self.records, self.records_stride


def column_launch(
    kernel: str, constants: tuple[int, ...], columns: int, rows: int, values: tuple[float, ...]
) -> Launch:
    """A launch with one thread per column of every row."""
    return Launch(kernel, constants, (-(-columns // THREADS), rows, 1), THREADS, values)


def quantized_place(memory: DeviceMemory, name: str, width: int, rows: int) -> Quantized:
    """Memory for the codes of a buffer."""
    blocks = -(-width // 32)
    codes = memory.shared(f"codes of {name}", rows * blocks * 32)
    records = memory.shared(f"records of {name}", rows * blocks * 8)
    return Quantized(codes, blocks * 32, records, blocks * 8)


def quantize_launch(x: int, x_stride: int, into: Quantized, width: int, rows: int) -> Launch:
    """Quantize rows of width columns, a multiple of 32."""
    return column_launch("quantize.quantize_rows", (), width, rows, (x, x_stride, *into.parameters, width))


def weight_rows(batch_rows: int, is_gated: bool) -> int:
    """Rows of each weight per warp: enough loads in flight for one row of activations, enough registers for many."""
    rows = 4 if batch_rows <= 4 else 2 if batch_rows <= 8 else 1
    return max(1, rows // 2) if is_gated else rows


def warps_to_a_row(num_rows: int, num_columns: int) -> int:
    """Number of warps that share a row.

    It depends only on the weights, because it determines the order of summation.
    """
    split = 1
    while split < 4 and num_rows // 4 * split < _ENOUGH_WARPS and num_columns >= 1024 * 2 * split:
        split *= 2
    return split


def small_gemm(
    x: Place,
    quantized: Quantized | None,
    slots: Sequence[Slot],
    batch_rows: int,
    activation: int | None,
    device: CudaDevice,
    codes: Quantized | None = None,
) -> Iterator[Launch]:
    """Multiply up to SMALL_ROWS rows, padded to a power of two, by weights of one layout and number of columns.

    activation: combines the two slots, gate and up, into the second's out. codes: where that is quantized to as well.
    """
    assert batch_rows <= SMALL_ROWS, "the library multiplies more rows"
    if quantized is not None and batch_rows >= _TILED_ROWS and device.capability >= TENSOR_CORES:
        yield from tiled_gemm(quantized, slots, batch_rows, activation, codes)
    else:
        yield from scalar_gemm(x, quantized, slots, batch_rows, activation, codes, prefetches=device.overlaps)


def tiled_gemm(
    quantized: Quantized,
    slots: Sequence[Slot],
    batch_rows: int,
    activation: int | None,
    codes: Quantized | None = None,
) -> Iterator[Launch]:
    """The same on tensor cores, with the same bits."""
    first = slots[0].weight
    for parameters, rows, split, kind in _parts(slots, activation, codes):
        # Two tiles with sixteen rows of activations need more sums than there are registers; gate and up share one.
        is_large = activation is None and batch_rows <= 8 and sum(rows) >= 2 * _TILE * _ENOUGH_BLOCKS
        tiles = 2 if is_large else 1
        tile_rows = _TILE * tiles if activation is None else _TILE // 2
        blocks = sum(-(-count // tile_rows) for count in rows)
        values = (*quantized.parameters, first.num_columns, activation or 0, *parameters, *first.row_bytes)
        constants = (first.layout, batch_rows, tiles, split, kind)
        yield Launch("matmul_tiles.matmul_tiles", constants, (blocks, 1, 1), _TILE_THREADS, values)


def scalar_gemm(
    x: Place,
    quantized: Quantized | None,
    slots: Sequence[Slot],
    batch_rows: int,
    activation: int | None,
    codes: Quantized | None = None,
    *,
    prefetches: bool = False,
) -> Iterator[Launch]:
    """The same with dp4a; prefetches: weights are prefetched before the previous kernel has ended."""
    first = slots[0].weight
    place = (*x, 0, 0) if quantized is None else quantized.parameters
    per_warp = weight_rows(batch_rows, activation is not None)
    for parameters, rows, split, kind in _parts(slots, activation, codes):
        groups = sum(-(-count // per_warp) for count in rows)
        values = (*place, first.num_columns, activation or 0, *parameters, *first.row_bytes, 0, 0, 1, 0)
        constants = (first.layout, batch_rows, per_warp, split, kind, *([1] if prefetches else []))
        yield Launch("matmul.matmul", constants, (-(-groups * split // 4), 1, 1), THREADS, values)


def _parts(
    slots: Sequence[Slot], activation: int | None, codes: Quantized | None
) -> Iterator[tuple[tuple[float, ...], list[int], int, int]]:
    """For each launch the parameters of its slots, their rows, in how many parts rows are summed, and its kind."""
    columns = slots[0].weight.num_columns
    if activation is not None:
        gate, up = slots
        gate = replace(gate, out=up.out, out_stride=up.out_stride, residual=0, residual_stride=0, scale=1.0)
        rows = gate.weight.num_rows
        third, kind = _NO_WEIGHT, GATED
        if codes is not None:
            third, kind = (*codes.parameters, 0, codes.counters, *_NO_WEIGHT[6:]), GATED_CODES
        yield (*gate.parameters, *up.parameters, *third), [rows], warps_to_a_row(2 * rows, columns), kind
        return
    for start in range(0, len(slots), _MAX_SLOTS):
        part = slots[start : start + _MAX_SLOTS]
        parameters = (*(value for slot in part for value in slot.parameters), *_NO_WEIGHT * (_MAX_SLOTS - len(part)))
        counts = [slot.weight.num_rows for slot in part]
        # The order of summation must not depend on the other weights of the launch.
        yield parameters, counts, warps_to_a_row(max(counts), columns), PLAIN


def expert_gemm(
    x: Place,
    width: int,
    codes: Quantized | None,
    slot: Slot,
    rows: int,
    x_head: tuple[int, int],
    out_size: int,
    num_selected: int = 0,
    expert_ids: Place = (0, 0),
) -> Iterator[Launch]:
    """Multiply every slot of every row by the matrix of its expert, or every head by its own if none are selected.

    x_head: size of a slot in x, and offset of the columns in it. out_size: of a slot of out. codes: memory for the
    codes of whole rows of x, of `width` columns; None for float weights. expert_ids: float32[rows][num_selected].
    """
    weight = slot.weight
    num_selected = num_selected or weight.num_experts
    head_size, offset = x_head
    if codes is None:
        place = (x[0] + 4 * offset, x[1], 0, 0)
        head_stride = 4 * head_size
    else:
        yield quantize_launch(*x, codes, width, rows)
        place = (codes.codes + offset, codes.codes_stride, codes.records + offset // 4, codes.records_stride)
        head_stride = head_size
    split = warps_to_a_row(weight.num_rows * num_selected, weight.num_columns)
    # The second slot has the strides of outputs of slots and of biases of experts.
    second = (*_NO_WEIGHT[:4], 4 * weight.num_rows if slot.bias else 0, 4 * out_size, *_NO_WEIGHT[6:])
    values = (*place, weight.num_columns, 0, *slot.parameters, *second, *_NO_WEIGHT)
    tail = (*weight.row_bytes, *expert_ids, num_selected, head_stride)
    grid = (-(-(-(-weight.num_rows // 4) * split) // 4), rows * num_selected, 1)
    yield Launch("matmul.matmul", (weight.layout, 1, 4, split, EXPERTS), grid, THREADS, (*values, *tail))


def large_gemm(
    memory: DeviceMemory, x: Place, width: int, slots: Sequence[Slot], rows: int, gemm_kind: int
) -> Iterator[Step]:
    """Multiply many rows with the library: activations and weights are dequantized, some rows at a time."""
    layout = slots[0].weight.layout
    kind = F32 if is_float(layout) and layout is not Layout.BF16 else gemm_kind
    inputs = memory.shared("inputs of the library", memory.max_input_bytes(width))

    def convert(
        arrays: Sequence[int], row_bytes: Sequence[int], layout: Layout, out: int, first: int, count: int
    ) -> Launch:
        return column_launch("rows.convert", (layout, kind), width, count, (*arrays, *row_bytes, out, width, first))

    yield convert((x[0], 0, 0, 0), (x[1], 0, 0, 0), Layout.F32, inputs, 0, rows)
    for slot in slots:
        weight = slot.weight
        count = max(1, min(weight.num_rows, _MAX_GRID, _SCRATCH_ELEMENTS // width))
        scratch = memory.shared("weights for the library", (4 if kind == F32 else 2) * count * width)
        finishes = bool(slot.bias or slot.residual or slot.scale != 1.0)
        target = memory.shared("products of the library", 4 * rows * weight.num_rows) if finishes else slot.out
        target_stride = 4 * weight.num_rows if finishes else slot.out_stride
        for first in range(0, weight.num_rows, count):
            part = min(count, weight.num_rows - first)
            yield convert(weight.arrays, weight.row_bytes, weight.layout, scratch, first, part)
            yield Gemm(target + 4 * first, target_stride, inputs, scratch, rows, part, width, kind)
        if finishes:
            places = (slot.out, slot.out_stride, target, target_stride, weight.num_rows)
            values = (*places, slot.bias, slot.residual, slot.residual_stride, slot.scale)
            yield column_launch("rows.finish_gemm", (), weight.num_rows, rows, values)
