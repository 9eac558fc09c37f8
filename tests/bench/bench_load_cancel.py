"""How soon `load(cancel=)` ends at every stage, and what it leaves.

    python -m tests.bench.bench_load_cancel MODEL [--loads N] [--draft MODEL] [--disk-cache] [--cold SECONDS]

The second load is timed; N more are cancelled at times spread evenly over as long. With an empty cache (XDG_CACHE_HOME)
and --cold, they are cancelled in those seconds of the first load instead, while kernels compile. For each stage in
which the event was set: how often, and the median and longest time from there to LoadCancelledError. Then what is left:
threads, child processes, files, maps of the model, and memory over that after the first cancelled load.
"""

import argparse
import gc
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

import localinfer
from localinfer.errors import LoadCancelledError


class Canceller:
    """Sets an event after some seconds, and knows the stage it was set in."""

    def __init__(self, seconds: float) -> None:
        self.cancel = threading.Event()
        self.stage, self.stage_at_set, self.set_at = "before the first", "", 0.0
        self._timer = threading.Timer(seconds, self._set)

    def __enter__(self) -> "Canceller":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()

    def _set(self) -> None:
        self.stage_at_set, self.set_at = self.stage, time.perf_counter()
        self.cancel.set()

    def report(self, stage: str, done: int, total: int) -> None:
        self.stage = stage.partition(":")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--loads", type=int, default=40)
    parser.add_argument("--draft")
    parser.add_argument("--disk-cache", action="store_true")
    parser.add_argument("--cold", type=float)
    settings = parser.parse_args()
    options = {"device": "cpu", "draft": settings.draft, "disk_cache": settings.disk_cache}
    process = psutil.Process()
    # Imported now: what that takes is no part of a load.
    load = localinfer.load
    whole = settings.cold
    if whole is None:
        load(settings.model, **options).close()
        began = time.perf_counter()
        load(settings.model, **options).close()
        whole = time.perf_counter() - began
        print(f"a whole load takes {whole:.2f} s")
    seconds: dict[str, list[float]] = defaultdict(list)
    rss = 0
    for number in range(settings.loads):
        with Canceller(whole * (number + 0.5) / settings.loads) as canceller:
            try:
                load(settings.model, **options, progress=canceller.report, cancel=canceller.cancel).close()
            except LoadCancelledError:
                seconds[canceller.stage_at_set].append(time.perf_counter() - canceller.set_at)
        gc.collect()
        rss = rss or process.memory_info().rss
    print(f"{'stage':<42} {'times':>6} {'median':>9} {'longest':>9}")
    for stage, found in seconds.items():
        print(f"{stage:<42} {len(found):>6} {statistics.median(found) * 1e3:>6.0f} ms {max(found) * 1e3:>6.0f} ms")
    name = Path(settings.model).name
    maps = [one.path for one in process.memory_maps() if name in one.path]
    files = [one.path for one in process.open_files() if name in one.path]
    threads = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
    grown = (process.memory_info().rss - rss) / 1e6
    print(f"left: threads {threads}, children {process.children()}, files {files}, maps {maps}, {grown:+.0f} MB")


if __name__ == "__main__":
    main()
