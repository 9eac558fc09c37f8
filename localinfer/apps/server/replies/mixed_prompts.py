"""Prompts as llama-server takes them: a text, token ids, both mixed, objects, and several of these."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from localinfer.apps.server.transport.http import ApiError, unsupported
from localinfer.errors import TokenIdError

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

Pieces = Sequence[str | int]
"""A prompt: texts and token ids, in order."""
_MEDIA = ("multimodal_data", "image_data")
_MAX_ID = (1 << 31) - 1
_WANTED_IDS = "give ids of this model's vocabulary, from 0, as /tokenize gives them"


def read_prompts(prompt: Any, field: str, *, at_most: int) -> list[Pieces]:
    """The prompts of a request: `"a"`, `[1, 2]` and `[1, "a"]` are one, `["a", "b"]` and `[[1], "a"]` two.

    An object has its text as `prompt_string`. Raises: ApiError.
    """
    if isinstance(prompt, list) and prompt and not _is_mixed(prompt):
        if len(prompt) > at_most:
            raise ApiError(400, f"{field} has {len(prompt)} prompts; give at most {at_most} at a time", param=field)
        return [_pieces(one, f"{field}[{index}]") for index, one in enumerate(prompt)]
    return [_pieces(prompt, field)]


def encode_pieces(
    tokenizer: "Tokenizer",
    pieces: Pieces,
    *,
    max_tokens: int | None,
    add_special: bool = False,
    parse_special: bool = False,
    field: str | None = None,
) -> list[int]:
    """The ids of a prompt.

    max_tokens: a longer text is not encoded to its end. add_special: with the tokens that begin and end a text, where
    the prompt begins with one. parse_special: names of special tokens are those tokens. field: the member of the
    request that has the prompt, where it is not the only one. Raises: ContextLengthError, TokenIdError.
    """
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            if piece >= tokenizer.vocab_size:
                raise TokenIdError(
                    f"token id {piece} is not in the vocabulary; wanted 0 to {tokenizer.vocab_size - 1}, as /tokenize "
                    "gives them",
                    field=field,
                )
            ids.append(piece)
        else:
            ids += tokenizer.encode(piece, add_special and not index, parse_special, max_tokens=max_tokens)
    return ids


def embedding_prompt(tokenizer: "Tokenizer", pieces: Pieces) -> str | list[int]:
    """A prompt as `LLM.embed_many` takes it: a text by itself, or the ids of what is mixed."""
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return pieces[0]
    return encode_pieces(tokenizer, pieces, max_tokens=None, add_special=True)


def _is_mixed(items: Sequence[Any]) -> bool:
    """Return whether a list is one prompt: it has ids, and nothing but ids and texts."""
    kinds = set(map(type, items))
    return int in kinds and kinds <= {int, str}


def _pieces(prompt: Any, path: str) -> Pieces:
    match prompt:
        case str():
            return [prompt]
        case list() if _is_mixed(prompt):
            for item in prompt:
                if isinstance(item, int) and not 0 <= item <= _MAX_ID:
                    raise ApiError(400, f"{path} has the token id {item}; {_WANTED_IDS}", param=path)
            return prompt
        case dict():
            return ["".join(_object_texts(prompt, path))]
    raise ApiError(
        400, f"{path} is no prompt; give a text, a list of token ids and texts, or a list of these", param=path
    )


def _object_texts(prompt: dict[str, Any], path: str) -> Iterator[str]:
    for name in _MEDIA:
        if prompt.get(name):
            raise unsupported(f"{path}.{name} has media, and this server reads text only; leave it out", path)
    match prompt:
        case {"prompt_string": str(text)}:
            yield text
        case {"content": [*parts]} if parts:
            for part in parts:
                match part:
                    case {"type": "text", "text": str(text)}:
                        yield text
                    case _:
                        raise unsupported(f"{path}.content has a part that is no text; send its text only", path)
        case _:
            raise ApiError(400, f"{path} is an object without a text; give it as prompt_string", param=path)
