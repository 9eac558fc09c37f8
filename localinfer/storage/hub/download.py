"""One file from the hub into its cache: resumed where it stopped, verified, and in place only once it is whole.

Checksums are those of the record of `localinfer pull`, and the names of files in the hub's cache and Ollama's store.
"""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from localinfer.errors import DownloadError
from localinfer.storage.hub.client import ConnectionLost, HubClient
from localinfer.storage.hub.variants import Repository
from localinfer.storage.hub.places import Places, blob_path, pointer_path
from localinfer.storage.hub.records import PullRecord, PullRecords
from localinfer.storage.hub.variants import StoredFile, describe_size
from localinfer.system.files import write_all
from localinfer.types import ProgressCallback

Received = Callable[[int], None]
"""Called with how many bytes of the file are here."""
_READ_BYTES = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_path(blob: Path) -> Path:
    """Where a file grows: beside the blob, as earlier versions of huggingface_hub name it."""
    return blob.with_name(f"{blob.name}.incomplete")


def held_bytes(cache: Path, repository: Repository, file: StoredFile) -> int:
    """How much of a file is here already, whole or in part."""
    for path in (pointer_path(cache, repository, file), blob_path(cache, repository, file)):
        if _size(path) == file.size:
            return file.size
    held = _size(partial_path(blob_path(cache, repository, file))) or 0
    return held if held <= file.size else 0


def fetch_file(
    client: HubClient,
    cache: Path,
    repository: Repository,
    file: StoredFile,
    received: Received,
    checked: Received,
    *,
    is_ours: bool,
) -> None:
    """Bring a file into the cache. A file that is there is verified too.

    checked: called with how many bytes have been verified. is_ours: a damaged file may be replaced.
    Raises: DownloadError. What has arrived is kept, unless its checksum is wrong.
    """
    blob, pointer = blob_path(cache, repository, file), pointer_path(cache, repository, file)
    try:
        for path in (pointer, blob):
            if not path.exists():
                continue
            wrong = mismatch(path, file, checked)
            if not wrong:
                if path == blob:
                    _link(blob, pointer)
                return
            if not is_ours:
                raise DownloadError(
                    f"{file.path} is in the hub's cache already, damaged: {wrong}; delete {os.path.realpath(path)} "
                    "and pull again"
                )
            path.unlink()
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(blob)
        _receive(client, repository, file, partial, received)
        wrong = mismatch(partial, file, checked)
        if wrong:
            partial.unlink()
            raise DownloadError(
                f"{file.path} of {repository.id} arrived damaged and was deleted: {wrong}; pull again, and if it "
                "happens again, something between here and the hub changes files"
            )
        os.replace(partial, blob)
        _link(blob, pointer)
    except OSError as error:
        raise _explained(error, blob.parent) from error


def _receive(client: HubClient, repository: Repository, file: StoredFile, partial: Path, received: Received) -> None:
    """Fill the partial file to its whole size, continuing after each loss of the connection."""
    retries = client.retries
    # Unbuffered, so that what is there after any failure is a good beginning of the file.
    with FileIO(partial, "ab") as out:
        if out.seek(0, os.SEEK_END) > file.size:
            out.truncate(0)
        while (here := out.seek(0, os.SEEK_END)) < file.size:
            received(here)
            try:
                with client.opened(repository, file, here) as (start, chunks):
                    if start != here:
                        out.truncate(start if start < here else 0)
                    for chunk in chunks:
                        here = out.seek(0, os.SEEK_END) + len(chunk)
                        if here > file.size:
                            out.truncate(0)
                            raise DownloadError(
                                f"the hub sends more of {file.path} than the {file.size:,} bytes it listed; try later"
                            )
                        write_all(out, chunk)
                        retries = client.retries
                        received(here)
                reason = "the answer ended early"
            except ConnectionLost as error:
                reason = str(error)
            here = out.seek(0, os.SEEK_END)
            if here < file.size:
                if not retries:
                    raise DownloadError(
                        f"the connection to {client.endpoint} was lost at {describe_size(here)} of "
                        f"{describe_size(file.size)} of {file.path} ({reason}); check the network: pulling again goes "
                        "on from there"
                    )
                time.sleep(client.retry_seconds * 2 ** (client.retries - retries))
                retries -= 1
        os.fsync(out.fileno())


def mismatch(path: Path, file: StoredFile, checked: Received) -> str:
    """How a file on disk differs from what the hub says of it; empty if it does not."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size:,} bytes, and the hub says {file.size:,}"
    if file.sha256 is not None:
        name, wanted, digest = "SHA-256", file.sha256, hashlib.sha256()
    elif file.git_id is not None:
        name, wanted = "git id", file.git_id
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    else:
        return "the hub gives no checksum of it"
    done = 0
    with path.open("rb", buffering=0) as content:
        while part := content.read(_READ_BYTES):
            digest.update(part)
            done += len(part)
            checked(done)
    found = digest.hexdigest()
    return "" if found == wanted.lower() else f"its {name} is {found}, and the hub says {wanted}"


def _link(blob: Path, pointer: Path) -> None:
    """Give a whole blob its name in the snapshot; where links are not allowed (Windows), move it there."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    try:
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        os.replace(blob, pointer)


def _explained(error: OSError, folder: Path) -> DownloadError:
    if error.errno in _FULL:
        return DownloadError(
            f"the disk of {folder} is full; free some space, or set HF_HOME to a folder on another disk: pulling again "
            "goes on from what has arrived"
        )
    return DownloadError(
        f"{folder} cannot be used: {error.strerror or error}; change who may write there, or set HF_HOME to another "
        "folder"
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


_NAMED_SO = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
_STAGE = "comparing checksums (MB)"


@dataclass(frozen=True)
class RecordedFile:
    """A file with a recorded checksum."""

    path: Path
    """Its path on this machine."""
    stored: StoredFile
    """Its size and checksum."""
    way_out: str
    """The remedy if it has another one."""


def recorded_files(paths: Iterable[Path], places: Places) -> list[RecordedFile]:
    """The files of the pulled model that some paths belong to, or those of the paths whose names are checksums."""
    real = {Path(os.path.realpath(path)) for path in paths}
    records = [] if places.records is None else PullRecords(places.records).all()
    for record in records:
        if isinstance(record, PullRecord) and record.is_whole:
            files = [
                RecordedFile(path, file.stored, f"delete {path} and run `localinfer pull {record.name}`")
                for file in record.files
                for path in [Path(os.path.realpath(pointer_path(record.cache, record.repository, file.stored)))]
            ]
            if real & {one.path for one in files}:
                return files
    found = []
    for path in sorted(real):
        named = _NAMED_SO.fullmatch(path.name)
        if named is not None and path.parent.name == "blobs":
            stored = StoredFile(path.name, path.stat().st_size, sha256=named[1])
            found.append(RecordedFile(path, stored, f"delete {path} and download the model again"))
    return found


def differing_files(files: Iterable[RecordedFile], progress: ProgressCallback | None = None) -> list[str]:
    """Read files and compare their checksums; a line for each that differs, with the way out.

    progress: told of MB done. Raises: OSError where one cannot be read.
    """
    files = list(files)
    total, before = sum(one.stored.size for one in files), 0
    found = []
    for one in files:
        problem = mismatch(one.path, one.stored, _reporter(progress, before, total))
        if problem:
            found.append(f"{one.stored.path} is not the file that was downloaded: {problem}; {one.way_out}")
        before += one.stored.size
    return found


def _reporter(progress: ProgressCallback | None, before: int, total: int) -> Callable[[int], None]:
    def read(count: int) -> None:
        if progress is not None:
            progress(_STAGE, before + count >> 20, total >> 20)

    return read
