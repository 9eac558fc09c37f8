"""The programs in `examples/`, each in a process of its own, and the code of `docs/apps.md`."""

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from tests.support.documents import blocks
from tests.support.limits import seconds, wait_until
from tests.support.warm_python import WarmPython, run_copy


def has_qt() -> bool:
    """Whether there is a PySide6 that works.

    A call that returns None loses a reference to it in 6.12.0. Python before 3.12 counts them: any program aborts.
    """
    if importlib.util.find_spec("PySide6") is None:
        return False
    try:
        version = metadata.version("PySide6-Essentials").split(".")
    except metadata.PackageNotFoundError:
        return True
    return sys.version_info >= (3, 12) or [int(part) for part in version[:2]] < [6, 12]


REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
MISSING = EXAMPLES / "no model.gguf"
NEEDS_QT = pytest.mark.skipif(not has_qt(), reason="needs PySide6-Essentials, before Python 3.12 one older than 6.12")
NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="needs node in PATH")
UNIX_ONLY = pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")

FAILING = """
import os, sys, time

def fail(*error):
    sys.__excepthook__(*error)
    os._exit(1)

sys.excepthook = fail
"""
"""A script that fails does not wait for the thread of its window."""
QT = """
from PySide6 import QtCore, QtWidgets
app = QtWidgets.QApplication([])

def until(condition, limit=float(sys.argv[1])):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        app.processEvents(QtCore.QEventLoop.ProcessEventsFlag.WaitForMoreEvents, 20)

def ask(window, text):
    window.line.setText(text)
    window.line.returnPressed.emit()

def shown(window):
    return window.view.toPlainText()

def is_ready(window):
    return window.bar.format() == "ready: %p%"

from qt_chat import ChatWindow
"""
TK = """
import tkinter
root = tkinter.Tk()

def until(condition, limit=float(sys.argv[1])):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        root.after(10, lambda: None)
        root.update()

def ask(window, text):
    window.line.insert(0, text)
    window.ask(None)

def shown(window):
    return window.view.get("1.0", "end")

def is_ready(window):
    return window.stage.cget("text") == "ready"

import tk_chat
ChatWindow = lambda model=None: tk_chat.ChatWindow(tkinter.Toplevel(root), model)
"""
LONG = """
import localinfer
session = localinfer.LLM.session
localinfer.LLM.session = lambda llm: session(llm, ignore_eos=True)
"""
"""Replies that go on to the end of the context."""
REPLIES = """
failed = ChatWindow("{missing}")
until(lambda: "does not exist; check the path" in shown(failed))
window = ChatWindow()
ask(window, "Tell me a story.")
until(lambda: is_ready(window))
until(lambda: len(shown(window)) > 60)
{stop}
until(lambda: window.session.messages[-1:] and window.session.messages[-1]["role"] == "assistant")
assert window.session.messages[-1]["finish_reason"] == "cancelled"
until(lambda: window.session.messages[-1]["content"] in shown(window))
ask(window, "Hi")
until(lambda: "\\n\\nHi\\n\\n" in shown(window) and shown(window).partition("\\n\\nHi\\n\\n")[2].strip())
{stop}
until(lambda: len(window.session.messages) == 4)
ask(window, "word " * 2000)
until(lambda: "the context holds 1024" in shown(window))
for one in (failed, window):
    one.close()
    assert not one.thread_of_model.is_alive()
"""
CLOSED = """
import gc, threading, localinfer
stages = []
load = localinfer.load
localinfer.load = lambda *given, progress, **options: load(
    *given, progress=lambda stage, done, total: (stages.append(stage), progress(stage, done, total)), **options
)
for wanted in ("reading the vocabulary", "loading weights", "linking kernels", "getting ready"):
    stages.clear()
    window = ChatWindow()
    until(lambda: any(stage.startswith(wanted) for stage in stages))
    window.close()
    assert not window.thread_of_model.is_alive()
first, second = ChatWindow(), ChatWindow()
for moment in (lambda: True, lambda: "\\n\\nword" in shown(second), lambda: len(shown(second)) > 2900):
    until(lambda: is_ready(first) and is_ready(second))
    ask(first, "Tell me a story.")
    ask(second, "word " * 550)
    until(moment)
    first.close()
    del first
    gc.collect()
    second, first = ChatWindow(), second
first.close(), second.close()
assert threading.active_count() == 1, threading.enumerate()
"""
MENU_BAR = """
import menu_bar
icon, told = menu_bar.MenuBarApp(idle_seconds=0.2), []
icon.told.connect(lambda title, text: told.append((title, text)))
app.clipboard().setText("Buy milk.")
sort_note, check_disk, leave = icon.contextMenu().actions()
titles = lambda: [title for title, _ in told]
sort_note.trigger()
until(lambda: titles() == ["Loading", "Answer", "Unloaded"])
assert told[1][1] in ("task", "question", "idea")
assert icon.session is not None
check_disk.trigger()
until(lambda: titles()[3:] == ["Loading", "Answer", "Unloaded"])
icon.model = "{missing}"
sort_note.trigger()
until(lambda: len(told) == 8)
assert all("does not exist; check the path" in text for _, text in told[6:])
icon.model = None
sort_note.trigger()
until(lambda: titles()[8:] == ["Loading"])
leave.trigger()
assert not icon.thread_of_model.is_alive()
"""


def run(*words: str | Path, code: int = 0, **options) -> str:
    """What a program of this interpreter prints, of which nothing is on standard error."""
    paths = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "PYTHONPATH": paths}
    done = subprocess.run(
        [*words], capture_output=True, text=True, timeout=seconds(60), env=environment, check=False, **options
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_script(*parts: str) -> None:
    script = "\n".join([FAILING, *parts]).replace("{missing}", MISSING.name)
    assert run(sys.executable, "-c", script, str(seconds(15))) == ""


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch):
    """A display for Tk, where there is none one of its own."""
    pytest.importorskip("tkinter", reason="needs Tk")
    if sys.platform != "linux" or os.environ.get("DISPLAY"):
        yield
        return
    if shutil.which("Xvfb") is None:
        pytest.skip("needs a display, or Xvfb in PATH")
    read, write = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write), "-nolisten", "tcp"], pass_fds=[write], stderr=subprocess.DEVNULL
    )
    os.close(write)
    with open(read) as number:
        monkeypatch.setenv("DISPLAY", f":{number.readline().strip()}")
    try:
        yield
    finally:
        server.terminate()
        server.wait(seconds(5))


def test_examples_are_short() -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES.iterdir() if path.is_file()
    }
    assert len(lengths) == 5 and max(lengths.values()) < 80, lengths


@NEEDS_QT
def test_the_window_of_qt_loads_replies_stops_and_says_what_is_wrong() -> None:
    run_script(QT, LONG, REPLIES.replace("{stop}", "window.stop.click()"))


@NEEDS_QT
def test_a_window_of_qt_closes_at_any_moment() -> None:
    run_script(QT, CLOSED)


def test_the_window_of_tk_loads_replies_stops_and_says_what_is_wrong(display) -> None:
    run_script(TK, LONG, REPLIES.replace("{stop}", "window.stop.invoke()"))


def test_a_window_of_tk_closes_at_any_moment(display) -> None:
    run_script(TK, CLOSED)


@NEEDS_QT
def test_the_menu_bar_app_loads_on_demand_and_unloads_when_idle() -> None:
    run_script(QT, MENU_BAR)


@contextmanager
def started(*words: str | Path, path: str | None = None, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = WarmPython(
        [*map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **({} if path is None else {"PATH": path})},
        bufsize=0,
        cwd=cwd,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def read_until(process: subprocess.Popen[bytes], ends: Callable[[bytes], object]) -> bytes:
    """What it has printed when that is enough."""
    assert process.stdout is not None
    printed = b""
    while not ends(printed):
        part = process.stdout.read(1 << 16)
        assert part, printed
        printed += part
    return printed


def test_the_chat_on_an_event_loop_ends_an_answer_for_the_next_question() -> None:
    script = LONG + "import asyncio, asyncio_chat; asyncio.run(asyncio_chat.main())"
    with started(sys.executable, "-c", script, cwd=EXAMPLES) as process:
        assert process.stdin is not None
        process.stdin.write(b"Tell me a story.\n")
        read_until(process, lambda printed: len(printed.partition(b"something\n")[2]) > 1)
        process.stdin.write(b"Hi\n")
        printed = read_until(process, lambda printed: printed.partition(b" tokens]\n")[2])
        told = re.search(rb"\[(\d+) of 1024", printed)
        assert told is not None and int(told[1]) < 1000


@UNIX_ONLY
def test_the_chat_on_an_event_loop_ends_by_an_interrupt_in_an_answer_and_before_one() -> None:
    for question in (b"Tell me a story.\n", b""):
        with started(sys.executable, EXAMPLES / "asyncio_chat.py") as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(question)
            read_until(
                process, lambda printed, question=question: len(printed.partition(b"something")[2]) > len(question)
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(seconds(10)) == 0
            assert b"Traceback" not in process.stderr.read()


def test_the_chat_on_an_event_loop_says_what_is_wrong() -> None:
    script = "import asyncio, asyncio_chat as chat; chat.ANSWER_SECONDS = 0; asyncio.run(chat.main())"
    for words, code, told in (
        ([str(EXAMPLES / "asyncio_chat.py"), str(MISSING)], 1, "no model.gguf does not exist; check the path"),
        (["-c", script], 0, "not finished after 0 seconds"),
    ):
        done = run_copy([sys.executable, *words], cwd=EXAMPLES, input="Hi\n", timeout=seconds(60))
        assert done.returncode == code and told in done.stdout + done.stderr


@pytest.fixture
def path_with_program(tmp_path: Path) -> str:
    """PATH with the `localinfer` of this interpreter."""
    program = tmp_path / "localinfer"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m localinfer \"$@\"\n", encoding="utf-8")
    program.chmod(0o755)
    return os.pathsep.join([str(tmp_path), os.environ.get("PATH", "")])


@NEEDS_NODE
@UNIX_ONLY
def test_a_program_of_node_asks_a_server_of_its_own(path_with_program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_with_program)
    assert len(run("node", EXAMPLES / "node_sidecar.mjs")) > 50
    told = run("node", EXAMPLES / "node_sidecar.mjs", MISSING, code=1)
    assert re.fullmatch(r"the model .*no model.gguf does not exist; check the path; .*\n", told)
    node = shutil.which("node")
    assert node is not None
    monkeypatch.setenv("PATH", str(EXAMPLES))
    assert "put localinfer in PATH" in run(node, EXAMPLES / "node_sidecar.mjs", code=1)


@NEEDS_NODE
@UNIX_ONLY
def test_the_server_of_a_program_of_node_ends_with_it_however_it_ends(path_with_program: str) -> None:
    for is_answering in (False, True):
        with started("node", EXAMPLES / "node_sidecar.mjs", path=path_with_program) as process:
            children = psutil.Process(process.pid).children
            assert wait_until(children)
            (server,) = children()
            if is_answering:
                read_until(process, len)
            process.kill()
            assert wait_until(lambda server=server: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


@pytest.fixture
def folder_with_model(tmp_path: Path) -> Path:
    """A folder whose model.gguf is the demo model."""
    shutil.copy(REPOSITORY / "models" / "demo" / "demo-f16.gguf", tmp_path / "model.gguf")
    return tmp_path


def test_the_code_for_apps_in_the_guide_runs(folder_with_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (text for text in blocks("docs/apps.md", "python") if "asyncio.run(main())" in text)
    monkeypatch.chdir(folder_with_model)
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "docs/apps.md", "exec"), {"__name__": "__main__"})
    printed = output.getvalue()
    assert "Availability(supported=True" in printed and "getting ready to answer 1 1" in printed
    assert re.search(r"Order\(fruit='(apple|pear)', is_gift=(True|False)\)\n", printed)


@UNIX_ONLY
def test_the_server_for_apps_in_the_guide_answers(folder_with_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APP_TOKEN", "x" * 32)
    (line,) = (line for text in blocks("docs/apps.md", "sh") for line in text.splitlines() if "--ready-json" in line)
    program, *words = shlex.split(line)
    assert program == "localinfer"
    with started(sys.executable, "-m", "localinfer", *words, cwd=folder_with_model) as process:
        ready = json.loads(read_until(process, lambda printed: printed.endswith(b"\n")))
        assert ready["port"] and ready["models"] == ["model"]
