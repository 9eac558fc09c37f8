"""Prefill in a process of its own, against the mixed scheduler on the same two cores.

Short chats run all the time, each reply followed by the next; long prompts arrive at fixed times. What the chats feel
of them is the inter-token latency while one is in flight. `python -m tests.bench.bench_roles MODEL`; Linux only.

The variants share two cores: `mixed` is one server with both; `apart` a decode server on the first and a prefill
server on the second; `apart-nice` a decode server on both, and a prefill server on the second with a nice value. They
take turns. `--threshold` measures from which length on it pays to hand a prompt over where nothing else runs.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VARIANTS = ("mixed", "apart", "apart-nice")
_EVENT = b"data: "


@dataclass
class Reply:
    """A reply as its client saw it: when it was asked for, and when each of its tokens came."""

    asked: float
    tokens: list[float] = field(default_factory=list)
    is_long: bool = False

    @property
    def first(self) -> float:
        return self.tokens[0] - self.asked

    @property
    def interval(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


@contextmanager
def serving(model: str, folder: Path, cores: Sequence[int], *options: str, nice: int = 0) -> Iterator[int]:
    """`localinfer serve` on some cores; yields its port."""
    words = [sys.executable, "-m", "localinfer", "serve", "-m", model, "--port", "0", "--no-socket", "--no-page"]
    words += ["--disk-cache-folder", str(folder), "--no-store", "--speculation", "off", "--no-config", *options]

    def place() -> None:
        os.sched_setaffinity(0, cores)
        os.nice(nice)

    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=place)
    try:
        assert process.stdout is not None and process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server did not start"
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
        process.stdout.readline()
        yield int(found[1])
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def variant(name: str, args: argparse.Namespace, folder: Path) -> Iterator[int]:
    """The servers of a variant; yields the port that clients ask."""
    first, second = args.cores
    common = ["--context-length", str(args.tokens + 600)]
    with ExitStack() as stack:
        if name == "mixed":
            yield stack.enter_context(serving(args.model, folder, args.cores, "--threads", "2", *common))
            return
        is_apart = name == "apart"
        nice = 0 if is_apart else args.nice
        prefill = serving(args.model, folder, [second], "--threads", "1", "--role", "prefill", *common, nice=nice)
        url = f"http://127.0.0.1:{stack.enter_context(prefill)}"
        more = ["--role", "decode", "--prefill-server", url, "--prefill-deadline", "600", *common]
        if args.handover_all:
            more += ["--prefill-threshold", "1"]
        threads = ["--threads", "1" if is_apart else "2"]
        yield stack.enter_context(serving(args.model, folder, [first] if is_apart else args.cores, *threads, *more))


async def complete(port: int, prompt: Sequence[int], max_tokens: int, is_long: bool = False) -> Reply:
    """Stream a completion, and note when its events come; they are not parsed."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    reply = Reply(time.perf_counter(), is_long=is_long)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + content)
    received = b""
    while data := await reader.read(1 << 16):
        reply.tokens += [time.perf_counter()] * data.count(_EVENT)
        received = (received + data)[-4096:]
    writer.close()
    assert b"[DONE]" in received, received.decode(errors="replace")
    assert f'"predicted_n":{max_tokens}'.encode() in received, received.decode(errors="replace")
    # The last event is [DONE]; before it comes the one with the reason. A token that ends inside a character has none.
    del reply.tokens[-2:]
    return reply


async def workload(port: int, args: argparse.Namespace, seed: int) -> tuple[list[Reply], list[Reply]]:
    """Chats all the time, and long prompts at fixed times; returns the replies of both."""
    rng = np.random.default_rng(seed)
    short: list[Reply] = []
    is_over = asyncio.Event()

    def ids(count: int) -> list[int]:
        return [int(number) for number in rng.integers(100, args.vocab, count)]

    async def chat() -> None:
        while not is_over.is_set():
            short.append(await complete(port, ids(args.chat_tokens), args.reply_tokens))

    await complete(port, ids(args.chat_tokens), 4)
    chats = [asyncio.create_task(chat()) for _ in range(args.streams)]
    await asyncio.sleep(args.baseline)
    began = time.perf_counter()

    async def arrive(number: int) -> Reply:
        await asyncio.sleep(began + number * args.every - time.perf_counter())
        return await complete(port, ids(args.tokens), 16, is_long=True)

    arriving = [asyncio.create_task(arrive(number)) for number in range(args.prompts)]
    await asyncio.wait(arriving, timeout=args.give_up)
    is_over.set()
    long = [task.result() if task.done() else Reply(began, is_long=True) for task in arriving]
    for task in arriving:
        task.cancel()
    await asyncio.gather(*chats)
    return short, long


def figures(short: Sequence[Reply], long: Sequence[Reply], args: argparse.Namespace) -> dict[str, Any]:
    """What a run was like; times in milliseconds."""
    last = max(reply.tokens[-1] for reply in short)
    # Of a prompt that was given up no token came.
    flights = [(reply.asked, reply.tokens[0] if reply.tokens else last) for reply in long]
    during: list[float] = []
    before: list[float] = []
    for reply in short:
        for one, next_one in zip(reply.tokens, reply.tokens[1:], strict=False):
            is_during = any(next_one > start and one < end for start, end in flights)
            (during if is_during else before).append(1e3 * (next_one - one))
    begin, end = flights[0][0], max(end for _, end in flights)
    finished = [reply for reply in (*short, *long) if reply.tokens]
    whole = [reply for reply in finished if reply.tokens[-1] >= begin and reply.asked <= end]
    goodput = {}
    for objective in args.objectives:
        good = [
            reply
            for reply in whole
            if reply.first <= (args.long_ttft if reply.is_long else args.short_ttft)
            and 1e3 * reply.interval <= objective
        ]
        goodput[f"{objective:g}"] = round(len(good) / (end - begin), 3)
    meanwhile = [1e3 * reply.first for reply in whole if not reply.is_long]
    return {
        "itl_p50_ms": percentile(during, 50),
        "itl_p99_ms": percentile(during, 99),
        "itl_max_ms": percentile(during, 100),
        "intervals": len(during),
        "quiet_itl_p50_ms": percentile(before, 50),
        "quiet_itl_p99_ms": percentile(before, 99),
        "long_ttft_s": [round(reply.first, 2) if reply.tokens else None for reply in long],
        "short_ttft_p50_ms": percentile(meanwhile, 50),
        "short_ttft_p99_ms": percentile(meanwhile, 99),
        "tokens_per_s": round(sum(len(reply.tokens) for reply in whole) / (end - begin), 1),
        "goodput_per_s_by_itl_objective_ms": goodput,
    }


def percentile(values: Sequence[float], which: float) -> float:
    return round(float(np.percentile(values, which)), 1) if values else float("nan")


def measure_threshold(args: argparse.Namespace) -> dict[str, Any]:
    """The first token of prompts by length, handed over and computed by the decode server, where nothing else runs."""
    found: dict[str, Any] = {}
    args.handover_all = True
    for name in ("apart", "mixed"):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder, variant(name, args, Path(folder)) as port:

            async def ask() -> dict[int, float]:
                rng = np.random.default_rng(1)
                times: dict[int, float] = {}
                for length in (32, 64, 128, 256, 512, 1024, 2048):
                    firsts = []
                    for _ in range(args.repetitions):
                        prompt = [int(number) for number in rng.integers(100, args.vocab, length)]
                        firsts.append(1e3 * (await complete(port, prompt, 1)).first)
                    times[length] = round(float(np.median(firsts)), 1)
                return times

            found[name] = asyncio.run(ask())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["mixed", "apart"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two long prompts")
    parser.add_argument("--baseline", type=float, default=4.0, help="seconds before the first")
    parser.add_argument("--give-up", type=float, help="seconds for the long prompts of a run; none: their time")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--chat-tokens", type=int, default=48)
    parser.add_argument("--reply-tokens", type=int, default=64)
    parser.add_argument("--short-ttft", type=float, default=1.0, help="objective in seconds")
    parser.add_argument("--long-ttft", type=float, default=60.0)
    parser.add_argument("--objectives", type=lambda text: [float(one) for one in text.split(",")], default=[25, 50])
    parser.add_argument("--vocab", type=int, default=30000, help="ids of prompts are below it")
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--cores", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1])
    parser.add_argument("--folder", help="of page files; a folder of tmpfs keeps the disk out of it")
    parser.add_argument("--threshold", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    args.handover_all = False
    if args.threshold:
        print(json.dumps(measure_threshold(args)))
        return
    for number in range(args.rounds):
        for name in args.variants:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder, variant(name, args, Path(folder)) as port:
                short, long = asyncio.run(workload(port, args, number))
            print(json.dumps({"variant": name, "round": number, **figures(short, long, args)}), flush=True)


if __name__ == "__main__":
    main()
