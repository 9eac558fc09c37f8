"""What a command's log has of a fault: what failed, and where; of everything else one line."""

import subprocess
import sys

CODE = """
import logging
import click
from localinfer.apps.cli.messages import send_messages_to_stderr

send_messages_to_stderr(click.Command("serve"))
logger = logging.getLogger("localinfer.server")
logger.error("a file is\\nmissing")
try:
    raise KeyError("the \\x1b[31mcause")
except KeyError as error:
    logger.error("request req-1 failed: a fault of the server", exc_info=error)
"""


def test_a_fault_is_logged_with_its_traceback_and_without_terminal_controls():
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stderr
    first, second, *rest = told.splitlines()
    assert first == "warning: a file is missing"
    assert second == "warning: request req-1 failed: a fault of the server"
    assert rest[0] == "Traceback (most recent call last):" and rest[-1].startswith("KeyError: ")
    assert "cause" in rest[-1] and "\x1b" not in told
