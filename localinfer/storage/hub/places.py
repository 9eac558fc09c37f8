"""Folders of models by name on this machine, and the layout of the hub's cache.

Blobs of the cache are named by checksum, and snapshots link to them, as huggingface_hub documents it.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from localinfer.storage.hub.variants import Repository, StoredFile
from localinfer.system import disk
from localinfer.system.files import delete_abandoned, write_atomically
from localinfer.system.folders import user_folder

HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Places:
    """Folders, which need not exist."""

    records: Path | None
    """Records of `localinfer pull`; None for a user without a home folder: nothing can be pulled."""
    hub_cache: Path | None
    """The cache of huggingface_hub, into which files are pulled; None likewise."""
    ollama: tuple[Path, ...] = ()
    """Folders with `manifests` and `blobs`."""
    lm_studio: tuple[Path, ...] = ()
    """Folders of publisher/repository/file."""
    endpoint: str = HUB
    """Address of the hub."""
    is_offline: bool = False
    """True: it is not asked."""

    @classmethod
    def of_user(cls) -> Self:
        """The folders of this user, by the variables that those programs read themselves."""
        data = user_folder("data")
        home = _home()
        ollama = [_folder("OLLAMA_MODELS")] if _folder("OLLAMA_MODELS") else [home and home / ".ollama/models"]
        if sys.platform == "linux":
            # Where its service for all users keeps them.
            ollama.append(Path("/usr/share/ollama/.ollama/models"))
        lm_studio = [home / below for below in (".lmstudio/models", ".cache/lm-studio/models")] if home else []
        return cls(
            records=None if data is None else data / "models",
            hub_cache=_hub_cache(home),
            ollama=tuple(folder for folder in ollama if folder is not None),
            lm_studio=tuple(lm_studio),
            endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB,
            is_offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        )


def _home() -> Path | None:
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) and os.environ.get("HOME") != "" else None


def _folder(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(os.path.expanduser(value)) if value else None


def _hub_cache(home: Path | None) -> Path | None:
    """As huggingface_hub finds it, without importing it, which takes half a second."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := _folder(variable):
            return folder
    if folder := _folder("HF_HOME"):
        return folder / "hub"
    caches = _folder("XDG_CACHE_HOME") or (home and home / ".cache")
    return caches / "huggingface" / "hub" if caches else None


_PREFIX = "models--"


_ROOM = 180
"""Characters of a path in a repository's folder: "snapshots", a commit, and a file's own path."""


def repository_folder(cache: Path, repo: str) -> Path:
    """The folder of `org/repo`."""
    return _with_room(cache / f"{_PREFIX}{repo.replace('/', '--')}")


def _with_room(folder: Path) -> Path:
    return Path(disk.path_with_room(folder, _ROOM))


def blob_path(cache: Path, repository: Repository, file: StoredFile) -> Path:
    """Path of the bytes of a file, named by their checksum."""
    return repository_folder(cache, repository.id) / "blobs" / (file.sha256 or file.git_id or "").lower()


def pointer_path(cache: Path, repository: Repository, file: StoredFile) -> Path:
    """Path of a file under its name, at a commit."""
    return repository_folder(cache, repository.id) / "snapshots" / repository.commit / file.path


def lock_path(cache: Path, repository: Repository, file: StoredFile) -> Path:
    """Path of the lock that a program holds which writes a file."""
    blob = blob_path(cache, repository, file)
    return _with_room(cache / ".locks" / blob.parents[1].name) / f"{blob.name}.lock"


def set_main(cache: Path, repository: Repository) -> None:
    """Record which commit is the newest, so that other programs find it without a network. Raises: OSError."""
    folder = repository_folder(cache, repository.id) / "refs"
    folder.mkdir(parents=True, exist_ok=True)
    # Other programs take every file here for the name of a commit.
    delete_abandoned(folder)
    write_atomically(folder / "main", lambda file: None if file.write(repository.commit.encode()) else None)


def snapshots(cache: Path) -> Iterator[tuple[str, Path]]:
    """Name and folder of each repository's newest snapshot: the one of `main`, or else the one changed last."""
    for folder in map(_with_room, _entries(cache)):
        if not folder.name.startswith(_PREFIX):
            continue
        repo = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
        candidates = [one for one in _entries(folder / "snapshots") if one.is_dir()]
        if not candidates:
            continue
        try:
            main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            main = ""
        named = [one for one in candidates if one.name == main]
        yield repo, named[0] if named else max(candidates, key=_changed)


def stored_files(folder: Path, max_depth: int = 3) -> Iterator[StoredFile]:
    """Files below a folder with their sizes; of links that lead nowhere it is -1."""
    for path in _entries(folder):
        if path.is_dir():
            if max_depth > 1:
                below = stored_files(path, max_depth - 1)
                yield from (StoredFile(f"{path.name}/{file.path}", file.size) for file in below)
            continue
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        yield StoredFile(path.name, size)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _changed(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
