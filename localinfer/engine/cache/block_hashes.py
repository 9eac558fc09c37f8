"""Names of prefixes: salts, which keep texts of different callers apart, and the hashes of whole blocks of ids; and
notifications of the blocks that enter and leave a prefix tree.

Texts of different salts share nothing of the cache, in memory or on disk. Facts that one caller can learn from the
cache, such as the number of cached tokens, are then of its own texts.

A block hash covers all ids up to the end of a page and the text's salt, so a router that knows a prompt's ids knows
which blocks it wants. It is BLAKE2b of 8 bytes throughout: the digest of `localinfer block hash`, a zero byte and the
salt comes before a text; each block is the digest of the 8 bytes before it and its ids as int32, little-endian. A hash
is read big-endian.

Only whole pages of the tree are reported to a `CacheObserver`: they are what another prompt can begin with. A page that
moves within the tree, is shared, or is computed again with its sliding-window block is reported once. Nodes remember
the hashes of reported pages. Ctrl-C may come between any two lines, so pages are reported before that is noted, and
notes are dropped before pages are reported as removed: an observer may be notified of a page twice, or for a while not
know of one, but never know of a page that is not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from localinfer.arguments import shown
from localinfer.errors import RequestError
from localinfer.types import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.engine.cache.prefix_tree import PrefixNode, Roots
    from localinfer.types import TokenIds

NO_SALT = b""
"""Salt of texts that all callers without a salt share."""
SALT_BYTES = (0, 32)
"""Sizes of NO_SALT, and of any other."""
_SALT_DOMAIN = b"localinfer cache salt\0"
_TYPE_DOMAIN = b"localinfer row type\0"


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


def salt_of_type(salt: bytes, row_type: int) -> bytes:
    """The salt of texts whose rows are of a type: those of type 0 have their own, others share nothing with these."""
    return hashlib.sha256(_TYPE_DOMAIN + bytes([row_type]) + salt).digest() if row_type else salt


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
    block, as events say it. Ids of pictures and sounds are below 0; where an adapter changes such prompts, they have a
    salt of their own, and other hashes than these.
    Returns T // block_size numbers of 64 bits, unsigned.
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
    if given.size and (int(given.min()) < limits.min or int(given.max()) > limits.max):
        raise RequestError(
            f"the token ids go from {given.min()} to {given.max()}; they must be from {limits.min} to {limits.max}"
        )
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


def common_length(a: TokenIds, b: TokenIds) -> int:
    """Number of ids that two arrays share at their start."""
    size = min(a.size, b.size)
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


class CacheObserver(Protocol):
    """Observer of a prefix cache, called under the step lock: it must not wait for anything, nor raise."""

    def stored(self, block_hashes: Sequence[int], parent_hash: int | None, token_ids: TokenIds, salt: bytes) -> None:
        """Whole pages are in the tree, each after the one before it, the first after `parent_hash`.

        parent_hash: None where a text begins. token_ids: theirs, int32, never written again.
        """

    def removed(self, block_hashes: Sequence[int]) -> None:
        """These are no longer in memory; what follows a block is named before it."""

    def cleared(self) -> None:
        """The tree is empty; the pages that were in it were reported as removed before."""

    def close(self) -> None:
        """The cache has ended."""


def tell_stored(observer: CacheObserver, node: PrefixNode, page_tokens: int) -> None:
    """Report the pages of a node, and of those before it, that were not reported yet."""
    parent: int | None = None
    for step, _ in node.path():
        known, whole = step.block_hashes, step.token_ids.size // page_tokens
        if len(known) < whole:
            before = known[-1] if known else parent
            fresh_ids = step.token_ids[len(known) * page_tokens : whole * page_tokens]
            fresh = chained_hashes(fresh_ids, page_tokens, step.salt, before)
            observer.stored(fresh, before, fresh_ids, step.salt)
            step.block_hashes = known = (*known, *fresh)
        parent = known[-1] if known else parent


def tell_removed(observer: CacheObserver, leaf: PrefixNode, kept: int, page_tokens: int) -> None:
    """Tell of the pages of a leaf that it is about to lose, all but the first `kept`."""
    lost = _hashes_of(leaf, page_tokens)[kept:]
    if lost:
        leaf.block_hashes = leaf.block_hashes[:kept]
        observer.removed(lost[::-1])


def tell_cleared(observer: CacheObserver, roots: Roots, page_tokens: int) -> None:
    """Tell that a tree is empty, or about to be dropped whole: of its pages first, for callers that count them."""
    left = [block for node in roots.nodes() for block in _hashes_of(node, page_tokens)]
    if left:
        observer.removed(left[::-1])
    observer.cleared()


def _hashes_of(node: PrefixNode, page_tokens: int) -> tuple[int, ...]:
    """The hashes of all whole pages of a node, which are noted unless Ctrl-C came in between."""
    known, whole = node.block_hashes, node.token_ids.size // page_tokens
    if len(known) == whole:
        return known
    import numpy as np

    before = np.concatenate([step.token_ids for step, _ in node.path()])
    return tuple(chained_hashes(before, page_tokens, node.salt)[-whole:])
