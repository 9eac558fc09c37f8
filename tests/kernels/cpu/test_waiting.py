"""Loops that wait: their words are a line apart, and they look on for a time on arm64, so many times elsewhere."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from llvmlite import binding as llvm, ir
from numba import types

from localinfer.kernels.cpu import kernel_abi
from localinfer.kernels.cpu.compiled import memory

WORD = ir.IntType(64)
CONTENDED = [
    *(kernel_abi.STATE, kernel_abi.NEXT_UNIT, kernel_abi.SLEEPERS, kernel_abi.OPS, kernel_abi.STOPPING),
    *(kernel_abi.NUM_RUNS, kernel_abi.RUNS),
    *(kernel_abi.SLEEPING + kernel_abi.LINE_BYTES * thread for thread in range(kernel_abi.MAX_THREADS)),
]


def test_words_that_threads_contend_for_are_a_line_of_any_cpu_apart() -> None:
    assert all(behind - before >= 128 for before, behind in itertools.pairwise(CONTENDED))
    # What lies in one line ends within its first half, so that an address of 64 is as good as one of 128.
    last_taken = kernel_abi.FIRST_TAKEN + (kernel_abi.MAX_THREADS - 1) // 64 * 8
    ends = {last_taken, kernel_abi.FIRST_SEQUENCE, kernel_abi.BARRIER_NANOSECONDS}
    assert all(0 < end % kernel_abi.LINE_BYTES < 64 for end in ends)
    assert kernel_abi.MUST_WAKE + 8 <= 64 and kernel_abi.LINE_BYTES % 64 == 0


def test_the_words_of_a_state_hold_the_most_threads_beside_each_other() -> None:
    most, bits = kernel_abi.MAX_THREADS, kernel_abi.SEQUENCE_SHIFT - kernel_abi.THREADS_SHIFT
    assert most >= 256 and most <= kernel_abi.ACTIVE < kernel_abi.CLOSED < 1 << kernel_abi.THREADS_SHIFT
    assert most < 1 << bits and (2 * kernel_abi.LAST_FIRST_SEQUENCE + 1) << kernel_abi.SEQUENCE_SHIFT < 1 << 63


def assembly(name: str, count: int, triple: str) -> str:
    """The instructions of an intrinsic of words for a target."""
    for part in ("targets", "asmprinters"):
        getattr(llvm, f"initialize_all_{part}")()
    codegen = SimpleNamespace(magic_tuple=lambda: (triple, "generic", ""))
    context = SimpleNamespace(codegen=lambda: codegen, get_dummy_value=lambda: None)
    _, generate = getattr(memory, name)._defn(None, *[types.int64] * count)
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(WORD, [WORD] * count), "piece")
    builder = ir.IRBuilder(function.append_basic_block())
    found = generate(context, builder, None, list(function.args))
    builder.ret(ir.Constant(WORD, 0) if found is None else found)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="generic", features="", opt=3)
    parsed: Any = llvm.parse_assembly(str(module))
    parsed.verify()
    return str(machine.emit_assembly(parsed)).lower()


@pytest.mark.parametrize("system", ["aarch64-unknown-linux-gnu", "arm64-apple-macosx13.0", "aarch64-pc-windows-msvc"])
def test_on_arm64_a_waiting_loop_reads_the_systems_counter_and_rests_at_a_barrier(system: str) -> None:
    assert "cntvct_el0" in assembly("clock", 0, system)
    waiting = assembly("is_waiting", 4, system)
    assert "cntvct_el0" in waiting and "cntfrq_el0" in waiting and "udiv" not in waiting
    assert "\tisb" in assembly("spin_hint", 0, system)


def test_on_x86_it_counts_looks_and_pauses() -> None:
    x86 = "x86_64-unknown-linux-gnu"
    assert "rdtsc" not in assembly("clock", 0, x86) + assembly("is_waiting", 4, x86)
    assert "\tpause" in assembly("spin_hint", 0, x86)


@pytest.mark.parametrize(
    "system, call",
    [("x86_64-unknown-linux-gnu", "sched_yield"), ("arm64-apple-macosx13.0", "sched_yield")]
    + [(f"{cpu}-pc-windows-msvc", "switchtothread") for cpu in ("x86_64", "aarch64")],
)
def test_a_thread_that_waits_lets_others_run_by_its_systems_call(system: str, call: str) -> None:
    assert call in assembly("yield_processor", 0, system)
