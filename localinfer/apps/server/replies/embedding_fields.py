"""Prompts that a request wants vectors of: texts, token ids, and pictures by themselves or among texts.

An item of `input` is a text, ids, a part of a message as chats have it (`image_url`, `input_image`, `text`), a list of
such parts, or an object: `{"content": [parts]}`, or `{"image": ...}` and `{"text": ...}` as Jina's API has them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from localinfer.apps.server.replies.fields import Pieces, embedding_prompt, read_prompts
from localinfer.apps.server.replies.media_fields import media_part
from localinfer.apps.server.transport.http import ApiError
from localinfer.generation.chat.media_parts import MediaSource, part_text

if TYPE_CHECKING:
    from localinfer.llm import LLM

Parts = list[str | MediaSource]
"""Texts and pictures of one prompt, in order."""


def read_inputs(value: Any, field: str, *, at_most: int) -> list[Pieces | Parts]:
    """Read one prompt or a list of them. Raises: ApiError."""
    if not isinstance(value, list) or not any(_has_parts(one) for one in value):
        return [_parts(value, field)] if _has_parts(value) else [*read_prompts(value, field, at_most=at_most)]
    if len(value) > at_most:
        raise ApiError(400, f"{field} has {len(value)} prompts; give at most {at_most} at a time", param=field)
    found: list[Pieces | Parts] = []
    for index, one in enumerate(value):
        path = f"{field}[{index}]"
        found += [_parts(one, path)] if _has_parts(one) else read_prompts(one, path, at_most=1)
    return found


def read_document(value: Any, path: str) -> str | Parts:
    """Read a document that is to be ranked: its text, or its parts where some is a picture. Raises: ApiError."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and set(value) == {"text"} and isinstance(value["text"], str):
        return str(value["text"])
    if not _has_parts(value):
        raise ApiError(400, f"{path} is neither a text nor a picture; give a text, or parts of a message", param=path)
    parts = _parts(value, path)
    return parts if _is_media(parts) else str(parts[0])


def shown_document(value: Any) -> dict[str, Any]:
    """A document as an answer repeats it."""
    return {"text": value} if isinstance(value, str) else value if isinstance(value, dict) else {"content": value}


def embedded(llm: "LLM", prompts: Sequence[Pieces | Parts]) -> list[Any]:
    """Prompts as `LLM.embedding_inputs` takes them."""
    return [one if _is_media(one) else embedding_prompt(llm.tokenizer, one) for one in prompts]  # type: ignore[arg-type]


def _is_media(prompt: Sequence[int | str | MediaSource]) -> bool:
    return any(isinstance(piece, MediaSource) for piece in prompt)


def _has_parts(value: Any) -> bool:
    """True for a part, an object that holds some, and a list of parts."""
    if isinstance(value, list):
        return any(isinstance(one, dict) and _has_parts(one) for one in value)
    return isinstance(value, dict) and any(key in value for key in ("type", "content", "image", "text"))


def _parts(value: Any, path: str) -> Parts:
    """The parts of a prompt; of texts alone the one that they are together. Raises: ApiError."""
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        value, path = value["content"], f"{path}.content"
    if isinstance(value, list):
        found = [_part(one, f"{path}[{index}]") for index, one in enumerate(value)]
    else:
        found = [_part(value, path)]
    return found if _is_media(found) else ["".join(map(str, found))]


def _part(value: Any, path: str) -> str | MediaSource:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and "type" not in value and isinstance(value.get("image"), str):
        value = {"type": "image_url", "image_url": value["image"]}
    found = media_part(value, path)
    if found is not None:
        return found
    text = part_text(value)
    if text is not None:
        return text
    raise ApiError(
        400,
        f"{path} is neither a text nor a picture; give a text, or a part such as {{'type': 'image_url', 'image_url': "
        "{'url': 'data:image/png;base64,...'}}",
        param=path,
    )
