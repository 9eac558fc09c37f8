"""Choice of the layout that a tensor runs in, and conversion of the types that a device's kernels do not read.

Most types run as they lie in the file. Every other goes to the smallest layout that holds its weights exactly; where
none does, to Q8_0, whose rounding lies far below what the type itself lost. CUDA kernels read fewer types than those of
the CPU, so every function takes the layouts that a device reads.
"""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, RequestError
from localinfer.kernels.layouts import GGUF_LAYOUTS, Layout
from localinfer.quant.formats.dequantize import (
    activation_type,
    dequantize,
    group_scales,
    iq1_codes,
    iq1_scales,
    levels_of,
    tensor_blocks,
)
from localinfer.quant.formats.types import (
    Blocks,
    TensorType,
    bits_per_weight,
    block_dtype,
    block_size,
    pack_codes,
    unpack_codes,
    unpack_signed_scales,
)
from localinfer.types import Record

Fields = dict[str, NDArray[Any]]

WEIGHTS_PER_CHUNK = 1 << 20
"""Weights converted at a time, so that what is in flight takes a few MiB however large the tensor."""

_OWN_LAYOUTS = {TensorType[layout.name]: layout for layout in GGUF_LAYOUTS}


class _Conversion(Record):
    """Change of a type: its layout, the writer of that layout's blocks, and the rounding of weights."""

    layout: Layout
    fields: Callable[[Blocks, TensorType], Fields]
    change: str
    fits: Callable[[Blocks], bool] = lambda blocks: True
    """False if the layout does not hold these weights."""
    otherwise: "_Conversion | None" = None
    """Conversion of weights that do not fit, or on devices without the layout."""


def runs_directly(type: TensorType, layouts: Collection[Layout] = GGUF_LAYOUTS) -> bool:
    """True if kernels of these layouts read this type at the density of the file."""
    return type in _OWN_LAYOUTS and _OWN_LAYOUTS[type] in layouts


def layout_of(type: TensorType, layouts: Collection[Layout] = GGUF_LAYOUTS) -> Layout:
    """Return the layout a type runs in: its own, or the one that `convert` gives it unless scales are extreme.

    Raises: UnsupportedFormatError for the types that only hold activations (Q8_1, Q8_K).
    """
    return _OWN_LAYOUTS[type] if runs_directly(type, layouts) else _conversion(type, layouts).layout


def conversion_note(type: TensorType, layouts: Collection[Layout] = GGUF_LAYOUTS) -> str:
    """Describe in one line the layout of a type, the bits per weight before and after, and the change of weights."""
    before = bits_per_weight(type)
    if runs_directly(type, layouts):
        return f"{type.name} runs as it is in the file, {before:g} bits per weight"
    conversion = _conversion(type, layouts)
    target = TensorType[conversion.layout.name]
    sizes = f"{bits_per_weight(target):g} bits per weight for {before:g}"
    place = " on a GPU" if type in _OWN_LAYOUTS else ""
    return f"{type.name} runs as {target.name}{place}, {sizes}; {conversion.change}"


def convert(
    data: NDArray[np.uint8],
    type: TensorType,
    shape: tuple[int, ...],
    done: Callable[[int, int], None] | None = None,
    layouts: Collection[Layout] = GGUF_LAYOUTS,
    num_threads: int = 1,
) -> tuple[Layout, NDArray[np.uint8]]:
    """Rewrite a tensor in one of the layouts that kernels read; types that run directly come back as they are.

    done: called with each stretch of data (first byte, end) that has been rewritten and is not needed any more; what it
        raises ends the conversion. Never called for a type that runs directly.
    num_threads: threads that rewrite stretches, which `done` still hears of in order.
    Shapes: data uint8, of any shape, row after row; result uint8[bytes of the tensor in the layout].
    Raises: ShapeError if the bytes do not fit the shape, CorruptFileError if a weight to be rounded is not finite,
        UnsupportedFormatError for the types that only hold activations.
    """
    blocks = tensor_blocks(data, type, shape)
    if runs_directly(type, layouts):
        return _OWN_LAYOUTS[type], blocks.view(np.uint8)
    conversion = _conversion(type, layouts)
    if conversion.otherwise and not conversion.fits(blocks):
        conversion = conversion.otherwise
    target = TensorType[conversion.layout.name]
    result = np.empty(len(blocks) * block_size(type) // block_size(target), block_dtype(target))
    step = max(1, WEIGHTS_PER_CHUNK // block_size(type))

    def rewrite(first: int) -> tuple[int, int]:
        chunk = blocks[first : first + step]
        start = first * block_size(type) // block_size(target)
        part = result[start : start + len(chunk) * block_size(type) // block_size(target)]
        with np.errstate(over="ignore", invalid="ignore"):
            fields = conversion.fields(chunk, type)
        for name, values in fields.items():
            part[name] = values.reshape(part[name].shape)
        return first * blocks.itemsize, (first + len(chunk)) * blocks.itemsize

    threads = ThreadPoolExecutor(num_threads)
    try:
        for stretch in threads.map(rewrite, range(0, len(blocks), step)):
            if done is not None:
                done(*stretch)
    finally:
        threads.shutdown(cancel_futures=True)
    return conversion.layout, result.view(np.uint8)


def _conversion(type: TensorType, layouts: Collection[Layout]) -> _Conversion:
    if type not in _CONVERSIONS:
        raise activation_type(type)
    found = _CONVERSIONS[type]
    return found.otherwise if found.otherwise and found.layout not in layouts else found


def _iq4(blocks: Blocks, type: TensorType) -> Fields:
    d = blocks["d"] if type is TensorType.IQ4_NL else group_scales(blocks, type)[0].astype(np.float16)
    return {"d": d, **pack_codes(levels_of(blocks, type), TensorType.Q8_0)}


def _mxfp4(blocks: Blocks, type: TensorType) -> Fields:
    """Doubled E2M1 codes reach from -12 to 12, inside Q5_0's -16 to 15; their scale is halved to match."""
    levels, (scale, _) = levels_of(blocks, type), group_scales(blocks, type)
    d = np.where((levels == 0).all(axis=1), np.float32(0), scale[:, 0])
    return {"d": d.astype(np.float16), **pack_codes(levels + 16, TensorType.Q5_0)}


def _exponents_fit(blocks: Blocks) -> bool:
    """True if float16 holds every MXFP4 scale that multiplies a weight: exponents -24 to 15."""
    step = max(1, WEIGHTS_PER_CHUNK // block_size(TensorType.MXFP4))
    for first in range(0, len(blocks), step):
        chunk = blocks[first : first + step]
        exponents = chunk["e"].astype(np.int32) - 128
        is_zero = (chunk["qs"] & 0x77 == 0).all(axis=1)
        if not (is_zero | ((exponents >= -24) & (exponents <= 15))).all():
            return False
    return True


def _iq1(blocks: Blocks, type: TensorType) -> Fields:
    """Eighths of the scale, of which levels are whole numbers of at most nine, and factors of 16 columns."""
    codes, factors = iq1_codes(blocks, type)
    d = iq1_scales(blocks) * np.float16(0.125)
    if not np.isfinite(d).all():
        raise _beyond_float16(type, "a scale is")
    return {"d": d, "scales": factors, **pack_codes(codes, TensorType.Q6_K)}


def _bf16(blocks: Blocks, type: TensorType) -> Fields:
    values = dequantize(blocks.view(np.uint8), type, (len(blocks), block_size(type)))
    return {"value": (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)}


def _ternary(blocks: Blocks, type: TensorType) -> Fields:
    return {"d": blocks["d"], **pack_codes(unpack_codes(blocks, type), TensorType.TQ2_0)}


def _few_codes(blocks: Blocks, type: TensorType) -> Fields:
    """Types of d times -1, 0, 1 or 2."""
    d = np.repeat(blocks["d"], block_size(type) // 32)
    return {"d": d, **pack_codes(levels_of(blocks, type).reshape(-1, 32) + 8, TensorType.Q4_0)}


def _q3_k(blocks: Blocks, type: TensorType) -> Fields:
    """Codes have the offset 4 here, and 32 there."""
    scales = unpack_signed_scales(blocks, type).astype(np.int8) - np.int8(32)
    return {"d": blocks["d"], "scales": scales, **pack_codes(unpack_codes(blocks, type) + 28, TensorType.Q6_K)}


def _plain(blocks: Blocks, type: TensorType) -> Fields:
    return {"value": blocks["value"].astype(np.float32)}


def _beyond_float16(type: TensorType, found: str) -> CorruptFileError:
    return CorruptFileError(
        f"a {type.name} tensor holds weights that are infinite, NaN or beyond float16 ({found}); "
        "download or convert the model again"
    )


def _rounded(blocks: Blocks, type: TensorType) -> Fields:
    # Few models have such types, and every other load does without the encoders.
    from localinfer.quant.formats.reference_encoders import quantize

    values = dequantize(blocks.view(np.uint8), type, (len(blocks), block_size(type))).reshape(-1, 32)
    try:
        encoded = quantize(values, TensorType.Q8_0)
    except RequestError as error:
        raise _beyond_float16(type, str(error)) from error
    target = encoded.reshape(-1).view(block_dtype(TensorType.Q8_0))
    return {"d": target["d"], "qs": target["qs"]}


_EXACT = "every weight stays exactly the same"
_ROUNDED_SCALES = "scales are rounded to float16, within 0.05 %"
_EIGHTHS = "weights stay the same, or are rounded by 0.000004 at most where their scale is below 0.0005"
_ROUNDED = "weights are rounded, by 0.5 % of a block's largest at most"

_FEW_CODES = _Conversion(Layout.Q4_0, _few_codes, _EXACT)
_BYTES = _Conversion(Layout.Q8_0, _rounded, _ROUNDED)
_CONVERSIONS: dict[TensorType, _Conversion] = {
    TensorType.IQ4_NL: _Conversion(Layout.Q8_0, _iq4, _EXACT),
    TensorType.IQ4_XS: _Conversion(Layout.Q8_0, _iq4, _ROUNDED_SCALES),
    TensorType.MXFP4: _Conversion(Layout.Q5_0, _mxfp4, _EXACT, _exponents_fit, _Conversion(Layout.BF16, _bf16, _EXACT)),
    TensorType.Q3_K: _Conversion(Layout.Q6_K, _q3_k, _EXACT),
    TensorType.TQ1_0: _Conversion(Layout.TQ2_0, _ternary, _EXACT, otherwise=_FEW_CODES),
    **dict.fromkeys((TensorType.TQ2_0, TensorType.Q1_0, TensorType.Q2_0), _FEW_CODES),
    **{type: _Conversion(Layout.Q6_K, _iq1, _EIGHTHS) for type in (TensorType.IQ1_S, TensorType.IQ1_M)},
    **dict.fromkeys((TensorType.Q2_K, TensorType.NVFP4, TensorType.IQ2_XXS, TensorType.IQ2_XS), _BYTES),
    **dict.fromkeys((TensorType.IQ2_S, TensorType.IQ3_XXS, TensorType.IQ3_S), _BYTES),
    **{
        type: _Conversion(Layout.F32, _plain, "numbers are rounded to float32 where it cannot hold them")
        for type in (TensorType.F64, TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64)
    },
}
