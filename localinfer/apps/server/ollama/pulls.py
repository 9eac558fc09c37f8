"""Models brought and removed by clients of Ollama's API; and what makes models there and cannot be had here."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.ollama.names import find_exactly, not_found
from localinfer.apps.server.ollama.wire import LineStream, line
from localinfer.apps.server.replies.service import Service, read_body, service_of
from localinfer.apps.server.router.load_threads import LoadThreads
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import OLLAMA, ApiError, json_response, to_api_error, unsupported
from localinfer.apps.server.transport.known_fields import KnownFields
from localinfer.errors import DownloadError, RequestError
from localinfer.storage.hub.find import find_model
from localinfer.storage.hub.installed import find_pulled
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.variants import Reference, parse_reference
from localinfer.system.event_loop import LoopCalls

if TYPE_CHECKING:
    from localinfer.storage.hub.records import PullRecord

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
    from localinfer.storage.hub.remove import remove_model

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
        """What a client reads of an error: one of the hub is not the server's, and names no folder."""
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
        """What happens, up to the success. Raises: what the pull raises."""
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
