"""Prompts as clients give them: one text or several, as characters or as token ids."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from localinfer.server.transport.errors import ApiError

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Prompts = str | list[str | TokenId | list[TokenId]]


def split_prompts(given: Prompts, field: str, *, at_most: int) -> list[str | Sequence[int]]:
    """One prompt per item: `[1, 2]` is one prompt of ids, `[[1, 2], "a"]` are two.

    Raises: ApiError for none, for too many, and for ids beside texts.
    """
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [ids]
    prompts = [item for item in given if not isinstance(item, int)]
    if ids or not prompts:
        raise ApiError(
            400, f"{field} is empty, or has token ids beside texts; give texts, or lists of token ids", param=field
        )
    if len(prompts) > at_most:
        raise ApiError(400, f"{field} has {len(prompts)} prompts; give at most {at_most} at a time", param=field)
    return list(prompts)
