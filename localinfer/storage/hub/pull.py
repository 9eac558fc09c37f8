"""`localinfer pull` brings a model into the hub's own cache; `localinfer rm` deletes only what it brought."""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localinfer.errors import DownloadError, HubUnreachableError, RequestError
from localinfer.storage.hub.download import HubClient, fetch_file, held_bytes, partial_path
from localinfer.storage.hub.installed import find_installed
from localinfer.storage.hub.places import Places, blob_path, lock_path, pointer_path, repository_folder, set_main
from localinfer.storage.hub.records import DamagedRecord, PullRecord, PullRecords, new_record
from localinfer.storage.hub.variants import (
    Reference,
    Repository,
    StoredFile,
    choose_variant,
    describe_size,
    encoders_for,
    parse_reference,
)
from localinfer.system.extras import require

if TYPE_CHECKING:
    from localinfer.types import ProgressCallback


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
    """Return True if another snapshot of the repository uses a blob, such as one that another program brought."""
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


_MOST_NAMES = 5
REPORT_SECONDS = 0.1
"""Progress is reported this often at most: its text changes with every byte."""


def read_reference(text: str) -> Reference:
    """Read what is to be pulled. Raises: RequestError."""
    reference = parse_reference(text)
    if reference is None:
        raise RequestError(
            f"{text!r} is not a model of the hub; give org/repo or org/repo:quant, such as "
            "`localinfer pull ggml-org/gemma-3-1b-it-GGUF:Q4_K_M`"
        )
    return reference


def pull_model(
    reference: Reference,
    places: Places,
    *,
    client: HubClient | None = None,
    with_encoders: bool = True,
    say: Callable[[str], None] = lambda line: None,
    progress: "ProgressCallback" = lambda stage, done, total: None,
) -> PullRecord:
    """Bring a model from the hub, or what is missing of it, and record it.

    with_encoders: also the file of its encoders for pictures or sounds (mmproj), if the repository has one. say: called
    with lines about what is chosen, and what it takes. progress: with bytes.
    Raises: RequestError for a name without a model; DownloadError. Arrived bytes are kept for the next pull.
    """
    require("hub", "pulling models")
    if places.records is None or places.hub_cache is None:
        raise DownloadError("this user has no home folder to keep models in; set HOME, or HF_HOME and XDG_DATA_HOME")
    client = client or HubClient(places.endpoint, is_offline=places.is_offline)
    records, cache = PullRecords(places.records), places.hub_cache
    try:
        repository = client.repository(reference.repo)
    except HubUnreachableError as error:
        raise HubUnreachableError(f"{error}; {_usable_offline(places)}") from error
    variant = choose_variant(reference, repository.files)
    name = f"{repository.id}:{variant.name}"
    encoders = encoders_for(variant, repository.files)
    files = variant.files
    if encoders is not None and with_encoders:
        say(f"with {encoders.path}, by which it reads pictures or sounds; --no-mmproj leaves it out")
        files = (*files, encoders)
    wanted = repository._replace(files=files)
    fresh = new_record(name, wanted, cache, quant=variant.quant, is_folder=variant.is_folder)
    with records.locked(name, waits=False) as is_mine:
        if is_mine:
            return _pull(client, records, fresh, say, progress)
    say(f"{name} is being pulled already; waiting for that")
    with records.locked(name, waits=True):
        return _pull(client, records, fresh, say, progress)


def _pull(
    client: HubClient,
    records: PullRecords,
    fresh: PullRecord,
    say: Callable[[str], None],
    progress: "ProgressCallback",
) -> PullRecord:
    repository, cache = fresh.repository, fresh.cache
    former = records.get(fresh.name, whole=True)
    if former is not None and former.repository == repository and _is_there(former):
        say(f"{fresh.name} is here already, as the hub has it now")
        return former
    _check_space(cache, repository, fresh.name, say)
    # What another program brought is not removed with the model, however often it is pulled.
    begun = records.get(fresh.name, whole=False)
    brought = {_key(file.stored) for one in (former, begun) if one for file in one.files if not file.was_here}
    missing = {_key(file) for file in repository.files if not _is_whole(cache, repository, file)}
    files = tuple(replace(file, was_here=_key(file.stored) not in brought | missing) for file in fresh.files)
    record = replace(fresh, files=files)
    records.put(record)
    try:
        _fetch_all(client, record, progress)
    except BaseException:
        if not any(held_bytes(cache, repository, file) for file in repository.files):
            records.remove_unfinished(fresh.name)
            delete_files(record, kept_by=[] if former is None else [former])
        raise
    try:
        set_main(cache, repository)
    except OSError as error:
        raise DownloadError(
            f"{cache} cannot be written: {error.strerror or error}; change who may write there"
        ) from error
    record = replace(record, is_whole=True, pulled=time.time())
    records.put(record)
    if former is not None:
        delete_files(former, kept_by=[record])
    return record


def _fetch_all(client: HubClient, record: PullRecord, progress: "ProgressCallback") -> None:
    name, cache, repository = record.name, record.cache, record.repository
    done = 0
    report = _Report(progress, record.num_bytes)
    for pulled in record.files:
        file = pulled.stored

        def received(count: int, done: int = done) -> None:
            report(f"pulling {name}:", done + count)

        def checked(count: int, done: int = done) -> None:
            report(f"checking {name}:", done + count)

        with _file_lock(cache, repository, file):
            fetch_file(client, cache, repository, file, received, checked, is_ours=not pulled.was_here)
        done += file.size


class _Report:
    """Tells progress in words, a few times a second."""

    def __init__(self, progress: "ProgressCallback", total: int) -> None:
        self._progress, self._total = progress, total
        self._next = 0.0

    def __call__(self, stage: str, done: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_SECONDS
            shown = f"{stage} {describe_size(done)} of {describe_size(self._total)}"
            self._progress(shown, done, self._total)


def _file_lock(cache: Path, repository: Repository, file: StoredFile) -> AbstractContextManager[object]:
    """The lock that huggingface_hub takes for the same file, so that no two programs write it."""
    from filelock import FileLock

    path = lock_path(cache, repository, file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"{cache} cannot be used: {error.strerror or error}; change who may write there, or set HF_HOME to another "
            "folder"
        ) from error
    return FileLock(str(path))


def _check_space(cache: Path, repository: Repository, name: str, say: Callable[[str], None]) -> None:
    """Tell what the pull takes. Raises: DownloadError if the disk has not enough."""
    total = sum(file.size for file in repository.files)
    held = sum(held_bytes(cache, repository, file) for file in repository.files)
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    files = f"{len(repository.files)} file{'s' if len(repository.files) > 1 else ''}"
    here = f", {describe_size(held)} of it here already" if held else ""
    say(f"{name}: {files}, {describe_size(total)}{here}; {describe_size(free)} free in {cache}")
    if total - held > free:
        raise DownloadError(
            f"{name} needs {describe_size(total - held)} more on the disk of {cache}, and {describe_size(free)} are "
            f"free; free some space (`localinfer list` shows what models take), pull a smaller quantization, or set "
            "HF_HOME to a folder on another disk"
        )


def _usable_offline(places: Places) -> str:
    names = [model.name for model in find_installed(places) if not model.problem]
    if not names:
        return "no model is on this machine yet; the demo model works without -m"
    more = f" and {len(names) - _MOST_NAMES} more (`localinfer list --all`)" if len(names) > _MOST_NAMES else ""
    return f"usable without a network: {', '.join(names[:_MOST_NAMES])}{more}"


def _key(file: StoredFile) -> str:
    return file.sha256 or file.git_id or file.path


def _is_whole(cache: Path, repository: Repository, file: StoredFile) -> bool:
    paths = pointer_path(cache, repository, file), blob_path(cache, repository, file)
    return any(path.exists() for path in paths)


def _is_there(record: PullRecord) -> bool:
    """Return True if every file is there at its whole size."""
    try:
        paths = [(pointer_path(record.cache, record.repository, file.stored), file.size) for file in record.files]
        return all(path.stat().st_size == size for path, size in paths)
    except OSError:
        return False
