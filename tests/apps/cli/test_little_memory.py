"""A process that may map little memory is refused in one line with the figures, where libraries would abort it."""

import errno
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from localinfer.errors import LocalinferError, OutOfMemoryError
from localinfer.kernels import address_space
from localinfer.kernels.cpu.memory import Arena, aligned, aligned_zeros
from localinfer.quant.gguf.mapped_file import MappedFile
from tests.kernels.subprocesses import REPOSITORY, environment
from tests.support.limits import seconds

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep no such limit")

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]) << 10,) * 2)
sys.argv[1:] = sys.argv[2:]
from localinfer.__main__ import main
sys.exit(main())
"""
"""The command under `ulimit -v`."""
DEMO = str(REPOSITORY / "models" / "demo" / "demo-f16.gguf")
COMMANDS = {
    "run": ["run", "-p", "Hi", "-n", "2", "--threads", "1", "--no-disk-cache"],
    "tokenize": ["tokenize", "Hi"],
    "show": ["show", DEMO],
    "serve": ["serve", "--port", "0", "--threads", "1", "--no-disk-cache", "--until-stdin-ends"],
}
NOTES = ("serving", "listening", "warning: ")
KILOBYTES = [60_000, 130_000, 200_000, 310_000, 340_000, 365_000]
"""From less than Python has to hardly enough; what lies between is what a library finds missing in its midst."""
TRIED = {"run": KILOBYTES, "serve": KILOBYTES[1::2], "tokenize": KILOBYTES[::3], "show": KILOBYTES[1::3]}
"""All import the same libraries, and differ in what they do with them."""


def run(words: list[str], kilobytes: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(kilobytes), *words],
        env=environment(OPENBLAS_NUM_THREADS="2"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@LINUX
@pytest.mark.parametrize("command", COMMANDS)
def test_little_memory_is_one_line_with_the_figures_or_enough(command: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    socket = ["--socket", str(tmp_path / "s.sock")] if command == "serve" else []
    for kilobytes in TRIED[command]:
        done = run(COMMANDS[command] + socket, kilobytes)
        told = f"{kilobytes} kB: {done.returncode}, {done.stderr}"
        assert done.returncode in (0, 2), told
        errors = [
            line for line in done.stderr.splitlines() if not line.startswith(("serving", "listening", "warning: "))
        ]
        if done.returncode == 0:
            assert errors == [], told
        else:
            assert len(errors) == 1 and errors[0].startswith("error: "), told
            assert "this process may map" in errors[0] and "MB" in errors[0] and "ulimit -v" in errors[0], told


@LINUX
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_help_needs_no_more_than_python(words: list[str]) -> None:
    assert run(words, 100_000).returncode == 0


@LINUX
def test_the_libraries_are_refused_before_they_abort_in_a_program_too() -> None:
    code = LIMITED.split("sys.argv[1:]")[0] + (
        "import localinfer\ntry: localinfer.load()\nexcept localinfer.errors.OutOfMemoryError as error: print(error)\n"
    )
    words = [sys.executable, "-c", code, "100000"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=seconds(15), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "importing NumPy and LLVM needs" in done.stdout


def test_what_is_required_is_compared_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "limit_bytes", lambda: 1_000_000_000)
    monkeypatch.setattr(address_space, "mapped_bytes", lambda: 400_000_000)
    address_space.require(600_000_000, "this")
    with pytest.raises(OutOfMemoryError, match="this needs 601 MB .* may map 1,000 MB and has mapped 400 MB.*ulimit"):
        address_space.require(600_000_001, "this")
    monkeypatch.setattr(address_space, "limit_bytes", lambda: None)
    address_space.require(1 << 60, "this")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (OSError("Could not find/load shared object file 'libx.so'"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ImportError("No module named 'x'"), False),
        (RuntimeError("another"), False),
        (LocalinferError("can't start new thread"), False),
    ],
)
def test_errors_of_libraries_are_told_apart(error: Exception, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "limit_bytes", lambda: 1 << 30)
    assert address_space.is_shortage(error) == expected


@pytest.mark.parametrize("take", [aligned, aligned_zeros, Arena().take])
def test_arrays_that_the_system_does_not_give_are_errors_of_ours(take) -> None:
    with pytest.raises(OutOfMemoryError, match="GB|MB"):
        take(1 << 55)


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="memory comes from elsewhere there")
def test_weights_take_no_more_than_they_need_where_a_large_block_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, asked = mmap.mmap, []

    def scarce(number: int, num_bytes: int, **options: int) -> mmap.mmap:
        asked.append(num_bytes)
        if num_bytes > 1 << 20:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mapped(number, num_bytes, **options)

    monkeypatch.setattr("localinfer.kernels.cpu.memory.mmap.mmap", scarce)
    assert Arena().take(1 << 12).size == 1 << 12
    assert asked == [256 << 20, 1 << 12]


def test_a_file_that_cannot_be_mapped_says_how_large_it_is(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(2_000_000))
    monkeypatch.setattr("localinfer.quant.gguf.mapped_file.mmap.mmap", scarce)
    with pytest.raises(OutOfMemoryError, match="model.gguf needs 2 MB"):
        MappedFile(path)


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from localinfer.kernels.cpu.program import ThreadPool

    start, started = threading.Thread.start, []

    def scarce(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(OutOfMemoryError, match="starting 4 threads"):
        ThreadPool(4)
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)
