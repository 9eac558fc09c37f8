"""Our records of pulled models: one small file per model, written when every byte of it has been verified."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localinfer.errors import DownloadError
from localinfer.storage.hub.variants import Repository, StoredFile, is_safe_path, parse_reference
from localinfer.storage.records import LOCK, RecordStore
from localinfer.system.folders import make_private

_VERSION = 1
_MOST_BYTES = 4 << 20
_WHOLE, _UNFINISHED = ".json", ".unfinished.json"


@dataclass(frozen=True)
class PulledFile:
    """A file of a pulled model; was_here: another program had brought it before."""

    path: str
    size: int
    sha256: str | None
    git_id: str | None
    was_here: bool

    @property
    def stored(self) -> StoredFile:
        return StoredFile(self.path, self.size, self.sha256, self.git_id)


@dataclass(frozen=True)
class PullRecord:
    """A model that was pulled, or is being pulled."""

    name: str
    """`org/repo:quant`."""
    repo: str
    """`org/repo`."""
    quant: str | None
    """Its quantization."""
    commit: str
    """Of the repository."""
    cache: Path
    """The hub's cache that holds it."""
    files: tuple[PulledFile, ...]
    """Its files."""
    pulled: float
    """Time of the pull, in seconds since 1970."""
    is_folder: bool
    """True for a Hugging Face folder."""
    is_whole: bool = True
    """True if every file is there."""
    last_used: float | None = None
    """Time when it was last found by name."""

    @property
    def repository(self) -> Repository:
        return Repository(self.repo, self.commit, tuple(file.stored for file in self.files))

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class DamagedRecord:
    """A record that cannot be read."""

    path: Path
    problem: str


class PullRecords:
    """The records in a folder, which need not exist; any number of processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = RecordStore(folder, most_bytes=_MOST_BYTES)

    def all(self) -> list[PullRecord | DamagedRecord]:
        """Whole and unfinished pulls, by name; a model that is being pulled again is there twice."""
        try:
            names = self._records.names()
        except OSError:
            return []
        return [self._read(self._folder / name) for name in names if name.endswith(_WHOLE)]

    def get(self, name: str, *, whole: bool) -> PullRecord | None:
        """One record; None if it is missing or damaged."""
        path = self._path(name, _WHOLE if whole else _UNFINISHED)
        record = self._read(path) if path.exists() else None
        return record if isinstance(record, PullRecord) else None

    def put(self, record: PullRecord) -> None:
        """Write a record; a whole one replaces the unfinished one. Raises: DownloadError."""
        fields = asdict(record) | {"version": _VERSION, "cache": str(record.cache)}
        del fields["is_whole"], fields["last_used"]
        content = json.dumps(fields, indent=1).encode()
        self._make_folder()
        try:
            self._records.delete_unfinished(is_locked=False)
            self._records.write(self._path(record.name, _WHOLE if record.is_whole else _UNFINISHED).name, content)
        except OSError as error:
            raise DownloadError(
                f"{self._folder} cannot be written: {error.strerror or error}; free some space, or change who may write"
            ) from error
        if record.is_whole:
            self.remove_unfinished(record.name)

    def remove(self, name: str) -> None:
        """Forget a model, whole or unfinished."""
        self._remove(name, _WHOLE)
        self.remove_unfinished(name)

    def remove_unfinished(self, name: str) -> None:
        """Forget a pull of which nothing is here, or that is whole now."""
        self._remove(name, _UNFINISHED)

    def mark_used(self, name: str) -> None:
        """Note that a model is used now, if that can be written."""
        with contextlib.suppress(OSError):
            os.utime(self._path(name, _WHOLE))

    @contextmanager
    def locked(self, name: str, *, waits: bool) -> Iterator[bool]:
        """Keep other processes from pulling or removing a model; False if one does, and it is not waited for.

        Raises: DownloadError if the folder cannot be used.
        """
        self._make_folder()
        with self._records.locked(self._path(name, LOCK).name, seconds=None if waits else 0) as is_mine:
            yield is_mine

    def _make_folder(self) -> None:
        refused = make_private(self._folder)
        if refused is not None:
            raise DownloadError(f"{refused}; make it a folder of yours: pulled models are recorded there")

    def _path(self, name: str, suffix: str) -> Path:
        digest = hashlib.sha256(name.lower().encode()).hexdigest()[:12]
        return self._folder / f"{quote(name.lower(), safe='')[:120]}-{digest}{suffix}"

    def _remove(self, name: str, suffix: str) -> None:
        self._records.discard(self._path(name, suffix).name)

    def _read(self, path: Path) -> PullRecord | DamagedRecord:
        try:
            record = _parsed(json.loads(self._records.read(path.name)))
            changed = path.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError) as error:
            return DamagedRecord(path, f"{type(error).__name__}: {error}")
        # Written a moment after the time that it holds.
        used = changed if changed > record.pulled + 1 else None
        return replace(record, is_whole=not path.name.endswith(_UNFINISHED), last_used=used)


def _parsed(fields: Any) -> PullRecord:
    """Raises: ValueError, KeyError, TypeError."""
    if fields["version"] != _VERSION:
        raise ValueError(f"its version is {fields['version']}, and this program writes {_VERSION}")
    files = tuple(PulledFile(**file) for file in fields["files"])
    names = [file.sha256 or file.git_id or "" for file in files]
    is_sound = all(is_safe_path(file.path) and isinstance(file.size, int) for file in files)
    if not is_sound or not files or not all(name.isalnum() for name in [*names, fields["commit"]]):
        raise ValueError("it names files that cannot be of a model")
    if parse_reference(fields["repo"]) is None:
        raise ValueError("it names no repository")
    return PullRecord(
        name=str(fields["name"]),
        repo=str(fields["repo"]),
        quant=fields["quant"],
        commit=str(fields["commit"]),
        cache=Path(fields["cache"]),
        files=files,
        pulled=float(fields["pulled"]),
        is_folder=bool(fields["is_folder"]),
    )


def new_record(name: str, repository: Repository, cache: Path, *, quant: str | None, is_folder: bool) -> PullRecord:
    """An unfinished pull of the repository's files."""
    return PullRecord(
        name=name,
        repo=repository.id,
        quant=quant,
        commit=repository.commit,
        cache=cache,
        files=tuple(PulledFile(file.path, file.size, file.sha256, file.git_id, False) for file in repository.files),
        pulled=time.time(),
        is_folder=is_folder,
        is_whole=False,
    )
