"""Members of Ollama's requests, names of its models, and the parts of its answers."""

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, get_args

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.replies.fields import GenerationFields, ResponseFormat, given
from localinfer.apps.server.replies.media_fields import decoded
from localinfer.apps.server.replies.message_fields import (
    ChatMessage,
    FunctionCall,
    MessageToolCall,
    Role,
    template_messages,
)
from localinfer.apps.server.replies.service import service_of
from localinfer.apps.server.router.models import ModelRegistry, ServedModel
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import ApiError, EventStream, json_response, refused_member
from localinfer.apps.server.transport.known_fields import KnownFields, Refusal
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.generation.options import Constraint, JsonObject

if TYPE_CHECKING:
    from localinfer.llm import LLM


_NEVER = datetime(2300, 1, 1, tzinfo=UTC)
"""Time of unloading of a model that stays for ever."""


class LineStream(EventStream):
    """Lines of JSON as they come; between two of them a space, which begins the next one, says that all is well."""

    media_type = "application/x-ndjson"
    ping = b" "


def line(value: Any) -> bytes:
    """A value as a line of JSON."""
    return msgspec.json.encode(value) + b"\n"


def timestamp(seconds: float | None) -> str:
    """A time in seconds since 1970, None for one that never comes, as RFC 3339 writes it."""
    moment = _NEVER
    if seconds is not None and seconds < _NEVER.timestamp():
        moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration for clients, which divide by it: at least one."""
    return max(1, round(seconds * 1e9))


_LATEST = ":latest"
_HUBS = ("hf.co/", "huggingface.co/")
_MOST_SHOWN = 10


class NamedModel(NamedTuple):
    """A model that a request named. shown: the name that its answer has: the one asked for, if it is this model's."""

    model: ServedModel
    shown: str

    @property
    def id(self) -> str:
        return self.model.source.id


def listed_name(model_id: str) -> str:
    """The name that a model is listed by: Ollama's always have a tag."""
    return model_id if ":" in model_id.rpartition("/")[2] else f"{model_id}{_LATEST}"


def find_named(registry: ModelRegistry, name: str | None) -> NamedModel:
    """The model that a client means. Where one model is served and any name will do, it is that one.

    Raises: ApiError 400 without a name, 404 for an unknown one.
    """
    model = find_exactly(registry, name)
    if model is not None:
        return NamedModel(model, name or "")
    plain = _without_tag(name or "")
    try:
        found = registry.find(plain)
    except ApiError as error:
        raise error if error.code == "model_ambiguous" else not_found(registry, name or "") from None
    is_its_own = any(own.casefold().endswith(plain.casefold().removesuffix(".gguf")) for own in _names_of(found))
    return NamedModel(found, (name or "") if is_its_own else listed_name(found.source.id))


def find_exactly(registry: ModelRegistry, name: str | None) -> ServedModel | None:
    """The model with this very name, but for its case, `:latest`, and a quantization written as a tag.

    Raises: ApiError 400 without a name.
    """
    if not name:
        raise ApiError(400, "model is required; name one of GET /api/tags", param="model")
    own = {one: model for model in registry.models() for one in _names_of(model)}
    in_any_case = {one.casefold(): model for one, model in own.items()}
    found = (own.get(one) or in_any_case.get(one.casefold()) for one in _spellings(name.strip()))
    return next((model for model in found if model is not None), None)


def not_found(registry: ModelRegistry, name: str) -> ApiError:
    """The error for an unknown name, in the words by which clients know it."""
    known = ", ".join(listed_name(source.id) for source in registry.sources[:_MOST_SHOWN])
    return ApiError(404, f"model '{name:.80}' not found; there are {known}", code="model_not_found", param="model")


def _names_of(model: ServedModel) -> Iterable[str]:
    return (model.source.id, *model.source.aliases)


def _spellings(name: str) -> Iterator[str]:
    """The ways in which a name may be written here."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    yield name
    yield _without_tag(name)
    base, _, tag = name.rpartition(":")
    if base:
        # A file's name has its quantization after a hyphen or a dot.
        yield f"{base}-{tag}"
        yield f"{base}.{tag}"


def _without_tag(name: str) -> str:
    return name[: -len(_LATEST)] if name.casefold().endswith(_LATEST) else name


KeepAlive = float | str
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_PART = re.compile(rf"(?P<number>{_NUMBER})(?P<unit>{'|'.join(_UNITS)})", re.ASCII)
_DURATION = re.compile(rf"(?P<sign>[-+]?)(?P<parts>(?:{_NUMBER}(?:{'|'.join(_UNITS)}))+|{_NUMBER})", re.ASCII)
_LONGEST_TEXT = 40


def keep_alive_seconds(value: KeepAlive) -> float | None:
    """The seconds of a duration; None, for ever, if it is negative. Raises: ApiError for what is none.

    Numbers without a unit are seconds, also as text, which Ollama's own server refuses.
    """
    seconds = float(value) if isinstance(value, int | float) else _seconds_of(value)
    if seconds is None or math.isnan(seconds):
        raise ApiError(
            400,
            f'keep_alive is {value!r:.60}; give seconds, or a duration such as "5m", "1h30m" or "500ms"; 0 unloads '
            "the model, a negative one keeps it",
            param="keep_alive",
        )
    return None if seconds < 0 or math.isinf(seconds) else seconds


def _seconds_of(text: str) -> float | None:
    found = _DURATION.fullmatch(text.strip()) if len(text) <= _LONGEST_TEXT else None
    if found is None:
        return None
    parts = found["parts"]
    seconds = sum(float(part["number"]) * _UNITS[part["unit"]] for part in _PART.finditer(parts))
    if _PART.match(parts) is None:
        seconds = float(parts)
    return -seconds if found["sign"] == "-" else seconds


_REFUSED = {
    "tfs_z": Refusal("send min_p or typical_p", (1, 0)),
    "penalize_newline": Refusal("send repeat_penalty, which counts new lines as any other token", (True,)),
    "f16_kv": Refusal("start the server with --kv-type", (True,)),
    "logits_all": Refusal("send logprobs beside options", (False,)),
    "vocab_only": Refusal("ask /tokenize for tokens", (False,)),
    "embedding_only": Refusal("ask /api/embed for vectors", (False,)),
}
_OF_LOADING = {
    "rope_frequency_base": Refusal("start the server with --rope-base"),
    "rope_frequency_scale": Refusal("start the server with --rope-frequency-scale"),
}


class Options(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Options of a reply: Ollama's, and every other member about sampling and form that this server has elsewhere.

    num_predict: most tokens of the reply; negative: to the end of the context. num_ctx: room for prompt and reply; more
    is given where the model was loaded with more, and an answer says so in `warnings` where it was with less.
    num_batch, num_gpu, main_gpu, num_thread, numa, low_vram, use_mmap, use_mlock, draft_num_predict, num_keep: not
    read, as they change no reply. The others are refused unless their value says what happens anyway.
    """

    known_fields: ClassVar = KnownFields({}, _OF_LOADING)

    num_predict: int | None = None
    num_ctx: int | None = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    draft_num_predict: Any = None
    tfs_z: Any = None
    penalize_newline: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    embedding_only: Any = None

    def check(self) -> None:
        """Raise ApiError for an option that cannot be had, with the way out."""
        for name, refusal in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in refusal.neutral:
                raise refused_member(f"options.{name}", refusal)
        if self.num_ctx is not None and self.num_ctx < 0:
            raise ApiError(400, f"options.num_ctx is {self.num_ctx}; give tokens, or leave it out", param="num_ctx")

    def engine_options(self) -> dict[str, Any]:
        """The engine's options about sampling and length. Raises: ApiError."""
        self.check()
        if self.num_predict is None:
            return self.sampling_options()
        # Where the server has a limit of its own, it is lifted.
        return {**self.sampling_options(), "max_tokens": None if self.num_predict < 0 else self.num_predict}

    def context_warning(self, context_length: int) -> str | None:
        """Warning about a context that is shorter than was asked for; None if it is not."""
        if not self.num_ctx or self.num_ctx <= context_length:
            return None
        return (
            f"num_ctx is {self.num_ctx}, and the model is loaded with a context of {context_length} tokens; longer "
            "prompts are refused: start the server with --context-length for more, as far as the model allows"
        )


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function that was called, with its arguments as an object. index: ignored, as calls stand in their order."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None


class OllamaCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call that an assistant made."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat.

    thinking: the reasoning of a former reply. tool_name, tool_call_id: of a tool's result, the call that it answers, by
    the tool's name or the call's id. images: files as base64, for models that see.
    """

    role: str
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


OllamaMessages = Annotated[list[OllamaMessage], Meta(max_length=10_000)]


def read_ollama_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Messages as templates read them. Raises: ApiError for what cannot be read, naming its path."""
    calls = _OpenCalls()
    return template_messages([_read(message, f"messages[{index}]", calls) for index, message in enumerate(messages)])


def image_parts(images: Sequence[Any] | None, path: str) -> list[MediaSource]:
    """Images as parts of a message, which stand before its text. Raises: ApiError for what is no base64."""
    sources = []
    for index, image in enumerate(images or ()):
        place = f"{path}[{index}]"
        if not isinstance(image, str):
            raise ApiError(400, f"{place} is {image!r:.40}; send the bytes of the file as base64", param=place)
        sources.append(MediaSource("image", decoded(image, place, place), place))
    return sources


def with_images(images: Sequence[MediaSource], content: str | list[Any]) -> str | list[Any]:
    """The content of a message with its images."""
    if not images:
        return content
    return [*images, *([{"type": "text", "text": content}] if isinstance(content, str) else content)]


def written_call(index: int, call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A whole tool call of a reply."""
    return {"id": call_id, "function": {"index": index, "name": name, "arguments": arguments}}


class _OpenCalls:
    """Calls whose results are still to come, by id: clients that know no ids name the tool, or answer in order."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._num_made = 0

    def add(self, call: OllamaCall) -> str:
        """The id of a call, a new one if it has none."""
        self._num_made += 1
        call_id = call.id or f"call_{self._num_made:04}"
        self._names[call_id] = call.function.name
        return call_id

    def take(self, message: OllamaMessage) -> str | None:
        """The id of the call that a result answers; where none is open, the one that it names."""
        wanted = message.tool_call_id
        if self._names and wanted not in self._names:
            # Some clients name ids in results only.
            name = message.tool_name or message.name
            named = (call_id for call_id, called in self._names.items() if called == name)
            wanted = next(named, None) or next(iter(self._names))
        if wanted is not None:
            self._names.pop(wanted, None)
        return wanted


def _read(message: OllamaMessage, path: str, calls: _OpenCalls) -> ChatMessage:
    role: Any = message.role.lower()
    if role not in get_args(Role):
        raise ApiError(
            400,
            f"{path}.role is {message.role!r:.40}; give one of {', '.join(get_args(Role))}",
            param=f"{path}.role",
        )
    images = image_parts(message.images, f"{path}.images")
    made = [
        MessageToolCall(FunctionCall(call.function.name, call.function.arguments or {}), calls.add(call), "function")
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=role,
        content=with_images(images, message.content or ""),
        name=message.tool_name or message.name,
        tool_calls=made or None,
        tool_call_id=calls.take(message) if role == "tool" else message.tool_call_id,
        reasoning_content=message.thinking or None,
    )


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
    the tokens, and of so many likeliest ones. shift: continue when the context is full, without its oldest part.
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
        """The form that the reply must have. Raises: ApiError."""
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
        """Members that every line of its answer begins with."""
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
