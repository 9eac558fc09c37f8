"""Members that Ollama's chats and completions share, and the engine's options that they become."""

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.ollama.keep_alive import KeepAlive, keep_alive_seconds
from localinfer.apps.server.ollama.names import NamedModel, find_named
from localinfer.apps.server.ollama.options import Options
from localinfer.apps.server.ollama.wire import timestamp
from localinfer.apps.server.replies.fields import given
from localinfer.apps.server.replies.form_fields import ResponseFormat
from localinfer.apps.server.replies.service import service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import ApiError, json_response
from localinfer.apps.server.transport.known_fields import KnownFields, Refusal
from localinfer.generation.chat.constraints import Constraint, JsonObject

if TYPE_CHECKING:
    from localinfer.llm import LLM

_IN_OPTIONS = "give it in options"
REFUSED = {
    **{name: Refusal(_IN_OPTIONS) for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "num_ctx")},
    **{name: Refusal("give options.num_predict") for name in ("max_tokens", "num_predict")},
    **{name: Refusal("this server makes no images", (None, 0)) for name in ("width", "height", "steps")},
    "response_format": Refusal("give format"),
    "_debug_render_only": Refusal("ask /apply-template"),
}
"""Members that routes which generate text do not have, with the way out."""
_LEVELS = ("low", "medium", "high", "max")


class ReplyFields(msgspec.Struct, kw_only=True):
    """The members that chats and completions share.

    stream: yes by default. format: "json", or the schema that the reply has to have. think: whether to reason first,
    or how much. keep_alive: how long the model stays loaded afterwards. logprobs, top_logprobs: log probabilities of
    the tokens, and of so many likeliest ones. shift: go on when the context is full, without its oldest part.
    truncate: ignored, as prompts that are too long are refused, never shortened.
    """

    known_fields: ClassVar = KnownFields({}, REFUSED)

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def generation_options(self) -> dict[str, Any]:
        """The engine's options but for reasoning and form. Raises: ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is given without logprobs; send logprobs: true", param="top_logprobs")
        more = given(context_shift=self.shift, logprobs=(self.top_logprobs or 0) if self.logprobs else None)
        return {**(self.options or Options()).engine_options(), **more}

    def constraint(self) -> Constraint | None:
        """What the reply has to be. Raises: ApiError."""
        form = (self.options or Options()).constraint()
        if self.format is None or self.format == "":
            return form
        if form is not None:
            raise ApiError(
                400, "format and a form in options were given, and a reply has one form; choose one", param="format"
            )
        if self.format == "json":
            return JsonObject()
        if isinstance(self.format, str):
            raise ApiError(
                400, f'format is {self.format!r:.60}; give "json", or a JSON Schema as an object', param="format"
            )
        return ResponseFormat(type="json_schema", schema=self.format).constraint("format")

    def thinking_options(self) -> dict[str, Any]:
        """The engine's options for reasoning. Raises: ApiError."""
        if self.think is None or isinstance(self.think, bool):
            return given(thinking=self.think)
        if self.think not in _LEVELS:
            raise ApiError(
                400, f"think is {self.think!r:.40}; give true, false or one of {', '.join(_LEVELS)}", param="think"
            )
        # Templates know three.
        effort = "high" if self.think == "max" else self.think
        return {"thinking": True, "template_variables": {"reasoning_effort": effort}}

    def check_thinking(self, llm: "LLM") -> None:
        """Raise ApiError if reasoning was asked of a model that has none. Off the event loop: its template is read."""
        if self.think and not llm.info.supports_thinking:
            raise ApiError(400, f'"{self.model:.80}" does not support thinking; leave think out', param="think")


class BegunRequest(NamedTuple):
    """A request on its way. named: the model that it means. began: when it came, of the monotonic clock."""

    named: NamedModel
    began: float

    @property
    def head(self) -> dict[str, Any]:
        """What every line of its answer begins with."""
        return {"model": self.named.shown, "created_at": timestamp(time.time())}


def begin_request(request: Request, model: str | None, keep_alive: KeepAlive | None) -> BegunRequest:
    """Find the model of a request, and note how long it is to stay loaded. Raises: ApiError."""
    began = time.monotonic()
    registry = service_of(request).registry
    named = find_named(registry, model)
    if keep_alive is not None:
        registry.set_keep_alive(named.id, keep_alive_seconds(keep_alive))
    return BegunRequest(named, began)


async def load_or_unload(
    request: Request, begun: BegunRequest, keep_alive: KeepAlive | None, content: dict[str, Any]
) -> Response:
    """Answer a request without a prompt, which loads its model, or with a `keep_alive` of 0 unloads it.

    A model that answers others is unloaded after them. content: what the answer has in place of a reply.
    Raises: ApiError, 409 for a model that is pinned.
    """
    registry, model_id, reason = service_of(request).registry, begun.named.id, "load"
    if keep_alive is not None and keep_alive_seconds(keep_alive) == 0:
        reason = "unload"
        if begun.named.model.is_idle or begun.named.model.is_pinned:
            await registry.unload(model_id)
    else:
        await unless_gone(request.receive, registry.load(model_id))
    return json_response({**begun.head, **content, "done": True, "done_reason": reason})
