"""`/v1/embeddings` and llama-server's `/embedding`: vectors of texts and pictures; `/v1/rerank`: documents by
relevance."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.embedding_fields import Parts, embedded, read_document, read_inputs, shown_document
from localinfer.apps.server.replies.fields import Pieces, embedding_prompt, read_prompts
from localinfer.apps.server.replies.service import read_body, reserve_prompts, service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import ApiError, json_response, too_long, unsupported
from localinfer.apps.server.transport.known_fields import EMBEDDINGS, RERANK, KnownFields
from localinfer.errors import ContextLengthError

if TYPE_CHECKING:
    from localinfer.generation.embedding_inputs import EmbeddingInput
    from localinfer.llm import LLM
    from localinfer.types import RankedDocument


Text = TypeVar("Text")
Result = TypeVar("Result")

MOST_TEXTS = 2048
_TEXTS_AT_ONCE = 64
"""Texts between two looks at whether the client is still there."""


class EmbeddingRequest(msgspec.Struct):
    """Texts, token ids, both mixed, or pictures, that vectors are wanted for. truncate: cut texts longer than the
    context."""

    known_fields: ClassVar = EMBEDDINGS

    input: str | list[Any] | dict[str, Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate: bool = False


async def embeddings(request: Request) -> Response:
    """The vectors of texts, in order, as numbers or as base64 of little-endian float32."""
    body = await read_body(request, EmbeddingRequest)
    prompts = read_inputs(body.input, "input", at_most=MOST_TEXTS)
    began = time.perf_counter()
    inputs: list[EmbeddingInput] = []
    vectors: list[NDArray[np.float32]] = []
    with await service_of(request).lease(request, body.model) as lease:
        async for encoded in in_batches(request, prompts, partial(_encode, lease.llm, body)):
            inputs += encoded
        count = sum(one.num_tokens for one in inputs)
        reserve_prompts(request, count)
        work = partial(_embed, lease.llm, body, service_of(request).settings.pooling)
        async for found in in_batches(request, inputs, work):
            vectors += found
    service_of(request).totals.count_prompts(count, time.perf_counter() - began)
    data = await asyncio.to_thread(_data, vectors, body.encoding_format)
    record_of(request.scope).input_tokens = count
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": lease.model_id, "usage": usage})


async def in_batches(
    request: Request, texts: Sequence[Text], work: Callable[[Sequence[Text]], Result]
) -> AsyncIterator[Result]:
    """Run work on texts in a thread, some at a time: a client that leaves ends it.

    Raises: ClientGone, and what the work raises.
    """
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        yield await unless_gone(request.receive, asyncio.to_thread(work, texts[start : start + _TEXTS_AT_ONCE]))


def _encode(llm: "LLM", body: EmbeddingRequest, prompts: Sequence[Pieces | Parts]) -> "list[EmbeddingInput]":
    """Prompts as they are computed."""
    try:
        return llm.embedding_inputs(embedded(llm, prompts), truncate=body.truncate)
    except ContextLengthError as error:
        raise too_long(error, "input", "is too large") from None


def _embed(
    llm: "LLM", body: EmbeddingRequest, pooling: str | None, inputs: "Sequence[EmbeddingInput]"
) -> list[NDArray[np.float32]]:
    """Their vectors; several of each where there is one per token. Raises: ApiError for these as base64."""
    vectors = llm.embed_many(inputs, pooling=pooling, dimensions=body.dimensions)
    if any(vector.ndim > 1 for vector in vectors) and body.encoding_format == "base64":
        raise unsupported("there is a vector per token, which base64 has no shape for; send encoding_format float")
    return vectors


def _data(vectors: Sequence[NDArray[np.float32]], encoding: str) -> list[msgspec.Raw]:
    """The vectors as JSON, written one by one: a request may have millions of numbers."""
    is_base64 = encoding == "base64"
    written = []
    for index, vector in enumerate(vectors):
        numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") if is_base64 else vector.tolist()
        item = {"object": "embedding", "index": index, "embedding": numbers}
        written.append(msgspec.Raw(msgspec.json.encode(item)))
    return written


_MOST_DOCUMENTS = 1024


Documents = Annotated[list[Any], Meta(min_length=1, max_length=_MOST_DOCUMENTS)]


class RerankRequest(msgspec.Struct):
    """A query, and documents to rank by it: texts, `{"text": ...}`, or pictures as of EmbeddingRequest.

    truncate: cut documents that do not fit the context.
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
    """The documents by falling relevance: their indices among those sent, and scores from 0 to 1."""
    body = await read_body(request, RerankRequest)
    documents = body.documents if body.texts is None else body.texts
    if documents is None or (body.documents is not None and body.texts is not None):
        raise ApiError(400, "documents and texts are two names of one member; give one of them", param="documents")
    name = "documents" if body.texts is None else "texts"
    texts = [read_document(one, f"{name}[{index}]") for index, one in enumerate(documents)]
    model_id, ranked = await _ranked(request, body, texts)
    count = sum(one.num_tokens for one in ranked)
    if body.texts is not None:
        return json_response(
            [
                {
                    "index": one.index,
                    "score": one.score,
                    **(shown_document(documents[one.index]) if body.return_text else {}),
                }
                for one in ranked[: body.top_n]
            ]
        )
    results = []
    for one in ranked[: body.top_n]:
        result: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
        if body.return_documents:
            result["document"] = shown_document(documents[one.index])
        results.append(result)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "model": model_id, "results": results, "usage": usage})


async def _ranked(
    request: Request, body: RerankRequest, texts: Sequence[str | Parts]
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


_MOST_TEXTS = 2048
_READ = ("content", "embd_normalize")


class LlamaEmbeddingRequest(msgspec.Struct):
    """Texts or token ids. input, content: two names of them. embd_normalize: 2 scales to length 1, -1 leaves as it is.

    Vectors of single tokens, which models without pooling give, are never scaled.
    """

    known_fields: ClassVar = KnownFields(
        EMBEDDINGS.ignored, {name: refusal for name, refusal in EMBEDDINGS.refused.items() if name not in _READ}
    )

    input: Any = None
    content: Any = None
    model: str | None = None
    embd_normalize: Literal[-1, 2] | None = None
    truncate: bool = False
    dimensions: Annotated[int, Meta(ge=1)] | None = None


async def embedding(request: Request) -> Response:
    """A list of vectors per prompt: one, or for a model without pooling one per token."""
    body = await read_body(request, LlamaEmbeddingRequest)
    if (body.input is None) == (body.content is None):
        raise ApiError(400, "input and content are two names of one member; give one of them", param="input")
    field = "input" if body.content is None else "content"
    prompts = read_prompts(getattr(body, field), field, at_most=_MOST_TEXTS)
    pooling = service_of(request).settings.pooling
    began = time.perf_counter()
    with await service_of(request).lease(request, body.model) as lease:
        reserve = partial(reserve_prompts, request)
        work = asyncio.to_thread(_embed_pieces, lease.llm, prompts, body, pooling, reserve)
        count, vectors = await unless_gone(request.receive, work)
    record_of(request.scope).input_tokens = count
    service_of(request).totals.count_prompts(count, time.perf_counter() - began)
    return json_response(vectors)


def _embed_pieces(
    llm: "LLM",
    prompts: list[Pieces],
    body: LlamaEmbeddingRequest,
    pooling: str | None,
    reserve: Callable[[int], None],
) -> tuple[int, list[msgspec.Raw]]:
    """Count the prompts' tokens, and compute their vectors. reserve: called with that number before."""
    ids = llm.embedding_ids([embedding_prompt(llm.tokenizer, pieces) for pieces in prompts], truncate=body.truncate)
    reserve(sum(map(len, ids)))
    made = llm.embed_many(ids, pooling=pooling, normalize=False, dimensions=body.dimensions)
    if body.embd_normalize != -1 and all(vector.ndim == 1 for vector in made):
        made = llm.embed_many(ids, pooling=pooling, dimensions=body.dimensions)
    return sum(map(len, ids)), [
        msgspec.Raw(msgspec.json.encode({"index": index, "embedding": vector.reshape(-1, vector.shape[-1]).tolist()}))
        for index, vector in enumerate(made)
    ]
