"""Names of prefixes: salts, which keep texts of different callers apart, and the hashes of whole blocks of ids.

Texts of different salts share nothing of the cache, in memory or on disk. Facts that one caller can learn from the
cache, such as the number of cached tokens, are then of its own texts.

A block hash covers all ids up to the end of a page and the text's salt, so a router that knows a prompt's ids knows
which blocks it wants. It is BLAKE2b of 8 bytes throughout: the digest of `localinfer block hash`, a zero byte and the
salt comes before a text; each block is the digest of the 8 bytes before it and its ids as int32, little-endian. A hash
is read big-endian.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localinfer.arguments import shown
from localinfer.errors import RequestError
from localinfer.types import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.types import TokenIds

NO_SALT = b""
"""Salt of texts that all callers without a salt share."""
SALT_BYTES = (0, 32)
"""Sizes of NO_SALT, and of any other."""
_SALT_DOMAIN = b"localinfer cache salt\0"


def salt_of(name: str | None) -> bytes:
    """The salt that a caller's name for it stands for, 32 bytes of SHA-256; NO_SALT for None.

    The name itself is kept nowhere. Raises: RequestError for what is no text, or an empty one.
    """
    if name is None:
        return NO_SALT
    if not isinstance(name, str) or not name:
        reason = f"cache_salt is {name!r:.80}; give a text that is not empty, or leave it out"
        raise RequestError(reason, field="cache_salt")
    return hashlib.sha256(_SALT_DOMAIN + name.encode("utf-8", "surrogatepass")).digest()


def check_salt(salt: bytes) -> bytes:
    """Return what may be a salt. Raises: RequestError for what `salt_of` never gives."""
    if not isinstance(salt, bytes) or len(salt) not in SALT_BYTES:
        raise RequestError(f"salt is {shown(salt)}; give the 32 bytes of salt_of, or none", field="salt")
    return salt


_BLOCK_DOMAIN = b"localinfer block hash\0"
_DIGEST_BYTES = 8


def block_hashes(
    token_ids: Sequence[int] | NDArray[np.integer], *, cache_salt: str | None = None, block_size: int = PAGE_TOKENS
) -> list[int]:
    """The block hashes of a prompt, one for each whole block of it, as the KV cache events of a model name them.

    token_ids: int[T], with the beginning-of-text token if the prompt has one. cache_salt: of the request, if it has
    one: the same ids under another salt have other hashes, which cannot be computed without it. block_size: tokens of a
    block, as events say it. Returns T // block_size numbers of 64 bits, unsigned.
    Raises: RequestError.
    """
    from localinfer.kernels.address_space import require_libraries

    require_libraries(with_llvm=False)
    import numpy as np

    if not isinstance(block_size, int) or block_size < 1:
        raise RequestError(f"block_size is {block_size!r}; give the number of tokens in a block, such as {PAGE_TOKENS}")
    given = np.asarray(token_ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise RequestError("token_ids is no list of token ids; give those of one prompt, as a tokenizer makes them")
    limits = np.iinfo(np.int32)
    if given.size and (int(given.min()) < 0 or int(given.max()) > limits.max):
        raise RequestError(f"the token ids go from {given.min()} to {given.max()}; they must be from 0 to {limits.max}")
    return chained_hashes(given.astype(np.int32), block_size, salt_of(cache_salt), None)


def chained_hashes(token_ids: TokenIds, block_size: int, salt: bytes = NO_SALT, parent: int | None = None) -> list[int]:
    """The hashes of whole blocks that follow the block `parent`, or begin a text: int32[T] -> T // block_size."""
    import numpy as np

    content = np.ascontiguousarray(token_ids, "<i4").tobytes()
    size = 4 * block_size
    before = _first(salt) if parent is None else parent.to_bytes(_DIGEST_BYTES, "big")
    hashes = []
    for start in range(0, len(content) - size + 1, size):
        before = hashlib.blake2b(before + content[start : start + size], digest_size=_DIGEST_BYTES).digest()
        hashes.append(int.from_bytes(before, "big"))
    return hashes


def _first(salt: bytes) -> bytes:
    return hashlib.blake2b(_BLOCK_DOMAIN + salt, digest_size=_DIGEST_BYTES).digest()
