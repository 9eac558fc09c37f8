"""Run kernel pieces on fixed inputs: products, which alone are made of other instructions in each instruction set.

Products of weights in every layout, of codes of keys and of codes of values.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from numba import types
from numpy.typing import NDArray

from localinfer.kernels.cpu.compiled import attention_scratch as scratch
from localinfer.kernels.cpu.kernel_abi import (
    IN_PAIRS,
    IN_SHARED_BYTES,
    PAIR_BYTES,
    PAIR_CODES,
    RECORD_BYTES,
    SCRATCH_BYTES,
    activation_row_bytes,
)
from localinfer.kernels.cpu.memory import Arena, address
from localinfer.kernels.cpu.parameters import ATTENTION
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.weights import fields_of
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.host import target_features
from localinfer.kernels.kv_layout import PAGE_TOKENS, SCALE_BLOCK
from localinfer.kernels.layouts import SIZES, TILE_ROWS, WHOLE_LAYOUTS, Layout, is_float
from tests.kernels.cpu.tape_runs import linear, random_rows
from tests.kernels.random_weights import random_weights

Piece = Callable[..., None]
Tiles = dict[Layout, NDArray[np.uint8]]
ROWS = 4
"""Rows of activations of a tile, which pieces take one by one or all at once."""
COLUMNS = 96
"""Of keys and values: more than a block of scales, and no whole number of blocks."""
QUERY_COUNTS = (1, 2, 4, 8)

for _part in ("target", "asmprinter", "asmparser"):
    getattr(llvm, f"initialize_native_{_part}")()


def linked(assembly: str, argument_types: Sequence[Any]) -> Piece:
    """The function `piece` of an assembly listing for this system.

    argument_types: Numba's, of which a literal is one that it was made for, and is not given.
    """
    quoted = assembly.translate({ord(letter): f"\\{ord(letter):02X}" for letter in '"\\\n\t'})
    triple = llvm.get_process_triple()
    module = llvm.parse_assembly(f'target triple = "{triple}"\nmodule asm "{quoted}"')
    machine = llvm.Target.from_triple(triple).create_target_machine(
        features=target_features(), opt=0, codemodel="jitdefault", jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine.emit_object(module)))
    engine.finalize_object()
    kinds = [ctypes.c_float if one is types.float32 else ctypes.c_int64 for one in argument_types]
    call = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address("piece"))
    literals = [0] * sum(isinstance(one, types.Literal) for one in argument_types)

    def piece(*values: float, _code: object = engine) -> None:
        call(*literals, *values)

    return piece


def _array(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes of an array, aligned as kernels want them."""
    found = Arena(0).take(values.nbytes)
    found[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return found


def packed_tiles() -> Tiles:
    """Random weights in every layout, a tile of each, as products of single rows take it."""
    pool, shapes = ThreadPool(1), {layout: (TILE_ROWS, _columns(layout)) for layout in Layout}
    found = {one: linear(pool, one, random_weights(one, shapes[one], 1), shapes[one]).packed.data for one in Layout}
    for layout, tile in found.items() if isa.shares_bytes() else ():
        tile[:] = _of_single_rows(layout, tile)
    return found


def _of_pairs(layout: Layout) -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
    """Where each byte of a tile in pairs is otherwise, and the bits in which it differs."""
    unit = SIZES[layout].unit_bytes
    places, flips = np.arange(unit), np.zeros(unit, np.uint8)
    row, byte = np.divmod(np.arange(64), 4)
    for single, paired in zip(fields_of(layout, False, False), fields_of(layout, True, True), strict=False):
        _, _, items, start, kind, _, step = paired
        for item in range(0, items if kind & IN_PAIRS else 0, 2):
            for column in range(2):
                target = start + step * (item + row // 8) + 8 * (row % 8) + 4 * column + byte
                places[target] = start + step * (item + column) + np.arange(64)
                flips[target] = 0x80 if kind % IN_PAIRS != single[4] else 0
    units = np.arange(_columns(layout) // SIZES[layout].unit)
    return (unit * units[:, None] + places).reshape(-1), np.tile(flips, units.size)


def _of_products(layout: Layout, tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A tile as products of the selected instruction set take it, from one of single rows."""
    if isa.pairs_rows():
        places, flips = _of_pairs(layout)
        tile = tile[places] ^ flips
    if layout in WHOLE_LAYOUTS:
        return _with_whole_codes(layout, tile)
    if layout is Layout.IQ4_XS:
        return _byte_planes(tile, are_planes=False)
    return _shared(layout, tile) ^ _signs(layout, tile.size)


def _of_single_rows(layout: Layout, tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What `_of_products` takes."""
    if layout in WHOLE_LAYOUTS:
        tile = _without_whole_codes(layout, tile)
    elif layout is Layout.IQ4_XS:
        tile = _byte_planes(tile, are_planes=True)
    else:
        tile = _shared(layout, tile ^ _signs(layout, tile.size))
    if isa.pairs_rows():
        places, flips = _of_pairs(layout)
        single = np.empty_like(tile)
        single[places] = tile ^ flips
        return single
    return tile


def _vectors_of_codes(layout: Layout, tile: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
    """A copy of a tile, and what lies in it, by vector of columns: fifth bits and nibbles of Q5_K, thirds of Q6_K."""
    units = tile.reshape(-1, SIZES[layout].unit_bytes).copy()
    body = units[:, SIZES[layout].header_bytes :]
    if layout is Layout.Q5_K:
        return units, [body[:, 512 * part : 512 * (part + 1)] for part in range(5)]
    halves = body.reshape(len(units), 2, 24, 64)
    return units, [halves[:, :, 0:16:2], halves[:, :, 16:], halves[:, :, 1:16:2]]


def _with_whole_codes(layout: Layout, tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A tile of Q5_K or Q6_K with whole codes in bytes, and bits of other ones."""
    units, parts = _vectors_of_codes(layout, tile)
    if layout is Layout.Q5_K:
        fifth, rest = parts[0].copy(), np.zeros_like(parts[0])
        for pair, nibbles in enumerate(parts[1:]):
            second = nibbles >> 4 | (fifth >> 2 * pair + 1 & 1) << 4
            nibbles[:] = nibbles & 15 | (fifth >> 2 * pair & 1) << 4 | second << 5
            rest |= second >> 3 << 2 * pair
        parts[0][:] = rest
        return units.reshape(-1)
    even, odd, upper = (part.copy() for part in parts)
    codes = [even & 15 | (upper & 3) << 4, odd & 15 | (upper >> 2 & 3) << 4, even >> 4 | (upper >> 4 & 3) << 4]
    last = odd >> 4 | upper >> 6 << 4
    for block, part in enumerate(parts):
        part[:] = codes[block] | last >> 2 * block << 6
    return units.reshape(-1)


def _without_whole_codes(layout: Layout, tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What `_with_whole_codes` takes."""
    units, parts = _vectors_of_codes(layout, tile)
    if layout is Layout.Q5_K:
        rest, fifth = parts[0].copy(), np.zeros_like(parts[0])
        for pair, codes in enumerate(parts[1:]):
            second = codes >> 5 | (rest >> 2 * pair & 3) << 3
            fifth |= (codes >> 4 & 1) << 2 * pair | second >> 4 << 2 * pair + 1
            codes[:] = codes & 15 | second << 4
        parts[0][:] = fifth
        return units.reshape(-1)
    first, second, third = (part.copy() for part in parts)
    last = first >> 6 | second >> 6 << 2 | third >> 6 << 4
    parts[0][:] = first & 15 | third << 4
    parts[1][:] = second & 15 | last << 4
    parts[2][:] = (first >> 4 & 3) | (second >> 4 & 3) << 2 | (third >> 4 & 3) << 4 | last >> 4 << 6
    return units.reshape(-1)


def _byte_planes(tile: NDArray[np.uint8], are_planes: bool) -> NDArray[np.uint8]:
    """A tile of IQ4_XS with what its scales are made of byte by byte, or number by number again."""
    units = tile.reshape(-1, SIZES[Layout.IQ4_XS].unit_bytes).copy()
    for size, first in ((2, 32), (4, 64)):
        numbers = units[:, first : first + 16 * size]
        shape = (-1, size, 16) if are_planes else (-1, 16, size)
        numbers[:] = numbers.reshape(shape).swapaxes(1, 2).reshape(numbers.shape)
    return units.reshape(-1)


def _codes(layout: Layout, size: int) -> NDArray[np.bool_]:
    """Which bytes of a tile have codes of two rows, where any do."""
    unit = np.zeros(SIZES[layout].unit_bytes, np.bool_)
    for _, _, items, start, kind, _, step in fields_of(layout, isa.pairs_rows(), isa.shares_bytes()):
        if kind & IN_SHARED_BYTES:
            assert step == 64
            unit[start : start + step * items] = True
    return np.tile(unit, size // unit.size)


def _shared(layout: Layout, tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A tile with the nibbles of every two registers of codes transposed."""
    found, codes = tile.copy(), _codes(layout, tile.size)
    first, second = tile[codes].reshape(-1, 2, 16).swapaxes(0, 1)
    found[codes] = np.stack([first & 15 | second << 4, first >> 4 | second & 240], axis=1).reshape(-1)
    return found


def _signs(layout: Layout, size: int) -> NDArray[np.uint8]:
    return np.where(_codes(layout, size) & (not isa.pairs_rows()), 128, 0).astype(np.uint8)


def _columns(layout: Layout) -> int:
    return 37 if is_float(layout) else 2 * SIZES[layout].unit


def tile_product(tiles: Tiles, layout: Layout, product: Piece, num_rows: int, quantize: Piece) -> bytes:
    """ROWS rows of activations times a tile, num_rows at a time, to 16 columns each, and to 11 that are there."""
    columns, data = _columns(layout), tiles[layout]
    if isa.shares_bytes():
        data = _array(_of_products(layout, data))
    values = random_rows(ROWS, columns, 2)
    memory = [_array(row) for row in values] if is_float(layout) else _quantized(values, quantize)
    rows = [address(row) for row in memory]
    spare = _array(np.zeros(16, np.float32))
    bias, residuals = _array(random_rows(1, 16, 3)), _array(random_rows(ROWS, 16, 4))
    found = b""
    for count in (16, 11):
        out = _array(np.full((ROWS, 16), np.nan, np.float32))
        for first in range(0, ROWS, num_rows):
            table = np.zeros((3, 8), np.int64)
            for slot in range(num_rows):
                # Rows of a product that are more than there are repeat them, and are written elsewhere.
                row = (first + slot) % ROWS
                target = address(out) + 64 * row if first + slot < ROWS else address(spare)
                table[:, slot] = rows[row], target, address(residuals) + 64 * row
            product(address(data), columns, address(table), address(bias), 0.75, 0, count)
        # What is not there stays as it was.
        assert np.isfinite(out.view(np.float32).reshape(ROWS, 16)).sum() == ROWS * count
        found += out.tobytes()
    return found


def _quantized(rows: NDArray[np.float32], quantize: Piece) -> list[NDArray[np.uint8]]:
    """Codes and records of an even number of rows of activations, from a row's first code on."""
    count, columns = rows.shape
    row_bytes = activation_row_bytes(columns)
    memory = Arena(0).take(count * row_bytes)
    found = []
    for index, row in enumerate(rows):
        source, second = _array(row), index % 2 if isa.pairs_rows() else 0
        codes = (index - second) * row_bytes + 8 * second
        for block in range(columns // 32):
            if isa.pairs_rows():
                places = codes + PAIR_BYTES * block, codes - 4 * second + PAIR_BYTES * block + PAIR_CODES
            else:
                places = codes + 32 * block, codes + columns + RECORD_BYTES * block
            quantize(address(source) + 128 * block, *[address(memory) + place for place in places])
        found.append(memory[codes:])
    return found


class _Chunk:
    """Half a chunk of a cache of keys or values in codes, and what attention keeps of it in memory."""

    def __init__(self, codes_per_byte: int) -> None:
        generator = np.random.default_rng(5)
        self.memory = _array(np.zeros(SCRATCH_BYTES, np.uint8))
        blocks = -(-COLUMNS // SCALE_BLOCK)
        self.code_bytes = PAGE_TOKENS * COLUMNS // codes_per_byte
        self.pages = []
        for _ in range(scratch.PAGES_PER_CHUNK // 2):
            codes = generator.integers(0, 256, self.code_bytes, dtype=np.uint8)
            scales = np.abs(generator.normal(size=blocks * PAGE_TOKENS)).astype(np.float16)
            self.pages.append(_array(np.concatenate([codes, scales.view(np.uint8)])))
        self.put(scratch.PAGES, [address(page) for page in self.pages] * 4)
        words: dict[str, float] = dict.fromkeys(ATTENTION.fields, 0) | dict.fromkeys(ATTENTION.floats, 0.0)
        sizes = {"key_columns": COLUMNS, "value_columns": COLUMNS}
        scales = {"key_scales": self.code_bytes, "value_scales": self.code_bytes}
        self.parameters = ATTENTION.pack(**words | sizes | scales)
        self.num_positions = PAGE_TOKENS * len(self.pages)

    def put(self, offset: int, values: Sequence[int]) -> None:
        """Write words to the memory."""
        self.memory[offset : offset + 8 * len(values)].view(np.int64)[:] = values

    def floats(self, offset: int, count: int) -> NDArray[np.float32]:
        """Numbers in the memory."""
        return self.memory[offset : offset + 4 * count].view(np.float32)


def scored_codes(kind: int, score: Piece) -> bytes:
    """Scores of one to eight queries for keys in codes."""
    chunk, generator = _Chunk(1 + kind), np.random.default_rng(6)
    blocks = -(-COLUMNS // SCALE_BLOCK)
    queries = []
    for _ in range(max(QUERY_COUNTS)):
        codes = generator.integers(-127, 128, COLUMNS, dtype=np.int8)
        sums = np.array([codes[SCALE_BLOCK * i :][:SCALE_BLOCK].sum(dtype=np.int32) for i in range(blocks)], np.int32)
        parts = [codes, generator.random(blocks, np.float32), sums * np.int32(-8 if kind else -128)]
        queries.append(_array(np.concatenate([part.view(np.uint8) for part in parts])))
    chunk.put(scratch.QUERY_TABLE, [address(query) for query in queries])
    found = b""
    for count in QUERY_COUNTS:
        chunk.put(scratch.COUNT, [count])
        scores = chunk.floats(scratch.SCORES, count * scratch.SCORE_STRIDE // 4)
        scores[:] = 0
        score(address(chunk.parameters), address(chunk.memory), 1, chunk.num_positions // 16)
        found += scores.tobytes()
    return found


def weighed_codes(kind: int, weigh: Piece) -> bytes:
    """Sums of values in codes, for one to eight queries."""
    chunk, generator = _Chunk(1 + kind), np.random.default_rng(7)
    chunk.floats(scratch.SCORES, 8 * scratch.SCORE_STRIDE // 4)[:] = generator.random(2 * scratch.SCORE_STRIDE)
    out = _array(np.zeros((max(QUERY_COUNTS), COLUMNS), np.float32))
    chunk.put(scratch.CHUNK_VALUES, [address(out)])
    found = b""
    for count in QUERY_COUNTS:
        chunk.put(scratch.COUNT, [count])
        weigh(address(chunk.parameters), address(chunk.memory), 16, chunk.num_positions)
        found += out.tobytes()
    return found
