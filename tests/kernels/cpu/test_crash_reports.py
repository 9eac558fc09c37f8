"""A native crash is reported: where it was, with what shapes, on stderr and in a private file, and nothing else."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding as llvm

from localinfer.kernels.cpu.crash_reports import code_around
from localinfer.kernels.cpu.weights import _FOLD
from localinfer.kernels.jit import isa, object_cache
from localinfer.kernels.versions import installed_version
from localinfer.system.crash_files import stored_reports, take_untold
from tests.kernels.subprocesses import environment, run_in_copy, start
from tests.support.limits import seconds
from tests.support.warm_python import WarmPython, run_copy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is handled on Windows")

_LOST_MATRIX = """
from localinfer.kernels.cpu.parameters import MATMUL, PROJECTION
from localinfer.kernels.cpu.program import CpuProgram
first = CpuProgram.run
def run_wrongly(self, batch):
    (index,) = [i for i, one in enumerate(self.tape.descriptions) if "blk.3.ffn_down.weight" in one]
    self.tape.parameters[index][len(MATMUL.fields) + PROJECTION.fields.index("weights")] -= 1 << 40
    return first(self, batch)
CpuProgram.run = run_wrongly
"""
"""Make every model's matrix lie a terabyte before its place, where nothing is."""

_LOADED = """
import localinfer
localinfer.report_crashes({folder!r})
with localinfer.load(threads=2, context_length=256) as model:
    {then}
print("survived")
"""

_COMMAND = """
import sys
from localinfer.__main__ import main
sys.argv = ["localinfer", *{words!r}]
sys.exit(main())
"""


def _crash(code: str, expected: signal.Signals = signal.SIGSEGV) -> str:
    process = start(code, kind=WarmPython)
    output, errors = process.communicate(timeout=seconds(50))
    assert process.returncode == -expected, f"{process.returncode}: {output} {errors}"
    assert "survived" not in output
    return errors


def _command(words: list[str], before: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    code = before + _COMMAND.format(words=words)
    # Not the interpreter's own option, which would be read as the command's.
    return run_copy([sys.executable, "-c", code], env=environment(**changes), timeout=seconds(50))


def test_a_crash_in_an_op_names_it_with_its_tensor_and_shapes(tmp_path: Path) -> None:
    code = _LOST_MATRIX + _LOADED.format(folder=str(tmp_path / "a"), then='model.complete("zebra", max_tokens=4)')
    errors = _crash("import faulthandler; faulthandler.enable()\n" + code)
    lines = errors.splitlines()
    assert re.fullmatch(r"localinfer crashed: SIGSEGV at address 0x[0-9a-f]+", lines[0])
    wanted = r"  in op \d+ of \d+: matmul.matmul_f16 of blk.3.ffn_down.weight \(256 rows x 768 columns, F16\)"
    assert re.fullmatch(wanted, lines[1])
    assert re.fullmatch(r"  thread [12] of 2, rows: \d+, with output: \d+, sequences: 1", lines[2])
    assert lines[3] == "  the instruction is in kernel matmul.matmul_f16"
    version = f"  localinfer {installed_version('localinfer')}, kernels for {isa.available()[0].value}, "
    assert lines[4].startswith(version) and "LOCALINFER_GUARD" not in errors
    assert lines[5] == "  last runs, the newest first:" and re.match(r"    ops: \d+, rows: \d+, ", lines[6])
    # The other thread may crash meanwhile, which ends the process in the midst of what comes now.
    assert "Fatal Python error" in errors, "what handled the signal before answers it afterwards"
    assert "zebra" not in errors
    (report,) = stored_reports(tmp_path / "a")
    assert errors.startswith(report.text) and report.text.count(str(report.path)) == 1
    assert report.place == lines[1].strip()
    assert report.path.stat().st_mode & 0o777 == 0o600 and (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_kernel_that_is_in_no_tape_is_named_by_its_code(tmp_path: Path) -> None:
    then = "weights.fold(bytes(64)); weights._FOLD(0, 0, 8)"
    code = "from localinfer.kernels.cpu import weights\n" + _LOADED.format(folder=str(tmp_path), then=then)
    errors = _crash(code)
    assert "SIGSEGV at address 0x0\n  the instruction is in kernel packing.fold\n  localinfer " in errors


def test_a_crash_outside_kernels_and_one_that_was_asked_for_are_told_as_such(tmp_path: Path) -> None:
    outside = _LOADED.format(folder=str(tmp_path), then="import ctypes; ctypes.string_at(8)")
    assert "SIGSEGV at address 0x8\n  not inside a kernel of localinfer\n" in _crash(outside)
    sent = _LOADED.format(folder=str(tmp_path), then="import os; os.abort()")
    assert _crash(sent, signal.SIGABRT).startswith("localinfer crashed: SIGABRT\n  not inside a kernel of localinfer\n")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the handled signals from /proc")
def test_a_program_that_asks_for_nothing_keeps_its_handlers() -> None:
    code = """
import localinfer, signal
faults = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
def handled():
    caught = next(int(line.split()[1], 16) for line in open("/proc/self/status") if line.startswith("SigCgt"))
    return [number for number in faults if caught >> number - 1 & 1]
with localinfer.load(threads=1, context_length=256) as model:
    model.complete("a", max_tokens=1)
    assert handled() == []
    localinfer.report_crashes()
    assert handled() == [*faults]
"""
    run_in_copy(code)


def test_the_command_reports_its_crash_and_the_next_one_mentions_it_once(tmp_path: Path) -> None:
    changes = {"XDG_STATE_HOME": str(tmp_path)}
    crashed = _command(["run", "-p", "zebra", "-n", "2", "--no-disk-cache"], _LOST_MATRIX, **changes)
    assert crashed.returncode == -signal.SIGSEGV and "blk.3.ffn_down.weight" in crashed.stderr
    assert "Fatal Python error" in crashed.stderr
    again = [_command(["tokenize", "a"], **changes) for _ in range(2)]
    assert [one.returncode for one in again] == [0, 0]
    said = (
        r"note: localinfer crashed before in op \d+ of \d+: matmul.matmul_f16 of blk.3.ffn_down.weight .*`localinfer d"
    )
    assert re.match(said, again[0].stderr) and not again[1].stderr
    doctor = (
        "from localinfer.apps.doctor.checks import CHECKS\nfrom localinfer.apps.doctor.report import report_lines\n"
    )
    shown, _ = run_in_copy(doctor + "print(*report_lines({'crashes': CHECKS['crashes']()}, []), sep='\\n')", **changes)
    assert "Crashes\n  last crashes    localinfer crashed: SIGSEGV at address 0x" in shown
    assert "blk.3.ffn_down.weight (256 rows x 768 columns, F16)" in shown and "last runs" not in shown


def test_what_was_kept_of_a_tape_goes_with_it(tmp_path: Path) -> None:
    """A server that swaps models for months must not keep what a report would say of each."""
    code = f"""
import tracemalloc
import numpy as np
import localinfer
from localinfer.kernels.cpu.crash_reports import REPORTS
from localinfer.kernels.cpu.memory import address
localinfer.report_crashes({str(tmp_path)!r})
assert REPORTS.install()
tracemalloc.start()
for _ in range(30):
    entries = np.zeros((100, 2), np.int64)
    REPORTS.add_tape(entries, ["x" * 1000] * 100)
    REPORTS.remove_tape(address(entries))
print(tracemalloc.get_traced_memory()[0])
"""
    assert int(run_in_copy(code)[0]) < 500_000, "two of thirty times 100 kB"


def test_only_the_newest_reports_are_kept(tmp_path: Path) -> None:
    for second in range(12):
        (tmp_path / f"2030-01-01-0000{second:02}-7.crash.txt").write_text(f"localinfer crashed: {second}\n  in op 1\n")
    newest = take_untold(tmp_path)
    assert newest is not None and newest.text.startswith("localinfer crashed: 11\n") and newest.place == "in op 1"
    assert take_untold(tmp_path) is None
    assert [report.text.split()[2] for report in stored_reports(tmp_path)] == ["11", "10", "9", "8", "7", "6", "5", "4"]
    assert stored_reports(tmp_path / "missing") == [] and take_untold(None) is None


def test_the_code_of_a_kernel_is_found_in_its_object_file() -> None:
    assert _FOLD.address
    code = next(code for name, _, code in object_cache.linked() if name == _FOLD.name)
    before, behind = code_around(code, object_cache.symbol(_FOLD.name))
    sizes = [section.size() for section in llvm.ObjectFileRef.from_data(code).sections() if section.is_text()]
    assert before >= 0 and behind > 0 and (not code.startswith(b"\x7fELF") or before + behind in sizes)
    assert code_around(code, "another") == code_around(b"no object file at all".ljust(len(code)), "another")
