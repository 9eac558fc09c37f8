"""`localinfer chat` with the demo model in a process of its own, on a terminal whose keys a test types."""

import os
import re
import select
import signal
import sys
import time
from pathlib import Path

from tests.kernels.subprocesses import environment
from tests.support.limits import seconds
from tests.support.warm_python import WarmPython

GIVING_UP_SECONDS = 20.0
READY = r"\x1b\[\?2004h"
"""What the chat draws when it begins to read keys."""
CACHED = r"prompt (\d+) tokens,\s+(\d+) of them\s+cached"
"""What it says after a reply that was saved."""


class ChatEndedError(AssertionError):
    """The chat ended before it showed what was waited for."""


class ChatCommand:
    """`localinfer chat` with the demo model in a process of its own, on a terminal of ours."""

    def __init__(self, folder: Path, *words: str) -> None:
        import pty

        self.screen = ""
        self._master, slave = pty.openpty()
        shown = environment(TERM="xterm", NO_COLOR="1", PROMPT_TOOLKIT_NO_CPR="1", XDG_STATE_HOME=str(folder / "state"))
        fixed = ["--threads", "1", "-n", "40", "--seed", "1", "--disk-cache-folder", str(folder / "cache"), "--stats"]
        self.process = WarmPython(
            [sys.executable, "-m", "localinfer", "chat", *fixed, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=shown,
        )
        os.close(slave)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, pattern: str, start: int = 0) -> re.Match[str]:
        """Read until the pattern stands in what was drawn, from a place on. Raises: AssertionError with the screen."""
        deadline = time.monotonic() + seconds(GIVING_UP_SECONDS)
        while (found := re.compile(pattern).search(self.screen, start)) is None:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} never came:\n{self.screen}"
            try:
                received = os.read(self._master, 1 << 16)
            except OSError:
                received = b""
            if not received:
                raise ChatEndedError(f"the chat ended before {pattern!r}:\n{self.screen}")
            self.screen += received.decode(errors="replace")
        return found

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
