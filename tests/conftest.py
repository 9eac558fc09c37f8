"""Fixtures that the tests of all packages share."""

import gc
import itertools
import os
import re
import signal
import ssl
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - loads the BLAS that is limited below
import pytest
from threadpoolctl import threadpool_limits

from tests.support.case_table import as_tables, log_skipped

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"

threadpool_limits(1, user_api="blas")
"""The matrices of the oracles are small: a second thread would only spin, beside the other processes of a run."""

os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"
"""Numba colours errors that it never shows, wherever colorama is: a fiftieth of the time that kernels take."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""Tests start hundreds of processes, each of which would compile the modules of the package again, for a second."""

gc.disable()
"""A collection of 17,000 tests makes nothing that is garbage: a quarter of its time was spent in looking."""

_STARTS = re.compile(
    r"^\s*(?:import|from) (?:subprocess|multiprocessing|socket|http\.server|httpx|openai|anthropic|ollama|zmq)\b"
    r"|\bLocalServer\b|\basyncio\.start_server\b|\bcreate_subprocess_",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^(?:from|import) ([\w.]+)", re.MULTILINE)
_SERVERS = {"served", "scripted"}
"""Fixtures of `apps/server` that are servers."""
_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the tests from the last to the first in every other process, so that each compiles half of the modules."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if int(worker.removeprefix("gw")) % 2:
        folders = [Path(argument) for argument in session.config.args]
        for path in sorted((path for folder in folders for path in folder.rglob("test_*.py")), reverse=True):
            with suppress(pytest.skip.Exception, pytest.Collector.CollectError):
                pytest.Module.from_parent(session, path=path).obj  # noqa: B018


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests of processes and sockets: `-m "not system"` is the ring without. What is chosen becomes tables.

    But on a GPU (`-m cuda`) each case is compiled for, for seconds, and alone, so that several processes share them.
    """
    for item in items:
        if starts_others(item.path) or _SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.system)
    yield
    if config.option.markexpr != "cuda":
        items[:] = as_tables(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "teardown":
        log_skipped(item)
    return report


def pytest_collection_finish() -> None:
    """Leave what the collection made out of the garbage collector, which took a sixth of the suite's time with it."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    gc.enable()


@cache
def starts_others(path: Path) -> bool:
    """Whether a file of the tests, or what it imports of them, starts processes or opens sockets."""
    text = path.read_text(encoding="utf-8")
    return bool(_STARTS.search(text)) or any(starts_others(other) for other in _imported(path, text))


def _imported(path: Path, text: str) -> list[Path]:
    names = [name.replace(".", "/") for name in _IMPORT.findall(text)]
    places = [folder / f"{name}.py" for name in names for folder in (REPOSITORY, path.parent)]
    own = [place for place in places if place.is_relative_to(REPOSITORY / "tests") and place.is_file()]
    return [place for place in own if place not in (path, Path(__file__))]


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard() -> Iterator[None]:
    """A shell's `&` has a script's commands ignore SIGINT and SIGQUIT, and nohup SIGHUP, which all children inherit.

    What a function handles here is the system's default again in a child. This process stays deaf to all but SIGINT,
    which tests of what runs in it raise.
    """
    handlers = {"SIGINT": signal.default_int_handler, "SIGQUIT": _stay_deaf, "SIGHUP": _stay_deaf}
    known = {getattr(signal, name): handler for name, handler in handlers.items() if hasattr(signal, name)}
    ignored = [number for number in known if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, known[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def _stay_deaf(_number: int, _frame: object) -> None:
    pass


@pytest.fixture(autouse=True, scope="session")
def files_stay_in_memory() -> Iterator[None]:
    """Nothing that is written here outlives the test, so that no disk is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def kernels_are_compiled_here() -> Iterator[None]:
    """Tests need a few new kernels at a time, which take no longer than a child process that imports Numba for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localinfer.kernels.jit.compile_ahead.can_start_children", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Each client of httpx would read those of all authorities, for 20 ms, to ask a server of this machine in plain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def other_threads_need_not_be_waited_for() -> Iterator[None]:
    """Long work lets others have the interpreter without a pause, which takes milliseconds where all cores are busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localinfer.system.pieces._PAUSE_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def threads_sleep_between_runs() -> Iterator[None]:
    """Two processes share the cores: a thread that looks for another run for a millisecond takes it from the other.

    Nor is it measured on such a machine for long how many threads are the fastest, by every load anew.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localinfer.kernels.cpu.worker_threads._IDLE_SPINS", {"normal": 100, "background": 100})
        patch.setattr("localinfer.models.load.threads._PATIENCE_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def whole_files_are_checked_once() -> Iterator[None]:
    """Many tests load the same file: where a load's checks have found nothing, they find nothing in it again.

    Folders, files in parts and changed settings are checked by every load.
    """
    from localinfer.models.load import loader

    sound: dict[tuple[object, ...], object] = {}
    check = loader.check_loaded

    def check_once(file: Any, config: Any, tokenizer: Any) -> tuple[Any, ...]:
        if file.path.suffix != ".gguf" or "-of-" in file.path.name or getattr(file.metadata, "replaced_keys", ()):
            return check(file, config, tokenizer)
        status = file.path.stat()
        key = (file.path, status.st_ino, status.st_mtime_ns, status.st_size, tokenizer is None)
        if sound.get(key) == config:
            return ()
        found = check(file, config, tokenizer)
        if not found:
            sound[key] = config
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "check_loaded", check_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a person who runs the tests has configured changes none of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, which looks through the names of all that there are for each."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / "each" / f"{name}{next(_numbers)}"
    folder.mkdir(mode=0o700, parents=True)
    return folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional data folder beside the checkout; tests that need it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("the data folder ../shared is not beside this checkout")
    return SHARED
