"""Prompts that ask for what stands between two texts, for models that were trained to fill in."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from localinfer.models.text.special_tokens import FILL_IN_SPELLINGS
from localinfer.server.transport.errors import ApiError

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer


def fill_prompt(
    tokenizer: "Tokenizer", prompt: str | Sequence[int], suffix: str, max_tokens: int | None = None
) -> list[int]:
    """The ids of a prompt whose completion stands before `suffix`: first what is before, then what is after.

    Raises: ApiError 400 if the vocabulary has no tokens for that; ContextLengthError for a long text of more than
    `max_tokens`. Source: Bavarian et al., arXiv 2207.14255 (PSM).
    """
    begin, hole, end = (
        next((token_id for text in spellings if (token_id := tokenizer.special_ids.get(text)) is not None), None)
        for spellings in FILL_IN_SPELLINGS
    )
    if begin is None or hole is None or end is None:
        raise ApiError(
            400,
            "suffix was given, but this model has no tokens for filling in; leave it out, or use a model for code",
            code="unsupported_parameter",
            param="suffix",
        )
    before = (
        tokenizer.encode(prompt, add_special=False, max_tokens=max_tokens) if isinstance(prompt, str) else list(prompt)
    )
    first = [] if not tokenizer.adds_bos or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    after = tokenizer.encode(suffix, add_special=False, max_tokens=max_tokens)
    return [*first, begin, *before, hole, *after, end]
