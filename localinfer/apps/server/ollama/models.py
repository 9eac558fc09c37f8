"""Ollama's routes about models and the server: what there is, what is loaded, and which version answers."""

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localinfer.apps.server.api.webui import chat_page
from localinfer.apps.server.ollama.model_facts import OllamaModelFacts, capabilities_of, facts_of
from localinfer.apps.server.ollama.names import find_named, listed_name
from localinfer.apps.server.ollama.wire import timestamp
from localinfer.apps.server.replies.service import read_body, service_of
from localinfer.apps.server.router.served_model import ServedModel
from localinfer.apps.server.transport.http import ApiError, json_response
from localinfer.kernels.versions import installed_version

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
    """Which version of Ollama's API answers, and of what."""
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
    """What is told of a loaded model; None if it is unloaded while it is looked at."""
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
    """One model as LM Studio tells of it."""
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
