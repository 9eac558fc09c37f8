"""What a model costs the program it runs in: processor time when idle and beside other work, and memory after loads.

    python -m tests.bench.bench_host_program [--model MODEL] [--loads 20]

Linux only: processor time is of this process, memory is what is resident.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import localinfer
from localinfer.llm import LLM

_IDLE_SECONDS = 2.0
_HOST = """
import time
began = time.perf_counter()
while time.perf_counter() - began < 4:
    pass
print(time.process_time() / 4)
"""
_PROMPT = "Once upon a time there was a little dog who lived in a big house. " * 4


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def idle_percent() -> float:
    """Processor time of this process while nothing is asked of it, in percent of one processor."""
    time.sleep(0.1)
    before, began = time.process_time(), time.perf_counter()
    time.sleep(_IDLE_SECONDS)
    return 100 * (time.process_time() - before) / (time.perf_counter() - began)


def tokens_per_second(llm: LLM, count: int = 200) -> tuple[float, float]:
    """Tokens per second of a text, and processors' worth of time meanwhile."""
    before, began = time.process_time(), time.perf_counter()
    found = llm.complete(_PROMPT, max_tokens=count, ignore_eos=True, seed=1)
    seconds = time.perf_counter() - began
    return len(found.token_ids) / seconds, (time.process_time() - before) / seconds


def beside_a_busy_host(llm: LLM) -> tuple[float, float]:
    """What a host's processes on every processor get, and tokens per second of a model beside them."""
    code = (
        "import time\nt = time.perf_counter()\nwhile time.perf_counter() - t < 4: pass\nprint(time.process_time() / 4)"
    )
    hosts = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
    is_over, count = threading.Event(), 0

    def generate() -> None:
        nonlocal count
        while not is_over.is_set():
            for _ in llm.stream(_PROMPT, max_tokens=200, ignore_eos=True, seed=1):
                count += 1
                if is_over.is_set():
                    break

    reader = threading.Thread(target=generate)
    reader.start()
    shares = [float(host.communicate()[0]) for host in hosts]
    is_over.set()
    reader.join()
    return sum(shares) / len(shares), count / 4


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model")
    arguments.add_argument("--loads", type=int, default=20)
    given = arguments.parse_args()
    options: dict[str, Any] = {"model": given.model, "device": "cpu", "speculation": None}
    with localinfer.load(**options) as llm:
        llm.complete(_PROMPT, max_tokens=4)
        for priority in ("normal", "background"):
            llm.set_priority(priority)
            speed, processors = tokens_per_second(llm)
            print(
                f"{priority:12}{speed:8.1f} tokens/s on {processors:.2f} processors, {idle_percent():.2f} % when idle"
            )
        for threads in (1, None):
            llm.set_threads(threads)
            print(f"threads {threads!s:6}{tokens_per_second(llm)[0]:8.1f} tokens/s in the background")
        for priority in ("normal", "background"):
            llm.set_priority(priority)
            share, speed = beside_a_busy_host(llm)
            print(f"{priority:12}{speed:8.1f} tokens/s beside busy programs, which get {100 * share:.0f} % each")
    sizes = []
    for _ in range(given.loads + 1):
        with localinfer.load(**options) as llm:
            llm.complete(_PROMPT, max_tokens=20)
        sizes.append(resident_mb())
    print(f"resident after 1 load {sizes[0]:.1f} MB, after {given.loads} more {sizes[-1]:.1f} MB")
    threads = [thread.name for thread in threading.enumerate()]
    print(f"threads {threads}, open files {len(os.listdir('/proc/self/fd'))}")


if __name__ == "__main__":
    main()
