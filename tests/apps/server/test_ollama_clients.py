"""Ollama's own clients for Python and JavaScript, unmodified."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_imports import import_or_skip
from local_servers import STORY, ServedModel

from localinfer.apps.server.ollama.fields import Options
from tests.support.limits import seconds

# Other people's packages warn of each other; what they send and read is what is tested.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_leftovers")]

SHORT = {"temperature": 0, "num_predict": 8}
ASK = "Tell me a story."
NODE_FOLDERS = "LOCALINFER_NODE_MODULES"
"""The variable that names a folder with npm's package `ollama` in its `node_modules`."""


@pytest.fixture
def client(served: ServedModel) -> Iterator[Any]:
    ollama = import_or_skip("ollama")
    with ollama.Client(served.url) as one:
        yield one


@pytest.fixture
def scripted_client(scripted: Any) -> Iterator[Any]:
    ollama = import_or_skip("ollama")
    with ollama.Client(str(scripted.base_url)) as one:
        yield one


def test_chat_streamed_and_whole(client):
    whole = client.chat("demo", messages=STORY, options=SHORT)
    assert (whole.model, whole.done, whole.done_reason, whole.message.role) == ("demo", True, "length", "assistant")
    assert (whole.eval_count, whole.prompt_eval_count) == (8, 14)
    assert whole.total_duration >= whole.eval_duration > 0
    lines = list(client.chat("demo:latest", messages=STORY, options=SHORT, stream=True))
    assert "".join(one.message.content for one in lines) == whole.message.content
    assert [one.done for one in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == 8 and lines[0].eval_count is None


def test_generate_goes_on_with_its_context(client):
    first = client.generate("demo", prompt=ASK, system="You tell stories.", options=SHORT)
    second = client.generate("demo", prompt="And then?", context=first.context, options=SHORT)
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    assert second.context[: len(first.context)] == first.context
    lines = list(client.generate("demo", prompt=ASK, raw=True, options=SHORT, stream=True))
    assert lines[-1].done and lines[-1].context is None
    assert "".join(one.response for one in lines)


def test_schema_and_log_probabilities(client):
    schema = {"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}}, "required": ["pet"]}
    schema["additionalProperties"] = False
    reply = client.chat("demo", messages=STORY, format=schema, options={**SHORT, "num_predict": 60})
    assert json.loads(reply.message.content)["pet"] in ("cat", "dog")
    told = client.generate("demo", prompt=ASK, logprobs=True, top_logprobs=2, options=SHORT).logprobs
    assert len(told) == 8
    assert all(one.top_logprobs[0].logprob >= one.logprob for one in told)


def test_vectors(client):
    found = client.embed("demo", ["A cat sat.", "The dog ran."], dimensions=64)
    assert [len(one) for one in found.embeddings] == [64, 64]
    assert sum(x * x for x in found.embeddings[0]) == pytest.approx(1, abs=1e-4)
    assert len(client.embeddings("demo", "A cat sat.").embedding) == 256


def test_models_as_the_client_lists_them(client):
    (listed,) = client.list().models
    assert (listed.model, listed.details.format, listed.details.family) == ("demo:latest", "gguf", "llama")
    shown = client.show(listed.model)
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["llama.context_length"] == 1024
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert "im_start" in shown.template and shown.parameters.split() == ["num_ctx", "1024"]


def test_tools_and_thinking(scripted_client):
    def look(at: str) -> str:
        """Look somewhere."""
        return at

    def count(to: int) -> int:
        """Count."""
        return to

    asked = {"model": "calls", "messages": STORY, "tools": [look, count], "think": True}
    whole = scripted_client.chat(**asked).message
    lines = list(scripted_client.chat(**asked, stream=True))
    calls = [call for one in lines for call in one.message.tool_calls or ()]
    for found in (whole.tool_calls, calls):
        made = [(call.function.name, dict(call.function.arguments)) for call in found]
        assert made == [("look", {"at": "b"}), ("count", {"to": 3})]
    assert (whole.thinking, whole.content) == ("Hm.", "I look.")
    assert "".join(one.message.thinking or "" for one in lines) == "Hm."
    assert "".join(one.message.content or "" for one in lines) == "I look."
    assert lines[-1].done_reason == "stop"
    # The conversation goes on with what the client has, which are no ids of calls.
    results = [
        {"role": "tool", "content": "4", "tool_name": "count"},
        {"role": "tool", "content": "b", "tool_name": "look"},
    ]
    again = scripted_client.chat("calls", messages=[*STORY, whole, *results], tools=[look, count])
    assert again.message.content == "I look."


def test_levels_of_thinking(scripted_client):
    for think in (True, "low", "max"):
        reply = scripted_client.chat("thinking", messages=STORY, think=think).message
        assert (reply.thinking, reply.content) == ("Hm, well.", "Yes.")
    lines = list(scripted_client.generate("thinking", prompt="a", stream=True))
    assert "".join(one.thinking or "" for one in lines) == "Hm, well."
    assert "".join(one.response for one in lines) == "Yes."


def test_every_option_that_the_client_knows_is_read_or_refused_by_name():
    ollama = import_or_skip("ollama")
    assert set(ollama.Options.model_fields) <= set(Options.__struct_fields__)


def test_errors_are_those_that_the_client_reads(scripted_client):
    ollama = import_or_skip("ollama")
    for ask, status, words in (
        (lambda: scripted_client.chat("nobody", messages=STORY), 404, "model 'nobody' not found"),
        (lambda: scripted_client.chat("letters", messages=STORY, options={"f16_kv": False}), 400, "--kv-type"),
        (lambda: list(scripted_client.chat("failing", messages=STORY, stream=True)), -1, "the server failed"),
        (lambda: scripted_client.copy("letters", "others"), 400, "not copied"),
        (lambda: scripted_client.create("others", from_="letters"), 400, "localinfer quantize"),
        (lambda: scripted_client.push("letters"), 400, "not published"),
        (lambda: scripted_client.pull("llama3.2"), 400, "org/repo"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as raised:
            ask()
        assert raised.value.status_code == status


def test_async_client(served):
    ollama = import_or_skip("ollama")

    async def ask() -> str:
        client = ollama.AsyncClient(served.url)
        return "".join([one.response async for one in await client.generate("demo", ASK, options=SHORT, stream=True)])

    assert asyncio.run(ask())


def test_npm_client(served, scripted):
    node = shutil.which("node")
    folder = os.environ.get(NODE_FOLDERS)
    if node is None:
        pytest.skip("node is not installed")
    if folder is None or not (Path(folder) / "node_modules" / "ollama").is_dir():
        pytest.skip(
            f"npm's package ollama is not installed: `npm install ollama` in a folder that {NODE_FOLDERS} names"
        )
    script = Path(__file__).with_name("ollama_client.mjs")
    environment = {**os.environ, "OLLAMA_MODULE": str(Path(folder) / "node_modules" / "ollama" / "dist" / "index.mjs")}
    done = subprocess.run(
        [node, str(script), served.url, str(scripted.base_url)],
        capture_output=True,
        text=True,
        timeout=seconds(60),
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == "done"
