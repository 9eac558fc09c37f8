"""`/v1/rerank`: documents by their relevance to a query, in the shape of Jina's and Cohere's APIs."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.operation.request_record import record_of
from localinfer.apps.server.replies.service import read_body, reserve_prompts, service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import ApiError, json_response
from localinfer.apps.server.transport.known_fields import RERANK

if TYPE_CHECKING:
    from localinfer.types import RankedDocument

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


class ScoreRequest(msgspec.Struct):
    """A text, and one or several to be compared with it: vLLM's shape."""

    known_fields: ClassVar = RERANK

    text_1: str
    text_2: str | Annotated[list[str], Meta(min_length=1, max_length=_MOST_DOCUMENTS)]
    model: str | None = None


async def score(request: Request) -> Response:
    """The scores of pairs of texts, from 0 to 1, in the order of `text_2`."""
    body = await read_body(request, ScoreRequest)
    texts = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    model_id, ranked = await _ranked(request, RerankRequest(query=body.text_1, model=body.model), texts)
    count = sum(one.num_tokens for one in ranked)
    data = [
        {"index": one.index, "object": "score", "score": one.score} for one in sorted(ranked, key=lambda one: one.index)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "model": model_id, "data": data, "usage": usage})


async def rerank(request: Request) -> Response:
    """The documents by falling relevance: their places among those sent, and scores from 0 to 1."""
    body = await read_body(request, RerankRequest)
    documents = body.documents if body.texts is None else body.texts
    if documents is None or (body.documents is not None and body.texts is not None):
        raise ApiError(400, "documents and texts are two names of one member; give one of them", param="documents")
    texts = [one.text if isinstance(one, Document) else one for one in documents]
    model_id, ranked = await _ranked(request, body, texts)
    count = sum(one.num_tokens for one in ranked)
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
    return json_response({"object": "list", "model": model_id, "results": results, "usage": usage})


async def _ranked(
    request: Request, body: RerankRequest, texts: Sequence[str]
) -> tuple[str, Sequence["RankedDocument"]]:
    """The name of the model that compared the texts with the query, and what it found, best first."""
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
        ranked = await unless_gone(request.receive, work)
    count = sum(one.num_tokens for one in ranked)
    record_of(request.scope).input_tokens = count
    service_of(request).totals.count_prompts(count, time.perf_counter() - began)
    return lease.model_id, ranked
