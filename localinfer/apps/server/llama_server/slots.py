"""`/slots`: what runs in each slot, without its text, and its session saved to a file, restored and erased.

Where clients are kept apart, one sees of the slots of others whether they are taken; to all else they are empty, and
each client's files lie in a folder of their own.
"""

import asyncio
import re
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.operation.requests import record_of
from localinfer.apps.server.replies.ownership import digest_of, may_see, may_see_reply
from localinfer.apps.server.replies.service import Service, read_body, service_of
from localinfer.apps.server.replies.slots import SlotText
from localinfer.apps.server.transport.http import ApiError, json_response, not_supported
from localinfer.errors import SessionFileError, SessionMismatchError

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
