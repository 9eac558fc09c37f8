"""Machines whose systems lack or refuse what localinfer asks of them: models load, answer, and `doctor` reports."""

import builtins
import ctypes
import errno
import io
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.apps.doctor import checks
from localinfer.kernels import address_space
from localinfer.kernels.jit import host
from localinfer.models import demo
from localinfer.system import machine_limits
from tests.api.test_golden_text import GOLDEN

DEMO = Path(demo.__file__).parent / "demo-f16.gguf"
Patch = pytest.MonkeyPatch


def refuse_advice(patch: Patch) -> None:
    """As kernels without transparent huge pages, which know the call and not its argument."""

    class Map(mmap.mmap):
        def madvise(self, *arguments: Any) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    patch.setattr(mmap, "mmap", Map)


def remove_advice(patch: Patch) -> None:
    for name in ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTNEED"):
        patch.delattr(mmap, name, raising=False)


def remove_affinity(patch: Patch) -> None:
    patch.delattr(os, "sched_getaffinity", raising=False)


def refuse_affinity(patch: Patch) -> None:
    def getaffinity(process: int) -> set[int]:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    patch.setattr(os, "sched_getaffinity", getaffinity, raising=False)


def hide(*folders: str) -> Callable[[Patch], None]:
    """Let nothing be found under some folders of the system."""

    def apply(patch: Patch) -> None:
        def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
                text = "" if isinstance(path, int) else os.fsdecode(path)
                if any(text == folder or text.startswith(f"{folder}/") for folder in folders):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
                return function(path, *arguments, **options)

            return call

        for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
            patch.setattr(os, name, hidden(getattr(os, name)))
        for module in (builtins, io):
            patch.setattr(module, "open", hidden(io.open))

    return apply


def remove_auxiliary_vector(patch: Patch) -> None:
    """A C library without `getauxval`, which an arm64 CPU's features are asked of."""
    whole = ctypes.CDLL(None)

    def library(name: str | None, *arguments: Any, **options: Any) -> Any:
        lacks = SimpleNamespace(malloc_trim=getattr(whole, "malloc_trim", None))
        return lacks if name is None else type(whole)(name, *arguments, **options)

    patch.setattr(ctypes, "CDLL", library)
    patch.setattr(host, "is_arm64", lambda: True)
    host.host_features.cache_clear()


def refuse_everything(patch: Patch) -> None:
    for take_away in (refuse_advice, refuse_affinity, hide("/proc", "/sys")):
        take_away(patch)


MACHINES: dict[str, Callable[[Patch], None]] = {
    "madvise refuses": refuse_advice,
    "no MADV_HUGEPAGE": remove_advice,
    "no sched_getaffinity": remove_affinity,
    "sched_getaffinity refuses": refuse_affinity,
    "no /proc": hide("/proc"),
    "no /sys": hide("/sys"),
    "no getauxval": remove_auxiliary_vector,
    "all of these": refuse_everything,
}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: Patch) -> Iterator[str]:
    """A machine that lacks something."""
    MACHINES[request.param](monkeypatch)
    yield request.param
    host.host_features.cache_clear()


def test_a_machine_that_lacks_an_interface_loads_answers_and_reports(
    machine: str, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, text = next(iter(GOLDEN["demo"].items()))
    with localinfer.load(DEMO) as llm:
        assert text.startswith(llm.complete(prompt, max_tokens=5, temperature=0).text)
    monkeypatch.setattr(checks, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(checks, "_BUSY_SECONDS", 0.0)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["kernels"] for line in lines)
    # What other programs do is known from /proc alone.
    unknown = [line.split()[0] for line in lines if "could not be checked" in line]
    assert unknown == (["load"] if machine in ("no /proc", "all of these") else [])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no sysconf")
def test_a_machine_that_says_nothing_of_its_memory_is_taken_to_have_some(monkeypatch: Patch) -> None:
    def unreadable() -> Any:
        raise FileNotFoundError(errno.ENOENT, "no such file", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", unreadable)
    monkeypatch.setattr(psutil, "swap_memory", unreadable)
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found = machine_limits.memory_limits(Path("/nowhere"))
    assert found.total_bytes == pages * page and found.total_bytes // 2 <= found.available_bytes <= found.total_bytes
    monkeypatch.delattr(os, "sysconf")
    found = machine_limits.memory_limits(Path("/nowhere"))
    assert found.total_bytes == 2 * found.available_bytes == 4 << 30 and found.swap_bytes == 0


def test_processors_are_counted_where_nothing_is_said_of_cores_or_affinity(monkeypatch: Patch) -> None:
    def unreadable(logical: bool = True) -> int:
        raise FileNotFoundError(errno.ENOENT, "no such file", "/proc/cpuinfo")

    monkeypatch.setattr(psutil, "cpu_count", unreadable)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    refuse_affinity(monkeypatch)
    found = machine_limits.processor_limits(Path("/nowhere"))
    assert (found.physical_cores, found.hardware_threads, found.allowed, found.usable_threads) == (6, 6, 6, 6)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert address_space._num_blas_threads() == 6
