"""Every CUDA kernel compiles to PTX for each architecture with the instructions it is made for, and fits the registers.

No GPU and no CUDA toolkit are needed; only the check of registers wants NVIDIA's assembler.
"""

import contextlib
import ctypes
import functools
import gc
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from localinfer.kernels.layouts import Layout
from localinfer.system.folders import set_cache_folder
from tests.support.samples import by_turns, one_of_each

pytest.importorskip("numba_cuda", reason="CUDA kernels are compiled by numba-cuda, which is not installed")

from numba.cuda.codegen import JITCUDACodegen
from numba.cuda.compiler import CUDACompiler

from localinfer.kernels.cuda import front_end, jit, kernel_cache
from localinfer.kernels.cuda.compiled import matmul, reductions, rows, sampling
from localinfer.kernels.cuda.device import OVERLAP_CAPABILITY, Launch, overlapping_launch, parameter_kinds

ARCHITECTURES = ((7, 5), (8, 0), (9, 0), (10, 0))
TENSOR_CORES = (8, 0)
"""From this one on there are the instructions that kernels with tiles are made of."""

ASSEMBLER = shutil.which("ptxas")

BYTE_TILES = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 shfl.sync.idx ld.global.nc.L1::no_allocate.v4"
HALF_BYTE_TILES = "mma.sync.aligned.m16n8k16.row.col.s32"
HALF_TILES = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 cvt.rn.f16x2.f32 bar.sync"

# Kernel, constants, registers it may take on sm_90, instructions it must have. `test_cuda_on_ptx.py` runs some of them,
# whose constants are those that its tests launch.
KERNELS = [
    (
        "matmul.matmul",
        (Layout.Q4_0, 1, 4, 1, matmul.PLAIN),
        80,
        "dp4a.s32.s32 ld.global.nc.L1::no_allocate.v4 .maxntid",
    ),
    ("matmul.matmul", (Layout.Q4_K, 1, 2, 1, matmul.GATED, 1), 84, "dp4a.s32.s32 ld.global.nc.L1::no_allocate.v4"),
    (
        "matmul.matmul",
        (Layout.Q4_0, 1, 2, 1, matmul.GATED_CODES, 1),
        84,
        "dp4a.s32.s32 atom.acq_rel.gpu.global.add.u32 st.global.u8",
    ),
    ("matmul.matmul", (Layout.Q6_K, 8, 2, 2, matmul.PLAIN), 168, "dp4a.s32.s32 bar.sync"),
    ("matmul.matmul", (Layout.INT8_32, 4, 4, 1, matmul.PLAIN), 128, "dp4a.u32.s32 .maxntid"),
    ("matmul.matmul", (Layout.F16, 1, 4, 1, matmul.EXPERTS), 80, "ld.global.nc.L1::no_allocate.v4"),
    (
        "matmul_tiles.matmul_tiles",
        (Layout.Q4_0, 8, 2, 1, matmul.PLAIN),
        160,
        f"{BYTE_TILES} prefetch.global.L2",
    ),
    (
        "matmul_tiles.matmul_tiles",
        (Layout.Q6_K, 16, 1, 1, matmul.GATED_CODES),
        184,
        f"{HALF_BYTE_TILES}.s8.s8 atom.acq_rel.gpu.global.add.u32",
    ),
    (
        "matmul_tiles.matmul_tiles",
        (Layout.INT8_32, 8, 1, 1, matmul.PLAIN),
        120,
        f"{HALF_BYTE_TILES}.u8.s8 .maxntid .minnctapersm",
    ),
    ("quantize.quantize_rows", (), 32, "shfl.sync.bfly cvt.rni.s32.f32"),
    ("rows.embed", (Layout.Q5_K,), 40, "cvt.f32.f16"),
    ("rows.convert", (Layout.Q4_K, rows.TO_BF16), 40, "st.global.u16"),
    ("rows.norm", (rows.RMS, 8, 1, 4, 1), 48, "shfl.sync.bfly st.global.u8"),
    ("rows.norm", (rows.LAYER, 32, 0, 4, 0), 48, "bar.sync"),
    ("rows.elementwise", (rows.GATE,), 32, "ex2.approx"),
    ("rows.elementwise", (rows.TIMES_ROW,), 32, "ld.global.f32"),
    ("rows.mix_slots", (), 48, "ld.global.f32"),
    ("rows.row_statistic", (1,), 40, "shfl.sync.bfly"),
    ("rows.rope_angles", (), 48, "cvt.rni.f64.f64"),
    ("rows.rope_angles_by_axis", (), 48, "cvt.rni.f64.f64"),
    ("rows.embed_media", (), 32, "st.global.f32"),
    ("rows.rope", (), 40, ""),
    ("kv_store.store_rows", (2, 2), 48, "cvt.rn.f16.f32"),
    ("kv_store.store_codes", (1, 0, 20, 141), 40, "shfl.sync.bfly bar.sync st.global.u8"),
    ("rotation.rotate_heads", (72,), 40, "bar.sync"),
    ("attention.attend_chunks", (2, 2, 2, 32, 32, 1, 0, 0), 128, "cvt.f32.f16 shfl.sync.bfly bar.sync"),
    (
        "attention.attend_chunks",
        (1, 1, 4, 128, 128, 1, 1, 0),
        128,
        "dp4a.s32.s32 prefetch.global.L2 bar.sync atom.acq_rel.gpu.global.add.u32 st.global.u8",
    ),
    (
        "attention.attend_chunks",
        (2, 2, 4, 128, 128, 1, 1),
        128,
        "cvt.f32.f16 cvt.rn.f16.f32 st.global.u16 atom.acq_rel.gpu.global.add.u32 st.global.u8",
    ),
    ("attention.attend_chunks", (2, 2, 1, 64, 64, 0, 1, 1), 128, "cvt.f32.f16 shfl.sync.bfly bar.sync"),
    ("attention.attend_chunks", (2, 2, 2, 64, 64, 0, 1, 2), 128, "cvt.f32.f16 shfl.sync.bfly bar.sync"),
    (
        "attention.attend_chunks",
        (0, 0, 4, 128, 128, 1, 1),
        128,
        "dp4a.s32.s32 ld.global.v4.u32 st.global.u8 st.global.u16 shfl.sync.idx",
    ),
    ("attention_tiles.attend_tiles", (0, 0, 80, 72, 4, 0), 168, HALF_TILES),
    ("attention_tiles.attend_tiles", (2, 2, 32, 32, 4, 0), 168, HALF_TILES),
    ("attention_tiles.attend_tiles", (2, 2, 64, 64, 4, 1), 168, HALF_TILES),
    ("attention_tiles.attend_tiles", (2, 2, 64, 64, 4, 2), 168, HALF_TILES),
    ("attention_tiles.attend_tiles", (1, 1, 256, 64, 2), 168, HALF_TILES),
    ("page_sums.page_shares", (2, 32), 48, "cvt.f32.f16 shfl.sync.bfly bar.sync"),
    ("page_sums.page_shares", (1, 128), 48, "dp4a.s32.s32 shfl.sync.bfly bar.sync"),
    ("page_sums.page_shares", (0, 80), 48, "dp4a.s32.s32 shfl.sync.bfly bar.sync"),
    ("page_sums.add_shares", (), 40, "st.global.f32"),
    ("pooling.mean_rows", (), 40, "div.rn.f32"),
    ("experts.route", (0,), 40, "shfl.sync.bfly bar.sync"),
    ("experts.route", (3,), 40, "shfl.sync.bfly max.f32"),
    ("sampling.best_of_warps", (64,), 40, "shfl.sync.bfly"),
    ("sampling.best_of_row", (64,), 40, "st.global.u32"),
    ("sampling.find_heads", (64,), 40, "bar.sync"),
    ("sampling.gather", (64,), 80, "atom.global.add.u32 bar.sync mul.rn.f64 cvt.f64.f32"),
    ("sampling.choose", (64,), 80, "bar.sync mul.rn.f64 cvt.rpi.f64.f64 div.rn.f64"),
]
TRIED = one_of_each(KERNELS, lambda kernel: (kernel[0], kernel[1][:1]))
"""One of each kernel and first constant: the layout of its weights, the numbers of its keys, its operation."""


@pytest.fixture(autouse=True, scope="module")
def ir_compiled_once() -> Iterator[None]:
    """What a kernel is on all architectures is compiled once; collecting garbage meanwhile takes a third longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "kernel_ir", functools.cache(jit.kernel_ir))
        was_enabled = gc.isenabled()
        gc.disable()
        yield
        if was_enabled:
            gc.enable()


def ptx_of(name: str, constants: tuple[int, ...], capability: tuple[int, int]) -> str:
    """As a start of the program gets it: from the cache of compiled kernels, under a key of all their sources."""
    return kernel_cache.kernel_ptx((name, constants), capability).decode()


@pytest.mark.parametrize(("name", "constants", "registers", "instructions"), TRIED)
def test_kernel_has_its_instructions(name: str, constants: tuple[int, ...], registers: int, instructions: str) -> None:
    able = [one for one in ARCHITECTURES if one >= TENSOR_CORES or "mma.sync" not in instructions]
    for capability in by_turns(able, [one[:2] for one in TRIED].index((name, constants)), 2):
        ptx = ptx_of(name, constants, capability)
        assert f".target sm_{capability[0]}{capability[1]}" in ptx
        assert ptx.count(".entry ") == ptx.count(f".visible .entry {kernel_cache.entry_name((name, constants))}(") == 1
        assert ".extern" not in ptx and ".func" not in ptx, "a kernel calls nothing that is not in it"
        assert ".local" not in ptx, "arrays of a lane lie in registers"
        waits = ptx.count("griddepcontrol.wait")
        assert waits == ptx.count("griddepcontrol.launch_dependents") == int(capability >= OVERLAP_CAPABILITY)
        for instruction in instructions.split():
            assert instruction in ptx, f"{instruction} for sm_{capability[0]}{capability[1]}"


@pytest.mark.skipif(ASSEMBLER is None, reason="registers are counted by NVIDIA's ptxas, which is not here")
@pytest.mark.parametrize(("name", "constants", "registers", "instructions"), TRIED)
def test_kernel_fits_the_registers_and_needs_no_stack(
    name: str, constants: tuple[int, ...], registers: int, instructions: str, tmp_path: Path
) -> None:
    for capability in (TENSOR_CORES, (9, 0)) if "mma.sync" in instructions else ((9, 0),):
        source = tmp_path / "kernel.ptx"
        source.write_text(ptx_of(name, constants, capability))
        architecture = f"-arch=sm_{capability[0]}{capability[1]}"
        command = [str(ASSEMBLER), "-v", architecture, str(source), "-o", str(tmp_path / "kernel.cubin")]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report), report
        used = re.search(r"Used (\d+) registers", report)
        assert used is not None and int(used[1]) <= registers, report


def test_a_small_batch_reads_its_weights_once() -> None:
    # Per row of weights a lane loads one unit, of eight words of four columns or of four words of bytes.
    for layout, batch_rows, weight_rows, split, words in (
        (Layout.Q4_0, 1, 4, 1, 8),
        (Layout.INT8_32, 4, 4, 1, 4),
        (Layout.Q6_K, 8, 2, 2, 8),
    ):
        ptx = ptx_of("matmul.matmul", (layout, batch_rows, weight_rows, split, matmul.PLAIN), (9, 0))
        assert ptx.count("no_allocate.v4") == weight_rows
        assert ptx.count("dp4a") == batch_rows * weight_rows * words
    tiles = ptx_of("matmul_tiles.matmul_tiles", (Layout.Q4_0, 8, 2, 1, matmul.PLAIN), (9, 0))
    # Two tiles of 16 rows: a lane loads four units, and four blocks of two tiles are one instruction each.
    assert tiles.count("no_allocate.v4") == 4 and tiles.count("mma.sync") == 8


def test_nothing_is_read_that_another_kernel_writes_before_that_one_has_ended() -> None:
    prefetching = ptx_of("matmul.matmul", (Layout.Q4_0, 1, 2, 1, matmul.GATED_CODES, 1), (9, 0))
    tiles = ptx_of("matmul_tiles.matmul_tiles", (Layout.Q4_0, 8, 2, 1, matmul.PLAIN), (9, 0))
    norm = ptx_of("rows.norm", (rows.RMS, 8, 1, 4, 1), (9, 0))
    attention = ptx_of("attention.attend_chunks", (1, 1, 4, 128, 128, 1, 1, 0), (9, 0))
    for ptx in (prefetching, tiles, norm, attention):
        assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
        before, after = ptx.split("griddepcontrol.wait")
        assert not re.search(r"(ld|st|atom)[.\w]*\.global", before) and "ld.global" in after
    assert "prefetch.global.L2" in prefetching.split("griddepcontrol.wait")[0]
    assert "prefetch.global.L2" in tiles.split("griddepcontrol.wait")[0]


def test_an_overlapping_launch_asks_the_driver_for_it() -> None:
    pytest.importorskip("cuda.bindings.driver")
    config = overlapping_launch(Launch("rows.rope", (), (3, 2, 1), 128, ()), 7)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (3, 2, 1, 128)
    assert int(config.hStream) == 7 and config.numAttrs == 1
    assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_what_a_kernel_is_called_with_is_read_off_its_ptx() -> None:
    name = "rows.norm"
    ptx = ptx_of(name, (rows.RMS, 8, 1, 4, 1), (9, 0)).encode()
    wanted = {"q": ctypes.c_int64, "f": ctypes.c_float}
    template = jit.find_template(name)
    kinds = "".join(template.parameters_of(template.make(rows.RMS, 8, 1, 4, 1)))
    assert parameter_kinds(ptx) == tuple(wanted[kind] for kind in kinds)


@pytest.mark.parametrize("name", ["rows.norm", "sampling.find_heads"])
def test_kernels_are_what_all_passes_of_numba_cuda_make_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of loops, shared arrays and functions that others call, with the types of operators found anew."""
    constants = {"rows.norm": (rows.RMS, 8, 1, 4, 1), "sampling.find_heads": (64,)}[name]
    monkeypatch.setattr(jit, "kernel_ir", jit.kernel_ir.__wrapped__)
    ours = jit.compile_ptx(name, constants, (9, 0))
    called = [one for module in (reductions, rows, sampling) for one in vars(module).values()]
    for function in {one for one in called if isinstance(one, jit.DeviceFunction)}:
        monkeypatch.setattr(function, "overloads", {})
    monkeypatch.setattr(jit, "_typed_once", contextlib.nullcontext)
    monkeypatch.setattr(front_end, "_Compiler", CUDACompiler)
    monkeypatch.setattr(JITCUDACodegen, "_library_class", front_end.FunctionLibrary)
    # Shared arrays are numbered in the order of compilation.
    numbers = r"(?<=smem_)\d+"
    assert re.sub(numbers, "", jit.compile_ptx(name, constants, (9, 0))) == re.sub(numbers, "", ours)


def test_many_kernels_are_compiled_by_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_cache_folder(tmp_path)
    kernel_cache.cache_folder.cache_clear()
    monkeypatch.setattr(kernel_cache, "MIN_SHARE", 1)
    monkeypatch.setattr(jit, "compile_ptx", lambda *what: pytest.fail(f"{what} was left by the children"))
    monkeypatch.setattr(kernel_cache.os, "cpu_count", lambda: 2)
    keys = [("rows.gather_columns", ()), ("rows.elementwise", (rows.ADD,))]
    told: list[tuple[str, int, int]] = []
    kernel_cache.compile_all(keys, (8, 0), lambda *what: told.append(what))
    assert b".entry elementwise_3(" in kernel_cache.kernel_ptx(keys[1], (8, 0))
    assert told[0] == (kernel_cache.STAGE, 0, 2) and told[-1] == (kernel_cache.STAGE, 2, 2)
    set_cache_folder(None)
    kernel_cache.cache_folder.cache_clear()


def test_a_compiled_kernel_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    compiled = []
    monkeypatch.setattr(jit, "compile_ptx", lambda *what: compiled.append(what) or ".entry kernel()")
    told: list[tuple[str, int, int]] = []
    for _ in range(2):
        kernel_cache.compile_all([("rows.rope", ())], (9, 0), lambda *what: told.append(what))
        assert kernel_cache.kernel_ptx(("rows.rope", ()), (9, 0)) == b".entry kernel()"
    assert compiled == [("rows.rope", (), (9, 0))]
    assert told == [(kernel_cache.STAGE, 0, 1), (kernel_cache.STAGE, 1, 1)]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    kernel_cache.kernel_ptx(("rows.rope", ()), (9, 0))
    assert len(compiled) == 2, "a torn file is compiled anew"
