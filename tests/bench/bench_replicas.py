"""Replicas of the demo model behind Ray Serve: `python -m tests.bench.bench_replicas routing kills drains`.

`routing` holds the conversations of `tests.proof.simulation.fleet_workload` with two replicas of one thread each, whose
caches hold twelve of the twenty, once with each way of routing, and prints the figures that the model of fleets
predicts. `kills` kills the replica of a streamed reply after a random number of tokens, and compares what the client
received with an undisturbed run; `drains` removes and adds a replica while replies run. Both end with 1 if a byte or a
request is lost. `choices` needs no Ray: what a choice among replicas takes that all have most of the prompt.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import threading
import time
from contextlib import closing
from typing import Any

from localinfer.apps.bench.figures import Failure, percentile
from localinfer.apps.bench.serve import CHAT_PATH, LoadClient, read_reply
from localinfer.apps.fleet.placement import Placement
from tests.apps.fleet.serve_process import ServeProcess, serving_replicas
from tests.apps.fleet.streams import STORY, streamed
from tests.proof.simulation.fleet_workload import REPLICA_KV_BYTES, Conversation, make_workload

_FIRST_TOKEN, _INTERVAL = 0.5, 0.05
"""The objective of goodput: seconds to the first token, and the mean between two."""
_REPLICAS: dict[str, Any] = {
    "replicas": 2,
    "cpus": 0.9,
    "threads": 1,
    "kv_memory": REPLICA_KV_BYTES,
    "speculation": None,
}


class Conversations:
    """What came of conversations that were held at one time."""

    def __init__(self, port: int, think_scale: float) -> None:
        self._port, self._think_scale = port, think_scale
        self._hits = self._shareable = self._tokens = self._good = 0
        self._first_tokens: list[float] = []
        self._intervals: list[float] = []

    async def hold(self, conversations: tuple[Conversation, ...]) -> dict[str, float]:
        """Hold all of them; returns figures by name."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(self._hold(conversation, began))
        seconds = time.perf_counter() - began
        return {
            "hit_rate": self._hits / self._shareable,
            "ttft_p50": percentile(self._first_tokens, 50),
            "ttft_p99": percentile(self._first_tokens, 99),
            "interval_p50": percentile(self._intervals, 50),
            "interval_p99": percentile(self._intervals, 99),
            "tokens_per_second": self._tokens / seconds,
            "goodput": self._good / seconds,
            "seconds": seconds,
        }

    async def _hold(self, conversation: Conversation, began: float) -> None:
        await asyncio.sleep(began + conversation.start_seconds * self._think_scale - time.perf_counter())
        replies: list[str] = []
        with closing(LoadClient(self._port)) as client:
            for index, turn in enumerate(conversation.turns):
                await asyncio.sleep(turn.think_seconds * self._think_scale)
                answer = await client.request("POST", CHAT_PATH, conversation.request_body(index, replies))
                reply = read_reply(answer, turn.reply_tokens)
                if isinstance(reply, Failure):
                    raise SystemExit(f"conversation {conversation.number}, turn {index}: {reply.reason}")
                replies.append(reply.text)
                self._hits += min(_cached_tokens(answer.body), turn.shareable_tokens)
                self._shareable += turn.shareable_tokens
                self._tokens += reply.num_tokens
                self._first_tokens.append(reply.time_to_first_token_seconds)
                self._intervals += reply.intervals
                mean = sum(reply.intervals) / max(1, len(reply.intervals))
                self._good += reply.time_to_first_token_seconds <= _FIRST_TOKEN and mean <= _INTERVAL


def _cached_tokens(body: bytes) -> int:
    found = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {") and b'"usage":{' in line]
    return int(found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])


def measure_routing(words: argparse.Namespace, cluster: ServeProcess) -> bool:
    """Print the figures of each way of routing; the caches are empty at the start of each."""
    for index, routing in enumerate(words.routings.split(",")):
        router = "tests.apps.fleet.random_router.RandomRouter" if routing == "random" else routing
        former = set(cluster.replicas())
        # Other options of the model, if by a byte, are other replicas.
        cluster.deploy(routing=router, kv_memory=REPLICA_KV_BYTES + index + 1)
        cluster.wait_for(lambda now, former=former: len(now) == 2 and not former & set(now))
        for number in range(4):
            streamed(cluster, {"messages": [{"role": "user", "content": f"Warm {number}."}], "max_tokens": 8})
        held = Conversations(cluster.port, words.think_scale).hold(make_workload(words.seed).conversations)
        figures = asyncio.run(held)
        print(f"{routing}, think times x {words.think_scale:g}:")
        for name, value in figures.items():
            print(f"  {name:>18} {value:10.5g}", flush=True)
    return True


def kill_replicas(words: argparse.Namespace, cluster: ServeProcess) -> bool:
    """Kill replicas in the midst of replies; return whether every client received the bytes of an undisturbed run."""
    numbers = random.Random(words.seed)
    num_same = 0
    for number in range(words.count):
        cluster.wait_for(lambda now: len(now) >= 2)
        body = {"messages": STORY, "seed": number, "temperature": 1.1, "ignore_eos": True, "max_tokens": 400}
        undisturbed = streamed(cluster, body)
        after = numbers.randrange(1, 300)
        began = time.perf_counter()
        is_same = streamed(cluster, body, killed_after=after) == undisturbed
        num_same += is_same
        seconds = time.perf_counter() - began
        verdict = "same" if is_same else "OTHER"
        print(f"{number}: killed after {after} events, {verdict} bytes, {seconds:.1f} s", flush=True)
    print(f"{num_same} of {words.count} replies had the bytes of an undisturbed run")
    return num_same == words.count


def drain_replicas(words: argparse.Namespace, cluster: ServeProcess) -> bool:
    """Remove and add a replica while requests are sent; return whether each had its whole reply."""
    lost: list[str] = []
    num_whole = [0] * 6
    is_over = threading.Event()

    def ask(number: int) -> None:
        while not is_over.is_set():
            body = {"messages": STORY, "seed": number, "ignore_eos": True, "max_tokens": 300}
            found = streamed(cluster, body)
            if found.endswith(b"data: [DONE]\n\n") and found.count(b'"content"') > 200 and b'"error"' not in found:
                num_whole[number] += 1
            else:
                lost.append(found[-300:].decode())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(num_whole))]
    for thread in threads:
        thread.start()
    for number in range(words.count):
        cluster.deploy(replicas=1 + number % 2)
        cluster.wait_for(lambda now, wanted=1 + number % 2: len(now) == wanted)
    is_over.set()
    for thread in threads:
        thread.join()
    print(f"{words.count} changes of the number of replicas, {sum(num_whole)} whole replies, {len(lost)} lost")
    print("\n".join(lost[:3]))
    return not lost and all(num_whole)


def time_choices(seed: int) -> None:
    """Print milliseconds of processor time of a choice, and of noting it, by replicas and blocks; medians of 50."""
    for replicas in (10, 100, 1_000):
        for blocks in (181, 2_699):
            numbers = random.Random(seed)
            placement = Placement(16, seed=seed)
            names = [f"r{number}" for number in range(replicas)]
            placement.set_replicas(names)
            shared = [numbers.getrandbits(64) for _ in range(blocks - 20)]
            prompts = [(*shared, *(numbers.getrandbits(64) for _ in range(20))) for _ in names]
            for name, prompt in zip(names, prompts, strict=True):
                placement.begin(name, prompt, numbers.randrange(4), 0)
            chosen, noted = [], []
            for _ in range(50):
                prompt = numbers.choice(prompts)
                began = time.process_time()
                name = placement.choose(prompt, waits=False)
                chosen.append(time.process_time() - began)
                assert name is not None
                began = time.process_time()
                placement.begin(name, prompt, 1, 0)
                noted.append(time.process_time() - began)
                placement.change(name, -1, 0)
            figures = f"chosen {1e3 * percentile(chosen, 50):.3f} ms, noted {1e3 * percentile(noted, 50):.3f} ms"
            print(f"{replicas:5,} replicas, {blocks:5,} blocks: {figures}", flush=True)


def main() -> None:
    """Measure what the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["choices", "routing", "kills", "drains"])
    parser.add_argument("--replicas", type=int, default=2, help="for kills: with more, fewer are waited for")
    parser.add_argument("--routings", default="prefix,random,balanced")
    parser.add_argument("--think-scale", type=float, default=1.0, help="multiplies times of arrival and thinking")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    words = parser.parse_args()
    measures = {"routing": measure_routing, "kills": kill_replicas, "drains": drain_replicas}
    if "choices" in words.what:
        time_choices(words.seed)
        words.what.remove("choices")
    if not words.what:
        return
    num_cpus = math.ceil(words.replicas * _REPLICAS["cpus"] + 0.1)
    with serving_replicas(num_cpus, **{**_REPLICAS, "replicas": words.replicas}) as cluster:
        is_right = [measures[what](words, cluster) for what in words.what]
    sys.exit(not all(is_right))


if __name__ == "__main__":
    main()
