"""Whole sessions of agents, as their programs sent them: every request answered, no tool lost, and read only once."""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_models import TEMPLATE, given_replies, load_agent_model, write_agent_model
from agent_replies import Answer, read_answer
from agent_sessions import NAMES, AgentRequest, chat_reply, read_session
from client_imports import import_or_skip
from local_servers import serving

from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM
from tests.support.samples import by_turns

SHARE = 0.99
"""Of the tokens that a request shares with earlier ones, so many at least are not read again."""


@dataclass
class AgentServer:
    """A server whose model gives the replies that a session had then.

    prompts: what the model was shown by each request so far, as text. models: those loaded.
    """

    client: httpx.Client
    replies: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    models: list[LLM] = field(default_factory=list)

    def count_tokens(self, text: str) -> int:
        """How many tokens the beginning of a prompt has."""
        return len(self.models[0].tokenizer.encode(text, parse_special=True)) if text else 0

    def ask(self, request: AgentRequest) -> Answer:
        """Send a request as its program did."""
        self.replies.append(chat_reply(request))
        query = f"?{request.query}" if request.query else ""
        response = self.client.post(f"{request.path}{query}", json=request.body, headers=dict(request.headers))
        return read_answer(request.path, response)


Replayed = tuple[list[str], list[AgentRequest], list[Answer]]
"""The prompts of a session, its requests and what they were answered."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agent_model(tmp_path_factory.mktemp("agent") / "agent-test.gguf")


@contextmanager
def agent_server(path: Path, **options: Any) -> Iterator[AgentServer]:
    """A server on a model that has read nothing yet."""

    def load(source: ModelSource) -> LLM:
        def script(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
            shared = {name: options[name] for name in ("tools",) if name in options}
            made.prompts.append(llm.render_chat(messages, **shared))
            return made.replies[-1]

        llm = load_agent_model(source.path, script, threads=1, **{"kv_memory": 256 << 20, **options})
        made.models.append(llm)
        return llm

    source = ModelSource("agent-test", path, 1_700_000_000)
    with (
        given_replies(),
        serving(ServerSettings(port=0), sources=[source], load=load) as running,
        running.client() as client,
    ):
        made = AgentServer(client)
        yield made


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[AgentServer]:
    with agent_server(path) as running:
        yield running


@pytest.fixture(scope="module", params=NAMES)
def replayed(request: pytest.FixtureRequest, server: AgentServer) -> Replayed:
    """One session, sent once. A server that has answered another one reads no more of it than one that has not."""
    requests = read_session(request.param)
    server.prompts.clear()
    answers = [server.ask(one) for one in requests]
    return server.prompts[:], requests, answers


def test_every_request_is_answered_and_no_tool_is_lost(replayed):
    prompts, requests, answers = replayed
    assert [answer.message for answer in answers] == [request.reply for request in requests]
    for request, prompt in zip(requests, prompts, strict=True):
        block = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
        shown = [json.loads(line)["function"]["name"] for line in block[1].split("\n")] if block else []
        assert shown == request.tool_names


def test_what_was_read_or_written_before_is_not_read_again(server, replayed):
    prompts, requests, answers = replayed
    shared = cached = 0
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        # What a program repeats is what was sent and answered: how the server writes it must not matter.
        repeated = [
            former.prompt_tokens + former.completion_tokens
            for former, sent in zip(answers[:index], requests, strict=False)
            if request.continues(sent)
        ]
        begins_alike = [len(commonprefix((prompts[index], former))) for former in prompts[:index]]
        num_tokens = server.count_tokens(prompts[index][: max(begins_alike, default=0)])
        shareable = min(max(num_tokens, *repeated, 0), answer.prompt_tokens)
        shared += shareable
        cached += min(answer.cached_tokens, shareable)
        # The token that ends a turn is written by the template, and the last one of a prompt is always read.
        assert answer.cached_tokens >= shareable - 4, (index, answer.miss)
    assert shared and cached >= SHARE * shared


def test_every_event_is_of_a_type_that_official_packages_have(replayed):
    _, requests, answers = replayed
    adapter_of = functools.cache(import_or_skip("pydantic").TypeAdapter)
    for request, answer in zip(requests, answers, strict=True):
        if request.path.endswith("/messages"):
            kind = import_or_skip("anthropic").types.RawMessageStreamEvent
        elif request.path.endswith("/responses"):
            kind = import_or_skip("openai.types.responses").ResponseStreamEvent
        else:
            kind = import_or_skip("openai.types.chat").ChatCompletionChunk
        adapter = adapter_of(kind)
        for event in answer.events:
            if event.get("type") != "ping":
                adapter.validate_python(event)


def test_what_is_refused_has_a_message_where_programs_look_for_it(server: AgentServer):
    for sent in (read_session(name)[0] for name in NAMES):
        for member, value in (("tool_choise", 1), ("model", 5)):
            body = {**sent.body, member: value}
            answer = server.client.post(sent.path, json=body, headers=dict(sent.headers))
            assert answer.status_code == 400 and answer.headers["content-type"].startswith("application/json")
            error = answer.json()["error"]
            assert member in error["message"] and error["type"] == "invalid_request_error"


def requests_of_each_shape() -> list[AgentRequest]:
    """The first of all sessions with messages of the system at certain places, by a path and with tools or without."""
    shapes: dict[tuple[Any, ...], AgentRequest] = {}
    for request in (one for name in NAMES for one in read_session(name)):
        roles = [message.get("role") for message in request.messages]
        places = tuple(index for index, role in enumerate(roles) if role in ("system", "developer"))
        shapes.setdefault((request.path, places, bool(request.tool_names)), request)
    return list(shapes.values())


@pytest.mark.parametrize(
    ("turn", "refused"), [(0, "message.role == 'system' and not loop.first"), (1, "message.role == 'system'")]
)
def test_templates_that_refuse_system_messages_answer_every_shape_of_request(path: Path, turn: int, refused: str):
    check = (
        f"{{% for message in messages %}}{{% if {refused} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{% endfor %}}"
    )
    with agent_server(path, chat_template=check + TEMPLATE) as server:
        for request in by_turns(requests_of_each_shape(), turn, 2):
            assert server.ask(request).message == request.reply
