"""Play a coding agent's day, eight hours of a turn a minute, against a server that compacts, and audit every prompt.

`python -m tests.bench.bench_agent_day [--turns 480] [--tasks 1] [--restarts 3] [--context 16384] [--seed 1]`, from
the repository's root. The agent sends its whole history each time: tool results, questions, edits of the last question,
interruptions, titles that it reads in between, and the server is restarted three times. The model is a random llama
whose replies are given (`tests/apps/server/agent_models.py`); all kernels run, with a prompt cache on disk.

Of each prompt, those for summaries included, the tokens that any former text began with are counted. Where fewer came
from the cache, the answer has to name a reason, or the turn is printed as a fault and the exit status is 1. Memory is
that of the process, without what it could give back and the audited texts, after a quarter of the turns and at the end.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "apps" / "server"))

from agent_models import given_replies, load_agent_model, write_agent_model
from local_servers import serving

from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.engine.cache.block_hashes import common_length
from localinfer.generation.compaction import SUMMARY_REQUEST
from localinfer.llm import LLM
from localinfer.storage.response_store import ResponseStoreOptions
from tests.support.inside import engine_of

WORDS = "the file has a line where the value of the index is read before it was set and the test fails for that".split()
SYSTEM = "You are an agent that edits files. " + "Follow the rules of the project, and run its tests. " * 40
TOOL_NAMES = ("read_file", "run", "edit")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Use it to " + "look at the project. " * 8,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in TOOL_NAMES
]
SLACK = 33
"""Tokens that may be computed again without a word: the last of a text is sampled, and not computed; and a page's."""


class Audit:
    """Compares each prompt with all texts before it."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.streams: list[Any] = []
        self.reasons: Counter[str] = Counter()
        self.computed = self.prompt_tokens = self.again = self.explained = 0
        self.faults: list[str] = []

    def watch(self, llm: LLM) -> None:
        """Note the streams that a model opens."""
        stream_chat = llm.stream_chat

        def noted(messages: Any, **options: Any) -> Any:
            stream = stream_chat(messages, **options)
            self.streams.append(stream)
            return stream

        llm.stream_chat = noted  # type: ignore[method-assign]

    def settle(self, turn: int) -> None:
        """Judge the streams since the last call."""
        for stream in self.streams:
            stats, ids = stream.stats, np.asarray(stream.token_ids)
            num_computed = stream.computed_tokens
            if not num_computed:
                continue
            known = max((common_length(ids[: stats.prompt_tokens], text) for text in self.texts), default=0)
            self.prompt_tokens += stats.prompt_tokens
            self.computed += stats.prompt_tokens - stats.cached_tokens
            missed = known - stats.cached_tokens
            if missed > SLACK:
                if stats.cache_miss_summary is None:
                    self.faults.append(f"turn {turn}: {missed} of {known} tokens again, and no reason")
                self.again += missed
                self.reasons["".join(c for c in str(stats.cache_miss_summary) if not c.isdigit())] += missed
            text = ids[: min(num_computed, ids.size)]
            # What a longer text begins with is known by it.
            self.texts = [one for one in self.texts if common_length(one, text) < one.size]
            self.texts.append(text)
        self.streams.clear()

    @property
    def num_bytes(self) -> int:
        """Memory of the texts."""
        return sum(one.nbytes for one in self.texts)


class Agent:
    """The agent: its history, and the replies that the model is to give."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.messages: list[dict[str, Any]] = []
        self.compactions: list[dict[str, int]] = []
        self.num_calls = 0

    def begin(self) -> None:
        """Begin another conversation."""
        self.messages = [{"role": "system", "content": SYSTEM}]

    def text(self, least: int, most: int) -> str:
        """Some words."""
        return " ".join(self.random.choice(WORDS) for _ in range(self.random.randint(least, most)))

    def reply(self, messages: Sequence[Mapping[str, Any]], _: Mapping[str, Any]) -> dict[str, Any]:
        """The reply of the model: a summary where one is asked for, a call most of the time, or words."""
        last = messages[-1]["content"]
        if SUMMARY_REQUEST in (last if isinstance(last, str) else ""):
            return {"content": f"Summary: {self.text(60, 200)}"}
        if messages[0]["content"] != SYSTEM or self.random.random() < 0.2:
            return {"content": self.text(5, 60)}
        self.num_calls += 1
        arguments = json.dumps({"path": f"src/{self.random.randint(1, 99)}.py"})
        call = {"id": f"call{self.num_calls}", "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": self.random.choice(TOOL_NAMES), "arguments": arguments}}]}

    def ask(self, client: httpx.Client, messages: list[dict[str, Any]], *, leaves: bool = False) -> dict[str, Any]:
        """Send messages, and return the reply; leaves: after its first part."""
        tools = {"tools": TOOLS} if messages[0]["content"] == SYSTEM else {}
        body = {"messages": messages, "temperature": 0, "max_tokens": 300, **tools, "stream": leaves}
        if leaves:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines(), None)
            return {}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        if usage.get("compaction", {}).get("completion_tokens"):
            self.compactions.append(usage["compaction"])
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    def turn(self, client: httpx.Client) -> str:
        """Play one turn, and return its kind."""
        drawn = self.random.random()
        if self.messages[-1].get("tool_calls"):
            for call in self.messages[-1]["tool_calls"]:
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.text(50, 700)})
            kind = "result"
        else:
            self.messages.append({"role": "user", "content": self.text(10, 80)})
            kind = "question"
        if drawn < 0.06:
            self.ask(
                client, [{"role": "system", "content": "Give a title."}, {"role": "user", "content": self.text(5, 40)}]
            )
            kind = "title between"
        elif drawn < 0.12:
            self.ask(client, self.messages, leaves=True)
            kind = "interrupted"
        elif drawn < 0.17 and kind == "question" and len(self.messages) > 4:
            self.ask(client, self.messages)
            self.messages[-1] = {"role": "user", "content": self.text(10, 80)}
            kind = "edited"
        reply = self.ask(client, self.messages)
        kept = {name: reply[name] for name in ("content", "tool_calls") if reply.get(name)}
        self.messages.append({"role": "assistant", "content": "", **kept})
        return kind


def trim() -> None:
    """Give memory that nothing holds back to the system, as far as the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=480)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=1, help="conversations, one after the other")
    parser.add_argument("--kv-memory", type=int, default=16 << 20)
    arguments = parser.parse_args()
    agent, audit, kinds = Agent(arguments.seed), Audit(), Counter[str]()
    process, memory = psutil.Process(), {}
    with tempfile.TemporaryDirectory() as folder, given_replies():
        path = write_agent_model(Path(folder) / "day.gguf", layers=arguments.layers, heads=arguments.heads)
        source = ModelSource("day", path, 1_700_000_000)
        loaded: list[LLM] = []

        def load(source: ModelSource) -> LLM:
            llm = load_agent_model(
                source.path,
                agent.reply,
                threads=1,
                speculation=None,
                context_length=arguments.context,
                kv_memory=arguments.kv_memory,
                disk_cache=True,
                disk_cache_folder=Path(folder) / "cache",
            )
            audit.watch(llm)
            loaded[:] = [llm]
            return llm

        settings = ServerSettings(
            port=0, compacts_chats=True, kept_responses=ResponseStoreOptions(Path(folder) / "responses")
        )
        done, share = 0, arguments.turns // (arguments.restarts + 1)
        for life in range(arguments.restarts + 1):
            last = arguments.turns if life == arguments.restarts else done + share
            with serving(settings, sources=[source], load=load) as running, running.client() as client:
                client.timeout = httpx.Timeout(600)
                while done < last:
                    if done % -(-arguments.turns // arguments.tasks) == 0:
                        agent.begin()
                    kinds[agent.turn(client)] += 1
                    audit.settle(done)
                    done += 1
                    if done % max(1, arguments.turns // 8) == 0:
                        trim()
                        memory[done] = process.memory_info().rss - audit.num_bytes
                        pool = engine_of(loaded[0]).pool
                        used = f"{pool.num_pages - pool.num_free_pages} of {pool.num_pages} pages"
                        print(f"turn {done}: {memory[done] >> 20} MiB, {used}", flush=True)
    print(f"\n{done} turns: {dict(kinds)}; {arguments.restarts} restarts; {len(agent.messages):,} messages at the end")
    print(f"{audit.prompt_tokens:,} tokens of prompts, {audit.computed:,} computed")
    print(f"{audit.again:,} of these were computed before, each with its reason:")
    for reason, count in audit.reasons.most_common():
        print(f"  {count:,}: {reason}")
    written = agent.compactions
    computed = [one["prompt_tokens"] - one["cached_tokens"] for one in written]
    print(f"{len(written)} compactions of {sum(one['prompt_tokens'] for one in written):,} tokens computed {computed}")
    first, last = memory[sorted(memory)[1]], memory[sorted(memory)[-1]]
    print(f"memory: {first >> 20} MiB after a quarter, {last >> 20} MiB at the end")
    for fault in audit.faults:
        print(f"FAULT {fault}")
    return 1 if audit.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
