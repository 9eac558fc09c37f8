"""`/props`, `/metrics` with llama.cpp's names, `/models/load` and `/models/unload`, and `/lora-adapters`."""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import psutil
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api import status
from localinfer.apps.server.llama_server.completion_request import generation_settings
from localinfer.apps.server.replies.service import Service, read_body, service_of
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


async def metrics(request: Request) -> Response:
    """All metrics, as Prometheus reads them."""
    response = await status.metrics(request)
    body = bytes(response.body) + "".join(_lines(service_of(request))).encode()
    started = int(psutil.Process().create_time())
    shown = Response(body, media_type=response.headers["content-type"])
    # Written as llama-server writes it: its clients look for it so.
    shown.raw_headers.append((b"Process-Start-Time-Unix", str(started).encode()))
    return shown


def _lines(service: Service) -> Iterator[str]:
    totals = service.totals
    work, recent = totals.work, totals.take_recent()
    running = [reply for reply in service.replies() if not reply.is_cancelled]
    waiting = sum(reply.num_texts for reply in running if not reply.num_tokens)
    counters = {
        "prompt_tokens_total": ("Tokens of prompts that were computed", work.prompt_tokens),
        "prompt_tokens_cached_total": ("Tokens of prompts that were cached", totals.cached_tokens),
        "prompt_seconds_total": ("Seconds that prompts took", work.prompt_seconds),
        "tokens_predicted_total": ("Tokens generated", totals.completion_tokens),
        "tokens_predicted_seconds_total": ("Seconds that tokens took after the first of a text", work.later_seconds),
        "n_decode_total": ("Passes of the model, as if each text had run alone", totals.num_passes),
        "n_tokens_max": ("Most tokens that a text has had", totals.longest_tokens),
        "spec_decode_num_draft_tokens_total": ("Tokens drafted", totals.drafted_tokens),
        "spec_decode_num_accepted_tokens_total": ("Drafted tokens that were accepted", totals.accepted_tokens),
        "spec_decode_num_drafts_total": ("Drafts of at least one token", totals.num_drafts),
    }
    gauges = {
        "prompt_tokens_seconds": (
            "Tokens of prompts per second since the last look",
            _rate(recent.prompt_tokens, recent.prompt_seconds),
        ),
        "predicted_tokens_seconds": (
            "Tokens generated per second since the last look",
            _rate(recent.later_tokens, recent.later_seconds),
        ),
        "requests_processing": ("Texts being generated now", sum(reply.num_texts for reply in running)),
        "requests_deferred": ("Texts that have no token yet", waiting),
        "n_busy_slots_per_decode": (
            "Texts that ran when one ended, in the mean",
            _rate(totals.num_running, totals.num_texts),
        ),
    }
    for kind, table in (("counter", counters), ("gauge", gauges)):
        for name, (what, value) in table.items():
            yield f"# HELP llamacpp:{name} {what}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
    if totals.accepted_by_position:
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        yield f"# HELP {name} Drafted tokens that were accepted, by place in the draft\n# TYPE {name} counter\n"
        for position, count in enumerate(totals.accepted_by_position):
            yield f'{name}{{position="{position}"}} {count}\n'


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


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
