"""Vocabularies of byte-level BPE that are known by their merges, and the pre-tokenizer that each was trained with."""

import hashlib
from collections.abc import Sequence

_SAMPLES = 64

_KNOWN = {
    "9c3a10e256187b0c": ("GPT-2's", "gpt-2"),
    "89e1fd564c1bbc34": ("Llama 3's", "llama-bpe"),
    "716b0ab21afb32de": ("Qwen 2's", "qwen2"),
}
"""Whose it is, and its pre-tokenizer, by the digest of some merges."""


def merges_digest(merges: Sequence[str]) -> str:
    """A digest of the number of merges and of some of them, spread over all: 16 hexadecimal digits."""
    count = len(merges)
    samples = [merges[index * count // _SAMPLES] for index in range(_SAMPLES if count else 0)]
    text = "\n".join([str(count), *samples])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def known_vocabulary(merges: Sequence[str]) -> tuple[str, str] | None:
    """Whose vocabulary has these merges, and the name of its pre-tokenizer in GGUF files; None for an unknown one.

    Models that were trained further may have more tokens, and have the same merges.
    """
    return _KNOWN.get(merges_digest(merges))
