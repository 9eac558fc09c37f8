"""The instructions that kernels are written in, as PTX: memory at addresses, integer dot products, shuffles.

Whole numbers are int64 on the Python side whatever they are in a register, so that no mix of signed and unsigned ever
becomes a float; LLVM narrows them again. The tests run kernels without a GPU on a Python counterpart of each of these.
Source: PTX ISA 7.8, sections 9.7.1 (dp4a), 9.7.8 (ld, st), 9.7.8.6 (shfl), 9.7.12 (bar), 9.7.13 (mma).
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

_REGISTERS = {
    "q": (types.int64, ir.IntType(64), "l"),
    "u": (types.int64, ir.IntType(32), "r"),
    "s": (types.int64, ir.IntType(32), "r"),
    "h": (types.int64, ir.IntType(16), "h"),
    "f": (types.float32, ir.FloatType(), "f"),
    "d": (types.float64, ir.DoubleType(), "d"),
}
"""Kinds of operands: the type in Python, in LLVM and the letter of its register. u and h are extended with zeros, s
with its sign."""


def _instruction(template: str, results: str, arguments: str, effect: str = "") -> Any:
    """Make a function of an instruction.

    effect: "memory" if it writes, "converge" if all lanes must reach it, "warp" if they must and it touches no memory.
    """
    result_types = [_REGISTERS[kind][0] for kind in results]
    if len(results) == 1:
        result: Any = result_types[0]
    else:
        result = types.UniTuple(result_types[0], len(results)) if results else types.void
    letters = [f"={_REGISTERS[kind][2]}" for kind in results] + [_REGISTERS[kind][2] for kind in arguments]
    touches_memory = effect in ("memory", "converge")
    constraints = ",".join([*letters, "~{memory}"] if touches_memory else letters)

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        operands = []
        for kind, value in zip(arguments, values, strict=True):
            register = _REGISTERS[kind][1]
            operands.append(builder.trunc(value, register) if kind in "ush" else value)
        registers = [_REGISTERS[kind][1] for kind in results]
        if len(registers) == 1:
            returned: Any = registers[0]
        else:
            returned = ir.LiteralStructType(registers) if registers else ir.VoidType()
        kind_of = ir.FunctionType(returned, [operand.type for operand in operands])
        call = builder.asm(kind_of, template, constraints, operands, side_effect=touches_memory)
        if effect in ("converge", "warp"):
            call.attributes.add("convergent")
        if not results:
            return context.get_dummy_value()
        outs = [call] if len(results) == 1 else [builder.extract_value(call, index) for index in range(len(results))]
        wide = [_extend(builder, kind, out) for kind, out in zip(results, outs, strict=True)]
        return wide[0] if len(wide) == 1 else context.make_tuple(builder, result, wide)

    types_in = [_REGISTERS[kind][0] for kind in arguments]

    def describe(_context: Any, *_arguments: Any) -> tuple[Any, Callable[..., Any]]:
        return signature(result, *types_in), generate

    # Numba asks for the names of an intrinsic's parameters, the context's first.
    names = ["context", *(f"operand_{index}" for index in range(len(arguments)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    describe.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(describe)


def _extend(builder: Any, kind: str, value: Any) -> Any:
    if kind == "s":
        return builder.sext(value, ir.IntType(64))
    return builder.zext(value, ir.IntType(64)) if kind in "uh" else value


load_stream = _instruction("ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", "uuuu", "q")
"""Sixteen bytes that are read once: weights. The address is a multiple of 16."""
load_v4 = _instruction("ld.global.v4.u32 {$0, $1, $2, $3}, [$4];", "uuuu", "q", "memory")
load_v2 = _instruction("ld.global.v2.u32 {$0, $1}, [$2];", "uu", "q", "memory")
load_i64 = _instruction("ld.global.u64 $0, [$1];", "q", "q", "memory")
load_u32 = _instruction("ld.global.u32 $0, [$1];", "u", "q", "memory")
load_u16 = _instruction("ld.global.u16 $0, [$1];", "h", "q", "memory")
load_u8 = _instruction("ld.global.u8 $0, [$1];", "h", "q", "memory")
load_f64 = _instruction("ld.global.f64 $0, [$1];", "d", "q", "memory")
load_f32 = _instruction("ld.global.f32 $0, [$1];", "f", "q", "memory")
store_i64 = _instruction("st.global.u64 [$0], $1;", "", "qq", "memory")
store_u32 = _instruction("st.global.u32 [$0], $1;", "", "qu", "memory")
store_u16 = _instruction("st.global.u16 [$0], $1;", "", "qh", "memory")
store_u8 = _instruction("st.global.u8 [$0], $1;", "", "qh", "memory")
store_f32 = _instruction("st.global.f32 [$0], $1;", "", "qf", "memory")
prefetch = _instruction("prefetch.global.L2 [$0];", "", "q", "memory")
"""Prefetch the line at an address into the L2 cache."""
wait_for_previous = _instruction("griddepcontrol.wait;", "", "", "memory")
"""Wait for the kernel before this one, where a launch did not. `jit` puts it first in kernels that do not call it, and
leaves it out where the GPU has no such instruction."""
add_u32 = _instruction("atom.global.add.u32 $0, [$1], $2;", "u", "qu", "memory")
"""Add to what lies at an address, in one step for all lanes; gives what was there before."""
add_ordered = _instruction("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", "u", "qu", "memory")
"""`add_u32` that orders: what this block wrote before is visible to blocks that add to the address after it."""

dot_signed = _instruction("dp4a.s32.s32 $0, $1, $2, $3;", "s", "uus")
"""c + the products of four signed bytes with four signed bytes."""
dot_unsigned = _instruction("dp4a.u32.s32 $0, $1, $2, $3;", "s", "uus")
"""c + the products of four unsigned bytes of a with four signed bytes of b."""

half_to_float = _instruction("cvt.f32.f16 $0, $1;", "f", "h")
float_to_half = _instruction("cvt.rn.f16.f32 $0, $1;", "h", "f")
pack_halves = _instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "u", "ff")
"""Two floats as float16, the first in the lower half of a word; sm_80 and newer."""
to_float = _instruction("cvt.rn.f32.s32 $0, $1;", "f", "s")
to_int = _instruction("cvt.rni.s32.f32 $0, $1;", "s", "f")
"""Round to the nearest whole number, of two the even one."""
round_f64 = _instruction("cvt.rni.f64.f64 $0, $1;", "d", "d")
to_f64 = _instruction("cvt.rn.f64.s64 $0, $1;", "d", "q")
narrow = _instruction("cvt.rn.f32.f64 $0, $1;", "f", "d")
widen = _instruction("cvt.f64.f32 $0, $1;", "d", "f")
to_i64 = _instruction("cvt.rni.s64.f64 $0, $1;", "q", "d")
ceil_f64 = _instruction("cvt.rpi.f64.f64 $0, $1;", "d", "d")
divide_f64 = _instruction("div.rn.f64 $0, $1, $2;", "d", "dd")
multiply_f64 = _instruction("mul.rn.f64 $0, $1, $2;", "d", "dd")
"""Never joined with a sum, as a plain product may be."""
f64_bits = _instruction("mov.b64 $0, $1;", "q", "d")
bits_f64 = _instruction("mov.b64 $0, $1;", "d", "q")
float_bits = _instruction("mov.b32 $0, $1;", "u", "f")
bits_float = _instruction("mov.b32 $0, $1;", "f", "u")
divide = _instruction("div.rn.f32 $0, $1, $2;", "f", "ff")
square_root = _instruction("sqrt.rn.f32 $0, $1;", "f", "f")
exp2 = _instruction("ex2.approx.f32 $0, $1;", "f", "f")
log2 = _instruction("lg2.approx.f32 $0, $1;", "f", "f")
maximum = _instruction("max.f32 $0, $1, $2;", "f", "ff")
minimum = _instruction("min.f32 $0, $1, $2;", "f", "ff")

shuffle = _instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "f", "fu", "converge")
"""The float of the lane whose number differs from this one's by the bits of the mask."""
shuffle_int = _instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "s", "su", "converge")
shuffle_word = _instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "u", "uu", "converge")
shuffle_from = _instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "f", "fu", "converge")
"""The float of the lane of this number."""
fetch_word = _instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "u", "uu", "converge")
syncthreads = _instruction("bar.sync 0;", "", "", "converge")
"""Wait for every thread of the block."""

_TILE = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
multiply_halves = _instruction(
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {_TILE}", "ffff", "uuuuuuffff", "warp"
)
"""c + a b of a warp, 16 x 16 by 16 x 8, sm_80 and newer. Lane 4 g + t holds, as pairs of float16 along the inner axis,
a: rows g and g + 8 at 2 t, then both at 2 t + 8; b: column g at 2 t and 2 t + 8; and of c, float32: row g at columns
2 t and 2 t + 1, then row g + 8."""
multiply_signed = _instruction(f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {_TILE}", "ssss", "uuuuuussss", "warp")
"""The same of fours of signed bytes along the inner axis, at 4 t and 4 t + 16, and of whole numbers."""
_SHORT_TILE = "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
multiply_half_signed = _instruction(
    f"mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {_SHORT_TILE}", "ssss", "uuussss", "warp"
)
"""The first half of `multiply_signed`'s inner axis."""
multiply_half_unsigned = _instruction(
    f"mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {_SHORT_TILE}", "ssss", "uuussss", "warp"
)
"""The same of unsigned bytes of a."""

thread = _instruction("mov.u32 $0, %tid.x;", "u", "")
block_x = _instruction("mov.u32 $0, %ctaid.x;", "u", "")
block_y = _instruction("mov.u32 $0, %ctaid.y;", "u", "")
block_z = _instruction("mov.u32 $0, %ctaid.z;", "u", "")
