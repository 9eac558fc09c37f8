"""What a router knows of a request before its prompt is tokens: hashes of its beginnings, its texts, its priority."""

from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

_BLOCK_BYTES = 64
"""About fifteen tokens: a page of the cache holds 32."""
_MOST_BLOCKS = 4096
_HEADS = ("model", "cache_salt", "tools", "system", "instructions")
"""Members that stand before all messages in a prompt, or keep it apart from others."""
_COPIES = ("best_of", "n", "n_cmpl")
_MOST_TEXTS = 1_000_000
_BODIES = ("messages", "input", "prompt", "content", "query")


class PromptFacts(NamedTuple):
    """What a request's body says.

    prefixes: a number for each beginning of its prompt, by blocks; requests share as many as their texts begin alike.
    num_texts: that it asks for. priority: None if it does not say.
    """

    prefixes: tuple[int, ...] = ()
    num_texts: int = 1
    priority: int | None = None


def prompt_facts(body: bytes, salt: str = "") -> PromptFacts:
    """What a router is to know of a request.

    body: as it came; of what is no JSON object, or has no prompt, there are no prefixes. salt: whose it is, where
    clients are kept apart: then beginnings of one are those of no other.
    """
    try:
        members = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PromptFacts()
    if not isinstance(members, dict):
        return PromptFacts()
    options = members.get("options")
    priority = members.get("priority", options.get("priority") if isinstance(options, dict) else None)
    copies = next((one for name in _COPIES if isinstance(one := members.get(name), int) and one > 0), 1)
    prompt = members.get("prompt")
    # A list of ids is one prompt.
    has_several = isinstance(prompt, list) and bool(prompt) and not any(isinstance(one, int) for one in prompt)
    num_texts = min(copies * (len(prompt) if has_several and isinstance(prompt, list) else 1), _MOST_TEXTS)
    prefixes = _prefixes(_text(members), salt) if any(members.get(name) for name in _BODIES) else ()
    return PromptFacts(prefixes, num_texts, priority if isinstance(priority, int) else None)


def _prefixes(text: bytes, salt: str) -> tuple[int, ...]:
    prefixes = []
    chain = blake2b(salt.encode(), digest_size=8).digest() if salt else b""
    for end in range(_BLOCK_BYTES, min(len(text), _BLOCK_BYTES * _MOST_BLOCKS) + 1, _BLOCK_BYTES):
        chain = blake2b(chain + text[end - _BLOCK_BYTES : end], digest_size=8).digest()
        prefixes.append(int.from_bytes(chain, "little"))
    return tuple(prefixes)


def _text(members: dict[str, Any]) -> bytes:
    pieces = [msgspec.json.encode(members.get(name), order="deterministic") for name in _HEADS]
    for name in _BODIES:
        value = members.get(name)
        if isinstance(value, list):
            pieces += [msgspec.json.encode(one, order="deterministic") for one in value]
        elif isinstance(value, str):
            pieces.append(value.encode("utf-8", "surrogatepass"))
    return b"".join(pieces)
