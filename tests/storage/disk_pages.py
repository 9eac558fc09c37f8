"""Pages of made-up bytes for tests of what goes to disk: each byte depends on every token id up to its page."""

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from localinfer.storage.page_store import Contents, DiskTier, PageSource, no_contents
from localinfer.types import TokenIds

PAGE_TOKENS = 4
PAGE_BYTES = 192
FINGERPRINT = hashlib.sha256(b"a model").digest()


def ids(*values: int) -> TokenIds:
    return np.array(values, np.int32)


def numbered(count: int, start: int = 0) -> TokenIds:
    return np.arange(start, start + count, dtype=np.int32)


def tier(
    folder: Path,
    *,
    fingerprint: bytes = FINGERPRINT,
    max_bytes: int = 1 << 20,
    threads: int = 2,
    contents: Contents = no_contents,
) -> DiskTier:
    sizes = {"page_tokens": PAGE_TOKENS, "page_bytes": PAGE_BYTES, "max_bytes": max_bytes}
    return DiskTier(folder, fingerprint, **sizes, threads=threads, contents=contents)


def computed(token_ids: TokenIds) -> list[memoryview]:
    """The pages a model would compute for these ids."""
    pages = []
    for start in range(0, token_ids.size, PAGE_TOKENS):
        seed = hashlib.sha256(token_ids[: start + PAGE_TOKENS].tobytes()).digest()
        generator = np.random.default_rng(list(seed))
        pages.append(memoryview(bytearray(generator.bytes(PAGE_BYTES))))
    return pages


def source(token_ids: TokenIds) -> PageSource:
    """The same, as a save asks for them."""
    pages = computed(token_ids)
    return lambda indices: [pages[index] for index in indices]


def fresh(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE_BYTES)) for _ in range(count)]


def failing(original: Callable[..., object], after: int) -> Callable[..., object]:
    """The same, until the disk is full after so many calls."""
    calls = 0

    def call(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **options)

    return call


def restored(disk: DiskTier, token_ids: TokenIds, first_page: int = 0) -> tuple[int, list[memoryview]]:
    """Find and restore; the tokens that hold, and the pages read."""
    found = disk.find(token_ids, first_page)
    pages = fresh(len(found.pages))
    return disk.restore(found, pages).num_tokens, pages


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
