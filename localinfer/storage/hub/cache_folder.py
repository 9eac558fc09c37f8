"""The layout of the hub's cache, as huggingface_hub documents it: blobs by checksum, snapshots that link to them."""

import os
from collections.abc import Iterator
from pathlib import Path

from localinfer.storage.hub.client import Repository
from localinfer.storage.hub.variants import StoredFile
from localinfer.system.files import delete_abandoned, write_atomically

_PREFIX = "models--"


def repository_folder(cache: Path, repo: str) -> Path:
    """The folder of `org/repo`."""
    return cache / f"{_PREFIX}{repo.replace('/', '--')}"


def blob_path(cache: Path, repository: Repository, file: StoredFile) -> Path:
    """Where the bytes of a file are, under their checksum."""
    return repository_folder(cache, repository.id) / "blobs" / (file.sha256 or file.git_id or "").lower()


def pointer_path(cache: Path, repository: Repository, file: StoredFile) -> Path:
    """Where a file is under its name, at a commit."""
    return repository_folder(cache, repository.id) / "snapshots" / repository.commit / file.path


def set_main(cache: Path, repository: Repository) -> None:
    """Record which commit is the newest, so that other programs find it without a network. Raises: OSError."""
    folder = repository_folder(cache, repository.id) / "refs"
    folder.mkdir(parents=True, exist_ok=True)
    # Other programs take every file here for the name of a commit.
    delete_abandoned(folder)
    write_atomically(folder / "main", lambda file: None if file.write(repository.commit.encode()) else None)


def snapshots(cache: Path) -> Iterator[tuple[str, Path]]:
    """Name and folder of each repository's newest snapshot: the one of `main`, or else the one changed last."""
    for folder in _entries(cache):
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
