"""The steps of the first run on a GPU, see `cuda_first_run.sh`: what each runs, and for how long at most.

usage: python3 -m tests.bench.cuda_steps [--dry-run] [STEP ... | all]
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_RESULTS, _DRY_RESULTS = Path(".cuda/results"), Path(".cuda/dry-run")
_FIGURES = "FIGURES"
"""In place of the file of figures, which is another one in a dry run."""

LIMIT = 480
"""Seconds that no step may exceed."""

_PYTHON = ("python3", "-m")
_PYTEST = (*_PYTHON, "pytest", "-q", "-m", "cuda", "-W", "default", "-p", "no:cacheprovider")
_ON_GPU = "tests/kernels/cuda/test_cuda_on_gpu.py"
_OPS_ON_GPU = "tests/kernels/cuda/test_cuda_ops_on_gpu.py"
_BENCH = (*_PYTHON, "tests.bench.bench_cuda", _FIGURES)
_SANITIZED = "Q4_0-1 or Q4_0-5 or Q6_K-5 or F16-3 or draw or every_other_op or block_of_a_decoder or picture_is"
_FAILED = "experts_are or stored_by_its or picture_is or two_hundred or every_architecture"
_MAX_WORKERS = 12
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer")
"""What a dry run has stand-ins for."""


@dataclass(frozen=True)
class Step:
    """Commands that run one after another until one fails.

    seconds: for all of them. allocates_apart: torch asks the driver for each array, so that a sanitizer sees its ends.
    """

    name: str
    what: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]
    allocates_apart: bool = False


STEPS = (
    Step(
        "imports",
        "versions and imports, and what is missing",
        90,
        (
            ("nvidia-smi",),
            (*_PYTHON, "tests.bench.cuda_requirements"),
        ),
    ),
    Step("product", "one product, with every number of rows", 90, ((*_PYTEST, "-x", _ON_GPU, "-k", "Q4_0 or memory"),)),
    Step("demo", "the model that ships: bench, and a warm start", 120, ((*_PYTHON, "tests.bench.cuda_demo"),)),
    Step("decode", "8B plain and with launches that overlap", 120, ((*_BENCH, "decode"),)),
    Step("ceilings", "read bandwidth, and what an empty kernel costs", 30, ((*_BENCH, "ceilings"),)),
    Step("rates", "products, beside torch's, and attention", 240, ((*_BENCH, "products", "torch", "attention"),)),
    Step("shapes", "3B, 1B, and 8B with a cache in q8_0", 180, ((*_BENCH, "models"),)),
    Step("failed", "tests that the first run failed", 240, ((*_PYTEST, _ON_GPU, _OPS_ON_GPU, "-k", _FAILED),)),
    Step(
        "memcheck",
        "reads and writes outside of arrays",
        470,
        ((*_SANITIZER, "memcheck", *_PYTEST, _ON_GPU, _OPS_ON_GPU, "-k", _SANITIZED),),
        allocates_apart=True,
    ),
    Step(
        "racecheck",
        "shared memory without barriers",
        470,
        ((*_SANITIZER, "racecheck", *_PYTEST, _ON_GPU, _OPS_ON_GPU, "-k", _SANITIZED),),
        allocates_apart=True,
    ),
    Step(
        "layer",
        "one layer under the profiler",
        300,
        (
            (
                *("ncu", "--profile-from-start", "off", "--set", "full", "--page", "details", "--csv"),
                *(*_BENCH, "layer"),
            ),
        ),
    ),
    Step("ops", "every op, as the emulator tests it", 300, ((*_PYTEST, _OPS_ON_GPU),)),
    Step("products", "every layout", 420, ((*_PYTEST, _ON_GPU, "-k", "product_on_the_gpu or overlap"),)),
    Step("models", "every architecture, and texts", 470, ((*_PYTEST, _ON_GPU, "-k", "not product_on_the_gpu"),)),
    Step("table", "what was wanted, predicted and found", 30, ((*_PYTHON, "tests.bench.cuda_table", _FIGURES),)),
)

_STAND_IN = """#!/bin/sh
# Takes the place of {name}: runs what it would have watched.
echo "{name} $*" >>"$COMMANDS_LOG"
while [ $# -gt 0 ] && [ "$1" != python3 ]; do shift; done
[ $# -eq 0 ] || exec "$@"
"""


def with_workers(command: Sequence[str]) -> list[str]:
    """A command of pytest with as many processes as there are cores, where that is possible; others as they are.

    Compiling takes most of the time of these tests. Sanitizers watch one process.
    """
    count = min(_MAX_WORKERS, os.cpu_count() or 1)
    if "pytest" not in command or command[0] != "python3" or count < 2 or importlib.util.find_spec("xdist") is None:
        return list(command)
    return [*command, "-n", str(count), "--dist", "worksteal"]


def dry_command(command: Sequence[str]) -> list[str]:
    """A command as a machine without a GPU can run it: tests are only collected, figures made up, tools stood in."""
    if "pytest" in command:
        return [*command, "--collect-only"]
    if command[-1].endswith("cuda_requirements"):
        # What is missing here is no failure.
        return ["sh", "-c", f"{shlex.join(command)} || true"]
    return [*command, "--dry-run"] if "python3" in command else list(command)


def dry_environment(folder: Path) -> dict[str, str]:
    """An environment whose tools only note how they were called, in commands.log of the results."""
    scripts = {name: _STAND_IN.format(name=name) for name in TOOLS}
    scripts["python3"] = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "COMMANDS_LOG": str((_DRY_RESULTS / "commands.log").absolute())}


def run_step(step: Step, environment: dict[str, str], *, is_dry: bool) -> bool:
    """Run a step, show the end of what it writes to NAME.log; whether all of it succeeded in time."""
    print(f"== {step.name}: {step.what}", flush=True)
    if step.allocates_apart:
        environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    results = _DRY_RESULTS if is_dry else _RESULTS
    path = results / f"{step.name}.log"
    status = 0
    with path.open("w") as log:
        for command in step.commands:
            named = [str(results / "bench.json") if word == _FIGURES else word for word in command]
            told = dry_command(named) if is_dry else with_workers(named)
            log.write(f"$ {shlex.join(told)}\n")
            log.flush()
            left = step.seconds - (time.monotonic() - began)
            status = run_within(told, left, log.fileno(), environment)
            if status:
                break
        log.write(f"exit {status} after {time.monotonic() - began:.0f} s\n")
    print("\n".join(path.read_text(errors="replace").splitlines()[-12:]), flush=True)
    if out := environment.get("OUT"):
        # At once: a machine may be taken away before the last step has ended.
        shutil.copytree(results, out, dirs_exist_ok=True)
    return status == 0


def run_within(command: list[str], seconds: float, output: int, environment: dict[str, str]) -> int:
    """The exit status of a command; 124 of one that was interrupted because its time was over."""
    try:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    except FileNotFoundError as error:
        os.write(output, f"{error}\n".encode())
        return 127
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return 124


def main() -> int:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(prog="cuda_first_run.sh", description="Try and measure the GPU, step by step.")
    parser.add_argument("steps", nargs="*", metavar="STEP", choices=[*names, "all", []], help="or all")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU; every step if none is named")
    options = parser.parse_args()
    if not options.steps and not options.dry_run:
        print("steps, and the most seconds of each (or all):")
        print("\n".join(f"  {step.name:<10} {step.seconds:>4}  {step.what}" for step in STEPS))
        return 0
    is_all = not options.steps or "all" in options.steps
    wanted = [step for step in STEPS if is_all or step.name in options.steps]
    results = _DRY_RESULTS if options.dry_run else _RESULTS
    results.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = dry_environment(Path(folder)) if options.dry_run else dict(os.environ)
        for step in wanted:
            if not run_step(step, environment, is_dry=options.dry_run):
                failed.append(step.name)
                if step.name == "imports":
                    print("put wheels of what is missing into .cuda/wheels, or install it", file=sys.stderr)
                    break
    print(f"results are in {results}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
