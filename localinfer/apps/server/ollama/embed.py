"""`/api/embed` and the older `/api/embeddings`: texts as vectors."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.embeddings import MOST_TEXTS, in_batches
from localinfer.apps.server.ollama.fields import KeepAlive, Options, begin_request, nanoseconds
from localinfer.apps.server.operation.requests import record_of
from localinfer.apps.server.replies.service import read_body, reserve_prompts, service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import json_response, unsupported
from localinfer.apps.server.transport.known_fields import KnownFields, Refusal

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.types import TokenIds


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Texts that vectors of length 1 are wanted for; without any the model is loaded.

    truncate: cut those longer than the context, as Ollama does by default; an answer says so in `warnings`.
    """

    known_fields: ClassVar = KnownFields({}, {"prompt": Refusal("send input, or ask /api/embeddings")})

    model: str | None = None
    input: str | Annotated[list[str], Meta(max_length=MOST_TEXTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0)] | None = None
    keep_alive: KeepAlive | None = None
    options: Options | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """One text that a vector is wanted for, as the model gives it; without it the model is loaded."""

    known_fields: ClassVar = KnownFields({}, {"input": Refusal("send prompt, or ask /api/embed")})

    model: str | None = None
    prompt: str | None = None
    keep_alive: KeepAlive | None = None
    options: Options | None = None


async def embed(request: Request) -> Response:
    """The vectors of texts, in order."""
    body = await read_body(request, OllamaEmbedRequest)
    texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input or ())
    begun = begin_request(request, body.model, body.keep_alive)
    settings = service_of(request).settings
    ids: list[TokenIds] = []
    vectors: list[msgspec.Raw] = []
    num_cut = 0
    with await service_of(request).lease(request, begun.named.id) as lease:
        loaded = time.monotonic()
        async for encoded in in_batches(request, texts, partial(_encode, lease.llm, body)):
            ids += encoded
        count = sum(map(len, ids))
        reserve_prompts(request, count)
        async for found in in_batches(request, ids, partial(_embed, lease.llm, body, settings.pooling)):
            vectors += found.vectors
            num_cut += found.num_cut
        warnings = _warnings(body.options, lease.llm.context_length, num_cut)
    record_of(request.scope).input_tokens = count
    answer = {
        "model": begun.named.shown,
        "embeddings": vectors,
        "total_duration": nanoseconds(time.monotonic() - begun.began),
        "load_duration": nanoseconds(loaded - begun.began),
        "prompt_eval_count": count,
    }
    return json_response({**answer, **warnings})


async def embeddings(request: Request) -> Response:
    """The vector of one text."""
    body = await read_body(request, OllamaEmbeddingsRequest)
    begun = begin_request(request, body.model, body.keep_alive)
    warnings: dict[str, Any] = {}
    vector = msgspec.Raw(b"[]")
    with await service_of(request).lease(request, begun.named.id) as lease:
        if body.prompt:
            pooling, reserve = service_of(request).settings.pooling, partial(reserve_prompts, request)
            found = await unless_gone(request.receive, asyncio.to_thread(_embed_one, lease.llm, body, pooling, reserve))
            record_of(request.scope).input_tokens = found.num_tokens
            vector = found.vectors[0]
        warnings = _warnings(body.options, lease.llm.context_length, 0)
    return json_response({"embedding": vector, **warnings})


class _Found(msgspec.Struct):
    """Vectors as JSON, with how many tokens they were made of, and how many texts were cut."""

    vectors: list[msgspec.Raw]
    num_tokens: int
    num_cut: int


def _encode(llm: "LLM", body: OllamaEmbedRequest, texts: Sequence[str]) -> "list[TokenIds]":
    _check(body.options)
    return llm.embedding_ids(texts, truncate=body.truncate is not False)


def _embed(llm: "LLM", body: OllamaEmbedRequest, pooling: str | None, ids: "Sequence[TokenIds]") -> _Found:
    return _found(ids, llm.embed_many(ids, pooling=pooling, dimensions=body.dimensions or None), llm.context_length)


def _embed_one(
    llm: "LLM", body: OllamaEmbeddingsRequest, pooling: str | None, reserve: Callable[[int], None]
) -> _Found:
    _check(body.options)
    ids = llm.embedding_ids([body.prompt or ""])
    reserve(len(ids[0]))
    return _found(ids, llm.embed_many(ids, pooling=pooling, normalize=False), llm.context_length)


def _found(ids: Sequence[NDArray[np.int32]], vectors: Sequence[NDArray[np.float32]], context_length: int) -> _Found:
    """Vectors of texts of these ids. Raises: ApiError for a model with a vector per token."""
    if any(vector.ndim > 1 for vector in vectors):
        raise unsupported("this model gives a vector per token, which has no place in this answer; ask /embedding")
    # A text that fills the context to the last token was cut, or is taken for it.
    num_cut = sum(len(one) >= context_length for one in ids)
    written = [msgspec.Raw(msgspec.json.encode(vector.tolist())) for vector in vectors]
    return _Found(written, sum(map(len, ids)), num_cut)


def _check(options: Options | None) -> None:
    if options is not None:
        options.check()


def _warnings(options: Options | None, context_length: int, num_cut: int) -> dict[str, Any]:
    told = [] if options is None else [options.context_warning(context_length)]
    if num_cut:
        told.append(
            f"{num_cut} texts have more than {context_length} tokens and were cut; send truncate: false instead"
        )
    warnings = [warning for warning in told if warning is not None]
    return {"warnings": warnings} if warnings else {}
