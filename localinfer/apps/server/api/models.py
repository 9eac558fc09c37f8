"""The models that can be asked for: what each is called and can do, whether it is loaded, and what it takes."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.replies.service import service_of
from localinfer.apps.server.router.served_model import ServedModel
from localinfer.apps.server.transport.http import json_response

_READ_SECONDS = 5.0
"""What a list waits for files of which nothing was read yet; of a slow disk it tells the rest the next time."""


async def models(request: Request) -> Response:
    """All models, loaded or not; loads none."""
    registry = service_of(request).registry
    await registry.measure_all(_READ_SECONDS)
    return json_response({"object": "list", "data": [_card(model) for model in registry.models()]})


async def model(request: Request) -> Response:
    """One model, by any of its names."""
    registry = service_of(request).registry
    found = registry.find(request.path_params["model"])
    await registry.measure_all(_READ_SECONDS, found)
    return json_response(_card(found))


def _card(model: ServedModel) -> dict[str, Any]:
    """A model to clients; what is not known yet, or cannot be read, is null."""
    need, context = model.need, model.context_length
    memory = {
        "fixed_bytes": None if need is None else need.fixed_bytes,
        "bytes_per_token": None if need is None else need.bytes_per_token,
        "held_bytes": model.memory_bytes,
    }
    # llama-server's name for it, with its values.
    status = {"value": "unloaded" if model.state == "failed" else model.state, "failed": model.state == "failed"}
    return {
        "id": model.source.id,
        "object": "model",
        "created": model.source.created,
        "owned_by": "localinfer",
        "aliases": list(model.source.aliases),
        "state": model.state,
        "status": status,
        "problem": model.problem,
        "max_model_len": context,
        "context_length": context,
        "capabilities": list(model.capabilities),
        "size_bytes": None if need is None else need.file_bytes,
        "memory": memory,
        "pinned": model.is_pinned,
        "keep_alive_seconds": None if model.is_pinned else model.keep_alive_seconds,
        "running": model.num_leases,
        "waiting": model.num_waiting,
        "waiting_for": list(model.waiting_for),
        "meta": {
            "n_ctx": context,
            "n_ctx_train": None if need is None else need.trained_context_length,
            "size": None if need is None else need.file_bytes,
            "loaded": model.llm is not None,
        },
    }
