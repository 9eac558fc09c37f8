"""A process whose localinfer sees Windows: everything is imported, and the main commands run."""

import builtins
import errno
import hashlib
import importlib
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.support.as_on_windows import ABSENT_MODULES, BREAK, REFUSED, as_on_windows

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = REPOSITORY / "models" / "demo" / "demo-f16.gguf"
FOLDERS = ("localinfer", "kernels", "models", "quant")
LEFT_OUT = (
    "localinfer.ray",
    "localinfer.pyinstaller_hooks",
    "localinfer.kernels.cuda",
    "localinfer.models.demo.training",
)
"""What imports large packages that are the same everywhere, or only runs inside another program."""
WRONG, CUT = 2, 3
"""Exit codes."""
_REFUSED_NAME = re.compile(r'[<>:"|?*\x00-\x1f]|[. ]$|^(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$)', re.IGNORECASE)


def refuse_names(folder: Path) -> None:
    """Have files with names that Windows refuses not be made below a folder."""

    def named(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            text = "" if isinstance(path, int) else os.fsdecode(path)
            if text.startswith(str(folder)):
                parts = text.removeprefix(str(folder)).split("/")
                if any(part and _REFUSED_NAME.search(part) for part in parts if part not in (".", "..")):
                    REFUSED.append(f"{name} of {text}")
                    raise OSError(errno.EINVAL, "the name has a character that Windows refuses", text)
            return whole(path, *arguments, **options)

        setattr(module, name, call)

    for module, name in ((os, "open"), (os, "mkdir"), (io, "open"), (builtins, "open")):
        named(module, name)


def import_everything() -> dict[str, str]:
    """Import every module of localinfer; those that cannot be imported, each with its error."""
    faults = {}
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            name = ".".join(part for part in ("localinfer", *parts[folder == "localinfer" :]) if part != "__init__")
            if name.endswith("__main__") or name.startswith(LEFT_OUT):
                continue
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Packages that an extra installs may be missing.
                if str(error.name).partition(".")[0] in {"localinfer", *ABSENT_MODULES}:
                    faults[name] = str(error)
            except Exception as error:
                faults[name] = f"{type(error).__name__}: {error}"
    return faults


@contextmanager
def streams(given: str = "") -> Iterator[tuple[io.StringIO, io.StringIO]]:
    former, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8")
    try:
        with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
            yield output, errors
    finally:
        sys.stdin = former


def ran(words: list[str], given: str = "", code: int = 0) -> str:
    """Run a command; returns what it printed. Raises: AssertionError if it ends otherwise than wanted."""
    from localinfer.apps.cli import main

    with streams(given) as (output, errors):
        found = main(words)
    assert found == code, f"{words} ended with {found}: {errors.getvalue()}"
    return errors.getvalue() if code == WRONG else output.getvalue()


def serve_until_break() -> None:
    """Serve, and press Ctrl-Break once a request is answered."""
    from localinfer.apps.server import app

    asked: list[bool] = []
    run = app.LocalServer.run

    def run_until_break(server: Any, *, on_ready: Callable[[], object]) -> None:
        def ready() -> None:
            on_ready()
            asked.append(True)
            threading.Timer(0.05, os.kill, (os.getpid(), BREAK)).start()

        run(server, on_ready=ready)

    app.LocalServer.run = run_until_break  # type: ignore[method-assign]
    try:
        output = ran(["serve", "--port", "0"])
    finally:
        app.LocalServer.run = run  # type: ignore[method-assign]
    assert asked and "serving" in output, output
    assert signal.getsignal(BREAK) == signal.SIG_DFL


def main() -> None:
    """Import everything and run the main commands in a folder; prints what was found as JSON."""
    folder = Path(sys.argv[1])
    # What other packages import of the system, they have before; numba, gguf and the rest are not under test.
    for name in (
        "numba",
        "gguf",
        "ctypes.wintypes",
        "psutil",
        "uvicorn",
        "prompt_toolkit",
        "asyncio",
        "subprocess",
        "multiprocessing",
    ):
        importlib.import_module(name)
    as_on_windows()
    refuse_names(folder)
    results: dict[str, Any] = {"imports": import_everything()}
    steps: dict[str, Callable[[], object]] = {
        "version": lambda: ran(["--version"]),
        "doctor": lambda: ran(["doctor"]),
        "show": lambda: ran(["show", str(DEMO)]),
        "run": lambda: ran(["run", "-p", "Once upon a time", "-n", "4", "--temperature", "0"]),
        "run of a pipe": lambda: ran(["run", "-n", "2", "--temperature", "0"], "Once upon a time\r\n"),
        "tokenize": lambda: ran(["tokenize", "Once", "--ids"]),
        "chat": lambda: ran(["chat", "-p", "Tell me a story.", "-n", "3", "--temperature", "0"], code=CUT),
        "list": lambda: ran(["list"]),
        "sessions": lambda: ran(["sessions"]),
        "cache": lambda: ran(["cache"]),
        "quantize": lambda: quantize(folder),
        "two writers": lambda: write_at_once(folder),
        "serve": serve_until_break,
    }
    for name, step in steps.items():
        try:
            found = step()
            results[name] = found.splitlines()[:3] if isinstance(found, str) else True
        except BaseException:
            results[name] = {"failed": traceback.format_exc(limit=-6)}
    results["refused"] = REFUSED
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


def write_at_once(folder: Path) -> None:
    """Have a writer of an output begin and end while another writes, and in the moment in which that one ends."""
    from localinfer.system import disk
    from localinfer.system.files import OutputFile

    target, replace, moments = folder / "written twice", disk.replace, []

    def write_whole() -> None:
        with OutputFile(target) as other:
            other.write(b"other")

    def replace_late(path: disk.AnyPath, place: disk.AnyPath) -> None:
        disk.replace = replace
        write_whole()
        moments.append(target.read_bytes())
        replace(path, place)

    with OutputFile(target) as file:
        file.write(b"one")
        write_whole()
        disk.replace = replace_late
    assert moments == [b"other"] and target.read_bytes() == b"one"
    assert not list(folder.glob(".*.tmp")), "a writer left its file"


def quantize(folder: Path) -> None:
    """Quantize the demo model beside what a killed writer left of the same output, which goes."""
    target = folder / "small.gguf"
    mark = hashlib.sha256(target.name.encode()).hexdigest()[:6]
    left = folder / f".{mark}000000.tmp"
    left.write_bytes(b"half of a model")
    ran(["quantize", str(DEMO), str(target), "--type", "q8_0"])
    assert target.stat().st_size > 1000 and not left.exists(), "what a killed writer left is there still"
    told = ran(["quantize", str(DEMO), str(folder / "a:b.gguf"), "--type", "q8_0"], code=WRONG)
    assert "a:b.gguf cannot be written: names have no ':' on Windows" in told, told
    assert [path.name for path in folder.glob("*.gguf")] == [target.name]


if __name__ == "__main__":
    main()
