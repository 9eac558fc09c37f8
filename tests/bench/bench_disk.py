"""Time what a conversation on disk costs: saving and restoring beside a plain copy, and the first token of a restart.

`python -m tests.bench.bench_disk MODEL [--context 3000] [--new 40]`, from the repository's root. Files are written to a
temporary folder and stay in the system's file cache, so what is measured is the program and the memory, not the disk.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import localinfer
from localinfer.llm import LLM
from localinfer.storage.page_store import DiskTier
from localinfer.storage.prompt_cache import DiskCache
from localinfer.system.files import num_io_threads
from tests.bench.conversation_options import conversation_parser

NEVER = 1e9


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def load(model: str, folder: Path) -> tuple[LLM, DiskCache]:
    """A model over a folder, which writes only when it is told to."""
    llm = localinfer.load(model, disk_cache=True, disk_cache_folder=folder)
    disk = llm._disk
    assert disk is not None
    disk._behind.idle_seconds = NEVER
    disk._opener.join()
    return llm, disk


def first_token_seconds(llm: LLM, prompt: list[int], cached_tokens: int) -> float:
    stats = llm.complete(prompt, max_tokens=2, temperature=0, ignore_eos=True).stats
    assert stats.cached_tokens == cached_tokens, f"{stats.cached_tokens} tokens were cached: {stats.cache_miss}"
    return stats.time_to_first_token_seconds


def measure(model: str, context: int, new: int, repetitions: int, folder: Path) -> None:
    chooser = np.random.default_rng(0)
    llm, disk = load(model, folder)
    disk._identity.compute(threads=num_io_threads())
    ids = chooser.integers(10, llm.vocab_size, context).tolist()
    messages = [ids + chooser.integers(10, llm.vocab_size, new).tolist() for _ in range(2 * repetitions + 2)]
    llm.complete(ids[:64], max_tokens=4, ignore_eos=True)
    cold = llm.complete([*ids, 5], max_tokens=1, temperature=0, ignore_eos=True).stats.time_to_first_token_seconds
    llm.save_session(folder / "session", ids)
    num_bytes = (folder / "session").stat().st_size
    warm = [first_token_seconds(llm, message, context) for message in messages[: repetitions + 1]][1:]

    times: dict[str, list[float]] = {name: [] for name in ("copy", "save", "save session", "restore", "load session")}
    disk.flush()
    tier = disk._tiers.pages
    assert tier is not None
    for _ in range(repetitions):
        for path in tier.folder.rglob("*.page"):
            path.unlink()
        (folder / "session").rename(folder / "original")
        times["copy"].append(seconds(lambda: shutil.copyfile(folder / "original", folder / "copy")))
        (folder / "copy").unlink()
        disk.on_idle(np.array(ids, np.int32))
        times["save"].append(seconds(disk.flush))
        times["save session"].append(seconds(lambda: llm.save_session(folder / "session", ids)))
        (folder / "original").unlink()
        times["restore"].append(seconds(lambda: restore(tier, ids)))
    llm.close()

    restarted = []
    for message in messages[repetitions + 1 :]:
        llm, disk = load(model, folder)
        restarted.append(first_token_seconds(llm, message, context))
        llm.clear_cache()
        times["load session"].append(seconds(lambda llm=llm: llm.load_session(folder / "session")))
        disk._behind._pending.clear()
        llm.close()
    report(times, num_bytes)
    read, turn, restart = (statistics.median(values) for values in (times["restore"], warm, restarted[1:]))
    print(
        f"first token of {new} new tokens after {context}: cold {cold:.3f} s, warm {turn:.4f} s, "
        f"restart {restart:.4f} s"
    )
    print(f"restart / (warm + restore) {100 * restart / (turn + read):.0f} %")


def restore(tier: DiskTier, ids: list[int]) -> None:
    """Find and read pages into memory that was never used, as a restart does."""
    found = tier.find(np.array(ids, np.int32))
    pages = np.zeros((len(found.pages), tier.form.page_bytes), np.uint8)
    assert tier.restore(found, [memoryview(page) for page in pages]).num_tokens == len(ids)


def report(times: dict[str, list[float]], num_bytes: int) -> None:
    plain = statistics.median(times["copy"])
    print(f"{num_bytes / 1e6:.1f} MB")
    for name, values in times.items():
        middle = statistics.median(values)
        rate = num_bytes / middle / 1e9
        print(f"{name:13s} {1e3 * middle:7.1f} ms  {rate:.2f} GB/s  {plain / middle:.2f} x the copy's rate")


if __name__ == "__main__":
    options = conversation_parser(__doc__, "tokens of the conversation", 5).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(options.model, options.context, options.new, options.repetitions, Path(temporary))
