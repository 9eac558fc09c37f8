"""Conversations that tests of tools hold."""

from typing import Any

ASK = [{"role": "user", "content": "Hello"}]


def called(name: str, arguments: str) -> list[dict[str, Any]]:
    """A call of a function that was asked for by `ASK`, and its result, 42 degrees."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "42 degrees"}
    return [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
