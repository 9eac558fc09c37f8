"""Print the assembly of kernel pieces for any target LLVM knows; run as a program, since LLVM may end the process.

Behind a piece's title stands a digest of what it computes, where this machine runs it and `run_pieces` has inputs.
Arguments: names from TARGETS, by default all.
"""

import gc
import hashlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from llvmlite import binding as llvm, ir
from numba import types

from localinfer.kernels.cpu.compiled import attention_tiles, elementwise, kv_store, matmul
from localinfer.kernels.cpu.compiled.tile import GRIDS
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.host import host_features
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.jit.numba import optimised
from localinfer.kernels.layouts import CUDA_LAYOUTS, SHARED_LAYOUTS, WHOLE_LAYOUTS, Layout
from tests.bench.bench_assembly import COMMON
from tests.kernels.cpu import run_pieces
from tests.kernels.cpu.run_pieces import Piece, Tiles

_AVX2 = "+avx,+avx2,+fma,+f16c"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
TARGETS: dict[str, tuple[ISA, str, str, str]] = {
    "avx512vnni": (ISA.AVX512_VNNI, "x86_64-unknown-linux-gnu", "x86-64", _AVX512),
    "avx512vbmi": (ISA.AVX512_VNNI, "x86_64-unknown-linux-gnu", "x86-64", f"{_AVX512},+avx512vbmi"),
    "amx": (ISA.AMX, "x86_64-unknown-linux-gnu", "sapphirerapids", f"{_AVX512},+avx512vbmi,+amx-tile,+amx-int8"),
    "avxvnni": (ISA.AVX_VNNI, "x86_64-unknown-linux-gnu", "x86-64", f"{_AVX2},+avxvnni"),
    "avxvnni of avx512": (ISA.AVX_VNNI, "x86_64-unknown-linux-gnu", "x86-64", f"{_AVX2},+avx512vnni,+avx512vl"),
    "avx2": (ISA.AVX2, "x86_64-unknown-linux-gnu", "x86-64", _AVX2),
    "generic": (ISA.GENERIC, "x86_64-unknown-linux-gnu", "x86-64", ""),
    "neon": (ISA.NEON_DOTPROD, "aarch64-unknown-linux-gnu", "generic", "+neon,+dotprod"),
    "i8mm": (ISA.NEON_I8MM, "aarch64-unknown-linux-gnu", "generic", "+neon,+dotprod,+i8mm"),
    "pairs": (ISA.NEON_I8MM, "x86_64-unknown-linux-gnu", "x86-64", _AVX2),
    "shared bytes": (ISA.NEON_DOTPROD, "x86_64-unknown-linux-gnu", "x86-64", _AVX2),
    "windows on arm": (ISA.NEON_DOTPROD, "aarch64-pc-windows-msvc", "generic", "+neon,+dotprod"),
    "apple": (ISA.NEON_DOTPROD, "arm64-apple-macosx13.0", "apple-m1", "+neon,+dotprod"),
}


def _literal(value: int) -> Any:
    return types.literal(value)


_ADDRESS, _FLOAT = types.int64, types.float32


def tile(layout: Layout, num_rows: int, *, gathers: bool = False) -> tuple[Any, list[Any]]:
    """The product of a tile and rows of activations, which may be any where `gathers`."""
    literals = [_literal(int(layout)), _literal(num_rows), _literal(int(gathers))]
    return matmul.tile_product, [*literals, *[_ADDRESS] * 4, _FLOAT, _ADDRESS, _ADDRESS]


LONG_TILE = "avx512vnni"
"""The target whose tiles have four rows: others take long to compile.

Layouts that only the CPU has come in tiles of one row: it has all their instructions.
"""
_EACH_BODY = (
    *(Layout.F16, Layout.Q8_0, Layout.Q5_K, Layout.Q6_K, Layout.INT4_32, Layout.MXFP4, Layout.NVFP4, Layout.IQ4_NL),
    *(Layout.Q3_K, Layout.IQ3_S, Layout.Q1_0),
)
_PAIRS = (*_EACH_BODY, Layout.Q5_0, Layout.INT8_32)
_COMMON = (Layout.Q4_0, Layout.Q4_K, Layout.IQ4_XS)
"""Those of `bench_assembly.COMMON` that these lack."""
_SPELLED = (Layout.F16, Layout.Q8_0, Layout.IQ3_S)
_SOME_LAYOUTS = {
    "avx512vbmi": GRIDS,
    "avxvnni": _SPELLED,
    "avxvnni of avx512": _PAIRS,
    "generic": _PAIRS,
    "neon": (*_PAIRS, *_COMMON),
    "i8mm": (*_PAIRS, *_COMMON),
    "pairs": (*_PAIRS, *_COMMON),
    "shared bytes": (*SHARED_LAYOUTS, *WHOLE_LAYOUTS, Layout.IQ4_XS),
    "windows on arm": _SPELLED,
    "apple": _SPELLED,
}
"""One layout of each function there is, where another target has all: what a layout has of its own is the same on each.

Those of `_SPELLINGS` differ from another target in the spelling alone, and have fewer. "pairs" and "shared bytes" lack
the instructions of their paths, and compute the same from tiles that these take.
"""

_SPELLINGS = ("avxvnni", "windows on arm", "apple")
_LONG = ("key codes 1", "value codes 1", "head codes 1", "head codes 2")
"""Pieces that take longest, and differ from the one before in the width of a code."""

MATRICES = {
    f"matrices of {layout.name}": (matmul.matrix_product, [_literal(int(layout)), *[_ADDRESS] * 7])
    for layout in (Layout.Q4_0, Layout.Q4_K)
}
"""Products by AMX, of a layout of blocks and one of super-blocks: instructions are the same of every one."""

PIECES: dict[str, tuple[Any, list[Any]]] = {
    **{layout.name: tile(layout, 4) for layout in Layout},
    **MATRICES,
    "quantize": (matmul.quantize_block, [_ADDRESS] * 3),
    "key scores": (attention_tiles.score_keys, [_literal(1), *[_ADDRESS] * 4]),
    "softmax": (attention_tiles.softmax_chunk, [*[_ADDRESS] * 5, _FLOAT, _FLOAT, *[_ADDRESS] * 3]),
    "values": (attention_tiles.weigh_values, [_literal(1), *[_ADDRESS] * 4]),
    "merge": (attention_tiles.merge_chunk, [_ADDRESS] * 10),
    **{f"key codes {kind}": (attention_tiles.score_codes, [_literal(kind), *[_ADDRESS] * 4]) for kind in (0, 1)},
    **{f"value codes {kind}": (attention_tiles.weigh_codes, [_literal(kind), *[_ADDRESS] * 4]) for kind in (0, 1)},
    **{f"head codes {kind}": (kv_store.quantize_values, [_literal(kind), *[_ADDRESS] * 3]) for kind in (0, 1, 2)},
    "norm": (elementwise.layer_norm_row, [*[_ADDRESS] * 5, _FLOAT]),
    "gelu": (
        elementwise.elementwise_row,
        [_literal(list(elementwise.FORMULAS).index("gelu_erf")), *[_ADDRESS] * 3, _FLOAT, _ADDRESS],
    ),
}


def pieces_of(target_name: str) -> list[str]:
    """Names of the pieces that are compiled for a target."""
    if target_name == "amx":
        # All others are those of AVX-512 VNNI.
        return list(MATRICES)
    layouts = {layout.name for layout in _SOME_LAYOUTS.get(target_name, Layout)}
    if TARGETS[target_name][0] is ISA.NEON_I8MM or target_name == "shared bytes":
        # Only products are other than those of another target.
        return [name for name in PIECES if name in {*layouts, "quantize"}]
    left_out = {*Layout.__members__, *MATRICES, *(_LONG if target_name in _SPELLINGS else ())}
    return [name for name in PIECES if name in layouts or name not in left_out]


def runs_here(target_name: str) -> bool:
    """True if this process can run a target's code."""
    _, triple, _, features = TARGETS[target_name]
    has = {name for name, is_there in host_features().items() if is_there}
    return triple == llvm.get_process_triple() and has >= {name[1:] for name in features.split(",") if name}


def _is_optimised(target_name: str, name: str) -> bool:
    """True if a piece is optimised as kernels are, and has their registers.

    As they are emitted, LLVM's code generator takes minutes for products of pairs.
    """
    is_one = target_name == "amx" or (target_name == "neon" and name in COMMON)
    return TARGETS[target_name][0] is ISA.NEON_I8MM or is_one


def _piece(target_name: str, name: str) -> tuple[Any, list[Any], int]:
    """The intrinsic, the types of its arguments, and the rows of a tile."""
    if name not in Layout.__members__:
        return *PIECES[name], 0
    num_rows = 4 if target_name == LONG_TILE and Layout[name] in CUDA_LAYOUTS else 1
    if _is_optimised(target_name, name):
        # Registers are looked at of instructions of their own only.
        num_rows = 4 if name in (COMMON[:2] if target_name == "pairs" else COMMON) else 2
    return *tile(Layout[name], num_rows), num_rows


def assembly(target_name: str, name: str) -> str:
    """Assembly of one intrinsic as a function `piece` of its own."""
    intrinsic, argument_types, _ = _piece(target_name, name)
    machine, module = made(TARGETS[target_name], intrinsic, argument_types)
    if _is_optimised(target_name, name):
        module = optimised(module, machine)
    return str(machine.emit_assembly(module))


def made(target: tuple[ISA, str, str, str], intrinsic: Any, argument_types: list[Any]) -> tuple[Any, Any]:
    """LLVM's code generator for a target as in TARGETS, and a module of a function `piece` that calls an intrinsic."""
    path, triple, cpu, features = target
    isa.SELECTED = path
    codegen = SimpleNamespace(magic_tuple=lambda: (triple, cpu, features))
    context = SimpleNamespace(codegen=lambda: codegen, get_dummy_value=lambda: None)
    _, generate = intrinsic._defn(None, *argument_types)
    module = ir.Module()
    module.triple = triple
    kinds = [ir.FloatType() if type is _FLOAT else ir.IntType(64) for type in argument_types]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "piece")
    builder = ir.IRBuilder(function.append_basic_block())
    generate(context, builder, None, list(function.args))
    builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return machine, parsed


def listings(target_name: str, tiles: Tiles) -> Iterator[tuple[str, str, str]]:
    """Name, digest and assembly of each piece of a target; where it is not run the digest is empty."""
    texts = {name: assembly(target_name, name) for name in pieces_of(target_name)}
    quantize = _linked(target_name, "quantize", texts) if runs_here(target_name) and "quantize" in texts else None
    for name, text in texts.items():
        content = b""
        if quantize is not None:
            piece = _linked(target_name, name, texts)
            content = _run(tiles, name, piece, _piece(target_name, name)[2], quantize)
        yield name, hashlib.sha256(content).hexdigest() if content else "", text


def _linked(target_name: str, name: str, texts: dict[str, str]) -> Piece:
    return run_pieces.linked(texts[name], _piece(target_name, name)[1])


def _run(tiles: Tiles, name: str, piece: Piece, num_rows: int, quantize: Piece) -> bytes:
    if num_rows:
        return run_pieces.tile_product(tiles, Layout[name], piece, num_rows, quantize)
    what, _, kind = name.rpartition(" ")
    runs = {"key codes": run_pieces.scored_codes, "value codes": run_pieces.weighed_codes}
    return runs[what](int(kind), piece) if what in runs else b""


def main(names: list[str]) -> None:
    """Print all pieces of these targets."""
    for part in ("targets", "asmprinters"):
        getattr(llvm, f"initialize_all_{part}")()
    gc.freeze()
    gc.disable()
    # By kernels of the instruction set that is in use, before another one is chosen.
    tiles = run_pieces.packed_tiles()
    for target in names:
        for name, digest, text in listings(target, tiles):
            print(f"== {target}: {name}: {digest}\n{text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
