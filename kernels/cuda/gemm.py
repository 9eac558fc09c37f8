"""Products on a device: our kernels for a few rows of activations, plain numbers and a library for more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localinfer.kernels.cuda.device import F32, CudaDevice, Launch, Product, Step
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.cuda.planes import DeviceWeight
from localinfer.kernels.layouts import Layout, is_float

THREADS = 128
PLAIN, GATED, EXPERTS = 0, 1, 2
"""Kinds of `compiled.matmul`."""

_NO_WEIGHT = (*[0] * 10, 0.0)
_MAX_SLOTS = 3
_SCRATCH_ELEMENTS = 32 << 20
"""Weights that are plain numbers at a time: 64 MB in 16 bits, which a GPU's cache holds in part."""

_MAX_GRID = 32768
"""Rows of one launch: a second axis of a grid ends at 65535."""

TENSOR_CORES = (8, 0)
"""Compute capability from which on tiles are multiplied: that of `mma.m16n8k16` and `m16n8k32`."""

_TILE_THREADS, _TILE = 256, 16
_TILED_ROWS = 4
"""Rows of activations from which on tiles are multiplied; for fewer, dp4a is far from its limit."""
_ENOUGH_BLOCKS = 264
"""Two to a multiprocessor of a large GPU: with more, a block takes two tiles, which share what it reads of inputs."""

_ENOUGH_WARPS = 2048
"""Warps that keep a large GPU's memory busy (132 multiprocessors of 16 each); with fewer rows, warps share rows."""


@dataclass(frozen=True)
class Slot:
    """One weight of a product: what it is multiplied into, and what is added."""

    weight: DeviceWeight
    out: int
    out_stride: int
    bias: int = 0
    residual: int = 0
    residual_stride: int = 0
    scale: float = 1.0

    def words(self) -> tuple[float, ...]:
        """The slot's parameters of `compiled.matmul.matmul`."""
        place = (*self.weight.planes, self.weight.num_rows, self.out, self.out_stride)
        return (*place, self.bias, self.residual, self.residual_stride, self.scale)


@dataclass(frozen=True)
class Quantized:
    """Where the int8 codes and records of a buffer's rows are, and their strides."""

    codes: int
    codes_stride: int
    records: int
    records_stride: int

    def after(self, rows: int) -> "Quantized":
        """The places without the first rows."""
        codes, records = self.codes + rows * self.codes_stride, self.records + rows * self.records_stride
        return Quantized(codes, self.codes_stride, records, self.records_stride)

    @property
    def words(self) -> tuple[int, int, int, int]:
        return self.codes, self.codes_stride, self.records, self.records_stride


def quantized_place(memory: DeviceMemory, name: str, width: int, rows: int) -> Quantized:
    """Room for the codes of a buffer."""
    blocks = -(-width // 32)
    codes = memory.shared(f"codes of {name}", rows * blocks * 32)
    records = memory.shared(f"records of {name}", rows * blocks * 8)
    return Quantized(codes, blocks * 32, records, blocks * 8)


def quantize_launch(x: int, x_stride: int, into: Quantized, width: int, rows: int) -> Launch:
    """Quantize rows of width columns, a multiple of 32."""
    words = (x, x_stride, *into.words, width)
    return Launch("quantize.quantize_rows", (), (-(-width // THREADS), rows, 1), THREADS, words)


def weight_rows(batch_rows: int, is_gated: bool) -> int:
    """Rows of each weight to a warp: enough loads in flight for one row of activations, enough registers for many."""
    if is_gated:
        return 2 if batch_rows <= 2 else 1
    return 4 if batch_rows <= 2 else 2 if batch_rows <= 8 else 1


def warps_to_a_row(num_rows: int, num_columns: int) -> int:
    """How many warps share a row: so that there are enough of them, and each has units to read.

    A function of the weights alone, because it decides in which order a sum is taken.
    """
    split = 1
    while split < 4 and num_rows // 4 * split < _ENOUGH_WARPS and num_columns >= 1024 * 2 * split:
        split *= 2
    return split


def small_product(
    x: tuple[int, int],
    quantized: Quantized | None,
    slots: Sequence[Slot],
    batch_rows: int,
    activation: int | None,
    device: CudaDevice,
) -> Iterator[Launch]:
    """Multiply up to SMALL_ROWS rows, padded to a power of two, by weights of one layout and number of columns.

    activation: joins the two slots, gate and up, into the second's out.
    """
    assert batch_rows <= SMALL_ROWS, "more rows are for the library"
    if quantized is not None and batch_rows >= _TILED_ROWS and device.capability >= TENSOR_CORES:
        yield from tiled_product(quantized, slots, batch_rows, activation)
    else:
        yield from scalar_product(x, quantized, slots, batch_rows, activation, prefetches=device.overlaps)


def tiled_product(
    quantized: Quantized, slots: Sequence[Slot], batch_rows: int, activation: int | None
) -> Iterator[Launch]:
    """The same on tensor cores, with the same bits."""
    first = slots[0].weight
    for (words, rows, split), kind in _parts(slots, activation):
        # Two tiles of weights with sixteen rows of activations, or gate and up twice, are more sums than registers.
        is_large = activation is None and batch_rows <= 8 and sum(rows) >= 2 * _TILE * _ENOUGH_BLOCKS
        tiles = 2 if is_large else 1
        blocks = sum(-(-count // (_TILE * tiles)) for count in rows)
        values = (*quantized.words, first.num_columns, activation or 0, *words, *first.row_bytes)
        constants = (first.layout, batch_rows, tiles, split, kind)
        yield Launch("matmul_tiles.matmul_tiles", constants, (blocks, 1, 1), _TILE_THREADS, values)


def scalar_product(
    x: tuple[int, int],
    quantized: Quantized | None,
    slots: Sequence[Slot],
    batch_rows: int,
    activation: int | None,
    *,
    prefetches: bool = False,
) -> Iterator[Launch]:
    """The same a lane at a time; prefetches: weights are on their way before the kernel before this one has ended."""
    first = slots[0].weight
    place = (*x, 0, 0) if quantized is None else quantized.words
    per_warp = weight_rows(batch_rows, activation is not None)
    for (words, rows, split), kind in _parts(slots, activation):
        groups = sum(-(-count // per_warp) for count in rows)
        values = (*place, first.num_columns, activation or 0, *words, *first.row_bytes, 0, 0, 1, 0)
        constants = (first.layout, batch_rows, per_warp, split, kind, *([1] if prefetches else []))
        yield Launch("matmul.matmul", constants, (-(-groups * split // 4), 1, 1), THREADS, values)


def _parts(
    slots: Sequence[Slot], activation: int | None
) -> Iterator[tuple[tuple[tuple[float, ...], list[int], int], int]]:
    """What launches are made of: parameters of their slots, rows of each, in how many parts rows are summed; kind."""
    columns = slots[0].weight.num_columns
    if activation is not None:
        gate, up = slots
        words = (*Slot(gate.weight, up.out, up.out_stride, gate.bias).words(), *up.words(), *_NO_WEIGHT)
        rows = gate.weight.num_rows
        yield (words, [rows], warps_to_a_row(2 * rows, columns)), GATED
        return
    for start in range(0, len(slots), _MAX_SLOTS):
        part = slots[start : start + _MAX_SLOTS]
        given = [word for slot in part for word in slot.words()]
        counts = [slot.weight.num_rows for slot in part]
        # The order of sums must not depend on what else is multiplied, so that the same weight always gives the same.
        split = warps_to_a_row(max(counts), columns)
        yield ((*given, *(_NO_WEIGHT * (_MAX_SLOTS - len(part)))), counts, split), PLAIN


def head_product(
    x: tuple[int, int],
    width: int,
    codes: Quantized | None,
    slot: Slot,
    rows: int,
    x_head: tuple[int, int],
    out_size: int,
) -> Iterator[Launch]:
    """Multiply every head by its own matrix; x_head: its size in x, and where in it the columns begin.

    codes: room for those of whole rows of x, of `width` columns; None for plain numbers. out_size: of a head of out.
    """
    num_heads = slot.weight.num_experts
    return expert_product(x, width, codes, slot, rows, x_head, out_size, num_heads, (0, 0))


def expert_product(
    x: tuple[int, int],
    width: int,
    codes: Quantized | None,
    slot: Slot,
    rows: int,
    x_head: tuple[int, int],
    out_size: int,
    num_selected: int,
    expert_ids: tuple[int, int],
) -> Iterator[Launch]:
    """Multiply every slot of every row by the matrix of its expert; see `head_product`, whose slots are the heads.

    expert_ids: place of float32[rows][num_selected]; at address 0 every slot has the expert of its number.
    """
    weight = slot.weight
    head_size, offset = x_head
    if codes is None:
        place = (x[0] + 4 * offset, x[1], 0, 0)
        head_stride = 4 * head_size
    else:
        yield quantize_launch(*x, codes, width, rows)
        place = (codes.codes + offset, codes.codes_stride, codes.records + offset // 4, codes.records_stride)
        head_stride = head_size
    split = warps_to_a_row(weight.num_rows * num_selected, weight.num_columns)
    # Here the second slot only says how far apart outputs of slots and biases of experts are.
    second = (*_NO_WEIGHT[:4], 4 * weight.num_rows if slot.bias else 0, 4 * out_size, *_NO_WEIGHT[6:])
    values = (*place, weight.num_columns, 0, *slot.words(), *second, *_NO_WEIGHT)
    tail = (*weight.row_bytes, *expert_ids, num_selected, head_stride)
    grid = (-(-(-(-weight.num_rows // 4) * split) // 4), rows * num_selected, 1)
    yield Launch("matmul.matmul", (weight.layout, 1, 4, split, EXPERTS), grid, THREADS, (*values, *tail))


def large_product(
    memory: DeviceMemory, x: tuple[int, int], width: int, slots: Sequence[Slot], rows: int, product_kind: int
) -> Iterator[Step]:
    """Multiply many rows: activations and then weights as plain numbers, piece by piece, through the library."""
    layout = slots[0].weight.layout
    kind = F32 if is_float(layout) and layout is not Layout.BF16 else product_kind
    size = 4 if kind == F32 else 2
    inputs = memory.shared("inputs of the library", memory.max_input_bytes(width))
    yield _convert((x[0], 0, 0, 0), (x[1], 0, 0, 0), Layout.F32, kind, inputs, width, 0, rows)
    for slot in slots:
        weight = slot.weight
        count = max(1, min(weight.num_rows, _MAX_GRID, _SCRATCH_ELEMENTS // width))
        scratch = memory.shared("weights for the library", size * count * width)
        finishes = bool(slot.bias or slot.residual or slot.scale != 1.0)
        target = memory.shared("products of the library", 4 * rows * weight.num_rows) if finishes else slot.out
        target_stride = 4 * weight.num_rows if finishes else slot.out_stride
        for first in range(0, weight.num_rows, count):
            piece = min(count, weight.num_rows - first)
            yield _convert(weight.planes, weight.row_bytes, weight.layout, kind, scratch, width, first, piece)
            yield Product(target + 4 * first, target_stride, inputs, scratch, rows, piece, width, kind)
        if finishes:
            places = (slot.out, slot.out_stride, target, target_stride, weight.num_rows)
            words = (*places, slot.bias, slot.residual, slot.residual_stride, slot.scale)
            grid = (-(-weight.num_rows // THREADS), rows, 1)
            yield Launch("rows.finish_product", (), grid, THREADS, words)


def _convert(
    planes: Sequence[int],
    row_bytes: Sequence[int],
    layout: Layout,
    kind: int,
    out: int,
    width: int,
    first: int,
    rows: int,
) -> Launch:
    values = (*planes, *row_bytes, out, width, first)
    return Launch("rows.convert", (layout, kind), (-(-width // THREADS), rows, 1), THREADS, values)
