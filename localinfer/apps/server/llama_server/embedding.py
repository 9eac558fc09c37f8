"""`/embedding` and `/embeddings`: vectors in llama-server's own shape, also those of every token."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.operation.requests import record_of
from localinfer.apps.server.replies.mixed_prompts import Pieces, embedding_prompt, read_prompts
from localinfer.apps.server.replies.service import read_body, reserve_prompts, service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import ApiError, json_response
from localinfer.apps.server.transport.known_fields import EMBEDDINGS, KnownFields

if TYPE_CHECKING:
    from localinfer.llm import LLM

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
        work = asyncio.to_thread(_embed, lease.llm, prompts, body, pooling, reserve)
        count, vectors = await unless_gone(request.receive, work)
    record_of(request.scope).input_tokens = count
    service_of(request).totals.count_prompts(count, time.perf_counter() - began)
    return json_response(vectors)


def _embed(
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
