"""`/models/load` and `/models/unload`, and `/lora-adapters`, of which there are none."""

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.replies.service import read_body, service_of
from localinfer.apps.server.transport.http import json_response, not_supported


class ModelRequest(msgspec.Struct):
    """A model by its name."""

    model: Annotated[str, Meta(min_length=1)]


async def load(request: Request) -> Response:
    """Begin to load a model, without using it; /models says when it is loaded, or that it could not be."""
    body = await read_body(request, ModelRequest)
    registry = service_of(request).registry
    model = registry.find(body.model)
    if model.state != "loaded":
        service_of(request).keep(registry.load(body.model))
    return json_response({"success": True, "model": model.source.id})


async def unload(request: Request) -> Response:
    """Unload a model when its running replies have ended."""
    body = await read_body(request, ModelRequest)
    registry = service_of(request).registry
    model = registry.find(body.model)
    service_of(request).keep(registry.unload(body.model))
    return json_response({"success": True, "model": model.source.id})


async def lora_adapters(request: Request) -> Response:
    """The adapters of the model: none."""
    return json_response([])


async def change_lora_adapters(request: Request) -> Response:
    """Refuse: adapters cannot be had."""
    raise not_supported("LoRA adapters cannot be had here yet; merge them into the model, and serve that")
