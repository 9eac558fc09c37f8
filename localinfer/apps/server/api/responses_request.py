"""The body of a request for a response, and the engine's options that it becomes."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.api.responses_items import MOST_ITEMS, InputItem
from localinfer.apps.server.replies.fields import CacheSalt, ChatFields, Count
from localinfer.apps.server.replies.form_fields import ResponseFormat
from localinfer.apps.server.replies.tool_fields import Tools, responses_choice, responses_tools
from localinfer.apps.server.transport.http import ApiError, unsupported
from localinfer.apps.server.transport.known_fields import RESPONSES

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_INCLUDED = (
    _ENCRYPTED,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may ask for. All but the first are parts of things that this server neither makes nor reads."""
Items = Annotated[list[InputItem], Meta(min_length=1, max_length=MOST_ITEMS)]


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the reply. verbosity: ignored, as how much a model writes is decided by the model."""

    format: ResponseFormat | None = None
    verbosity: Any = None


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model reasons. The others are ignored: reasoning is given whole, and there is one way to reason."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ConversationName(msgspec.Struct, forbid_unknown_fields=True):
    """A conversation, named in an object."""

    id: str


class ResponsesRequest(ChatFields, kw_only=True):
    """The members of a responses request that are read.

    timings_per_token, return_progress: llama-server's, as on chats, for streams.
    """

    known_fields: ClassVar = RESPONSES

    input: str | Items | None = None
    model: str | None = None
    instructions: str | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, Any], Meta(max_length=256)] | None = None
    reasoning: ReasoningSettings | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    timings_per_token: bool | None = None
    cache_salt: CacheSalt | None = None
    return_progress: bool | None = None

    @property
    def conversation_id(self) -> str | None:
        """The conversation that is continued, if one is."""
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def items(self) -> list[InputItem]:
        """What is new."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input or []

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """Whether reasoning comes in the form that clients send back who do not have it kept here."""
        return _ENCRYPTED in (self.include or ())

    def check(self) -> None:
        """Raise ApiError for what this route does not have, and for members that contradict each other."""
        if self.prompt:
            raise unsupported("prompt is given, but no prompts are kept here; send its text as instructions", "prompt")
        if self.previous_response_id and self.conversation_id:
            raise ApiError(
                400,
                "previous_response_id and conversation are both given, and each says what goes before; give one",
                param="conversation",
            )
        if self.store is False:
            for name, is_given in (("background", self.background), ("conversation", self.conversation_id)):
                if is_given:
                    raise ApiError(
                        400, f"{name} is given, which keeps the response, and store is false; leave one out", param=name
                    )
        if self.input is None and not (self.previous_response_id or self.conversation_id):
            raise ApiError(400, "input is missing, and nothing goes before; send some", param="input")
        included = self.include or ()
        for wanted in included:
            if wanted not in _INCLUDED and wanted != _LOGPROBS:
                raise unsupported(
                    f"include lists {wanted!r:.80}, which this server does not have; leave it out", "include"
                )
        for name, is_wanted in (("top_logprobs", self.top_logprobs), ("include", _LOGPROBS in included)):
            if is_wanted:
                raise unsupported(
                    f"{name} wants log probabilities, which this route does not return; use /v1/chat/completions", name
                )

    def prompt_options(self) -> dict[str, Any]:
        """The engine's options that the prompt depends on. Raises: ApiError."""
        if self.reasoning is not None and self.reasoning_effort is None:
            self.reasoning_effort = self.reasoning.effort
        options = self.reply_options()
        tools = responses_tools(self.tools)
        choice = responses_choice(self.tool_choice, self.tools)
        if tools:
            options["tools"] = tools
            options["tool_choice"] = choice or "auto"
        return options

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request. Raises: ApiError."""
        options = {**self.sampling_options(), **self.prompt_options()}
        if "tools" in options:
            options["parallel_tool_calls"] = self.parallel_tool_calls is not False
        if self.max_output_tokens is not None:
            options["max_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            form = self.text.format.constraint("text.format")
            if form is not None and options.setdefault("constraint", form) is not form:
                raise ApiError(400, "text.format is given, and another form too; choose one", param="text.format")
        if self.truncation == "auto":
            options["context_shift"] = True
        return options
