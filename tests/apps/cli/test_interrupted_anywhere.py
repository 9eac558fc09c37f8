"""Ctrl-C at sampled calls of whole commands: whatever function it comes in, the command ends, and in silence."""

import signal
import subprocess
import sys
from random import Random

import pytest

from localinfer.models import demo
from tests.kernels.subprocesses import environment
from tests.support.limits import seconds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to a whole console")

INTERRUPTED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background leaves it ignored
from localinfer.apps import cli
from localinfer.__main__ import main
left, *sys.argv[1:] = sys.argv[1:]
left = int(left)
swallows = left % 2

def count(frame, event, argument):
    global left
    left -= event == "call"
    if left > 0:
        return
    sys.setprofile(None)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        if not swallows:
            raise

run = cli.main
def counted(**options):
    # From here on Python code answers it; before, the system does.
    sys.setprofile(count)
    code = run(**options)
    sys.setprofile(None)
    return code
cli.main = counted
sys.exit(main())
"""
"""The command, interrupted at its n-th call of a function in the main thread; an odd one swallows the exception."""
DEMO = str(demo.__path__[0] + "/demo-f16.gguf")
COMMANDS = {
    "run": (["run", "-p", "Once", "-n", "9", "--no-disk-cache", "--threads", "1"], 150_000),
    "chat": (["chat", "-p", "Once", "-n", "9", "--no-disk-cache", "--threads", "1"], 150_000),
    "show": (["show", DEMO], 60_000),
    "perplexity": (["perplexity", DEMO, "--threads", "1", "--chunks", "1"], 150_000),
    "serve": (["serve", "--port", "0", "--no-socket", "--no-disk-cache", "--threads", "1"], 120_000),
}
"""Words, and fewer calls than each makes until it is done or waits."""
SAMPLES = [
    (name, round(random.uniform(1, most) if random.random() < 0.7 else random.uniform(1, most / 20)))
    for random in [Random(17)]
    for name, (_, most) in COMMANDS.items()
    for _ in range(2)
]


@pytest.mark.parametrize(("name", "call"), SAMPLES)
def test_a_command_ends_in_silence_at_every_call(name: str, call: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(call), *COMMANDS[name][0]],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds(20),
        check=False,
    )
    assert done.returncode in (130, -signal.SIGINT) or (name == "serve" and done.returncode == 0), done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr and "error" not in done.stderr
