"""`/props`, `/slots`, `/metrics` with llama.cpp's names, `/models/load` and `/models/unload`, and `/lora-adapters`."""

import asyncio
import functools
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api import status
from localinfer.apps.server.llama_server.completion import generation_settings
from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.clients import digest_of, may_see, may_see_reply
from localinfer.apps.server.replies.service import Service, SlotText, read_body, service_of
from localinfer.apps.server.router.models import ServedModel
from localinfer.apps.server.transport.http import ApiError, json_response, not_supported
from localinfer.errors import SessionFileError, SessionMismatchError
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
        # Its path is not revealed.
        "model_path": model.source.path.name,
        "modalities": {name: name in model.capabilities for name in ("vision", "video", "audio")},
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
    started = _started_at()
    shown = Response(body, media_type=response.headers["content-type"])
    # Written as llama-server writes it: its clients look for it so.
    shown.raw_headers.append((b"Process-Start-Time-Unix", str(started).encode()))
    return shown


@functools.cache
def _started_at() -> int:
    """Seconds since the epoch when this process started; when it was first asked, where the system does not say."""
    try:
        return int(psutil.Process().create_time())
    except (psutil.Error, OSError, RuntimeError):
        return int(time.time())


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


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]*")
"""Names of files that mean the same on every system and lead nowhere else."""
_MOST_NAME_BYTES = 120
_RESERVED = re.compile(r"(?i:con|prn|aux|nul|com\d|lpt\d)(\..*)?")
"""Names that are no files on Windows."""


class SlotFileRequest(msgspec.Struct):
    """A file of the folder that --slot-save-path names. model: whose session is restored, the default one's if none."""

    filename: Annotated[str, Meta(min_length=1)]
    model: str | None = None


async def slots(request: Request) -> Response:
    """Every slot."""
    service = service_of(request)
    if not service.settings.shows_slots:
        raise not_supported("/slots is switched off; start the server without --no-slots")
    default = service.registry.models()[0]
    idle_context = default.llm.context_length if default.llm is not None else None
    tenant = record_of(request.scope).tenant
    listed = [
        _described(service, slot_id, text, idle_context, tenant) for slot_id, text in enumerate(service.slots.texts())
    ]
    return json_response(listed)


async def act(request: Request) -> Response:
    """Save, restore or erase what a slot holds."""
    service = service_of(request)
    number = request.path_params["slot"]
    if not number.isdecimal():
        raise ApiError(400, f"{number!r:.40} is no slot; give its number, see /slots", param="id_slot")
    slot_id = int(number)
    action = request.query_params.get("action")
    match action:
        case "save":
            return await _save(request, service, slot_id)
        case "restore":
            return await _restore(request, service, slot_id)
        case "erase":
            return await _erase(request, service, slot_id)
    raise ApiError(400, f"the action is {action!r:.40}; give action=save, restore or erase", param="action")


async def _save(request: Request, service: Service, slot_id: int) -> Response:
    path, _ = await _file(request, service)
    text = _ended(request, service, slot_id)
    began = time.perf_counter()
    with await service.lease(request, text.model_id) as lease:
        save = partial(lease.llm.save_session, path, text.token_ids, cache_salt=text.cache_salt)
        count = await asyncio.to_thread(save)
    milliseconds = 1e3 * (time.perf_counter() - began)
    written = (await asyncio.to_thread(path.stat)).st_size
    return json_response(
        {
            "id_slot": slot_id,
            "filename": path.name,
            "n_saved": count,
            "n_written": written,
            "timings": {"save_ms": milliseconds},
        }
    )


async def _restore(request: Request, service: Service, slot_id: int) -> Response:
    path, model = await _file(request, service)
    service.slots.check_idle(slot_id)
    record = record_of(request.scope)
    began = time.perf_counter()
    with await service.lease(request, model) as lease:
        try:
            load = partial(lease.llm.load_session, path, cache_salt=record.cache_salt)
            token_ids = await asyncio.to_thread(load)
        except SessionMismatchError:
            reason = f"{path.name} was saved with another model, setting or version; send the conversation again"
            raise ApiError(400, reason, code="session_mismatch", param="filename") from None
        except SessionFileError:
            reason = f"{path.name} is missing, or is no session that was saved whole; save it again"
            raise ApiError(400, reason, code="session_file", param="filename") from None
        service.slots.hold(slot_id, lease.model_id, token_ids, record.tenant, record.cache_salt)
    milliseconds = 1e3 * (time.perf_counter() - began)
    read = (await asyncio.to_thread(path.stat)).st_size
    return json_response(
        {
            "id_slot": slot_id,
            "filename": path.name,
            "n_restored": len(token_ids),
            "n_read": read,
            "timings": {"restore_ms": milliseconds},
        }
    )


async def _erase(request: Request, service: Service, slot_id: int) -> Response:
    service.slots.check_idle(slot_id)
    text = service.slots.text(slot_id)
    if text is not None and not may_see(record_of(request.scope).tenant, text.tenant):
        return json_response({"id_slot": slot_id, "n_erased": 0})
    count = 0
    if text is not None and len(text.token_ids):
        model = service.registry.lease_loaded(text.model_id)
        # Of a model that was unloaded meanwhile nothing is in memory.
        if model is not None:
            with model as lease:
                forget = partial(lease.llm.forget, text.token_ids, cache_salt=text.cache_salt)
                count = await asyncio.to_thread(forget)
    service.slots.erase(slot_id)
    return json_response({"id_slot": slot_id, "n_erased": count})


async def _file(request: Request, service: Service) -> tuple[Path, str | None]:
    """The file that a request names, and its model. Raises: ApiError."""
    folder = service.settings.slot_folder
    if folder is None:
        raise not_supported("slots cannot be saved here; start the server with --slot-save-path FOLDER")
    body = await read_body(request, SlotFileRequest)
    name = body.filename
    if (
        not _NAME.fullmatch(name)
        or len(name) > _MOST_NAME_BYTES
        or name.endswith((".", " "))
        or _RESERVED.fullmatch(name)
    ):
        raise ApiError(
            400,
            f"{name!r:.80} is no name for a file here; use letters, digits, dots, spaces, - and _, and no folders",
            param="filename",
        )
    tenant = record_of(request.scope).tenant
    if tenant:
        folder /= digest_of(tenant)
        await asyncio.to_thread(folder.mkdir, 0o700, parents=True, exist_ok=True)
    return folder / name, body.model


def _ended(request: Request, service: Service, slot_id: int) -> SlotText:
    service.slots.check_idle(slot_id)
    text = service.slots.text(slot_id)
    if text is None or not len(text.token_ids) or not may_see(record_of(request.scope).tenant, text.tenant):
        raise ApiError(400, f"slot {slot_id} holds nothing; generate something with id_slot {slot_id}", param="id_slot")
    return text


def _described(
    service: Service, slot_id: int, text: SlotText | None, context: int | None, tenant: str
) -> dict[str, Any]:
    """A slot under llama-server's names, as a client may see it."""
    shown: dict[str, Any] = {"id": slot_id, "n_ctx": context, "speculative": True, "is_processing": False}
    reply = None if text is None or text.has_ended or text.reply_id is None else service.reply(text.reply_id)
    if reply is None or text is None:
        return shown
    if not may_see_reply(tenant, reply):
        return {**shown, "is_processing": True}
    index = reply.slot_ids.index(slot_id)
    stats = reply.stats_so_far(index)
    decoded = 0 if stats is None else stats.completion_tokens
    return {
        **shown,
        "n_ctx": reply.llm.context_length,
        "is_processing": True,
        "id_task": reply.id,
        "model": reply.model_id,
        "n_prompt_tokens": reply.prompt_tokens[index],
        "n_prompt_tokens_cache": 0 if stats is None else stats.cached_tokens,
        "next_token": [{"has_next_token": True, "n_decoded": decoded}],
    }
