"""Launches on compiled PTX in place of the Python sources: the emulator with an executor of PTX under it.

The executor is not part of this repository: it is `ptxsim.py` of the shared tools, or of the folder that
LOCALINFER_PTX_EXECUTOR names. It makes C of PTX, so it needs gcc and an x86-64 machine. As a plugin of pytest this
module takes all CUDA tests there, in the order of warps that PTX_ORDER names (0, or 7 for all of them backwards), for
the compute capability PTX_CAPABILITY ("9,0"):

    PTX_ORDER=7 python -m pytest -p tests.kernels.cuda.ptx_executor tests/kernels/cuda
"""

import importlib.util
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from localinfer.kernels.cuda import jit, kernel_cache
from localinfer.kernels.cuda.kernel_cache import KernelKey
from tests.kernels.cuda.emulation import Emulator

_SHARED = Path(__file__).resolve().parents[4] / "shared/tools/ptxsim"
ORDERS = (0, 7)
"""Of warps, blocks and lanes: all forwards, all backwards."""

launched: Counter[KernelKey] = Counter()
"""How often each kernel ran on PTX."""


def missing() -> str | None:
    """Why nothing can be run on PTX here, if anything is missing."""
    if not _path().is_file():
        return "the executor of PTX is not beside this checkout"
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the executor of PTX is for x86-64"
    return None if shutil.which("gcc") else "the executor of PTX needs gcc"


def ptx_launch(order: int, capability: tuple[int, int] = (9, 0)) -> Any:
    """A method in place of `Emulator.launch`."""
    executor = _executor()

    def launch(
        emulator: Emulator,
        name: str,
        constants: Sequence[int],
        grid: tuple[int, int, int],
        threads: int,
        values: Sequence[float],
    ) -> None:
        key = (name, tuple(int(constant) for constant in constants))
        template = jit.find_template(name)
        kinds = "".join(template.parameters_of(template.make(*constants)))
        assert len(kinds) == len(values), f"{name} takes {len(kinds)} values, found {len(values)}"
        # The executor knows every entry as `kernel`.
        entry = kernel_cache.entry_name(key)
        ptx = kernel_cache.kernel_ptx(key, capability).decode()
        ptx = ptx.replace(f".entry {entry}(", ".entry kernel(").replace(f"{entry}_param_", "kernel_param_")
        # Blocks run one after another, so there is no order to make among them.
        ptx = ptx.replace("atom.acq_rel.gpu.global.", "atom.global.")
        most = re.search(r"\.maxntid (\d+)", ptx)
        assert most is None or threads <= int(most[1]), f"{name} is launched with {threads} threads of {most[1]}"
        emulator.num_launches += 1
        launched[key] += 1
        executor.launch(ptx, entry, emulator.memory, grid, threads, kinds, values, order)

    return launch


def pytest_configure() -> None:
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    order = int(os.environ.get("PTX_ORDER", "0"))
    major, minor = os.environ.get("PTX_CAPABILITY", "9,0").split(",")
    Emulator.launch = ptx_launch(order, (int(major), int(minor)))  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{launched.total()} launches of {len(launched)} kernels ran on PTX")


def _path() -> Path:
    return Path(os.environ.get("LOCALINFER_PTX_EXECUTOR", _SHARED)) / "ptxsim.py"


def _executor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ptxsim", _path())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
