"""`/infill`: the text between two others, by the tokens that a model for code has for that."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.llama_server.completion import serve_completion
from localinfer.apps.server.llama_server.completion_request import KNOWN, LlamaFields
from localinfer.apps.server.replies.mixed_prompts import Pieces, encode_pieces, read_prompts
from localinfer.apps.server.replies.service import read_body
from localinfer.apps.server.transport.http import unsupported
from localinfer.apps.server.transport.known_fields import KnownFields

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer

_PROJECT = "myproject\n"
_FILE = "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"
"""The names that llama-server gives to what has none, and what it puts before a snippet: models are used to them."""
_MOST_SNIPPETS = 1024


class Snippet(msgspec.Struct, forbid_unknown_fields=True):
    """Another file that helps to know what is missing, or a part of one."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields, kw_only=True):
    """A text with a hole.

    input_prefix, input_suffix: what stands before and after it. prompt: goes on with the prefix, where the cursor is.
    input_extra: texts of other files; those that do not fit the context are left out, the last ones first.
    """

    known_fields: ClassVar = KnownFields(
        KNOWN.ignored,
        {name: refusal for name, refusal in KNOWN.refused.items() if name not in ("input_prefix", "input_extra")},
    )

    input_prefix: str | list[Any]
    input_suffix: str | list[Any]
    prompt: str | list[Any] | None = None
    input_extra: Annotated[list[Snippet], Meta(max_length=_MOST_SNIPPETS)] | None = None


async def infill(request: Request) -> Response:
    """Fill in the hole of a text."""
    body = await read_body(request, InfillRequest)
    before = {"input_prefix": _one(body.input_prefix, "input_prefix")}
    before |= {"prompt": _one(body.prompt, "prompt")} if body.prompt else {}
    after = _one(body.input_suffix, "input_suffix")
    limit = body.n_predict if body.n_predict is not None and body.n_predict > 0 else 0
    prompt = partial(_prompt, before=before, after=after, snippets=body.input_extra or (), reserved=limit)
    return await serve_completion(request, body, [prompt])


def _one(prompt: str | list[Any], path: str) -> Pieces:
    (pieces,) = read_prompts(prompt, path, at_most=1)
    return pieces


def _prompt(
    llm: "LLM",
    *,
    before: Mapping[str, Pieces],
    after: Pieces,
    snippets: Sequence[Snippet],
    reserved: int,
    max_tokens: int | None,
) -> list[int]:
    """The ids of a prompt that the text in the hole goes on from.

    before: by the members of the request that have it. reserved: tokens that the context must have beside it and the
    snippets. Raises: ApiError for a model without such tokens; ContextLengthError, TokenIdError. Source: Bavarian et
    al., arXiv 2207.14255 (PSM); the order of files is Qwen's, arXiv 2409.12186.
    """
    tokenizer = llm.tokenizer
    tokens = tokenizer.fill_in_tokens
    if tokens is None:
        raise unsupported(
            "this model has no tokens for filling in; use a model for code, or ask /completion with the prefix", "model"
        )
    encode = partial(encode_pieces, tokenizer, max_tokens=max_tokens)
    first = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    start = [token_id for field, pieces in before.items() for token_id in encode(pieces, field=field)]
    hole = tokens.around(start, encode(after, field="input_suffix"))
    own_name = [] if tokens.separator is None else [tokens.separator, *tokenizer.encode(_FILE, add_special=False)]
    project = [] if tokens.repository is None else [tokens.repository, *tokenizer.encode(_PROJECT, add_special=False)]
    room = llm.context_length - len(first) - len(hole) - len(own_name) - len(project) - max(1, reserved)
    extra: list[int] = []
    for ids in _snippet_ids(tokenizer, snippets, tokens.separator):
        if len(extra) + len(ids) > room:
            break
        extra += ids
    if not extra and not snippets:
        return [*first, *hole]
    return [*first, *project, *extra, *own_name, *hole]


def _snippet_ids(tokenizer: "Tokenizer", snippets: Sequence[Snippet], separator: int | None) -> Iterator[list[int]]:
    for snippet in snippets:
        text = tokenizer.encode(snippet.text, add_special=False)
        if separator is None:
            yield [*tokenizer.encode(_SNIPPET, add_special=False), *text]
        else:
            yield [separator, *tokenizer.encode(f"{snippet.filename}\n", add_special=False), *text]
