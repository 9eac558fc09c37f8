"""What the first run on a GPU needs and this machine lacks, said before any of its minutes is spent.

usage: python3 -m tests.bench.cuda_requirements; ends with 1 and a line for each thing that is missing.
"""

import re
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = {
    "numpy": "numpy",
    "llvmlite": "llvmlite.binding",
    "numba": "numba",
    "numba-cuda": "numba.cuda",
    "cuda-bindings": "cuda.bindings.driver",
    "torch": "torch",
    "psutil": "psutil",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "threadpoolctl": "threadpoolctl",
}
"""Distribution -> what is imported of it, in a process of its own."""
GPU = """
import sys, torch
if not torch.cuda.is_available(): sys.exit(f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU")
if torch.cuda.get_device_capability() < (7, 5): sys.exit("compute capability 7.5 or newer is needed")
"""
OURS = (
    "import localinfer.loading.build, localinfer.apps.bench.gpu, localinfer.models.load.loader, "
    "localinfer.kernels.cuda.jit"
)
TESTS = "import tests.conftest, tests.kernels.cuda.test_cuda_ops_on_gpu, tests.bench.bench_cuda, tests.bench.cuda_demo"
_SECONDS = 25.0


def wanted_versions() -> dict[str, tuple[int, ...]]:
    """The oldest version of each distribution that pyproject.toml allows."""
    return {name: numbers(version) for name, version in _bounds(">=").items()}


def refused_versions() -> dict[str, tuple[int, ...]]:
    """The first version of each distribution that pyproject.toml no longer allows on a GPU."""
    return {name: numbers(version) for name, version in _bounds("<").items()}


def _bounds(sign: str) -> dict[str, str]:
    """Versions that follow a sign, of several bounds of a distribution the last, which is that of the extra `cuda`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["dev"], *extras["cuda"]]
    found = (re.match(rf"([A-Za-z0-9_-]+).*?{sign}([0-9.]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match is not None}


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without what follows its numbers."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, match[0].split("."))) if match is not None else ()


def version_problem(name: str, wanted: tuple[int, ...], refused: tuple[int, ...] = ()) -> str | None:
    """What is wrong with the version of a distribution that is installed, if anything."""
    text = ".".join(map(str, wanted))
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed" + (f"; {text} or newer is wanted" if wanted else "")
    if numbers(found) < wanted:
        return f"{name} {found} is installed; {text} or newer is wanted"
    if refused and numbers(found) >= refused:
        return f"{name} {found} is installed; one before {'.'.join(map(str, refused))} is wanted"
    return None


def main() -> int:
    """Print what is there and what is missing; 1 if anything is."""
    wanted, refused = wanted_versions(), refused_versions()
    found = [version_problem(name, wanted.get(name, ()), refused.get(name, ())) for name in MODULES]
    problems = [problem for problem in found if problem is not None]
    if problems:
        return report(problems)
    programs = {f"import {module}": f"import {module}" for module in MODULES.values()}
    programs |= {"a GPU": GPU, "localinfer, from beside this": OURS, "its tests": TESTS}
    running = {
        what: subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        for what, code in programs.items()
    }
    deadline = time.monotonic() + _SECONDS
    for what, process in running.items():
        try:
            errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[1].strip()
            last = errors.splitlines()[-1] if errors else f"exit code {process.returncode}"
            if process.returncode:
                problems.append(f"{what} fails: {last}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problems.append(f"{what} takes more than {_SECONDS:.0f} s")
    return report(problems)


def report(problems: list[str]) -> int:
    """Print what is missing; 1 if anything is."""
    for problem in problems:
        print(f"missing: {problem}")
    if not problems:
        print("everything that is needed is there")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
