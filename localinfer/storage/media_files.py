"""Embeddings and layouts of pictures and sounds on disk: what is known of before a restart is not computed again.

The embeddings of a run are kept as the pages of a text of its ids are (`page_store.py`): checked when they are read,
found by texts of the same salt only, evicted by use, and in the same byte budget. They depend on the encoder, which the
ids name, and on the program, but not on the decoder beside it, so they are in a folder of their own. In it is also a
record for the bytes of each file that came, of what it is in a prompt, so that it need not be decoded.
"""

import functools
import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.engine.media import EmbeddingStore
from localinfer.storage.fingerprint import program
from localinfer.storage.page_store import DiskCounters, DiskTier, FileKind
from localinfer.storage.records import NewerRecordError, RecordStore
from localinfer.system.files import num_io_threads
from localinfer.types import FloatArray, TokenIds

logger = logging.getLogger(__name__)

ROWS_PER_FILE = 32
"""Rows of a file: most pictures are a multiple of it, and the others leave little of the last file empty."""
_MOST_WAITING = 1024
"""Runs and layouts that wait to be written; of more, the oldest are computed again after a restart."""
_MOST_LAYOUT_BYTES = 1 << 20
"""Of a layout: a picture of a thousand tiles has some 200 KB."""


class MediaFiles:
    """The embeddings of one width in a cache folder, an `EmbeddingTier` over `store`, and layouts. Any thread may ask.

    folder: private, and existing. max_bytes: budget of the whole folder, all pages included.
    """

    def __init__(self, folder: Path, width: int, store: EmbeddingStore, max_bytes: int) -> None:
        self._folder = folder
        self._width = width
        self._store = store
        self._max_bytes = max_bytes
        self._computed: deque[tuple[TokenIds, bytes]] = deque(maxlen=_MOST_WAITING)
        self._laid_out: deque[tuple[str, bytes]] = deque(maxlen=_MOST_WAITING)

    @property
    def counters(self) -> DiskCounters:
        """Files and bytes read, written and rejected so far."""
        return self._tier.counters

    def find(self, ids: TokenIds, salt: bytes) -> FloatArray | None:
        """Read the embeddings of a run; None if they are not there, or a file is damaged, which is then deleted."""
        tier = self._tier_of(ids, salt)
        found = tier.find(ids)
        if found.num_tokens < ids.size:
            return None
        rows = np.empty((len(found.pages) * ROWS_PER_FILE, self._width), np.float32)
        if tier.restore(found, _pages(rows, range(len(found.pages)))).num_tokens < ids.size:
            return None
        tier.mark_used(found)
        return rows[: ids.size]

    def on_computed(self, ids: TokenIds, salt: bytes) -> None:
        """Have the embeddings of a run written with the next text that goes idle."""
        self._computed.append((ids, salt))

    def saving(self, *, threads: int, should_stop: Callable[[], bool]) -> Generator[None, None, None]:
        """The steps in which what waits is written, of embeddings those that the store still has: a few files each."""
        while self._laid_out and not should_stop():
            try:
                self._layouts.write(*self._laid_out.popleft())
            except OSError as error:
                logger.info("the layout of a picture was not cached on disk: %s", error)
            yield
        while self._computed and not should_stop():
            ids, salt = self._computed.popleft()
            rows = self._store.kept(ids, salt)
            if rows is not None:
                whole = np.zeros((-(-ids.size // ROWS_PER_FILE) * ROWS_PER_FILE, self._width), np.float32)
                whole[: ids.size] = rows
                yield from self._tier_of(ids, salt).saving(ids, functools.partial(_pages, whole), threads=threads)

    def find_layout(self, key: bytes) -> Mapping[str, Any] | None:
        """The layout that `add_layout` was given for a key; None if it is not there, or damaged, and then deleted."""
        name = _layout_name(key)
        try:
            fields = json.loads(self._layouts.read(name))
            if not isinstance(fields, dict):
                raise ValueError("it is no object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.info("the layout %s is not used: %s; it is made again", name, error)
            if not isinstance(error, NewerRecordError):
                self._layouts.discard(name)
            return None
        return fields

    def add_layout(self, key: bytes, fields: Mapping[str, Any]) -> None:
        """Have a layout written with the next text that goes idle. key: names all that it depends on."""
        self._laid_out.append((_layout_name(key), json.dumps(fields).encode()))

    @functools.cached_property
    def _layouts(self) -> RecordStore:
        return RecordStore(self._tier.folder, most_bytes=_MOST_LAYOUT_BYTES, is_sealed=True)

    @functools.cached_property
    def _tier(self) -> DiskTier:
        # Hashing the sources takes milliseconds, which a model that is shown nothing need not spend.
        fingerprint = hashlib.sha256(f"embeddings\0{self._width}\0{program()}".encode()).digest()
        return DiskTier(
            self._folder,
            fingerprint,
            page_tokens=ROWS_PER_FILE,
            page_bytes=ROWS_PER_FILE * self._width * 4,
            max_bytes=self._max_bytes,
            threads=num_io_threads(),
            kind=FileKind.EMBEDDING,
        )

    def _tier_of(self, ids: TokenIds, salt: bytes) -> DiskTier:
        """The tier in which a run's files follow no key that another run's do, so that none is searched for it."""
        contents = self._store.short_runs.contents(ids, salt)
        key = len(salt).to_bytes(8, "little") + salt + ids.tobytes() + contents
        return self._tier.of_salt(hashlib.sha256(key).digest())


def _pages(rows: FloatArray, indices: Sequence[int]) -> list[memoryview]:
    """The bytes of some files' rows."""
    cut = rows.reshape(-1, ROWS_PER_FILE, rows.shape[1])
    return [cut[index].view(np.uint8).reshape(-1).data for index in indices]


def _layout_name(key: bytes) -> str:
    return f"{key.hex()[:32]}.layout"
