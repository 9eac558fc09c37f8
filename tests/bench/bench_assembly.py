"""Predict the speed of matrix products on processors that are not here, from LLVM's model of their pipelines.

Every product of a tile is compiled for a processor, and llvm-mca (LLVM 19 or later, in PATH) says how many cycles its
loops take with all data in the first-level cache. Printed per layout and rows of activations: instructions and cycles
per unit, bytes of weights per instruction and per cycle, gigabytes of weights per second, multiply-adds per cycle, and
how often innermost loops read and write registers that they had no room for (spills). Memory, branches and prefetches
are not modelled. LLVM 19 has one model for Zen 4 and Zen 5, and products of bytes on one unit of Golden Cove, which
has two.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.layouts import SIZES, Layout, is_float

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Processor:
    """A processor that LLVM has a model of, and the instructions that its kernels use."""

    model: str
    """LLVM's name of the processor, and of its model."""
    gigahertz: float
    """Clock that cycles are converted with."""
    path: ISA = ISA.NEON_DOTPROD
    """Instruction set of its kernels."""
    features: str = "+neon,+dotprod"
    """LLVM's names of what that needs."""
    triple: str = "aarch64-unknown-linux-gnu"
    """LLVM's name of the system."""
    knows_zeros: bool = True
    """LLVM's model knows that a register's exclusive or with itself waits for nothing; else a load stands for it."""


_X86 = "x86_64-unknown-linux-gnu"
_AVX2 = "+avx,+avx2,+fma,+f16c"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
PROCESSORS = {
    "znver4": Processor("znver4", 3.7, ISA.AVX512_VNNI, f"{_AVX512},+avx512vbmi", _X86, knows_zeros=False),
    "golden-cove": Processor("sapphirerapids", 3.7, ISA.AVX512_VNNI, f"{_AVX512},+avx512vbmi", _X86, knows_zeros=False),
    "cascadelake": Processor("cascadelake", 3.1, ISA.AVX512_VNNI, _AVX512, _X86),
    "haswell": Processor("haswell", 3.5, ISA.AVX2, _AVX2, _X86),
    "znver3": Processor("znver3", 3.4, ISA.AVX2, _AVX2, _X86),
    "n1": Processor("neoverse-n1", 2.5),
    "v2": Processor("neoverse-v2", 2.8),
    "m1": Processor("apple-m1", 3.2),
    "v2-i8mm": Processor("neoverse-v2", 2.8, ISA.NEON_I8MM, "+neon,+dotprod,+i8mm"),
}

COMMON = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16", "IQ4_NL", "IQ4_XS", "MXFP4")
_INNER_LOOPS = {
    **dict.fromkeys(("Q4_K", "Q5_K"), 4),
    **dict.fromkeys(("Q6_K", "Q2_K", "Q3_K", "TQ2_0", "INT4_64"), 2),
    **dict.fromkeys(("IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 8),
    "INT4_128": 4,
}
"""Turns of the inner loop of a unit, where LLVM has left it a loop."""


@dataclass
class Loop:
    """Lines first..last of a function's assembly, from a label to the branch back to it."""

    first: int
    last: int
    inner: "list[Loop]"


_BRANCH = re.compile(r"\s+(?:b(?:\.\w+)?|cbn?z|tbn?z|j[a-z]+)\s(?:.*\s)?(\.L\w+)\s*$")
_END = re.compile(r"\s+(?:b|jmp)\s+\.L|\s+retq?$")
"""Instructions after which the next line is not reached."""


def loops(lines: Sequence[str]) -> list[Loop]:
    """The loops of a function, outer ones first: branches back to a label from which they are reached."""
    labels = {match[1]: number for number, line in enumerate(lines) if (match := re.match(r"(\.L\w+):", line))}
    branches = {
        number: labels[match[1]]
        for number, line in enumerate(lines)
        if (match := _BRANCH.match(line)) and match[1] in labels
    }
    ends: dict[int, int] = {}
    for number, label in branches.items():
        if label <= number and number in _reached(lines, branches, label):
            ends[label] = number
    found: list[Loop] = []
    for first, last in sorted(ends.items()):
        level = found
        while level and first < level[-1].last:
            level = level[-1].inner
        level.append(Loop(first, last, []))
    return found


def _reached(lines: Sequence[str], branches: dict[int, int], start: int) -> set[int]:
    """Numbers of the lines that a program may come to from one."""
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        number = waiting.pop()
        while number < len(lines) and number not in reached:
            reached.add(number)
            if number in branches:
                waiting.append(branches[number])
            if _END.match(lines[number]):
                break
            number += 1
    return reached


def _own(lines: Sequence[str], loop: Loop) -> list[str]:
    """A loop's instructions, without those of the loops in it."""
    skipped = {number for inner in loop.inner for number in range(inner.first, inner.last + 1)}
    body = [lines[number] for number in range(loop.first, loop.last + 1) if number not in skipped]
    return [line for line in body if re.match(r"\s+[a-z]", line) and not re.match(r"\s+\.", line)]


def cycles(program: str, instructions: Sequence[str], processor: Processor) -> float:
    """Cycles of one turn of a loop of these instructions."""
    command = [program, f"-mtriple={processor.triple}", f"-mcpu={processor.model}", "-iterations=100", "-json"]
    text = "\n".join(instructions) + "\n"
    if not processor.knows_zeros:
        text = re.sub(r"\tvp?xor\w*\s+%([xyz]mm)(\d+), %\1\2, %\1\2\n", r"\tvmovaps (%rsp), %zmm\2\n", text)
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} refuses a loop for {processor.model}: {done.stderr.strip()[:300]}")
    view = json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]
    return float(view["TotalCycles"]) / float(view["Iterations"])


@dataclass
class Figures:
    """What one unit of a tile takes."""

    instructions: float = 0
    cycles: float = 0
    spills: int = 0
    """Reads and writes of the stack in the innermost loops."""
    multiply_adds: int = 0
    """Fused multiply-adds of float32 in it, by which the columns are known that LLVM has put into a turn."""


def innermost(lines: Sequence[str]) -> list[list[str]]:
    """The instructions of each of a function's innermost loops."""

    def of(found: Sequence[Loop]) -> list[list[str]]:
        return [one for loop in found for one in (of(loop.inner) if loop.inner else [_own(lines, loop)])]

    return of(loops(lines))


def spills(listing: str) -> int:
    """Reads and writes of the stack in a function's innermost loops, by registers that LLVM had no room for."""
    return sum(map(_stack_uses, innermost(listing.splitlines())))


def _stack_uses(instructions: Sequence[str]) -> int:
    return sum(bool(re.search(r"\[sp\b|\(%rsp\)", line)) for line in instructions)


def _multiply_adds(instructions: Sequence[str]) -> int:
    lanes = {"fmla": 4, "zmm": 16, "ymm": 8}
    words = [re.search(r"\b(fmla)\b|\bvfn?madd\w+\s.*%([yz]mm)", line) for line in instructions]
    return sum(lanes[match[1] or match[2]] for match in words if match)


def figures(program: str, listing: str, layout: Layout, processor: Processor) -> Figures:
    """Sum the loops of one product over a unit of its layout, of float layouts over a turn of the first loop."""
    lines = listing.splitlines()
    found = loops(lines)
    if is_float(layout):
        # The second loop has the columns that are left.
        found = found[:1]
    total = Figures(spills=spills(listing))

    def add(loop: Loop, turns: int) -> None:
        own = _own(lines, loop)
        total.instructions += turns * len(own)
        total.multiply_adds += turns * _multiply_adds(own)
        total.cycles += turns * cycles(program, own, processor)
        for inner in loop.inner:
            add(inner, turns * _INNER_LOOPS[layout.name])

    for loop in found:
        add(loop, 1)
    return total


def listings(name: str, products: Sequence[str]) -> Iterator[str]:
    """Assembly of products "LAYOUT:ROWS" for a processor, made by a process of its own, which LLVM may end."""
    command = [sys.executable, "-m", "tests.bench.bench_assembly", "--emit", name, *products]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return iter(re.split(r"^== .*\n", done.stdout, flags=re.MULTILINE)[1:])


def emit(name: str, products: Sequence[str]) -> None:
    """Print the assembly of products, optimised as kernels are."""
    from llvmlite import binding as llvm

    from localinfer.kernels.jit.numba import optimised
    from tests.kernels.cpu.emit_assembly import made, tile

    for part in ("targets", "asmprinters"):
        getattr(llvm, f"initialize_all_{part}")()
    processor = PROCESSORS[name]
    target = (processor.path, processor.triple, processor.model, processor.features)
    for product in products:
        layout, _, rows = product.partition(":")
        machine, module = made(target, *tile(Layout[layout], int(rows)))
        print(f"== {product}\n{machine.emit_assembly(optimised(module, machine))}", flush=True)


def main() -> None:
    """Print a table per processor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processors", nargs="+", default=list(PROCESSORS), choices=PROCESSORS)
    parser.add_argument(
        "--layouts", nargs="+", default=[one.name for one in Layout], choices=[one.name for one in Layout]
    )
    parser.add_argument("--common", action="store_true", help="only the layouts that most files have")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--llvm-mca", default=shutil.which("llvm-mca-19") or shutil.which("llvm-mca") or "llvm-mca")
    parser.add_argument(
        "--emit", nargs="+", metavar=("PROCESSOR", "LAYOUT:ROWS"), help="print the assembly of products"
    )
    options = parser.parse_args()
    if options.emit:
        emit(options.emit[0], options.emit[1:])
        return
    layouts = [Layout[name] for name in (COMMON if options.common else options.layouts)]
    products = [(layout, rows) for layout in layouts for rows in options.rows]
    for name in options.processors:
        processor = PROCESSORS[name]
        print(f"\n{name}: {processor.model} at {processor.gigahertz} GHz, {processor.path.value}\n")
        print("| layout | rows | instructions | cycles | bytes/instruction | bytes/cycle | GB/s | MAC/cycle | spills |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for (layout, rows), listing in zip(
            products, listings(name, [f"{layout.name}:{rows}" for layout, rows in products]), strict=True
        ):
            one = figures(options.llvm_mca, listing, layout, processor)
            columns = one.multiply_adds // (16 * rows) if is_float(layout) else SIZES[layout].unit
            num_bytes = columns // SIZES[layout].unit * SIZES[layout].unit_bytes
            if not one.instructions:
                # No kernel takes so many rows at once.
                continue
            found = [
                *(f"{one.instructions:.0f}", f"{one.cycles:.0f}", f"{num_bytes / one.instructions:.1f}"),
                *(f"{num_bytes / one.cycles:.1f}", f"{num_bytes / one.cycles * processor.gigahertz:.1f}"),
                f"{16 * columns * rows / one.cycles:.1f}",
            ]
            print(f"| {layout.name} | {rows} | {' | '.join(found)} | {one.spills} |", flush=True)


if __name__ == "__main__":
    main()
