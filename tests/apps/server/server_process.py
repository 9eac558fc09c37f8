"""`localinfer serve` in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.limits import seconds
from tests.support.warm_python import WarmPython


@contextmanager
def serve(
    folder: Path, *options: str, script: str | None = None, **environment: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run `localinfer serve`; yield the process and its address by TCP.

    script: Python that runs the command line, in place of the command. environment: variables beside the present.
    """
    words = ["serve", "--port", "0", "--socket", str(folder / "s.sock"), "--threads", "1", "--idle-unload", "0"]
    words += ["--disk-cache-folder", str(folder), *options]
    process = WarmPython(
        [sys.executable, *(["-m", "localinfer"] if script is None else ["-c", script]), *words],
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stderr.read()
        yield process, found[0]
    finally:
        process.kill()
        process.wait(seconds(10))
        process.stderr.close()
