"""Pages about the server: its health, metrics, models and running replies for programs, and the chat page at `/`.

The chat page is one file that asks no other server than this one, under a policy that lets it do nothing else. It is
put together of the files beside `chat.html` when first asked for. The policy names its scripts and styles by their
hashes, which are taken of the served text: no other code runs, even if a text of a model were to become markup.
"""

import base64
import hashlib
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.clients import may_see_reply
from localinfer.apps.server.replies.service import service_of
from localinfer.apps.server.router.models import ServedModel
from localinfer.apps.server.transport.http import ApiError, json_response, not_supported, shutting_down
from localinfer.kernels.versions import installed_version

_READ_SECONDS = 5.0
"""Time that a list waits for files of which nothing was read yet; it has the rest of a slow disk the next time."""


async def models(request: Request) -> Response:
    """All models, loaded or not; loads none."""
    registry = service_of(request).registry
    await registry.measure_all(_READ_SECONDS)
    found = registry.models()
    deciding = [_decision_model(model) for model in found if model.decides]
    return json_response({"object": "list", "data": [_card(model) for model in found], "models": deciding})


async def model(request: Request) -> Response:
    """One model, by any of its names."""
    registry = service_of(request).registry
    found = registry.find(request.path_params["model"])
    await registry.measure_all(_READ_SECONDS, found)
    return json_response(_card(found))


def _decision_model(model: ServedModel) -> dict[str, Any]:
    """A model that answers questions, as the System One API lists it."""
    day = datetime.fromtimestamp(model.source.created, UTC).date().isoformat()
    kinds = " and ".join(("text", *(kind for kind in ("vision", "audio") if kind in model.capabilities)))
    return {"name": model.source.id, "description": f"answers decisions about {kinds}", "release_date": day}


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


async def health(request: Request) -> Response:
    """Say whether the server answers, or still loads the model it was started with; loads no model."""
    service = service_of(request)
    if service.is_stopping:
        raise shutting_down("the server is being stopped")
    if not service.is_ready:
        progress = service.load_progress()
        stage = f" ({progress['stage']}, {progress['done']} of {progress['total']})" if progress else ""
        facts = {"progress": progress} if progress else {}
        raise ApiError(503, f"the model is being loaded{stage}; try again", code="model_loading", facts=facts)
    return json_response({"status": "ok"})


async def ping(request: Request) -> Response:
    """As vLLM and SageMaker ask for it: the status of `health`, without a body."""
    return Response(status_code=(await health(request)).status_code)


async def show_version(request: Request) -> Response:
    """Say which version answers."""
    return json_response({"version": installed_version("localinfer")})


async def metrics(request: Request) -> Response:
    """All metrics, as Prometheus reads them."""
    service = service_of(request)
    if not service.settings.shows_metrics:
        raise not_supported("/metrics is switched off; start the server without --no-metrics")
    for model in service.registry.models():
        service.metrics.show_snapshots(model.source.id, None if model.llm is None else model.llm.snapshot_stats)
    return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def requests(request: Request) -> Response:
    """The replies that are running, without their text; where clients are kept apart, those of the client."""
    now, tenant = time.monotonic(), record_of(request.scope).tenant
    running = [
        {
            "id": reply.id,
            "model": reply.model_id,
            "texts": reply.num_texts,
            "tokens": reply.num_tokens,
            "seconds": round(now - reply.opened_seconds, 3),
            "is_processing": True,
        }
        for reply in service_of(request).replies()
        if may_see_reply(tenant, reply)
    ]
    return json_response(running)


async def cancel(request: Request) -> Response:
    """Stop a running reply; its text so far ends as if it were complete."""
    reply_id = request.path_params["reply"]
    if not service_of(request).cancel(reply_id, record_of(request.scope).tenant):
        raise ApiError(404, f"no reply {reply_id!r:.80} is running", code="reply_not_found", param="id")
    return json_response({"id": reply_id, "object": "reply.cancelled", "cancelled": True})


_FOLDER = Path(__file__).resolve().parents[2] / "webui"
_PARTS = re.compile(r'<link rel="stylesheet" href="(?P<style>[\w.]+)">|<script src="(?P<script>[\w.]+)"></script>')


@dataclass(frozen=True)
class Page:
    """A page as it is served. body: its bytes. headers: what goes with them, and with an answer without them."""

    body: bytes
    headers: dict[str, str]


def make_page(body: bytes) -> Page:
    """A page whose own scripts and styles are all that may run in it."""
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(body, b"script"),
        "style-src": _hashes(body, b"style"),
        # The page's icon is part of it.
        "img-src": "data:",
        "connect-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        # Text can become markup through no function of the browser.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        # Not no-referrer, under which some browsers also hide the origin from this server.
        "referrer-policy": "same-origin",
        "x-frame-options": "DENY",
        # Kept by browsers, and asked for each time: the next version of the server has another page.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return Page(body, headers)


def _hashes(body: bytes, tag: bytes) -> str:
    contents = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _read(name: str) -> str:
    # In text mode: browsers take hashes of lines that end with one character, whatever a checkout made of them.
    return (_FOLDER / name).read_text(encoding="utf-8")


def _embedded(part: re.Match[str]) -> str:
    tag = str(part.lastgroup)
    return f"<{tag}>\n{_read(part[tag])}</{tag}>"


@cache
def _page() -> Page:
    return make_page(_PARTS.sub(_embedded, _read("chat.html")).encode())


async def chat_page(request: Request) -> Response:
    """The page, or 304 if the client has it. Raises: ApiError where it is switched off."""
    if not service_of(request).settings.serves_page:
        raise ApiError(404, "the chat page is switched off by --no-page; ask the API under /v1", code="not_found")
    page = _page()
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if page.headers["etag"] in known:
        return Response(status_code=304, headers=page.headers)
    return Response(page.body, headers=page.headers, media_type="text/html")
