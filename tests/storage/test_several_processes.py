"""The disk tier between processes: two that write one folder, and one that is killed while it writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.subprocesses import environment, finish
from tests.storage.disk_pages import computed, files, numbered, restored, tier
from tests.support.limits import wait_until
from tests.support.warm_python import WarmPython

_RACE = """
import sys
from pathlib import Path
import numpy as np
from tests.storage.disk_pages import computed, fresh, numbered, source, tier
disk = tier(Path(sys.argv[1]), max_bytes={max_bytes})
generator = np.random.default_rng({seed})
wrong = 0
for _ in range(60):
    length = int(generator.integers(1, 60))
    history = numbered(length) if generator.random() < 0.5 else numbered(length, int(generator.integers(3)) * 100)
    pages = computed(history)
    assert disk.save(history, source(history)).failure is None
    found = disk.find(history)
    read = fresh(len(found.pages))
    num_tokens = disk.restore(found, read).num_tokens
    whole = num_tokens // 4
    wrong += read[:whole] != pages[:whole]
print(wrong, sum(disk.counters.rejected.values()))
"""

_WRITER = """
import sys
from pathlib import Path
from tests.storage.disk_pages import numbered, source, tier
disk = tier(Path(sys.argv[1]), max_bytes=1 << 30)
print("ready", flush=True)
for start in range(0, 10**9, 1000):
    disk.save(numbered(200, start), source(numbered(200, start)))
"""


def launch(code: str, folder: Path) -> subprocess.Popen[str]:
    return WarmPython(
        [sys.executable, "-c", code, str(folder)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("max_bytes", [1 << 20, 40 * 320])
def test_processes_that_write_one_folder_never_read_wrong_bytes(tmp_path: Path, max_bytes: int):
    processes = [launch(_RACE.format(seed=seed, max_bytes=max_bytes), tmp_path) for seed in range(3)]
    assert [finish(process)[0] for process in processes] == ["0 0"] * 3
    assert not list(tmp_path.rglob("*.tmp"))


def test_killed_writer_leaves_only_whole_pages(tmp_path: Path):
    process = launch(_WRITER, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert wait_until(lambda: len(files(tmp_path)) >= 120, 60)
    process.kill()
    process.communicate()
    assert process.returncode != 0
    disk = tier(tmp_path)
    num_tokens, pages = restored(disk, numbered(200))
    assert num_tokens == 200 and pages == computed(numbered(200))
    assert not disk.counters.rejected
    for path in tmp_path.rglob("*.page"):
        assert path.stat().st_size == disk.form.file_bytes
