"""Ctrl-C at every stage of a server's start ends it, also where somebody swallows its exception."""

import signal
import subprocess
import sys
import threading

import pytest

from tests.kernels.subprocesses import environment
from tests.support.limits import seconds
from tests.support.warm_python import WarmPython

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to a whole console")

INTERRUPTED = """
import functools, importlib, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background leaves it ignored
way, module, place, when, *sys.argv[1:] = sys.argv[1:]
from localinfer.__main__ import main

def press():
    if way == "raised":
        os.kill(os.getpid(), signal.SIGINT)
        return
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass

*owners, name = place.split(".")
owner = functools.reduce(getattr, owners, importlib.import_module(module))
changed = getattr(owner, name)

@functools.wraps(changed)
def interrupted(*arguments, **options):
    if when == "before":
        press()
    try:
        return changed(*arguments, **options)
    finally:
        if when == "after":
            press()

setattr(owner, name, interrupted)
sys.exit(main())
"""
"""The command, interrupted before or after one of its functions."""
PLACES = {
    "options": ("localinfer.apps.cli.serve", "_serve", "before"),
    "the application": ("localinfer.apps.server.app", "make_app", "before"),
    "sockets": ("localinfer.apps.server.app", "LocalServer.__init__", "after"),
    "the way to end": ("localinfer.apps.cli.shutdown", "ShutdownController.attach", "after"),
    "the loop": ("asyncio.events", "new_event_loop", "after"),
    "the first step": ("uvicorn.server", "Server._serve", "before"),
    "listening": ("uvicorn.server", "Server.startup", "before"),
    "the load": ("localinfer", "load", "before"),
    "readiness": ("localinfer.apps.cli.serve", "_say_ready", "before"),
}
SERVE = ["serve", "--port", "0", "--no-socket", "--no-disk-cache", "--threads", "1"]


@pytest.mark.parametrize("way", ["raised", "swallowed"])
@pytest.mark.parametrize("place", PLACES)
def test_server_ends(place: str, way: str) -> None:
    words = [sys.executable, "-c", INTERRUPTED, way, *PLACES[place], *SERVE]
    quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
    # What is interrupted comes after the imports, which a copy need not make again.
    with WarmPython(words, env=environment(), stdin=quiet, stdout=quiet, stderr=pipe, text=True) as process:
        try:
            _, said = process.communicate(timeout=seconds(30))
        finally:
            process.kill()
    assert process.returncode in (0, 130), said
    assert "Traceback" not in said and "ignored" not in said and "error" not in said


def test_server_in_a_program_gives_the_handlers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are answered from before the loop is made, and by who answered them before once it has ended."""
    from localinfer.apps.cli import main
    from localinfer.apps.server.app import LocalServer

    assert threading.current_thread() is threading.main_thread()
    watched = (signal.SIGINT, signal.SIGTERM)
    former = [signal.getsignal(number) for number in watched]
    seen = []
    run = LocalServer.run

    def run_until_ready(server: LocalServer, on_ready: object) -> None:
        def end() -> None:
            seen.extend(signal.getsignal(number) for number in watched)
            signal.raise_signal(signal.SIGINT)

        run(server, on_ready=end)

    monkeypatch.setattr(LocalServer, "run", run_until_ready)
    assert main(SERVE) == 0
    assert [signal.getsignal(number) for number in watched] == former
    assert len(seen) == 2 and not set(map(repr, seen)) & set(map(repr, former))
