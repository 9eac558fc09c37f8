"""`/props`: what the server and its model are, as llama-server tells it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.llama_server.generation_settings import generation_settings
from localinfer.apps.server.replies.service import Service, service_of
from localinfer.apps.server.router.served_model import ServedModel
from localinfer.apps.server.transport.http import json_response, not_supported
from localinfer.kernels.versions import installed_version


async def show_properties(request: Request) -> Response:
    """The server's properties, with those of one model: of `?model=`, or the default one. Loads none."""
    service = service_of(request)
    model = service.registry.find(request.query_params.get("model"))
    is_router = len(service.registry.models()) > 1
    settings = generation_settings({} if model.llm is None else model.llm.defaults, None, seed=None)
    properties = {
        "default_generation_settings": {"params": settings, "n_ctx": model.context_length},
        "total_slots": service.settings.num_slots,
        "model_alias": model.source.id,
        # Where it lies is not told.
        "model_path": model.source.path.name,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": service.settings.shows_slots,
        "endpoint_props": False,
        "endpoint_metrics": service.settings.shows_metrics,
        "ui": service.settings.serves_page,
        "build_info": f"b-localinfer-{installed_version('localinfer')}",
        "is_sleeping": model.state == "unloaded",
        "cors_proxy_enabled": False,
        **_of_model(model),
    }
    return json_response({**properties, **(_of_router(service, model) if is_router else {})})


async def change_properties(request: Request) -> Response:
    """Refuse: properties are options of the command."""
    raise not_supported("properties are not changed while the server runs; start it with other options, or send them")


def _of_model(model: ServedModel) -> dict[str, Any]:
    llm, info = model.llm, model.info()
    if llm is None or info is None:
        return {}
    begins, ends = llm.tokenizer.bos_token_id, llm.tokenizer.eos_token_id
    return {
        "model_ftype": info.quantization,
        "chat_template": info.chat_template or "",
        "chat_template_caps": {"supports_tools": info.supports_tools, "supports_thinking": info.supports_thinking},
        "bos_token": "" if begins is None else llm.tokenizer.token_text(begins),
        "eos_token": "" if ends is None else llm.tokenizer.token_text(ends),
    }


def _of_router(service: Service, model: ServedModel) -> dict[str, Any]:
    return {"role": "router", "max_instances": len(service.registry.models()), "models_autoload": True}
