"""Messages of a conversation as plain data: those of replies, where exchanges begin, calls without a result."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localinfer.arguments import owned, shown
from localinfer.errors import RequestError
from localinfer.generation.chat.messages import ROLES, read_messages
from localinfer.generation.completion import ToolCall

Turn = dict[str, Any]
"""A message with `role` and `content`; replies have `reasoning`, `finish_reason` and `tool_calls` where there are any,
results of calls `tool_call_id` and `name`."""

Turns = Sequence[Mapping[str, Any]]


def read_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Check messages that are to be kept, and copy them. Raises: MessageError, RequestError."""
    turns = read_messages(owned(messages))
    for turn in turns:
        if turn["role"] not in ROLES:
            raise RequestError(f"a message has the role {shown(turn['role'])}; give one of {', '.join(ROLES)}")
        if "reasoning_content" in turn:
            turn["reasoning"] = turn.pop("reasoning_content")
        try:
            json.dumps(turn)
        except (TypeError, ValueError) as error:
            raise RequestError(f"a message cannot be kept: {error}; give text, numbers, lists and dicts") from None
    return turns


def first_turns(system: str | None, messages: Sequence[Mapping[str, Any]] | None) -> list[Turn]:
    """The messages that a conversation begins with. Raises: MessageError, RequestError."""
    is_empty = isinstance(messages, list | tuple) and not messages
    turns = [] if messages is None or is_empty else read_turns(messages)
    if system is None:
        return turns
    if turns and turns[0]["role"] == "system":
        raise RequestError("messages begin with a system message, and system was given too; leave one of them out")
    return [{"role": "system", "content": checked_text(system, "system")}, *turns]


def checked_text(text: object, name: str = "the text of a message") -> str:
    """Return the text of a message. Raises: RequestError for what is none."""
    if not isinstance(text, str):
        raise RequestError(f"{name} is {shown(text)}; give text")
    return text


def reply_turn(text: str, finish_reason: str, *, reasoning: str = "", tool_calls: Sequence[ToolCall] = ()) -> Turn:
    """The message of a reply. Its calls are in it only where they ended it: of those cut short, nothing can be made."""
    turn: Turn = {"role": "assistant", "content": text}
    if reasoning:
        turn["reasoning"] = reasoning
    if finish_reason == "tool_calls":
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in tool_calls
        ]
    return {**turn, "finish_reason": finish_reason}


def result_turn(call: ToolCall, text: str) -> Turn:
    """The message with the result of a call."""
    return {"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name}


def exchange_starts(turns: Turns, first: int = 0) -> list[int]:
    """The indices of the user messages from `first` on, each of which begins an exchange."""
    return [place for place in range(first, len(turns)) if turns[place]["role"] == "user"]


def tool_rounds(turns: Turns) -> int:
    """Number of replies since the last user message that called tools."""
    starts = exchange_starts(turns)
    return sum(bool(turn.get("tool_calls")) for turn in turns[starts[-1] if starts else 0 :])


def open_calls(turns: Turns) -> list[ToolCall]:
    """The calls of the last reply that have no result behind it."""
    place = next((place for place in reversed(range(len(turns))) if turns[place]["role"] != "tool"), None)
    if place is None or not turns[place].get("tool_calls"):
        return []
    answered = [turn.get("tool_call_id") for turn in turns[place + 1 :]]
    return [call for call in map(_read_call, turns[place]["tool_calls"]) if call.id not in answered]


def _read_call(call: Mapping[str, Any]) -> ToolCall:
    arguments = call["function"].get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(call.get("id", ""), call["function"]["name"], text)
