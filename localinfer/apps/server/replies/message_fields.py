"""Messages of each API, brought into the one shape that the engine reads, or refused."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.replies.media_fields import media_part
from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import MESSAGE_MEMBERS, MESSAGE_PARTS
from localinfer.errors import MessageError
from localinfer.generation.chat.custom_tools import custom_arguments
from localinfer.generation.chat.media_parts import MediaSource, joined_parts, parts_content
from localinfer.generation.chat.messages import read_messages

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_IGNORED = ("refusal", "annotations", "audio", "id", "prefix", "partial")


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a function: its arguments are JSON, written as a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a custom tool: its input is text."""

    name: str
    input: str = ""


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call that an assistant made. index: ignored, as calls stand in their order."""

    function: FunctionCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    index: int | None = None
    custom: CustomCall | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat, as clients write it, and as they send former replies back.

    refusal, annotations, audio, id: members of former replies that are ignored, because this server gives none of them,
    or nothing in them. prefix, partial: say of a last reply that it is to be continued, which it is anyway.
    """

    known_fields: ClassVar = MESSAGE_MEMBERS

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: FunctionCall | None = None
    id: str | None = None
    prefix: bool | None = None
    partial: bool | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages as templates read them. Raises: ApiError for what cannot be read, naming its path."""
    try:
        return read_messages([_as_written(message, f"messages[{index}]") for index, message in enumerate(messages)])
    except MessageError as error:
        code = "unsupported_parameter" if error.is_unsupported else None
        raise ApiError(400, str(error), code=code, param=error.path) from error


def _as_written(message: ChatMessage, path: str) -> dict[str, Any]:
    """The message without the members that are ignored, its parts checked member by member."""
    written: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(message, content=None))
    for name in _IGNORED:
        del written[name]
    for index, call in enumerate(written["tool_calls"] or ()):
        del call["index"]
        custom = call.pop("custom")
        if (custom is None) == (call["function"] is None):
            place = f"{path}.tool_calls[{index}]"
            raise ApiError(400, f"{place} has no function and no custom, or both; give one", param=place)
        if custom is not None:
            function = {"name": custom["name"], "arguments": custom_arguments(custom["input"])}
            call |= {"type": "function", "function": function}
    written["content"] = message.content
    if isinstance(message.content, list):
        written["content"] = message_content(message.content, f"{path}.content", message.role)
    return written


def message_content(
    content: str | Sequence[Mapping[str, Any] | MediaSource] | None, path: str, role: str = "user"
) -> str | list[Any]:
    """The text of a message, of its parts if it has some; with pictures or sounds, the list of parts as `read_messages`
    takes them. Raises: ApiError for what is neither."""
    if content is None or isinstance(content, str):
        return content or ""
    return parts_content([_part_of(part, f"{path}[{index}]") for index, part in enumerate(content)], role)


def _part_of(part: Mapping[str, Any] | MediaSource, path: str) -> str | MediaSource:
    media = media_part(part, path)
    if media is not None:
        return media
    assert not isinstance(part, MediaSource)
    return _text_of(part, path)


def joined_text(content: str | Sequence[Mapping[str, Any]] | None, path: str, role: str = "user") -> str:
    """The text of a message, of its parts if it has some. Raises: ApiError for what is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined_parts([_text_of(part, f"{path}[{index}]") for index, part in enumerate(content)], role)


def _text_of(part: Mapping[str, Any], path: str) -> str:
    kind = part.get("type")
    member = "refusal" if kind == "refusal" else "text"
    text = part.get(member)
    if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
        raise unsupported(
            f'{path} is of type {kind!r:.40}; what is read here is text, as {{"type": "text", "text": "..."}}', path
        )
    check_object(part, f"type {member}", path, MESSAGE_PARTS)
    return text


_MEMBERS = {
    "text": "type text",
    "thinking": "type thinking",
    "redacted_thinking": "type",
    "tool_use": "type id name input",
    "tool_result": "type tool_use_id content",
    "image": "type source",
    "document": "type source title context",
    "search_result": "type source title content",
}
"""Type of a block -> its members that are read."""


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message: text, or blocks of text, documents, tool calls, their results, and former reasoning."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


def chat_messages(message: InputMessage, path: str) -> list[ChatMessage]:
    """One message as one or several: results of tools are messages of their own. Raises: ApiError."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    results: list[ChatMessage] = []
    parts: list[str | MediaSource] = []
    reasoning: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(message.content):
        place = f"{path}[{index}]"
        _check_block(block, place)
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                calls.append(MessageToolCall(FunctionCall(name, arguments), call_id, "function"))
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                content = blocks_content(block.get("content") or "", f"{place}.content")
                results.append(ChatMessage("tool", content, tool_call_id=call_id))
            case _:
                parts.append(_block_part(block, place))
    if not (parts or reasoning or calls) and results:
        return results
    return [
        *results,
        ChatMessage(
            message.role,
            parts_content(parts, message.role),
            tool_calls=calls or None,
            reasoning_content="".join(reasoning) if reasoning else None,
        ),
    ]


def blocks_content(content: Any, path: str) -> str | list[Any]:
    """The content of a result, of its blocks if it has some. Raises: ApiError for what is no text or picture."""
    if isinstance(content, str):
        return content
    parts: list[str | MediaSource] = []
    for index, block in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(block, dict):
            raise _refused(block, f"{path}[{index}]")
        _check_block(block, f"{path}[{index}]")
        parts.append(_block_part(block, f"{path}[{index}]"))
    return parts_content(parts, "user")


def text_of(content: Any, path: str) -> str:
    """As `blocks_content`, of what has to be text, such as a system message."""
    read = blocks_content(content, path)
    if isinstance(read, list):
        media = next(part for part in read if isinstance(part, MediaSource))
        raise unsupported(f"{media.path} is of type {media.kind!r}; only text can stand there", media.path)
    return read


def _block_part(block: Mapping[str, Any], path: str) -> str | MediaSource:
    media = media_part(block, path)
    return _block_text(block, path) if media is None else media


def _check_block(block: Mapping[str, Any], path: str) -> None:
    check_object(block, _MEMBERS.get(str(block.get("type")), " ".join(block)), path, MESSAGE_PARTS)


def _block_text(block: Mapping[str, Any], path: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "document", "source": dict(source)}:
            return _titled(block, _document_text(source, f"{path}.source"))
        case {"type": "search_result", "source": str(source), "content": list(content)}:
            return _titled({**block, "context": source}, text_of(content, f"{path}.content"))
        case _:
            raise _refused(block, path)


def _document_text(source: Mapping[str, Any], path: str) -> str:
    match source:
        case {"type": "text", "data": str(text)}:
            return text
        case {"type": "content", "content": content}:
            return text_of(content, f"{path}.content")
        case _:
            raise unsupported(
                f"{path} is of type {source.get('type')!r:.40}; this server reads documents of plain text only, as "
                '{"type": "text", "media_type": "text/plain", "data": "..."}',
                path,
            )


def _titled(block: Mapping[str, Any], text: str) -> str:
    """A document as the model reads it: its title and context, where it has some, then its text."""
    heads = [block[name] for name in ("title", "context") if isinstance(block.get(name), str) and block[name]]
    return "\n".join([*heads, text])


def _refused(block: Any, path: str) -> ApiError:
    kind = block.get("type") if isinstance(block, dict) else block
    return unsupported(
        f"{path} is of type {kind!r:.40} and cannot be read; this server reads text, images, tool calls and their "
        "results",
        path,
    )
