"""What a router compares of prompts: hashes of their beginnings, made of requests before they are cut into tokens."""

from hashlib import blake2b
from typing import Any

import msgspec

_BLOCK_BYTES = 64
"""About fifteen tokens: a page of the cache holds 32."""
_MOST_BLOCKS = 4096
_HEADS = ("model", "cache_salt", "tools", "system", "instructions")
"""Members that stand before all messages in a prompt, or keep it apart from others."""
_BODIES = ("messages", "input", "prompt", "content", "query")


def prompt_prefixes(body: bytes) -> tuple[int, ...]:
    """A number for each beginning of a request's prompt, by blocks; requests share as many as their texts begin alike.

    body: as it came; of what is no JSON object, or has no prompt, there are none.
    """
    try:
        members = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    if not isinstance(members, dict) or not any(members.get(name) for name in _BODIES):
        return ()
    text = _text(members)
    prefixes = []
    chain = b""
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
