"""System messages where a template takes none, or none so late: their text stays in the conversation, at its place.

Agents write system messages into the midst of conversations, and several at the start. Templates that refuse that would
leave such a program without any answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

SYSTEM_ROLES = ("system", "developer")


def has_late_system(messages: Messages) -> bool:
    """Whether a system message stands behind another message."""
    return any(message["role"] in SYSTEM_ROLES for message in messages[1:])


def placed_system(messages: Messages, *, takes_one: bool) -> list[Mapping[str, Any]]:
    """Messages of which at most the first is a system message.

    Those at the start become one; takes_one: else it stands before the text of the first message of the user. Later
    ones are written behind the message of the user before them, or, behind another one, as a message of the user.
    Texts are joined by an empty line.
    """
    start = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    head = "\n\n".join(message["content"] for message in messages[:start] if message["content"])
    result: list[Mapping[str, Any]] = [{**messages[0], "content": head}] if start else []
    if start and not takes_one:
        result = [{"role": "user", "content": head}]
    is_made = bool(result) and not takes_one
    for message in messages[start:]:
        last = result[-1] if result else {"role": None}
        if message["role"] in SYSTEM_ROLES:
            if last["role"] == "user":
                result[-1] = _joined(last, message)
            else:
                result.append({"role": "user", "content": message["content"]})
                is_made = True
            continue
        if message["role"] == "user" and is_made:
            # Templates may want roles to alternate.
            result[-1] = _joined(last, message)
        else:
            result.append(message)
        is_made = False
    return result


def _joined(message: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": f"{message['content']}\n\n{other['content']}"}
