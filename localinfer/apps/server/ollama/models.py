"""Ollama's routes about models: what there is and what is loaded, bringing one and removing it."""

import asyncio
import hashlib
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localinfer.apps.server.api.status import chat_page
from localinfer.apps.server.ollama.fields import (
    LineStream,
    find_exactly,
    find_named,
    line,
    listed_name,
    not_found,
    timestamp,
)
from localinfer.apps.server.replies.service import Service, read_body, service_of
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.router.models import LoadThreads, ServedModel
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import OLLAMA, ApiError, json_response, to_api_error, unsupported
from localinfer.apps.server.transport.known_fields import KnownFields
from localinfer.errors import DownloadError, LocalinferError, RequestError
from localinfer.kernels.versions import installed_version
from localinfer.models.text.vocabulary import FILL_IN_ROLES
from localinfer.storage.hub.installed import find_model, find_pulled
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.variants import Reference, parse_reference, quant_of
from localinfer.system.event_loop import LoopCalls

if TYPE_CHECKING:
    from localinfer.storage.hub.records import PullRecord


_MOST_MODELS = 256
_BLOB = re.compile(r"(?:sha256-)?(?P<digest>[0-9a-f]{64})")
"""The name of a file that is stored under its SHA-256, as the hub's cache and Ollama's do."""
_FILL_IN_KEYS = tuple(f"tokenizer.ggml.{role}_token_id" for role in FILL_IN_ROLES)
_TEMPLATE = "tokenizer.chat_template"
_LEFT_OUT = ("general.name", _TEMPLATE)
_THINKING = re.compile(r"enable_thinking|<think>|reasoning_content|<\|channel\|>|\bthinking\b")
"""Parts of templates whose models reason."""
_ARRAY = re.compile(r"array of \d+ ")
"""The form in which `describe_file` writes a long array."""


@dataclass(frozen=True)
class OllamaModelFacts:
    """Properties of a model's file under Ollama's names."""

    digest: str
    """64 hexadecimal digits that change with the file."""
    num_bytes: int
    format: str
    family: str
    num_parameters: int
    quantization: str
    context_length: int | None
    embedding_length: int | None
    template: str
    """The chat template, "" without one."""
    license: str
    model_info: Mapping[str, Any]
    """Metadata under GGUF's keys, None for long arrays."""
    tensors: tuple[Mapping[str, Any], ...]
    """Name, type and shape of each."""
    problem: str = ""
    """Reason why the file could not be read, "" if it could."""

    def details(self) -> dict[str, Any]:
        """Details of a model as Ollama lists them."""
        lengths = {"context_length": self.context_length, "embedding_length": self.embedding_length}
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else None,
            "parameter_size": human_count(self.num_parameters) if self.num_parameters else "",
            "quantization_level": self.quantization,
            **{name: length for name, length in lengths.items() if length},
        }


def facts_of(source: ModelSource) -> OllamaModelFacts:
    """The facts of a model; of a file that cannot be read, its name and size alone. Not on the event loop."""
    try:
        status = source.path.stat()
    except OSError:
        return _unread(source, 0, "the file is missing")
    try:
        return _read(source.path, source.id, status.st_mtime_ns, status.st_size)
    except LocalinferError as error:
        return _unread(source, status.st_size, str(error))


def capabilities_of(model: ServedModel, facts: OllamaModelFacts) -> list[str]:
    """Capabilities of a model, in Ollama's words; of one that is not loaded, as its file lets expect.

    Not on the event loop: the template of one that was just loaded is looked at first.
    """
    if "completion" not in model.capabilities:
        return ["embedding"] if "embeddings" in model.capabilities else []
    told = {
        "vision": "vision" in model.capabilities,
        "audio": "audio" in model.capabilities,
        "insert": any(key in facts.model_info for key in _FILL_IN_KEYS),
        "tools": "tools" in facts.template,
        "thinking": bool(_THINKING.search(facts.template)),
    }
    if (llm := model.llm) is not None:
        # It may be unloaded meanwhile, have no tokenizer, or its file have been cut.
        with suppress(LocalinferError):
            told["insert"] = llm.tokenizer.fill_in_tokens is not None
            told |= {"tools": llm.info.supports_tools, "thinking": llm.info.supports_thinking}
    return ["completion", *(name for name, is_there in told.items() if is_there)]


def human_count(count: int) -> str:
    """A number of weights as Ollama writes it: 135M, 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            amount = count / size
            return f"{amount:.0f}{unit}" if unit != "B" and amount >= 10 else f"{amount:.1f}{unit}"
    return str(count)


@lru_cache(maxsize=_MOST_MODELS)
def _read(path: Path, model_id: str, changed: int, size: int) -> OllamaModelFacts:
    """The facts of a file, kept while it is the same. Raises: ModelFileError."""
    from localinfer.apps.show.describe import describe_file

    described = describe_file(str(path))
    info = {
        key: None if isinstance(value, str) and _ARRAY.match(value) else value
        for key, value in described.metadata.items()
    }
    template, license_name = info.get(_TEMPLATE), info.get("general.license")
    info = {key: value for key, value in info.items() if key not in _LEFT_OUT}
    # Clients show the one, and count on the other.
    info.setdefault("general.basename", model_id.rpartition("/")[2])
    info.setdefault("general.parameter_count", described.num_parameters)
    blob = _BLOB.fullmatch(path.resolve().name)
    return OllamaModelFacts(
        digest=blob["digest"] if blob is not None else _made_digest(model_id, changed, described.num_bytes),
        num_bytes=described.num_bytes,
        format="gguf" if described.gguf_version is not None else "safetensors",
        family=described.architecture,
        num_parameters=described.num_parameters,
        quantization=quant_of(path.name) or quant_of(model_id) or (described.types[0].type if described.types else ""),
        context_length=described.sizes.get("context_length"),
        embedding_length=described.sizes.get("hidden_size"),
        template=template if isinstance(template, str) else "",
        license=license_name if isinstance(license_name, str) else "",
        model_info=info,
        tensors=tuple({name: one[name] for name in ("name", "type", "shape")} for one in described.tensors),
    )


def _unread(source: ModelSource, num_bytes: int, problem: str) -> OllamaModelFacts:
    digest = _made_digest(source.id, source.created, num_bytes)
    return OllamaModelFacts(digest, num_bytes, "", "", 0, "", None, None, "", "", {}, (), problem)


def _made_digest(*facts: object) -> str:
    """A digest of a file's name, time and size: its contents may be many gigabytes."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


API_VERSION = "0.32.0"
"""The version of Ollama whose API this is; clients refuse servers that seem too old."""
_RUNNING = "Ollama is running"
"""By these words clients know a server of this API."""
_NAMED = f"localinfer {{}} is running: a chat page for browsers, APIs under /v1 and /api ({_RUNNING})\n"
"""For anyone else; other programs look for those words with libraries of any name."""
_KEY_WIDTH = 30


class ShowRequest(msgspec.Struct):
    """A model that facts are wanted of. name: the older name of `model`. verbose: with the list of tensors.

    system, template, options: not read, as no model is made of them here.
    """

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


async def root(request: Request) -> Response:
    """The chat page for browsers, which ask for HTML; for Ollama's clients the line by which they find a server; for
    others which server this is."""
    if "text/html" in request.headers.get("accept", ""):
        response = await chat_page(request)
    else:
        is_its_own = "ollama" in request.headers.get("user-agent", "").casefold()
        response = PlainTextResponse(_RUNNING if is_its_own else _NAMED.format(installed_version("localinfer")))
    response.headers["vary"] = "Accept, User-Agent"
    return response


async def version(request: Request) -> Response:
    """Versions of Ollama's API and of this program."""
    return json_response({"version": API_VERSION, "localinfer": installed_version("localinfer")})


async def tags(request: Request) -> Response:
    """All models, loaded or not; loads none."""
    models = service_of(request).registry.models()
    return json_response({"models": await asyncio.to_thread(lambda: [_listed(model) for model in models])})


async def show(request: Request) -> Response:
    """One model: its settings, its template, what it can do."""
    body = await read_body(request, ShowRequest)
    model = find_named(service_of(request).registry, body.model or body.name).model
    return json_response(await asyncio.to_thread(_shown, model, with_tensors=bool(body.verbose)))


async def running(request: Request) -> Response:
    """The models that are loaded, with how long they stay."""
    models = [model for model in service_of(request).registry.models() if model.llm is not None]
    cards = await asyncio.to_thread(lambda: [_running_card(model) for model in models])
    return json_response({"models": [card for card in cards if card is not None]})


def _listed(model: ServedModel) -> dict[str, Any]:
    facts = facts_of(model.source)
    told = {"modified_at": timestamp(model.source.created), "capabilities": capabilities_of(model, facts)}
    return {**_card(model, facts), **told}


def _shown(model: ServedModel, *, with_tensors: bool) -> dict[str, Any]:
    """The facts of a model. Raises: ApiError if its file cannot be read."""
    facts = facts_of(model.source)
    if facts.problem:
        raise ApiError(500, f"the file of {model.source.id} cannot be read; `localinfer show` tells more")
    name = listed_name(model.source.id)
    parameters = _parameters(model)
    lines = ["# What a Modelfile would say of this model", f"FROM {name}", *(f"PARAMETER {one}" for one in parameters)]
    return {
        "license": facts.license,
        "modelfile": "\n".join(lines) + "\n",
        "parameters": "\n".join(parameters),
        "template": facts.template,
        "details": facts.details(),
        "model_info": dict(facts.model_info),
        "capabilities": capabilities_of(model, facts),
        "modified_at": timestamp(model.source.created),
        **({"tensors": list(facts.tensors)} if with_tensors else {}),
    }


def _card(model: ServedModel, facts: OllamaModelFacts) -> dict[str, Any]:
    name = listed_name(model.source.id)
    return {
        "name": name,
        "model": name,
        "size": facts.num_bytes,
        "digest": facts.digest,
        "details": facts.details(),
    }


def _running_card(model: ServedModel) -> dict[str, Any] | None:
    """State of a loaded model; None if it is unloaded while it is looked at."""
    facts, info, llm = facts_of(model.source), model.info(), model.llm
    if llm is None:
        return None
    if info is None:
        size, on_gpu = model.memory_bytes, False
    else:
        size, on_gpu = info.memory_bytes, info.device != "cpu"
    seconds = None if model.is_pinned else model.keep_alive_seconds
    idle = 0.0 if model.num_leases else time.monotonic() - model.last_used_seconds
    return {
        **_card(model, facts),
        "size": size,
        "size_vram": size if on_gpu else 0,
        "expires_at": timestamp(None if seconds is None else time.time() + max(0.0, seconds - idle)),
        "context_length": llm.context_length,
    }


def _parameters(model: ServedModel) -> list[str]:
    """The context that a model has, if that is known yet, and what its user set for it."""
    context = {} if model.context_length is None else {"num_ctx": model.context_length}
    return [f"{name:<{_KEY_WIDTH}} {value}" for name, value in {**context, **model.source.settings.sampling}.items()]


async def studio_models(request: Request) -> Response:
    """All models as LM Studio lists them under `/api/v0`, loaded or not; loads none."""
    models = service_of(request).registry.models()
    cards = await asyncio.to_thread(lambda: [_studio_card(model) for model in models])
    return json_response({"object": "list", "data": cards})


async def studio_model(request: Request) -> Response:
    """One model as LM Studio describes it."""
    model = find_named(service_of(request).registry, request.path_params["model"]).model
    return json_response(await asyncio.to_thread(_studio_card, model))


def _studio_card(model: ServedModel) -> dict[str, Any]:
    facts, is_loaded = facts_of(model.source), model.llm is not None
    return {
        "id": model.source.id,
        "object": "model",
        "type": "llm" if "completion" in model.capabilities else "embeddings",
        "publisher": model.source.id.rpartition("/")[0].partition("/")[0],
        "arch": facts.family,
        "compatibility_type": facts.format,
        "quantization": facts.quantization,
        "state": "loaded" if is_loaded else "not-loaded",
        "max_context_length": facts.context_length or model.context_length,
        **({"loaded_context_length": model.context_length} if is_loaded else {}),
    }


_LATEST = ":latest"
_CHECKING = "checking "
_OTHERWISE = "names are those of files here"


class PullRequest(msgspec.Struct):
    """A model of the Hugging Face hub that is wanted: org/repo or org/repo:quant. name: the older name of `model`."""

    known_fields: ClassVar = KnownFields(
        dict.fromkeys(("insecure", "username", "password"), "the hub's own sign-in is used, over TLS"), {}
    )

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class DeleteRequest(msgspec.Struct):
    """A model that was pulled and is to be removed. name: the older name of `model`."""

    model: str | None = None
    name: str | None = None


class RefusedRequest(msgspec.Struct):
    """A request to copy, make or publish a model, which is always refused, with the way out; it is not read."""

    model: str | None = None
    source: str | None = None
    destination: str | None = None


async def pull(request: Request) -> Response:
    """Bring a model from the hub and serve it, with lines about how far it is."""
    body = await read_body(request, PullRequest)
    service = service_of(request)
    one = _Pull(_reference(body.model or body.name), service)
    if body.stream is False:
        return json_response(await unless_gone(request.receive, one.whole(request.state.request_id)))
    return LineStream(one.frames(request.state.request_id), one.stop)


async def delete(request: Request) -> Response:
    """Stop serving a model that was pulled, and remove its files once its replies have ended."""
    from localinfer.storage.hub.pull import remove_model

    body = await read_body(request, DeleteRequest)
    name = body.model or body.name
    registry = service_of(request).registry
    model = find_exactly(registry, name)
    if model is None:
        raise not_found(registry, str(name))
    places = Places.of_user()
    pulled = await asyncio.to_thread(find_pulled, places)
    record = next((one for one in pulled if one.path == model.source.path), None)
    if record is None:
        raise unsupported(
            f"{model.source.id} was not pulled by localinfer, which deletes only what it pulled; delete its file, and "
            "the server no longer serves it once it is started again",
            "model",
        )
    left = [source for source in registry.sources if source.id != model.source.id]
    if not left:
        raise ApiError(400, f"{model.source.id} is the only model here; stop the server to delete it", param="model")
    await registry.unload(model.source.id)
    registry.replace_sources([source for source in registry.sources if source.id != model.source.id])
    await asyncio.to_thread(remove_model, record.name, places)
    return Response()


async def copy(request: Request) -> Response:
    """Refuse another name for a model."""
    raise unsupported(f"models are not copied here, as {_OTHERWISE}; give the file another name, or an alias")


async def create(request: Request) -> Response:
    """Refuse a model made of another."""
    raise unsupported(
        f"models are not made here, as {_OTHERWISE}; give system, options and format with each request, and make files "
        "with `localinfer quantize`"
    )


async def push(request: Request) -> Response:
    """Refuse to publish a model."""
    raise unsupported("models are not published from here; upload the file with `hf upload`")


def _reference(name: str | None) -> Reference:
    if not name:
        raise ApiError(400, "model is required; give org/repo or org/repo:quant of the Hugging Face hub", param="model")
    reference = parse_reference(name.removesuffix(_LATEST))
    if reference is None:
        raise ApiError(
            400,
            f"{name!r:.80} is not a model of the Hugging Face hub, from which models are pulled here; give org/repo or "
            "org/repo:quant, such as ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
            param="model",
        )
    return reference


class _Stopped(Exception):
    """The client has left; what has arrived is kept."""


class _Pull:
    """One pull, in a thread of its own, and what it tells."""

    def __init__(self, reference: Reference, service: Service) -> None:
        self._reference = reference
        self._service = service
        self._places = Places.of_user()
        self._is_stopped = threading.Event()
        self._told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._calls = LoopCalls.of_running_loop()
        # Clients draw one bar for each digest.
        self._digest = f"sha256:{hashlib.sha256(str(reference).encode()).hexdigest()}"

    def stop(self) -> None:
        """End the pull at its next progress."""
        self._is_stopped.set()

    def in_words(self, error: Exception, request_id: str) -> ApiError:
        """Text of an error for clients: one of the hub is not the server's, and names no folder."""
        if not isinstance(error, DownloadError | RequestError):
            return to_api_error(error, request_id)
        text = str(error)
        for folder, words in ((self._places.hub_cache, "the hub's cache"), (self._places.records, "the records")):
            text = text if folder is None else text.replace(str(folder), words)
        return ApiError(400 if isinstance(error, RequestError) else 500, text)

    async def whole(self, request_id: str) -> dict[str, Any]:
        """The last line. Raises: ApiError."""
        try:
            return [told async for told in self.lines()][-1]
        except Exception as error:
            raise self.in_words(error, request_id) from error

    async def frames(self, request_id: str) -> AsyncIterator[bytes]:
        """The lines of a stream, an error last if there was one."""
        try:
            async for told in self.lines():
                yield line(told)
        except Exception as error:
            yield line(self.in_words(error, request_id).body(OLLAMA))

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Lines about the pull, up to the success. Raises: as the pull."""
        yield {"status": "pulling manifest"}
        pulling = asyncio.create_task(LoadThreads().run(self._work, lambda record: None))
        pulling.add_done_callback(lambda task: self._told.put_nowait(None))
        try:
            while (told := await self._told.get()) is not None:
                yield told
            record = await pulling
        finally:
            self.stop()
            pulling.cancel()
        for status in ("verifying sha256 digest", "writing manifest"):
            yield {"status": status}
        await self._serve(record)
        yield {"status": "success"}

    def _work(self) -> "PullRecord":
        from localinfer.storage.hub.pull import pull_model

        return pull_model(self._reference, self._places, progress=self._progress)

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self._is_stopped.is_set():
            raise _Stopped
        if not stage.startswith(_CHECKING):
            name = str(self._reference)
            told = {"status": f"pulling {name}", "digest": self._digest, "total": total, "completed": done}
            self._calls.add(lambda: self._told.put_nowait(told))

    async def _serve(self, record: "PullRecord") -> None:
        """Serve what was pulled, unless it is served already."""
        registry = self._service.registry
        path = await asyncio.to_thread(find_model, record.name, self._places)
        if all(source.path != path for source in registry.sources):
            source = ModelSource(record.name, path, int(record.pulled))
            registry.replace_sources([*(one for one in registry.sources if one.id != source.id), source])
