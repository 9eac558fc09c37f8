"""Chat completions as records: what a request may hold, and the message and the deltas that answer it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from localinfer.server.api.chat_messages import Messages
from localinfer.server.replies.deltas import Delta, pieces_of
from localinfer.server.replies.logprobs import chat_logprobs
from localinfer.server.replies.reply_fields import ReplyFields, Tools
from localinfer.server.replies.sampling_fields import Count, Prediction, StreamOptions, TextCount
from localinfer.server.replies.tool_fields import checked_choice, function_tools
from localinfer.server.transport.errors import ApiError
from localinfer.server.transport.known_fields import CHAT

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.stream import StreamEvent

ReasoningFormat = Literal["both", "reasoning_content", "reasoning", "none"]


class ChatRequest(ReplyFields, kw_only=True):
    """The members of a chat completion request that are read.

    reasoning_format: under which names reasoning is told; clients prefer one of two. return_progress: tell in a stream
    how far the prompt was read, and how many replies are ahead.
    """

    known_fields: ClassVar = CHAT

    messages: Messages
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: TextCount | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    reasoning_format: ReasoningFormat | None = None
    return_progress: bool | None = None

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request. Raises: ApiError."""
        if self.modalities and self.modalities != ["text"]:
            raise _refused("modalities", "modalities asks for more than text, which is all that is made here")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is given without logprobs; send logprobs: true", param="top_logprobs")
        options = {**self.options(), **self.reply_options()}
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        chosen = {
            "max_tokens": limit,
            "prediction": None if self.prediction is None else self.prediction.text(),
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "tools": function_tools(self.tools) or None,
            "tool_choice": checked_choice(self.tool_choice, has_tools=bool(self.tools)) if self.tool_choice else None,
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
        }
        return options | {name: value for name, value in chosen.items() if value is not None}

    def reasoning_names(self) -> tuple[str, ...]:
        """The members that hold reasoning."""
        chosen = self.reasoning_format or "both"
        return {"both": ("reasoning_content", "reasoning"), "none": ()}.get(chosen, (chosen,))


def _refused(field: str, message: str) -> ApiError:
    return ApiError(400, message, code="unsupported_parameter", param=field)


class MessageWriter:
    """Turns the events of one choice into deltas, and gathers them into a message."""

    def __init__(self, body: ChatRequest, tokenizer: "Tokenizer") -> None:
        self._names = body.reasoning_names()
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] | None = [] if body.logprobs else None

    def deltas(self, event: "StreamEvent") -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """The deltas of an event, and the `logprobs` that go with each; both are gathered."""
        told = None
        if event.logprobs is not None and self.logprobs is not None:
            entry = chat_logprobs(self._tokenizer, event.token_id, event.logprobs)
            self.logprobs.append(entry)
            told = {"content": [entry], "refusal": None}
        made = [delta for piece in pieces_of(event) if (delta := self._delta(piece))]
        if told is not None and not made:
            made = [{"content": ""}]
        for delta in made:
            yield delta, told
            told = None

    def message(self) -> dict[str, Any]:
        """The whole message."""
        text = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._thoughts:
            message |= dict.fromkeys(self._names, "".join(self._thoughts))
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        return message

    def all_logprobs(self) -> dict[str, Any] | None:
        """The whole `logprobs` of the choice."""
        return None if self.logprobs is None else {"content": self.logprobs, "refusal": None}

    def _delta(self, piece: Delta) -> dict[str, Any]:
        match piece.kind:
            case "text":
                self._texts.append(piece.text)
                return {"content": piece.text}
            case "reasoning":
                self._thoughts.append(piece.text)
                return dict.fromkeys(self._names, piece.text)
            case "call" if piece.call_id is not None:
                function = {"name": piece.name, "arguments": ""}
                call = {"id": piece.call_id, "type": "function", "function": function}
                self._calls.append({**call, "function": dict(function)})
                return {"tool_calls": [{"index": piece.call, **call}]}
            case _:
                self._calls[piece.call]["function"]["arguments"] += piece.text
                return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}


def choice(index: int, writer: MessageWriter, finish_reason: str) -> dict[str, Any]:
    """A choice of a whole reply."""
    return {
        "index": index,
        "message": writer.message(),
        "logprobs": writer.all_logprobs(),
        "finish_reason": finish_reason,
    }
