"""What the server is doing: health, metrics, running replies, and how to stop one."""

import time

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.operation.request_record import record_of
from localinfer.apps.server.replies.isolation import may_see_reply
from localinfer.apps.server.replies.service import service_of
from localinfer.apps.server.transport.http import ApiError, json_response, not_supported, shutting_down
from localinfer.kernels.versions import installed_version


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
