"""`localinfer rm`: deletes what pull brought, and nothing else."""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from localinfer.errors import RequestError
from localinfer.storage.hub.download import partial_path
from localinfer.storage.hub.installed import find_installed
from localinfer.storage.hub.places import Places, blob_path, pointer_path, repository_folder
from localinfer.storage.hub.records import DamagedRecord, PullRecord, PullRecords
from localinfer.storage.hub.variants import describe_size
from localinfer.system.extras import require


def remove_model(name: str, places: Places) -> str:
    """Delete a pulled model, or what is here of an unfinished pull, and return what was freed, in words.

    Raises: RequestError for a name that is unknown, means several, or is a model of another program's.
    """
    records = PullRecords(places.records) if places.records is not None else None
    found = _matching(name, records.all() if records is not None else [])
    if records is None or not found:
        raise RequestError(_refusal(name, places))
    names = sorted({record.name for record in found})
    if len(names) > 1:
        raise RequestError(f"{name} means several models; name one of: {', '.join(names)}")
    require("hub", "removing pulled models")
    with records.locked(names[0], waits=False) as is_mine:
        if not is_mine:
            raise RequestError(f"{names[0]} is being pulled now; stop that with Ctrl-C first")
        others = [one for one in records.all() if isinstance(one, PullRecord) and one.name != names[0]]
        freed, num_kept = 0, 0
        for record in found:
            num_bytes, kept = delete_files(record, kept_by=others)
            freed, num_kept = freed + num_bytes, max(num_kept, kept)
        records.remove(names[0])
    kept_text = (
        f"; {num_kept} of its files stay in the hub's cache, as they were there before it was pulled, or belong to "
        "another model"
        if num_kept
        else ""
    )
    return f"removed {names[0]}: {describe_size(freed)} freed{kept_text}"


def delete_files(record: PullRecord, *, kept_by: Iterable[PullRecord]) -> tuple[int, int]:
    """Delete the files that a pull brought, and that no other record needs: bytes freed, and files that were kept."""
    kept_blobs = {blob_path(one.cache, one.repository, file.stored) for one in kept_by for file in one.files}
    kept_names = {pointer_path(one.cache, one.repository, file.stored) for one in kept_by for file in one.files}
    freed = num_kept = 0
    for file in record.files:
        blob = blob_path(record.cache, record.repository, file.stored)
        pointer = pointer_path(record.cache, record.repository, file.stored)
        if file.was_here or pointer in kept_names:
            num_kept += 1
            continue
        freed += _delete(pointer) + _delete(partial_path(blob))
        if blob in kept_blobs or _is_linked(record, blob):
            num_kept += 1
        else:
            freed += _delete(blob)
        _delete_empty(pointer.parent, repository_folder(record.cache, record.repo))
        _delete_empty(blob.parent, repository_folder(record.cache, record.repo))
    return freed, num_kept


def _matching(name: str, records: Iterable[PullRecord | DamagedRecord]) -> list[PullRecord]:
    wanted = name.lower()
    whole = [one for one in records if isinstance(one, PullRecord)]
    exact = [one for one in whole if one.name.lower() == wanted]
    return exact or [one for one in whole if one.repo.lower() == wanted or _short(one.name) == wanted]


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _refusal(name: str, places: Places) -> str:
    for model in find_installed(places):
        if model.name.lower() == name.lower():
            return (
                f"{name} was brought by another program and lies in {model.path}; localinfer removes only what it "
                f"pulled: {_OWN_WAY.get(model.source, 'remove it there')}"
            )
    return f"no model {name} was pulled; `localinfer list` shows those that were"


_OWN_WAY = {
    "ollama": "use `ollama rm`",
    "lm studio": "remove it in LM Studio",
    "hub cache": "use `hf cache rm`",
}


def _is_linked(record: PullRecord, blob: Path) -> bool:
    """Whether another snapshot of the repository still uses a blob, such as one that another program brought."""
    for folder, _, names in os.walk(repository_folder(record.cache, record.repo) / "snapshots"):
        for name in names:
            other = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if os.path.islink(other) and os.path.samefile(other, blob):
                    return True
    return False


def _delete(path: Path) -> int:
    """Delete a file or a link: the bytes that frees."""
    try:
        status = path.lstat()
        path.unlink()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _delete_empty(folder: Path, top: Path) -> None:
    """Delete folders that became empty, up to the repository's own."""
    while folder.is_relative_to(top):
        try:
            if folder == top:
                # What is left there names commits of files that are gone.
                with contextlib.suppress(OSError):
                    if not any((top / name).is_dir() for name in ("blobs", "snapshots")):
                        (top / "refs" / "main").unlink(missing_ok=True)
                        (top / "refs").rmdir()
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
