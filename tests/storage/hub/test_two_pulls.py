"""Two processes that pull the same model at once, and one that is killed."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

from localinfer.storage.hub.installed import find_installed, find_model
from localinfer.storage.hub.pull import pull_model, read_reference
from tests.kernels.subprocesses import environment
from tests.storage.hub.conftest import CONTENT, NAME, REPO
from tests.storage.hub.pull_process import PULL
from tests.support.limits import seconds, wait_until
from tests.support.warm_python import WarmPython


def start(folder: Path, endpoint: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PULL, str(folder), endpoint, REPO]
    return WarmPython(command, stdout=subprocess.PIPE, text=True, env=environment())


def test_two_pulls_at_once_download_it_once(hub, places, tmp_path):
    hub.before_bytes = threading.Event()
    with start(tmp_path, hub.endpoint) as first:
        assert hub.asked.wait(seconds(30))
        with start(tmp_path, hub.endpoint) as second:
            waiting = second.stdout.readline()
            hub.before_bytes.set()
            outputs = [process.communicate(timeout=seconds(30))[0] for process in (first, second)]
    assert "is being pulled already; waiting" in waiting
    assert [output.splitlines()[-1] for output in outputs] == [NAME, NAME]
    assert len(hub.downloads) == 1
    assert find_model(NAME, places).read_bytes() == CONTENT


def test_a_killed_pull_is_resumed_and_blocks_nobody(hub, places, tmp_path):
    # The answer stops in the midst, and the connection stays open.
    hub.stall_after = 500_000
    with start(tmp_path, hub.endpoint) as first:
        partial = places.hub_cache / "models--org--Tiny-GGUF" / "blobs"
        assert wait_until(lambda: [one for one in partial.glob("*.incomplete") if one.stat().st_size == 500_000], 30)
        first.send_signal(signal.SIGKILL)
        first.wait(seconds(30))
    hub.stalled.set()
    assert [model.problem for model in find_installed(places) if not model.is_unfinished] == []
    hub.stall_after = None
    pull_model(read_reference(REPO), places)
    assert hub.downloads[1][1] == f"bytes=500000-{len(CONTENT) - 1}"
    assert find_model(NAME, places).read_bytes() == CONTENT
