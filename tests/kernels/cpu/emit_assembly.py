"""Print the assembly of kernel pieces for any target LLVM knows; run as a program, since LLVM may end the process.

Arguments: names from TARGETS, by default all.
"""

import sys
from types import SimpleNamespace
from typing import Any

from llvmlite import binding as llvm, ir
from numba import types

from localinfer.kernels.cpu.compiled import attention_tiles, elementwise, kv_store, matmul
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.layouts import CUDA_LAYOUTS, Layout

_AVX2 = "+avx,+avx2,+fma,+f16c"
TARGETS: dict[str, tuple[ISA, str, str, str]] = {
    "avx512vnni": (
        ISA.AVX512_VNNI,
        "x86_64-unknown-linux-gnu",
        "x86-64",
        f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni",
    ),
    "avxvnni": (ISA.AVX_VNNI, "x86_64-unknown-linux-gnu", "x86-64", f"{_AVX2},+avxvnni"),
    "avx2": (ISA.AVX2, "x86_64-unknown-linux-gnu", "x86-64", _AVX2),
    "generic": (ISA.GENERIC, "x86_64-unknown-linux-gnu", "x86-64", ""),
    "neon": (ISA.NEON_DOTPROD, "aarch64-unknown-linux-gnu", "generic", "+neon,+dotprod"),
    "windows on arm": (ISA.NEON_DOTPROD, "aarch64-pc-windows-msvc", "generic", "+neon,+dotprod"),
    "apple": (ISA.NEON_DOTPROD, "arm64-apple-macosx13.0", "apple-m1", "+neon,+dotprod"),
}


def _literal(value: int) -> Any:
    return types.literal(value)


_ADDRESS, _FLOAT = types.int64, types.float32


def _tile(layout: Layout, num_rows: int) -> tuple[Any, list[Any]]:
    return matmul.tile_product, [_literal(int(layout)), _literal(num_rows), *[_ADDRESS] * 4, _FLOAT, _ADDRESS, _ADDRESS]


LONG_TILES = ("avx512vnni", "neon")
"""Targets whose tiles have four rows; others take long to compile, or are those of these in another spelling.

Layouts that only the CPU has come in tiles of one row: it has all their instructions.
"""

PIECES: dict[str, tuple[Any, list[Any]]] = {
    **{layout.name: _tile(layout, 4) for layout in Layout},
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


def assembly(target_name: str, piece: str) -> str:
    """Assembly of one intrinsic as a function of its own."""
    path, triple, cpu, features = TARGETS[target_name]
    isa.SELECTED = path
    for name in ("targets", "asmprinters"):
        getattr(llvm, f"initialize_all_{name}")()
    codegen = SimpleNamespace(magic_tuple=lambda: (triple, cpu, features))
    context = SimpleNamespace(codegen=lambda: codegen, get_dummy_value=lambda: None)
    is_tile = piece in Layout.__members__
    is_short = is_tile and (target_name not in LONG_TILES or Layout[piece] not in CUDA_LAYOUTS)
    intrinsic, argument_types = _tile(Layout[piece], 1) if is_short else PIECES[piece]
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
    return str(machine.emit_assembly(parsed))


if __name__ == "__main__":
    for target in sys.argv[1:] or TARGETS:
        for name in PIECES:
            print(f"== {target}: {name}")
            print(assembly(target, name), flush=True)
