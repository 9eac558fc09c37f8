"""The internal route of a server of `--role prefill`: compute a prompt for a decode server, and write its pages.

The answer is lines of JSON: how far it is, several times a second, and at the end what is on disk. A decode server
that leaves before that stops the work.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.replies.reply import Reply, Silence, TextPlan
from localinfer.apps.server.replies.service import PREFILL, read_body, service_of
from localinfer.apps.server.transport.http import ApiError, EventStream, to_api_error
from localinfer.engine.cache.block_hashes import SALT_BYTES

if TYPE_CHECKING:
    from localinfer.generation.kv_transfer import Prefilled
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM


class PrefillRequest(msgspec.Struct):
    """A prompt, and what its pages depend on beside it.

    salt: that keeps texts apart, in hexadecimal digits. fingerprint: its parts by name, of the asking server's model.
    system_tokens, branch_tokens: where others are likely to continue from. owner: prompts are computed in turn among
    owners.
    """

    token_ids: list[int]
    fingerprint: dict[str, str]
    model: str | None = None
    salt: str = ""
    system_tokens: int = 0
    branch_tokens: list[int] = []
    owner: str = ""


class _Lines(EventStream):
    """Lines of JSON as they come."""

    media_type = "application/x-ndjson"
    ping = b"{}\n"


async def prefill(request: Request) -> Response:
    """Compute a prompt and write its pages."""
    body = await read_body(request, PrefillRequest)
    salt = _salt_of(body)
    host = "" if request.client is None else request.client.host
    owner = f"{host} {body.owner}" if body.owner else str(request.state.request_id)
    service = service_of(request)

    def plan(llm: "LLM") -> list[TextPlan]:
        return [TextPlan(partial(_open, llm, body, salt, owner))]

    reply = await service.begin(request, body.model, PREFILL, plan)
    return _Lines(_lines(reply, salt, service.settings.progress_seconds), reply.close)


def _salt_of(body: PrefillRequest) -> bytes:
    try:
        salt = bytes.fromhex(body.salt)
    except ValueError:
        salt = b"?"
    if len(salt) not in SALT_BYTES:
        raise ApiError(400, "salt: give 64 hexadecimal digits, or none", param="salt")
    return salt


def _open(llm: "LLM", body: PrefillRequest, salt: bytes, owner: str) -> "TextStream":
    """The stream that computes a prompt. Raises: ApiError where the two models differ."""
    from localinfer.storage.fingerprint import differing_parts

    different = differing_parts(body.fingerprint, llm.handover_fingerprint().parts)
    if different:
        raise ApiError(
            409,
            f"the prefill server and the one that asks differ in {', '.join(different)}; start both with the same "
            "model, options and version",
            code="fingerprint_mismatch",
            facts={"differing": different},
        )
    return llm.stream_prefill(
        body.token_ids,
        system_tokens=body.system_tokens,
        branch_tokens=body.branch_tokens,
        salt=salt,
        owner=owner,
    )


async def _lines(reply: Reply, salt: bytes, progress_seconds: float) -> AsyncIterator[bytes]:
    encode = msgspec.json.Encoder().encode
    try:
        async for item in reply.events(progress_seconds):
            if isinstance(item, Silence):
                yield encode({"computed_tokens": reply.progress()["processed"]}) + b"\n"
        if reply.is_cancelled:
            return
        stats, token_ids = reply.stats[0], reply.prompt_ids(0)
        assert stats is not None and token_ids is not None, "it came to its end"
        storing = asyncio.create_task(asyncio.to_thread(reply.llm.store_prompt, token_ids, stats.cached_tokens, salt))
        while not storing.done():
            await asyncio.wait([storing], timeout=progress_seconds)
            yield encode({"computed_tokens": reply.prompt_tokens[0]}) + b"\n"
        yield encode(_told(storing.result())) + b"\n"
    except Exception as error:
        yield encode(to_api_error(error, reply.id, prompt_field="token_ids").body()) + b"\n"


def _told(done: "Prefilled") -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "stored_tokens": done.stored_tokens,
        "problem": done.problem,
        "has_failed": done.has_failed,
    }
