"""A server whose model's words are a script: it calls an agent's own tools to read and edit a file, and answers.

The engine is the real one: prompts are computed and cached, and each token of a reply is a step; only which token is
chosen is given. Every request is noted with its answer.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "server"))

from agent_models import given_replies, load_agent_model, write_agent_model
from local_servers import serving as serve

import localinfer.apps.server.app as app_module
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM

MODEL = "agent-test"
FORMER, WANTED = "second line", "line two"
EDIT, LONG, AGAIN = "Edit the notes now.", "Count slowly, please.", "What did you change?"
DONE, ANSWER, SUMMARY, TITLE = "I changed the notes.", "I changed line two.", "The notes were changed.", "Notes"
_LONG_REPLY = " ".join(f"word{index % 97}" for index in range(4000))
"""Longer than anybody waits for."""
_SUMMARY = re.compile(r"summar|compact", re.IGNORECASE)


@dataclass
class Asked:
    """A request, and what came of it."""

    path: str
    """Of its address."""
    body: dict[str, Any]
    """As it was sent; empty where it is no JSON object."""
    status: int = 0
    """Of the answer."""
    answer: str = ""
    """The answer's text."""
    is_ended: bool = False
    """True once the answer was sent, or its client was gone."""


@dataclass
class StandIn:
    """The running server, and what it was asked."""

    port: int = 0
    """Where it answers."""
    requests: list[Asked] = field(default_factory=list)
    """In the order in which they came."""

    @property
    def num_running(self) -> int:
        """Requests with a body that have no whole answer yet."""
        return sum(not one.is_ended for one in self.requests if one.body)


_QUESTIONS = (EDIT, LONG, AGAIN)


def played(file: Path, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """The model's reply: calls of tools that read and edit a file, each once behind the question, then an answer."""
    texts = [_text(message.get("content")) for message in messages]
    last = max((index for index, text in enumerate(texts) if _question(text)), default=0)
    asked, final, system = _question(texts[last]), texts[-1], texts[0]
    tools = {tool["function"]["name"]: tool["function"] for tool in options.get("tools") or ()}
    if messages[-1]["role"] == "user" and not _question(final) and _SUMMARY.search(final):
        return {"content": SUMMARY}
    if not tools and "*file listing*" in " ".join(texts[:4]):
        return _of_listings(asked)
    if not tools and _SUMMARY.search(system):
        return {"content": SUMMARY}
    if not tools and "title" in (system + final).lower():
        return {"content": TITLE}
    if asked == LONG:
        return {"content": _LONG_REPLY}
    if asked == EDIT:
        calls = planned(tools, file)
        count = sum(message["role"] == "tool" for message in messages[last:])
        if count < len(calls):
            name, arguments = calls[count]
            function = {"name": name, "arguments": arguments}
            call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
            return {"content": "" if count else "I look at it.", "tool_calls": [call]}
        return {"content": DONE}
    return {"content": ANSWER}


def _question(text: str) -> str:
    """The last of the questions in a text; empty without one."""
    found = max(_QUESTIONS, key=text.rfind)
    return found if found in text else ""


def _of_listings(asked: str) -> dict[str, Any]:
    """The reply to aider, which takes whole files from the text."""
    if asked == LONG:
        return {"content": _LONG_REPLY}
    listing = f"{DONE}\n\nnotes.txt\n```\nfirst line\n{WANTED}\n```\n"
    return {"content": listing if asked == EDIT else ANSWER}


def planned(tools: Mapping[str, Mapping[str, Any]], file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Calls of the tools of an agent that read a file and replace a line, by their names and those of their members."""
    calls = []
    for pattern in (_READS, _EDITS):
        name = next((name for one in pattern for name in tools if re.fullmatch(one, name)), None)
        if name is not None:
            calls.append((name, _arguments(name, tools[name].get("parameters") or {}, file)))
    return calls


_READS = (r"(?i)read", r"read_file|read_files", r"view")
_EDITS = (
    r"(?i)edit|multiedit",
    r"apply_patch",
    r"replace_in_file|edit_file|str_replace|search_and_replace|editor|text_editor|developer__text_editor",
)
_PATCH = f"*** Begin Patch\n*** Update File: notes.txt\n@@\n first line\n-{FORMER}\n+{WANTED}\n*** End Patch"
_MEMBERS = {
    r"file_?path|path|absolute_?path|target_file": "{file}",
    r"old_?(string|str|text)|search|find|before": FORMER,
    r"new_?(string|str|text)|replace|replacement|after": WANTED,
    r"command": "str_replace",
    r"input|patch": _PATCH,
    r"diff": f"------- SEARCH\n{FORMER}\n=======\n{WANTED}\n+++++++ REPLACE",
}


def _arguments(name: str, schema: Mapping[str, Any], file: Path) -> dict[str, Any]:
    members = schema.get("properties") or {}
    required = set(schema.get("required") or members)
    found: dict[str, Any] = {}
    for member, form in members.items():
        value = next((value for one, value in _MEMBERS.items() if re.fullmatch(f"(?i){one}", member)), None)
        if form.get("type") == "array" and isinstance(form.get("items"), dict):
            if form["items"].get("type") == "object":
                found[member] = [_arguments(name, form["items"], file)]
            elif value == "{file}" or member in ("paths", "files"):
                found[member] = [str(file)]
        elif value is not None:
            found[member] = str(file) if value == "{file}" else value
        elif member in required:
            kinds = {"boolean": False, "integer": 1, "number": 1, "string": "notes", "object": {}}
            kind = form.get("type")
            found[member] = (
                form["enum"][0] if form.get("enum") else kinds.get(kind if isinstance(kind, str) else "", "")
            )
    return found


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


_make_app = app_module.make_app


class _Recorder:
    """ASGI middleware that notes requests and answers."""

    def __init__(self, app: Any, stand_in: StandIn) -> None:
        self._app = app
        self._stand_in = stand_in

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Asked(f"{scope['method']} {scope['path']}", {})
        data, answer = bytearray(), bytearray()
        self._stand_in.requests.append(asked)

        async def received() -> Any:
            message = await receive()
            data.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                try:
                    body = json.loads(bytes(data)) if data else {}
                except ValueError:
                    body = {"unread": len(data)}
                asked.body = body if isinstance(body, dict) else {}
            return message

        async def sent(message: Any) -> None:
            asked.status = message.get("status", asked.status)
            answer.extend(message.get("body", b""))
            asked.answer = answer.decode("utf-8", "replace")
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            asked.is_ended = True


@contextmanager
def serving(folder: Path, project: Path, context: int | None = None) -> Iterator[StandIn]:
    """A server of the scripted model on a free port, in a thread of this process.

    folder: where the model is written. project: the folder with `notes.txt`. context: of the model, None for its own.
    """
    stand_in = StandIn()
    former = app_module.make_app

    def recorded(*parts: Any) -> Any:
        app = _make_app(*parts)
        app.add_middleware(_Recorder, stand_in=stand_in)
        return app

    def load(source: ModelSource) -> LLM:
        return load_agent_model(
            source.path, partial(played, project / "notes.txt"), threads=1, context_length=context, disk_cache=False
        )

    source = ModelSource(MODEL, write_agent_model(folder / f"{MODEL}.gguf"), 1_700_000_000)
    app_module.make_app = recorded
    try:
        with given_replies(), serve(ServerSettings(port=0), sources=[source], load=load) as running:
            stand_in.port = running.port
            yield stand_in
    finally:
        app_module.make_app = former


def wait_for(is_true: Any, seconds: float) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
