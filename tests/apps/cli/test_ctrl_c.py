"""Ctrl-C ends a command in silence whenever it comes: in imports, options, loading or running."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.subprocesses import REPOSITORY, environment
from tests.support.limits import seconds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to a whole console")

INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background leaves it ignored
from localinfer.__main__ import main
milliseconds, *sys.argv[1:] = sys.argv[1:]
if milliseconds == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), signal.SIGINT))
signal.setitimer(signal.ITIMER_PROF, 0.02 if milliseconds == "ignored" else float(milliseconds) / 1000)
sys.exit(main())
"""
"""The command, interrupted after it computed for so many milliseconds, however busy the machine is."""
DEMO = str(REPOSITORY / "models" / "demo" / "demo-f16.gguf")
COMMANDS = {
    "run": ["run", "-p", "Once", "-n", "400", "--no-disk-cache", "--threads", "1"],
    "chat": ["chat", "--no-disk-cache", "--threads", "1"],
    "show": ["show", DEMO],
    "tokenize": ["tokenize", "Hi"],
    "serve": ["serve", "--port", "0", "--no-disk-cache", "--threads", "1"],
    "cache": ["cache"],
    "sessions": ["sessions"],
    "bench": ["bench", DEMO, "--threads", "1"],
    "compare": ["compare", DEMO, DEMO],
    "perplexity": ["perplexity", DEMO],
    "embed": ["embed", DEMO, "Hi"],
    "rerank": ["rerank", DEMO, "Hi", "one"],
    "quantize": ["quantize", DEMO, "/dev/null/never"],
    "completion": ["completion", "bash"],
    "welcome": [],
    "--help": ["--help"],
}
DELAYS = [1, 5, 20, 45, 90, 140, 200, 280, 380]
"""From the interpreter's own start to the last tokens."""


def interrupt(words: list[str], milliseconds: float | str) -> tuple[int, str]:
    """Exit code and errors of a command."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(milliseconds), *words],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stderr


def check(words: list[str], milliseconds: float) -> None:
    code, errors = interrupt(words, milliseconds)
    assert "Traceback" not in errors and "Exception ignored" not in errors, f"after {milliseconds} ms: {errors}"
    # Some have done their work by then, this quantization is refused, and an interpreter that ends hears no alarm.
    assert code in (-signal.SIGINT, 130, 0, 2, -signal.SIGPROF), f"after {milliseconds} ms: {errors}"


@pytest.mark.parametrize("milliseconds", DELAYS)
def test_run_ends_in_silence_at_every_moment_of_its_start(milliseconds: float) -> None:
    check(COMMANDS["run"], milliseconds)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_in_silence(command: str) -> None:
    """In what is its own: all begin as `run` does, and none is done by then."""
    check(COMMANDS[command], 150)


def test_the_first_moments_end_a_command_by_the_signal_itself() -> None:
    assert interrupt(COMMANDS["run"], 1) == (-signal.SIGINT, "")


def test_a_command_that_was_told_to_ignore_it_goes_on() -> None:
    """As a shell's `&` tells commands in scripts."""
    assert interrupt(["tokenize", "--ids", "Hi"], "ignored") == (0, "")


def test_tests_hear_signals_however_they_were_started(tmp_path: Path) -> None:
    """In the background of a script, or by nohup."""
    start = "import os, signal, sys; [signal.signal(number, signal.SIG_IGN) for number in (1, 2, 3)]; "
    wanted = f"{__file__}::{test_the_first_moments_end_a_command_by_the_signal_itself.__name__}"
    # In a folder of its own: pytest removes what earlier runs left where all of them write.
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    words += [wanted, f"{__file__}::{test_children_hear_signals.__name__}"]
    done = subprocess.run(
        [sys.executable, "-c", f"{start}os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *words],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_children_hear_signals(number: signal.Signals) -> None:
    code = f"import signal; print(int(signal.getsignal({int(number)}) == signal.SIG_IGN))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(15), check=True)
    assert done.stdout == "0\n"
