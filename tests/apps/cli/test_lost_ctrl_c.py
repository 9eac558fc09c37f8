"""Ctrl-C that somebody swallows comes again: whatever catches it, in whatever code, the command ends."""

import sys
from pathlib import Path

import pytest

from tests.kernels.subprocesses import run
from tests.support.limits import seconds
from tests.support.warm_python import run_copy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to a whole console")

COMMAND = """
import ctypes, gc, os, signal, sys, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background leaves it ignored
from localinfer.apps import cli
from localinfer.__main__ import main
from localinfer.system import interruption

class Thing:
    pass

def press():
    signal.raise_signal(signal.SIGINT)

def go_on():
    while True:
        time.sleep(1)

{swallow}
cli.localinfer_command.commands["tokenize"].callback = lambda **_: command()
sys.argv[1:] = ["tokenize", "Hi"]
sys.exit(main())
"""
SWALLOWED = {
    "in a finalizer": """
class Late:
    def __del__(self):
        press()
def command():
    Late()
    go_on()
""",
    "in a callback of a weak reference": """
def command():
    thing = Thing()
    reference = weakref.ref(thing, lambda _: press())
    del thing
    go_on()
""",
    "in a callback of the garbage collector": """
def collected(phase, info):
    gc.callbacks.remove(collected)
    press()
def command():
    gc.callbacks.append(collected)
    gc.collect()
    go_on()
""",
    "in a callback of C code": """
def command():
    ctypes.CFUNCTYPE(None)(press)()
    go_on()
""",
    "by a lookup of C code": """
class Asked:
    def __getattr__(self, name):
        press()
def command():
    ctypes.pythonapi.PyObject_HasAttrString(ctypes.py_object(Asked()), b"name")
    go_on()
""",
    "by a dictionary of C code": """
class Key:
    def __hash__(self):
        return 1
    def __eq__(self, other):
        press()
def command():
    ctypes.pythonapi.PyDict_GetItem(ctypes.py_object({Key(): 1}), ctypes.py_object(Key()))
    go_on()
""",
    "by an `except:`": """
def command():
    try:
        press()
    except:
        pass
    go_on()
""",
    "by an import that tries something else": """
def command():
    try:
        import pressing
    except BaseException:
        pressing = None
    go_on()
""",
    "by code that keeps it for a while": """
def command():
    kept = []
    try:
        press()
    except BaseException as error:
        kept.append(error)
    time.sleep(0.1)
    del kept
    go_on()
""",
    "by code that keeps it, and is done": """
kept = []
def command():
    try:
        press()
    except BaseException as error:
        kept.append(error)
""",
    "by an error of another kind": """
def command():
    try:
        press()
    except BaseException as error:
        raise ImportError("numpy is broken") from error
""",
    "by a call of sys.exit": """
def command():
    try:
        press()
    except BaseException:
        sys.exit(1)
""",
    "several times": """
def command():
    for _ in range(3):
        try:
            press()
            go_on()
        except BaseException:
            pass
    go_on()
""",
    "by nobody, and its own code cleans up": """
def command():
    try:
        press()
    finally:
        time.sleep(0.1)
        print("clean")
    go_on()
""",
}


def ends(code: str, folder: Path) -> tuple[int, str, str]:
    """Exit code and both outputs of a command."""
    (folder / "pressing.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = run_copy([sys.executable, "-c", code], cwd=folder, timeout=seconds(15))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", SWALLOWED)
def test_a_command_ends_when_ctrl_c_was_swallowed(how: str, tmp_path: Path) -> None:
    output = "clean\n" if "clean" in SWALLOWED[how] else ""
    assert ends(COMMAND.replace("{swallow}", SWALLOWED[how]), tmp_path) == (130, output, "")


def test_what_was_answered_does_not_come_again_and_a_second_one_ends(tmp_path: Path) -> None:
    command = """
def command():
    try:
        press()
    except KeyboardInterrupt:
        interruption.take()
    time.sleep(0.2)
    print("went on")
    press()
    print("never")
"""
    assert ends(COMMAND.replace("{swallow}", command), tmp_path) == (130, "went on\n", "")


def test_errors_are_told_where_nobody_pressed_it(tmp_path: Path) -> None:
    command = """
class Late:
    def __del__(self):
        raise ValueError("in a finalizer")
def command():
    Late()
    raise localinfer.errors.RequestError("as it is")
import localinfer
"""
    code, output, errors = ends(COMMAND.replace("{swallow}", command), tmp_path)
    assert (code, output) == (2, "") and "ValueError: in a finalizer" in errors and "error: as it is" in errors


HANDLERS = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from localinfer.system import interruption
count = 0
def counted(*_):
    global count
    count += 1
interruption.replace_handler(counted)
own = os.getpid()
child = os.fork()
if not child:
    # Until the parent is gone or has seen enough: a fixed number may all come while it waits for a core, and without
    # a pause it does nothing but answer.
    while os.getppid() == own:
        os.kill(own, signal.SIGINT)
        time.sleep(0.00001)
    os._exit(0)
rounds = 0
while rounds < 20000 or count < 100:
    # From one of Python's to the system's and back: what is lost in between is told as unraisable.
    interruption.replace_handler(signal.SIG_IGN)
    interruption.replace_handler(counted)
    rounds += 1
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the signal stays blocked"
"""


def test_no_signal_is_dropped_between_two_handlers(tmp_path: Path) -> None:
    """Python tells of one that it dropped: "Signal 2 ignored due to race condition"."""
    assert ends(HANDLERS, tmp_path) == (0, "", "")


RAISING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from localinfer.system import interruption
mask = signal.pthread_sigmask
def pressed_before(how, numbers):
    if numbers:
        signal.pthread_sigmask = mask
        signal.raise_signal(signal.SIGINT)
    return mask(how, numbers)
signal.pthread_sigmask = pressed_before
try:
    interruption.replace_handler(signal.SIG_DFL)
except KeyboardInterrupt:
    sys.exit(5 if not mask(signal.SIG_BLOCK, ()) else 6)
"""


def test_one_that_was_there_before_is_raised_and_nothing_stays_blocked(tmp_path: Path) -> None:
    assert ends(RAISING, tmp_path) == (5, "", "")


def test_the_library_alone_installs_no_handler() -> None:
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
hook = sys.unraisablehook
import localinfer
from localinfer.apps.cli import main
with localinfer.load(threads=1, context_length=64, disk_cache=False) as llm:
    llm.complete("Once", max_tokens=1)
assert main(["tokenize", "--ids", "Hi"]) == 0
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and sys.unraisablehook is hook
"""
    assert run(code)[1] == ""
