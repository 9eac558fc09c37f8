"""Time the first token of each turn of an agent's conversation, beside a lone new message.

`python -m tests.bench.bench_agents [--session continue] [--turns 10] [--layers 4] [--heads 32] [--threads N]
[--volatile [--move]]`, from the repository's root. System message and tools are those of a recorded session; every turn
adds a message of the same length. The model has random weights: 32 heads of 64 make it as wide as 1.1 billion
parameters do. Everything goes through the server, streamed; seconds go from the request to the first event with text.

lone message: one as long as a chat of its own, and as the first of another chat with the same head. Every token of a
turn also attends to all before it, which costs context / (6 x width) of what the weights cost at least; "bound" is the
lone message's time with that part added. `--volatile` puts a line with the turn's number first, `--move` moves it as
`serve --move-volatile-head` does.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "apps" / "server"))

from agent_models import write_agent_model
from agent_sessions import read_session
from local_servers import serving

import localinfer
from localinfer.apps.cli.serve_options import AgentOptions
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM
from localinfer.models.load.threads import available_threads

HEAD_SIZE = 64
REPLY_TOKENS = 8
LATEST = 5


@contextmanager
def server(folder: Path, arguments: argparse.Namespace) -> Iterator[httpx.Client]:
    path = write_agent_model(
        folder / "agent-bench.gguf", layers=arguments.layers, heads=arguments.heads, head_size=HEAD_SIZE
    )

    def load(source: ModelSource) -> LLM:
        llm = localinfer.load(source.path, threads=arguments.threads, speculation=None, kv_memory=4 << 30)
        return AgentOptions(move_volatile_head=arguments.move).prepared(llm)

    source = ModelSource("agent-bench", path, 1_700_000_000)
    settings = ServerSettings(port=0)
    with serving(settings, sources=[source], load=load) as running, running.client() as client:
        client.timeout = httpx.Timeout(600)
        yield client


def ask(client: httpx.Client, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[float, dict[str, Any], str]:
    """Seconds to the first event with text, the timings of the whole reply, and its text."""
    more = {"tools": tools} if tools else {}
    body = {"messages": messages, "stream": True, "temperature": 0, "max_tokens": REPLY_TOKENS, **more}
    first, timings, text, began = 0.0, {}, "", time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if text and not first:
                first = time.perf_counter() - began
            timings = chunk.get("timings") or timings
    return first, timings, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", default="continue")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--volatile", action="store_true")
    parser.add_argument("--move", action="store_true")
    arguments = parser.parse_args()
    request = next(one for one in read_session(arguments.session) if one.tool_names and "messages" in one.body)
    system, tools = request.body["messages"][0]["content"], request.body["tools"]
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), arguments) as client:

        def message(number: int) -> dict[str, Any]:
            words = [f"word{(7 * number + index) % 97}" for index in range(24)]
            return {"role": "user", "content": f"{number}: {' '.join(words)}"}

        ask(client, [message(999)], None)
        messages: list[dict[str, Any]] = []
        lone: list[float] = []
        first: list[float] = []
        turns: list[float] = []
        for turn in range(1, arguments.turns + 1):
            line = f"It is turn {turn}.\n" if arguments.volatile else ""
            messages.append(message(turn))
            seconds, timings, text = ask(client, [{"role": "system", "content": line + system}, *messages], tools)
            messages.append({"role": "assistant", "content": text})
            # In turns, since machines are not always as fast.
            alone, of_lone, _ = ask(client, [message(1000 + turn)], None)
            other = [{"role": "system", "content": line + system}, message(2000 + turn)]
            begun, of_begun, _ = ask(client, other, tools)
            turns.append(seconds)
            lone.append(alone)
            first.append(begun)
            print(
                f"turn {turn}: {timings['prompt_n']:,} read, {timings['cache_n']:,} cached, {seconds:.3f} s; "
                f"lone message: {of_lone['prompt_n']} read, {alone:.3f} s; "
                f"another chat's first: {of_begun['prompt_n']} read, {begun:.3f} s"
            )
        length = timings["cache_n"] + timings["prompt_n"]
        seconds, alone, begun = (min(one[-LATEST:]) for one in (turns, lone, first))
        bound = alone * (1 + length / (6 * arguments.heads * HEAD_SIZE))
        print(
            f"least of the last {LATEST}: lone {alone:.3f} s; turn {seconds:.3f} s, {seconds / alone:.2f} x; "
            f"{seconds / bound:.2f} x of the bound {bound:.3f} s at {length:,} tokens; "
            f"{seconds / begun:.2f} x of another chat's first message behind the same head, {begun:.3f} s"
        )


if __name__ == "__main__":
    main()
