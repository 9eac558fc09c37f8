"""`/v1/embeddings`: one vector per text."""

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.replies.fields import Prompts, split_prompts
from localinfer.server.replies.service import read_body, service_of, unless_gone
from localinfer.server.transport.http import json_response, unsupported
from localinfer.server.transport.known_fields import EMBEDDINGS

if TYPE_CHECKING:
    from localinfer.llm import LLM

_MOST_TEXTS = 2048


class EmbeddingRequest(msgspec.Struct):
    """Texts, or lists of token ids, that vectors are wanted for."""

    known_fields: ClassVar = EMBEDDINGS

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


async def embeddings(request: Request) -> Response:
    """The vectors of texts, in order, as numbers or as base64 of little-endian float32."""
    body = await read_body(request, EmbeddingRequest)
    if body.dimensions is not None:
        raise unsupported("dimensions is given, but vectors come whole; leave it out", "dimensions")
    texts = split_prompts(body.input, "input", at_most=_MOST_TEXTS)
    vectors: list[NDArray[np.float32]] = []
    count = 0
    with await service_of(request).lease(request, body.model) as lease:
        for text in texts:
            token_ids, vector = await unless_gone(request, asyncio.to_thread(_embed, lease.llm, text))
            vectors.append(vector)
            count += len(token_ids)
    data = await asyncio.to_thread(_data, vectors, body.encoding_format)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": lease.model_id, "usage": usage})


def _embed(llm: "LLM", text: str | Sequence[int]) -> tuple[Sequence[int], NDArray[np.float32]]:
    token_ids = llm.tokenizer.encode(text, max_tokens=llm.context_length) if isinstance(text, str) else text
    return token_ids, llm.embed(token_ids)


def _data(vectors: Sequence[NDArray[np.float32]], encoding: str) -> list[msgspec.Raw]:
    """The vectors as JSON, written one by one: a request may have millions of numbers."""
    is_base64 = encoding == "base64"
    written = []
    for index, vector in enumerate(vectors):
        numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") if is_base64 else vector.tolist()
        item = {"object": "embedding", "index": index, "embedding": numbers}
        written.append(msgspec.Raw(msgspec.json.encode(item)))
    return written
