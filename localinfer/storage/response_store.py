"""Responses and conversations that a server keeps: small files in a private folder, with a byte budget and an expiry.

What is put is there at once and is written behind by one thread, in order; `flush` waits for it. A file that is
deleted, by whomever, is forgotten; one that was not used for long is deleted. Without a folder, and where the disk
refuses, all this holds for the memory of the process.

A file has the SHA-256 of the content in hex and a newline, then the content. One that is damaged, as by a power cut, is
deleted; those of former versions have no hash, and begin with the brace of their JSON.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from localinfer.storage.budget import RESPONSE_FILE, DiskBudget, KeptFile, mark_used, newest_first
from localinfer.system import disk
from localinfer.system.files import read_bounded, write_all, write_atomically
from localinfer.system.folders import expand_home, make_private, user_folder
from localinfer.types import Closing

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 << 20
DEFAULT_EXPIRY_SECONDS = 30 * 86400.0
_LONGEST_FLUSH_SECONDS = 3.0
_PROOF_BYTES = 65
_SWEEP_SECONDS = 3600.0
"""Time between two searches for files that have expired."""


def responses_folder(parent: str | os.PathLike[str] | None) -> Path | None:
    """The folder of responses, beside the prompt cache: inside `parent`, or inside this user's cache folder."""
    cache = user_folder("cache") if parent is None else expand_home(parent).absolute()
    return None if cache is None else cache / "responses"


def stored_responses(folder: Path) -> list[KeptFile]:
    """The files of a folder of responses, those used last first."""
    return newest_first(folder)


def clear_responses(folder: Path) -> int:
    """Delete all of them, and return their bytes; a server that runs has forgotten them then."""
    deleted = 0
    for file in stored_responses(folder):
        with contextlib.suppress(OSError):
            disk.delete(file.path)
            deleted += file.num_bytes
    return deleted


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
    """Contents by the names of their files, which are those of `RESPONSE_FILE`. Thread-safe; any number of processes.

    The folder is made if it is missing, and refused, with a warning, if others could write it.
    """

    def __init__(self, options: ResponseStoreOptions) -> None:
        self.keeps = options.max_bytes > 0
        self._options = options
        self._folder = options.folder if self.keeps else None
        self._memory: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._memory_bytes = 0
        self._lock = threading.Lock()
        # None: to be deleted.
        self._pending: dict[str, bytes | None] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._last_failure: str | None = None
        self._swept = 0.0
        if self._folder is not None and (problem := make_private(self._folder)) is not None:
            logger.warning("responses are kept in memory only: %s", problem)
            self._folder = None
        if self._folder is not None:
            self._budget = DiskBudget(self._folder, options.max_bytes, stored_responses)
            self._writer = ThreadPoolExecutor(1, "localinfer-responses")

    def put(self, name: str, content: bytes) -> None:
        """Keep a content in place of a former one; returns before it is written."""
        assert re.fullmatch(RESPONSE_FILE, name), "the name of a response or a conversation"
        if not self.keeps:
            return
        if self._writer is None:
            self._remember(name, content)
            return
        self._later(name, content)

    def get(self, name: str) -> bytes | None:
        """The content of a name, None if there is none or it has expired. May wait for the disk."""
        if not self.keeps or not re.fullmatch(RESPONSE_FILE, name):
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
        return None if self._folder is None else self._read(self._folder / name)

    def delete(self, name: str) -> None:
        """Forget a content, if there is one; returns before its file is deleted."""
        with self._lock:
            self._forget(name)
        if self._writer is not None and re.fullmatch(RESPONSE_FILE, name):
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
        assert self._folder is not None, "there is a folder"
        path = self._folder / name
        failure = self._try(partial(_unlink, path) if content is None else partial(self._write, path, content))
        with self._lock:
            if self._pending.get(name, b"") is content:
                del self._pending[name]
                if failure is not None and content is not None:
                    self._remember_locked(name, content)
        if failure is not None and failure != self._last_failure:
            logger.warning("responses are kept in memory only: %s", failure)
        self._last_failure = failure

    def _try(self, work: Callable[[], None]) -> str | None:
        assert self._folder is not None, "there is a folder"
        try:
            work()
        except OSError as error:
            return f"{self._folder} cannot be written: {error.strerror or error}"
        return None

    def _write(self, path: Path, content: bytes) -> None:
        write = partial(write_all, data=_proof(content) + content)
        try:
            write_atomically(path, write)
        except FileNotFoundError:
            # Somebody deleted the folder.
            disk.make_folder(path.parent)
            write_atomically(path, write)
        self._sweep()
        self._budget.note_written(_PROOF_BYTES + len(content))
        self._budget.enforce()

    def _sweep(self) -> None:
        """Delete what has expired, now and then."""
        if not self._options.expiry_seconds or time.monotonic() - self._swept < _SWEEP_SECONDS and self._swept:
            return
        self._swept = time.monotonic()
        assert self._folder is not None, "there is a folder"
        for file in stored_responses(self._folder):
            if self._has_expired(file.used_ns / 1e9):
                with contextlib.suppress(OSError):
                    disk.delete(file.path)

    def _read(self, path: Path) -> bytes | None:
        try:
            if self._has_expired(disk.status(path).st_mtime):
                self.delete(path.name)
                return None
            kept = read_bounded(path, self._options.max_bytes)
        except OSError:
            return None
        content = _proven(kept)
        if content is None:
            logger.info("%s does not match its checksum; it is forgotten", path)
            self.delete(path.name)
        else:
            mark_used([path])
        return content

    def _has_expired(self, used: float) -> bool:
        return 0 < self._options.expiry_seconds < time.time() - used

    def _remember(self, name: str, content: bytes) -> None:
        with self._lock:
            self._remember_locked(name, content)

    def _remember_locked(self, name: str, content: bytes) -> None:
        self._forget(name)
        self._memory[name] = (time.time(), content)
        self._memory_bytes += len(content)
        while self._memory_bytes > self._options.max_bytes:
            self._forget(next(iter(self._memory)))

    def _forget(self, name: str) -> None:
        _, content = self._memory.pop(name, (0.0, b""))
        self._memory_bytes -= len(content)


def _proof(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def _proven(kept: bytes) -> bytes | None:
    """The content of a file; None if it is damaged."""
    content = kept[_PROOF_BYTES:]
    if kept[:_PROOF_BYTES] == _proof(content):
        return content
    return kept if kept.startswith(b"{") else None


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        disk.delete(path)
