"""`/v1/rerank`: documents by their relevance to a query, in the shape of Jina's and Cohere's APIs."""

import asyncio
import time
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.operation.request_record import record_of
from localinfer.server.replies.service import read_body, reserve_prompts, service_of
from localinfer.server.transport.bodies import unless_gone
from localinfer.server.transport.http import ApiError, json_response
from localinfer.server.transport.known_fields import RERANK

_MOST_DOCUMENTS = 1024


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=_MOST_DOCUMENTS)]


class RerankRequest(msgspec.Struct):
    """A query, and documents to rank by it. truncate: cut documents that do not fit the context.

    texts, return_text, raw_scores: in the shape of Text Embeddings Inference, whose answer is a list; raw_scores leaves
    scores as the classifier gives them.
    """

    known_fields: ClassVar = RERANK

    query: str
    documents: Documents | None = None
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    truncate: bool = False
    texts: Documents | None = None
    return_text: bool = False
    raw_scores: bool = False


async def rerank(request: Request) -> Response:
    """The documents by falling relevance: their places among those sent, and scores from 0 to 1."""
    body = await read_body(request, RerankRequest)
    documents = body.documents if body.texts is None else body.texts
    if documents is None or (body.documents is not None and body.texts is not None):
        raise ApiError(400, "documents and texts are two names of one member; give one of them", param="documents")
    texts = [one.text if isinstance(one, Document) else one for one in documents]
    began = time.perf_counter()
    with await service_of(request).lease(request, body.model) as lease:
        reserve = partial(reserve_prompts, request)
        work = asyncio.to_thread(
            lease.llm.rerank,
            body.query,
            texts,
            normalize=not body.raw_scores,
            truncate=body.truncate,
            on_encoded=reserve,
        )
        ranked = await unless_gone(request, work)
    count = sum(one.num_tokens for one in ranked)
    record_of(request.scope).input_tokens = count
    service_of(request).totals.count_prompts(count, time.perf_counter() - began)
    if body.texts is not None:
        return json_response(
            [
                {"index": one.index, "score": one.score, **({"text": texts[one.index]} if body.return_text else {})}
                for one in ranked[: body.top_n]
            ]
        )
    results = []
    for one in ranked[: body.top_n]:
        result: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
        if body.return_documents:
            result["document"] = {"text": texts[one.index]}
        results.append(result)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "model": lease.model_id, "results": results, "usage": usage})
