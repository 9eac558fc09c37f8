"""Recorded sessions of agents: what they sent, request by request, and the replies that they were given."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data" / "agents"
NAMES = tuple(sorted(path.stem for path in DATA.glob("*.json")))
SEARCHES = ("web_search", "web_search_preview")
_HINTS = ("cache_control", "id", "status")
"""Members of messages that change from request to request and no prompt."""


@dataclass(frozen=True)
class AgentRequest:
    """One request of a session. reply: content, and tool_calls with name and arguments."""

    path: str
    query: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    reply: dict[str, Any]

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, without what changes no prompt."""
        return [_plain(message) for message in self.body.get("messages") or self.body["input"]]

    @cached_property
    def head(self) -> Any:
        """What comes before the conversation."""
        return _plain([self.body.get(name) for name in ("system", "instructions", "tools", "output_config")])

    @property
    def tool_names(self) -> list[str]:
        """The tools that the model must be shown, by the names that it is told."""
        names = []
        for tool in self.body.get("tools") or ():
            if tool.get("type") == "namespace":
                names += [f"{tool['name']}__{inner['name']}" for inner in tool["tools"]]
            elif tool.get("type") not in SEARCHES:
                names.append(tool.get("function", tool)["name"])
        return names

    def continues(self, former: "AgentRequest") -> bool:
        """Whether it repeats all of a former request's conversation, and what was answered."""
        count = len(former.messages)
        follows = self.messages[count : count + 1]
        is_reply = bool(follows) and (
            follows[0].get("role") == "assistant" or follows[0].get("type") == "function_call"
        )
        return self.head == former.head and self.messages[:count] == former.messages and is_reply


def read_session(name: str) -> list[AgentRequest]:
    """The requests of one recorded session, in order."""
    document = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    parts = document["parts"]

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {"$part"}:
                return whole(parts[value["$part"]])
            return {key: whole(one) for key, one in value.items()}
        return [whole(one) for one in value] if isinstance(value, list) else value

    return [AgentRequest(**whole(request)) for request in document["requests"]]


def chat_reply(request: AgentRequest) -> dict[str, Any]:
    """The reply to a request as a chat message."""
    calls = [
        {"id": f"call_{index}", "type": "function", "function": dict(call)}
        for index, call in enumerate(request.reply.get("tool_calls", ()))
    ]
    return {"content": request.reply["content"], **({"tool_calls": calls} if calls else {})}


def _plain(value: Any) -> Any:
    """A value without hints, and with the text of a message that is given in one part as that text."""
    if isinstance(value, Mapping):
        made = {key: _plain(one) for key, one in value.items() if key not in _HINTS}
        content = made.get("content")
        if isinstance(content, list) and len(content) == 1 and content[0].keys() == {"type", "text"}:
            made["content"] = content[0]["text"]
        return made
    return [_plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
