"""Lines at the head of prompts that vary: named as the reason of a miss, and, where that is wanted, read last."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_models import given_replies, load_agent_model, write_agent_model
from local_servers import ServedModel, serving

from localinfer.apps.cli.serve_options import AgentOptions
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM

RULES = "\n".join(f"Rule {number}: keep to what rule {number} of the whole list says." for number in range(20))
REPLY = "It has two lines."


@pytest.fixture(params=[False, True], ids=["default", "moved"])
def moves(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def server(tmp_path: Path, moves: bool) -> Iterator[ServedModel]:
    source = ModelSource("agent-test", write_agent_model(tmp_path / "model.gguf"), 1_700_000_000)

    def load(source: ModelSource) -> LLM:
        llm = load_agent_model(source.path, lambda *_: {"content": REPLY}, threads=1, kv_memory=64 << 20)
        return AgentOptions(move_volatile_head=moves).prepared(llm)

    with given_replies(), serving(ServerSettings(port=0), sources=[source], load=load) as running:
        yield running


def body(api: str, turn: int, *texts: str) -> dict[str, Any]:
    """A request of a conversation whose system message begins with a line of its own in every turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    system = f"The time is 10:{turn:02}.\n{RULES}"
    if api == "messages":
        return {"system": system, "messages": messages, "max_tokens": 64}
    if api == "responses":
        return {"instructions": system, "input": messages}
    return {"messages": [{"role": "system", "content": system}, *messages]}


@pytest.mark.parametrize("api", ["chat/completions", "messages", "responses"])
def test_turns_under_a_line_that_varies(server: ServedModel, moves: bool, api: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "localinfer.server")
    texts: list[str] = []
    timings: list[dict[str, Any]] = []
    with server.client() as client:
        for turn in range(4):
            texts.append(f"Question {turn}: how many lines has notes.txt?")
            answer = client.post(f"/v1/{api}", json=body(api, turn, *texts))
            assert answer.status_code == 200, answer.text
            timings.append(answer.json()["timings"])
            texts.append(REPLY)
        counted = client.post("/v1/chat/completions/input_tokens", json=body("chat/completions", 3, *texts[:-1]))
    line = "in line 1 of the system message, which varies between requests that share the rest"
    words = "the text differs at token {}, " + line
    later = [(one["cache_n"], one.get("cache_miss")) for one in timings[1:]]
    if moves:
        # The second request shows what varies; from then on only what is new is read.
        assert later[0][0] < 10
        for former, one in zip(timings[1:], timings[2:], strict=False):
            assert one["cache_n"] >= former["cache_n"] + former["prompt_n"] + former["predicted_n"] - 2
            assert "cache_miss" not in one
    else:
        assert len({cached for cached, _ in later}) == 1
        assert [miss for _, miss in later] == [words.format(cached) for cached, _ in later]
        assert words.format(later[0][0]) in caplog.text and "10:0" not in caplog.text
    # Counting sees the same prompt, with the lines that vary where the model has them.
    assert counted.json()["input_tokens"] == timings[-1]["cache_n"] + timings[-1]["prompt_n"]
