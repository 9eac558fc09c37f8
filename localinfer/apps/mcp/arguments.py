"""Arguments and results of the tools, as records: the schemas that clients see are made of them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.generation.chat.media_parts import MediaSource, read_media_part

_MOST_TEXTS = 256


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """Text, as MCP's content has it."""

    text: str


class _FilePart(msgspec.Struct, tag_field="type", kw_only=True):
    """A file of MCP's content, whose bytes say what it is."""

    data: Annotated[str, Meta(description="The bytes of the file, in base64.")]
    mime_type: str | None = msgspec.field(default=None, name="mimeType")


class ImagePart(_FilePart, tag="image"):
    """A picture (PNG, JPEG, WebP, GIF, BMP), for a model that sees."""


class AudioPart(_FilePart, tag="audio"):
    """A sound (WAV, FLAC, Ogg, MP3, AIFF), for a model that hears."""


Content = str | Annotated[list[TextPart | ImagePart | AudioPart], Meta(min_length=1, max_length=_MOST_TEXTS)]


def content_of(content: Content, path: str) -> str | list[dict[str, Any] | MediaSource]:
    """Content as messages have it. path: of the argument. Raises: MessageError."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any] | MediaSource] = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            kind = "image" if isinstance(part, ImagePart) else "audio"
            source = read_media_part({"type": kind, "data": part.data}, f"{path}[{index}]")
            assert source is not None, "of a type that is read"
            parts.append(source)
    return parts


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Content


Temperature = Annotated[float, Meta(ge=0, le=100, description="0 always takes the likeliest token.")]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1, description="The same seed gives the same text.")]
MaxTokens = Annotated[int, Meta(ge=1, le=1 << 31, description="Most tokens to write.")]


class ChatArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Ask the local language model, and get its answer. It knows nothing but what it is told here."""

    message: Annotated[Content, Meta(description="What to ask or tell the model: text, or parts of text and pictures.")]
    system: Annotated[str, Meta(description="How the model should answer, put before everything else.")] | None = None
    history: (
        Annotated[list[Message], Meta(max_length=1000, description="Earlier messages of the conversation, in order.")]
        | None
    ) = None
    json_schema: Annotated[dict[str, Any], Meta(description="A JSON Schema that the answer is held to.")] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None


class CompleteArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Continue a text with the local language model, as it is: without a chat template."""

    prompt: Annotated[str, Meta(min_length=1, description="The text to continue.")]
    stop: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16, description="End before these.")] = []
    max_tokens: MaxTokens = 256
    temperature: Temperature | None = None
    seed: Seed | None = None


class TokenizeArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Split a text into the tokens of the local language model, for instance to count them."""

    text: Annotated[str, Meta(description="The text to split.")]


class EmbedArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Turn texts into vectors of length 1 whose scalar products say how alike the texts are."""

    texts: Annotated[list[str], Meta(min_length=1, max_length=_MOST_TEXTS, description="The texts, in order.")]


class Generated(msgspec.Struct):
    """A text that was generated."""

    text: str
    finish_reason: str
    """Why it ended: "length" where it was cut at max_tokens or the end of the context."""
    reasoning: str
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that needed not be computed."""
    completion_tokens: int


class Tokens(msgspec.Struct):
    """A text's tokens."""

    token_ids: list[int]
    count: int


class Vectors(msgspec.Struct):
    """A vector for each text, in order."""

    vectors: list[list[float]]


def schema_of(record: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON Schema of a record, whole: clients disagree about references to its root."""
    (root,), parts = msgspec.json.schema_components([record], ref_template="#/$defs/{name}")
    schema = dict(parts.pop(root["$ref"].rpartition("/")[2]))
    schema.pop("title", None)
    schema.pop("description", None)
    return {**schema, **({"$defs": parts} if parts else {})}
