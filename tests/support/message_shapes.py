"""Messages in every shape that callers send them in, with what becomes of each."""

from typing import Any

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Bonn"}'}
CALL = {"id": "a1", "type": "function", "function": FUNCTION}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "Sun.", "tool_call_id": "a1"}

READ: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text": ([USER], [USER]),
    "calls without content": ([USER, {"role": "assistant", "tool_calls": [CALL]}], [USER, CALLS]),
    "calls with null content": ([USER, {**CALLS, "content": None}], [USER, CALLS]),
    "calls with empty content": ([USER, CALLS], [USER, CALLS]),
    "calls with text": ([USER, {**CALLS, "content": "So."}], [USER, {**CALLS, "content": "So."}]),
    "calls with content in parts": ([USER, {**CALLS, "content": []}], [USER, CALLS]),
    "calls with arguments as an object": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        ],
    ),
    "calls without arguments, id or type": (
        [USER, {"role": "assistant", "tool_calls": [{"id": None, "type": None, "function": {"name": "f"}}]}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
    ),
    "a call of the older kind": (
        [USER, {"role": "assistant", "content": None, "function_call": FUNCTION}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": FUNCTION}]}],
    ),
    "no calls after all": (
        [USER, {"role": "assistant", "content": "Yes.", "tool_calls": []}],
        [USER, {"role": "assistant", "content": "Yes."}],
    ),
    "null calls": (
        [USER, {"role": "assistant", "content": "Yes.", "tool_calls": None}],
        [USER, {"role": "assistant", "content": "Yes."}],
    ),
    "an assistant with nothing": ([USER, {"role": "assistant"}], [USER, {"role": "assistant", "content": ""}]),
    "an assistant with null": (
        [USER, {"role": "assistant", "content": None, "refusal": None}],
        [USER, {"role": "assistant", "content": ""}],
    ),
    "reasoning": (
        [USER, {"role": "assistant", "content": "A", "reasoning_content": "B"}],
        [USER, {"role": "assistant", "content": "A", "reasoning_content": "B"}],
    ),
    "reasoning by its other name": (
        [USER, {"role": "assistant", "content": "A", "reasoning": "B", "reasoning_content": None}],
        [USER, {"role": "assistant", "content": "A", "reasoning_content": "B"}],
    ),
    "a result": ([USER, CALLS, RESULT], [USER, CALLS, RESULT]),
    "a result without an id": (
        [USER, CALLS, {"role": "tool", "content": "Sun."}],
        [USER, CALLS, {"role": "tool", "content": "Sun."}],
    ),
    "a result without content": ([USER, CALLS, {**RESULT, "content": None}], [USER, CALLS, {**RESULT, "content": ""}]),
    "a result in parts": (
        [USER, CALLS, {**RESULT, "content": [{"type": "text", "text": "Sun."}]}],
        [USER, CALLS, RESULT],
    ),
    "a result of the older kind": (
        [USER, CALLS, {"role": "function", "name": "weather", "content": "Sun."}],
        [USER, CALLS, {"role": "tool", "name": "weather", "content": "Sun."}],
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "input_text", "text": "i"}]}],
        [{"role": "user", "content": "H\ni"}],
    ),
    "parts of a reply": (
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "N"}, {"type": "refusal", "refusal": "o."}]}],
        [USER, {"role": "assistant", "content": "No."}],
    ),
    "a refusal": (
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [USER, {"role": "assistant", "content": "No."}],
    ),
    "no parts": ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    "a name": ([{**USER, "name": "Bo"}], [{**USER, "name": "Bo"}]),
    "a null name": ([{**USER, "name": None}], [USER]),
    "a developer": ([{"role": "developer", "content": "D"}, USER], [{"role": "system", "content": "D"}, USER]),
    "a system only": ([{"role": "system", "content": "S"}], [{"role": "system", "content": "S"}]),
    "an assistant first": ([{"role": "assistant", "content": "A"}], [{"role": "assistant", "content": "A"}]),
}
"""By what is odd about them: messages as they are sent, and as `read_messages` reads them."""

REFUSED: dict[str, tuple[Any, str]] = {
    "not a message": ([USER, 5], "messages[1]"),
    "text for a message": (["Hi"], "messages[0]"),
    "no role": ([{"content": "Hi"}], "messages[0].role"),
    "null role": ([{"role": None, "content": "Hi"}], "messages[0].role"),
    "a number for a role": ([{"role": 1, "content": "Hi"}], "messages[0].role"),
    "empty role": ([{"role": "", "content": "Hi"}], "messages[0].role"),
    "a user without content": ([{"role": "user"}], "messages[0].content"),
    "a user with null": ([USER, {"role": "user", "content": None}], "messages[1].content"),
    "a system without content": ([{"role": "system"}, USER], "messages[0].content"),
    "a number for content": ([{"role": "user", "content": 5}], "messages[0].content"),
    "an object for content": ([{"role": "user", "content": {"type": "text", "text": "Hi"}}], "messages[0].content"),
    "an image": (
        [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "image_url", "image_url": {}}]}],
        "messages[0].content[1]",
    ),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    "text for a part": ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
    "calls of a user": ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
    "an object for calls": ([USER, {"role": "assistant", "tool_calls": CALL}], "messages[1].tool_calls"),
    "text for calls": ([USER, {"role": "assistant", "tool_calls": "a"}], "messages[1].tool_calls"),
    "a number for a call": ([USER, {"role": "assistant", "tool_calls": [5]}], "messages[1].tool_calls[0]"),
    "a call without a name": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}],
        "messages[1].tool_calls[0]",
    ),
    "a list for arguments": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}],
        "messages[1].tool_calls[0].function.arguments",
    ),
    "a number for an id": (
        [USER, {"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}],
        "messages[1].tool_calls[0].id",
    ),
    "a number for the id of a result": ([USER, {**RESULT, "tool_call_id": 5}], "messages[1].tool_call_id"),
    "a list for a name": ([{**USER, "name": ["Bo"]}], "messages[0].name"),
    "a number for reasoning": (
        [USER, {"role": "assistant", "content": "A", "reasoning_content": 1}],
        "messages[1].reasoning_content",
    ),
}
"""By what is wrong with them: messages, and the place that the error names."""

SILENT = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {**RESULT, "content": None}, USER]
"""A conversation in which only the user has anything to say."""
