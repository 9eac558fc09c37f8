"""`/v1/rerank`: documents by their relevance to a query, in the shape of Jina's and Cohere's APIs."""

import asyncio
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.operation.request_record import record_of
from localinfer.server.replies.service import read_body, service_of, unless_gone
from localinfer.server.transport.http import json_response
from localinfer.server.transport.known_fields import RERANK

_MOST_DOCUMENTS = 1024


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct):
    """A query, and documents to rank by it. truncate: cut documents that do not fit the context."""

    known_fields: ClassVar = RERANK

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=_MOST_DOCUMENTS)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    truncate: bool = False


async def rerank(request: Request) -> Response:
    """The documents by falling relevance: their places among those sent, and scores from 0 to 1."""
    body = await read_body(request, RerankRequest)
    texts = [one.text if isinstance(one, Document) else one for one in body.documents]
    with await service_of(request).lease(request, body.model) as lease:
        work = asyncio.to_thread(lease.llm.rerank, body.query, texts, truncate=body.truncate)
        ranked = await unless_gone(request, work)
    results = []
    for one in ranked[: body.top_n]:
        result: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
        if body.return_documents:
            result["document"] = {"text": texts[one.index]}
        results.append(result)
    count = sum(one.num_tokens for one in ranked)
    record_of(request.scope).input_tokens = count
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "model": lease.model_id, "results": results, "usage": usage})
