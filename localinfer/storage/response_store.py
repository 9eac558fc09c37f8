"""Responses and conversations that a server keeps: small files in a private folder, with a byte budget and an expiry.

A content can be read at once and is written behind by one thread, in order; `flush` waits for it. A file that any
program deletes is forgotten; one that was not used for long is deleted. Without a folder, and where the disk refuses,
contents are kept in the memory of the process.

Files are sealed records (`records.py`); those of former versions have no seal, and begin with the brace of their JSON.
One that is damaged, as by a power cut, is deleted.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from localinfer.storage.budget import KeptFile, mark_used
from localinfer.storage.records import NewerRecordError, RecordStore, TornRecordError
from localinfer.system import disk
from localinfer.system.folders import expand_home, make_private, user_folder
from localinfer.types import Closing

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 << 20
DEFAULT_EXPIRY_SECONDS = 30 * 86400.0
_LONGEST_FLUSH_SECONDS = 3.0
_SWEEP_SECONDS = 3600.0
"""Time between two searches for files that have expired."""
_NAMES = r"(?:resp|conv|cmp)_[0-9a-f]{24}\.(?:json|events)"
"""Of the files of responses, conversations, and summaries of the chats that were compacted."""


def responses_folder(parent: str | os.PathLike[str] | None) -> Path | None:
    """The folder of responses, beside the prompt cache: inside `parent`, or inside this user's cache folder."""
    cache = user_folder("cache") if parent is None else expand_home(parent).absolute()
    return None if cache is None else cache / "responses"


def stored_responses(folder: Path) -> list[KeptFile]:
    """The files of a folder of responses, those used last first."""
    return _records(folder, DEFAULT_MAX_BYTES).files()


def clear_responses(folder: Path) -> int:
    """Delete all of them, and return their bytes; a server that runs has forgotten them then."""
    deleted = 0
    for file in stored_responses(folder):
        with contextlib.suppress(OSError):
            disk.delete(file.path)
            deleted += file.num_bytes
    return deleted


def _records(folder: Path, max_bytes: int) -> RecordStore:
    return RecordStore(folder, names=_NAMES, most_bytes=max_bytes, max_bytes=max_bytes, is_sealed=True, unsealed=b"{")


@dataclass(frozen=True)
class ResponseStoreOptions:
    """Folder and limits of stored responses."""

    folder: Path | None = None
    """None for the memory of this process."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """Of all files together; 0 keeps nothing."""
    expiry_seconds: float = DEFAULT_EXPIRY_SECONDS
    """Since the last use; 0 never expires."""


class ResponseStore(Closing):
    """Contents by the names of their files, `resp_`, `conv_` or `cmp_` and an id. Thread-safe; any number of processes.

    The folder is made if it is missing, and refused, with a warning, if others could write it.
    """

    def __init__(self, options: ResponseStoreOptions) -> None:
        self.keeps = options.max_bytes > 0
        self._options = options
        self._records: RecordStore | None = None
        self._memory: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._memory_bytes = 0
        self._lock = threading.Lock()
        # None: to be deleted.
        self._pending: dict[str, bytes | None] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._last_failure: str | None = None
        self._swept = 0.0
        if not self.keeps or options.folder is None:
            return
        problem = make_private(options.folder)
        if problem is not None:
            logger.warning("responses are kept in memory only: %s", problem)
        else:
            self._records = _records(options.folder, options.max_bytes)
            self._writer = ThreadPoolExecutor(1, "localinfer-responses")

    def put(self, name: str, content: bytes) -> None:
        """Keep a content instead of a former one; returns before it is written."""
        assert re.fullmatch(_NAMES, name), "the name of a response, a conversation or a summary"
        if not self.keeps:
            return
        if self._writer is not None:
            self._later(name, content)
            return
        with self._lock:
            self._remember(name, content)

    def get(self, name: str) -> bytes | None:
        """The content of a name, None if there is none or it has expired. May wait for the disk."""
        if not self.keeps or not re.fullmatch(_NAMES, name):
            return None
        with self._lock:
            if name in self._pending:
                return self._pending[name]
            used, content = self._memory.get(name, (0.0, None))
            if content is not None:
                if self._has_expired(used):
                    self._forget(name)
                    return None
                self._memory[name] = (time.time(), content)
                self._memory.move_to_end(name)
                return content
        return None if self._records is None else self._read(self._records, name)

    def delete(self, name: str) -> None:
        """Forget a content, if there is one; returns before its file is deleted."""
        with self._lock:
            self._forget(name)
        if self._writer is not None and re.fullmatch(_NAMES, name):
            self._later(name, None)

    def flush(self) -> None:
        """Wait until what was put and deleted before is in files, which a killed process leaves behind.

        For a few seconds at most: a disk that hangs ends no reply.
        """
        if self._writer is not None:
            # Once it is closed, everything is written where it is put.
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._writer.submit(lambda: None).result(_LONGEST_FLUSH_SECONDS)

    def close(self) -> None:
        """Write what is pending; may be called again."""
        if self._writer is not None:
            self._writer.shutdown()

    def _later(self, name: str, content: bytes | None) -> None:
        assert self._writer is not None, "there is a folder"
        with self._lock:
            self._forget(name)
            self._pending[name] = content
        try:
            self._writer.submit(self._work_off, name)
        except RuntimeError:
            # Closed, or the interpreter ends.
            self._work_off(name)

    def _work_off(self, name: str) -> None:
        with self._lock:
            if name not in self._pending:
                return
            content = self._pending[name]
        assert self._records is not None, "there is a folder"
        failure = None
        try:
            self._write(self._records, name, content)
        except OSError as error:
            failure = f"{self._records.folder} cannot be written: {error.strerror or error}"
        with self._lock:
            if self._pending.get(name, b"") is content:
                del self._pending[name]
                if failure is not None and content is not None:
                    self._remember(name, content)
        if failure is not None and failure != self._last_failure:
            logger.warning("responses are kept in memory only: %s", failure)
        self._last_failure = failure

    def _write(self, records: RecordStore, name: str, content: bytes | None) -> None:
        """Write a content, or delete it, and now and then what has expired. Raises: OSError."""
        if content is None:
            with contextlib.suppress(FileNotFoundError):
                records.delete(name)
            return
        records.write(name, content)
        if self._options.expiry_seconds and (not self._swept or time.monotonic() - self._swept >= _SWEEP_SECONDS):
            self._swept = time.monotonic()
            for file in records.files():
                if self._has_expired(file.used_ns / 1e9):
                    records.discard(Path(file.path).name)

    def _read(self, records: RecordStore, name: str) -> bytes | None:
        path = records.folder / name
        try:
            if self._has_expired(disk.status(path).st_mtime):
                self.delete(name)
                return None
            content = records.read(name)
        except OSError:
            return None
        except NewerRecordError as error:
            logger.info("%s is not used: %s", path, error)
            return None
        except TornRecordError as error:
            logger.info("%s is forgotten: %s", path, error)
            self.delete(name)
            return None
        mark_used([path])
        return content

    def _has_expired(self, used: float) -> bool:
        return 0 < self._options.expiry_seconds < time.time() - used

    def _remember(self, name: str, content: bytes) -> None:
        """Keep a content in memory; the lock is held."""
        self._forget(name)
        self._memory[name] = (time.time(), content)
        self._memory_bytes += len(content)
        while self._memory_bytes > self._options.max_bytes:
            self._forget(next(iter(self._memory)))

    def _forget(self, name: str) -> None:
        _, content = self._memory.pop(name, (0.0, b""))
        self._memory_bytes -= len(content)
