"""Keys and values of q4_0: heads rounded to codes of four bits, and a page's codes staged for tensor cores.

The layout is that of `kernels/kv_layout.py`: a byte has two columns of one position, a word four bytes of one position
(keys) or of one column (values). Codes have the bytes of the CPU's, columns of padding included.
"""

from numba import float32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.reductions import warp_max
from localinfer.kernels.cuda.jit import inline
from localinfer.kernels.kv_layout import PAGE_TOKENS, SCALE_BLOCK

_HALF = SCALE_BLOCK // 2
_WARPS = 4
"""Of a block that stores."""


@inline
def half_byte_scale(numbers, first, end):
    """The scale of numbers[first:end], at most SCALE_BLOCK of them: the one of largest magnitude becomes code -8.

    All lanes of a warp call it.
    """
    lane = ptx.thread() % 32
    highest = float32(0.0)
    # A block of zeros has the scale -0, as on the CPU.
    lowest = float32(-0.0)
    if first + lane < end:
        highest = ptx.maximum(highest, numbers[first + lane])
        lowest = ptx.maximum(lowest, -numbers[first + lane])
    if first + lane + _HALF < end:
        highest = ptx.maximum(highest, numbers[first + lane + _HALF])
        lowest = ptx.maximum(lowest, -numbers[first + lane + _HALF])
    highest = warp_max(highest)
    lowest = warp_max(lowest)
    return ptx.divide(highest if highest > lowest else -lowest, float32(-8.0))


@inline
def half_byte(numbers, column, size, inverse):
    """A column as a code, 0 to 15, which mean -8 to 7; columns past the end are 0."""
    code = 8
    if column < size:
        scaled = ptx.maximum(ptx.minimum(numbers[column] * inverse, float32(7.0)), float32(-8.0))
        code = ptx.to_int(scaled) + 8
    return code


@inline
def store_head_half_bytes(numbers, size, codes, run, stride, scales, scale_bytes):
    """Round a head to codes and a scale per block, with all threads of a block.

    A group of 2 * run columns has a row of 64 bytes, in which `run` bytes, `stride` apart, hold its first columns in
    their lower halves and the others in their upper halves.
    """
    lane = ptx.thread() % 32
    first = ptx.thread() // 32 * SCALE_BLOCK
    while first < size:
        bits = ptx.float_to_half(half_byte_scale(numbers, first, min(first + SCALE_BLOCK, size)))
        if lane == 0:
            ptx.store_u16(scales + first // SCALE_BLOCK * scale_bytes, bits)
        scale = ptx.half_to_float(bits)
        inverse = float32(0.0)
        if scale >= float32(1e-36) or scale <= float32(-1e-36):
            inverse = ptx.divide(float32(1.0), scale)
        byte = first // 2 + lane
        column = byte // run * 2 * run + byte % run
        if byte // run * 2 * run < size:
            low = half_byte(numbers, column, size, inverse)
            high = half_byte(numbers, column + run, size, inverse)
            ptx.store_u8(codes + byte // run * 64 + byte % run * stride, low | high << 4)
        first = first + _WARPS * SCALE_BLOCK


@inline
def scaled_code(word, number, scale):
    """The code in the lower half of byte `number` of a word, times a scale."""
    return scale * ptx.to_float(((word >> (8 * number)) & 15) - 8)


@inline
def stage_key_half_bytes(key, place, scales, key_size, steps, threads):
    """Keys of a page as pairs of dimensions of each position, float16, with their scales in them."""
    stride = 8 * steps + 4
    words = (key_size + 7) // 8
    blocks = (key_size + SCALE_BLOCK - 1) // SCALE_BLOCK
    index = ptx.thread()
    while index < 2 * PAGE_TOKENS * steps:
        word = index // 16 % (2 * steps)
        group = index // (32 * steps)
        code = 0
        scale = float32(0.0)
        if word < words:
            code = ptx.load_u32(place + (group * words + word) * 64 + index % 16 * 4)
            scale_place = scales + (group * blocks + 8 * word // SCALE_BLOCK) * 32 + index % 16 * 2
            scale = ptx.half_to_float(ptx.load_u16(scale_place))
        target = (group * 16 + index % 16) * stride + 4 * word
        for upper in range(2):
            for pair in range(2):
                left = scaled_code(code >> (4 * upper), 2 * pair, scale)
                right = scaled_code(code >> (4 * upper), 2 * pair + 1, scale)
                key[target + 2 * upper + pair] = ptx.pack_halves(left, right)
        index = index + threads


@inline
def stage_value_half_bytes(value, stride, place, scales, num_seen, columns, threads):
    """Values of a page as pairs of positions of each column, `stride` words apart, with their scales in them.

    columns: those of a position in the page, the first that is staged, and eighths of those that are staged.
    Positions not yet seen by any row are 0.
    """
    value_columns, first_column, tiles = columns
    index = ptx.thread()
    while index < (8 * tiles + 31) // 32 * 256:
        pair = index // 16 % 16
        vector = index // 256
        code = 0
        left = float32(0.0)
        right = float32(0.0)
        # The last part of the columns may reach past those that there are.
        if first_column + 32 * vector < value_columns and 2 * pair < num_seen:
            row = place + pair // 2 * 2 * value_columns
            code = ptx.load_u32(row + 2 * (first_column + 32 * vector) + index % 16 * 4)
            scale_place = scales + (first_column + 32 * vector) // SCALE_BLOCK * 64 + 4 * pair
            left = ptx.half_to_float(ptx.load_u16(scale_place))
            if 2 * pair + 1 < num_seen:
                right = ptx.half_to_float(ptx.load_u16(scale_place + 2))
        # The bytes of a column are of positions 0, 2, 1 and 3.
        code = code >> (8 * (pair % 2))
        column = 32 * vector + index % 16
        if column < 8 * tiles:
            value[column * stride + pair] = ptx.pack_halves(scaled_code(code, 0, left), scaled_code(code, 2, right))
        if column + 16 < 8 * tiles:
            code = code >> 4
            target = (column + 16) * stride + pair
            value[target] = ptx.pack_halves(scaled_code(code, 0, left), scaled_code(code, 2, right))
        index = index + threads
