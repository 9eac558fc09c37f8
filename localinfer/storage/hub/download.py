"""Files from the hub into its cache: listed, resumed where they stopped, verified, renamed once they are whole.

Checksums are those of the record of `localinfer pull`, and the names of files in the hub's cache and Ollama's store.
"""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import NoReturn
from urllib.parse import urlsplit

from localinfer.errors import DownloadError, HubUnreachableError
from localinfer.storage.hub.places import HUB, Places, blob_path, pointer_path
from localinfer.storage.hub.records import PullRecord, PullRecords
from localinfer.storage.hub.variants import Repository, StoredFile, describe_size, is_safe_path, parse_reference
from localinfer.system import disk
from localinfer.system.files import write_all
from localinfer.types import ProgressCallback

_PIECE_BYTES = 32 * 10**9
"""Asked for at once: networks that deliver the hub's files refuse answers beyond 50 GB."""


class ConnectionLost(Exception):
    """The connection failed on the way: what has arrived is good, and the rest may be asked for again."""


@dataclass(frozen=True)
class HubClient:
    """The hub at an address."""

    endpoint: str = HUB
    """The address."""
    token: str | None = None
    """Token of requests; None: the one that `hf auth login` or HF_TOKEN gave."""
    is_offline: bool = False
    """True: nothing is asked."""
    timeout_seconds: float = 20.0
    """Longest time without a byte."""
    retries: int = 5
    """Most attempts in sequence without a byte."""
    retry_seconds: float = 1.0
    """The wait before the first retry, doubled before each further one."""

    def repository(self, repo: str) -> Repository:
        """List a repository's files. Raises: DownloadError."""
        self._require_usable()
        from huggingface_hub import HfApi

        transport = _transport()
        try:
            found = HfApi(endpoint=self.endpoint, token=self.token).model_info(
                repo, files_metadata=True, timeout=self.timeout_seconds
            )
        except (transport.HTTPError, transport.InvalidURL, OSError, ValueError, TypeError) as error:
            self._fail(repo, error)
        commit, spelled = _hexadecimal(found.sha, 40), parse_reference(found.id)
        if commit is None or spelled is None or found.siblings is None:
            raise DownloadError(f"the hub at {self.endpoint} lists no files of {repo}; try again later")
        files = [
            StoredFile(
                one.rfilename,
                one.size,
                None if one.lfs is None else _hexadecimal(one.lfs.sha256, 64),
                _hexadecimal(one.blob_id, 40),
            )
            for one in found.siblings
            # Names of files and of blobs become paths here.
            if one.size is not None and is_safe_path(one.rfilename)
        ]
        return Repository(spelled.repo, commit, tuple(file for file in files if file.sha256 or file.git_id))

    @contextmanager
    def opened(self, repository: Repository, file: StoredFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The bytes of a file from `start` on: the offset where they begin, 0 if the server ignores it, and the bytes.

        They may end before the file does. Raises: DownloadError; ConnectionLost, also while they are read.
        """
        self._require_usable()
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        transport = _transport()
        url = hf_hub_url(repository.id, file.path, revision=repository.commit, endpoint=self.endpoint)
        headers = build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if start or file.size > _PIECE_BYTES:
            headers["Range"] = f"bytes={start}-{min(file.size, start + _PIECE_BYTES) - 1}"
        try:
            with get_session().stream("GET", url, headers=headers, timeout=self.timeout_seconds) as response:
                if response.status_code == 416:
                    raise ConnectionLost("the hub refuses to continue there")
                if response.status_code >= 400:
                    response.read()
                if response.status_code >= 500 or response.status_code in (408, 429):
                    raise ConnectionLost(f"the hub answers {response.status_code} {response.reason_phrase}")
                hf_raise_for_status(response)
                yield _place(response.status_code, response.headers.get("Content-Range", "")), response.iter_bytes()
        except (transport.TransportError, transport.StreamError, transport.DecodingError) as error:
            raise ConnectionLost(_reason(error)) from error
        except (transport.HTTPError, transport.InvalidURL, ConnectionError, ValueError) as error:
            self._fail(repository.id, error)

    def _require_usable(self) -> None:
        """Check the endpoint before huggingface_hub is imported, which reads HF_ENDPOINT by itself and fails at it; and
        have that library tell the hub nothing of the programs that run it."""
        if self.is_offline:
            raise HubUnreachableError("HF_HUB_OFFLINE or --offline forbids asking the hub; leave it out to pull")
        try:
            address = urlsplit(self.endpoint)
            is_usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise DownloadError(
                f"the address of the hub is {self.endpoint!r:.80}, as HF_ENDPOINT says; wanted one such as {HUB}; "
                "unset it for the usual hub"
            )
        from huggingface_hub import constants

        # Without it 2.4 asks the hub for a list of coding agents, and names the one that runs this in every request.
        constants.HF_HUB_DISABLE_TELEMETRY = True

    def _fail(self, repo: str, error: Exception) -> NoReturn:
        """Raise what an error of the hub's library means."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        lost = (_transport().TransportError, OfflineModeIsEnabled, ConnectionError)
        if isinstance(error, lost) and not isinstance(error, HfHubHTTPError):
            raise HubUnreachableError(
                f"the hub at {self.endpoint} cannot be reached ({_reason(error)}); check the network and pull again"
            ) from error
        raise DownloadError(self._explain(repo, error)) from error

    def _explain(self, repo: str, error: Exception) -> str:
        from huggingface_hub import get_token
        from huggingface_hub.errors import (
            DisabledRepoError,
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
        )

        page = f"{self.endpoint}/{repo}"
        has_token = (self.token or get_token()) is not None
        log_in = "log in with `hf auth login`, or set HF_TOKEN"
        if isinstance(error, GatedRepoError):
            then = "then pull again" if has_token else f"then {log_in}, and pull again"
            return f"{repo} is gated: its authors want their terms accepted first; do so at {page}, {then}"
        if isinstance(error, DisabledRepoError):
            return f"{repo} was disabled on the hub; look for another repository of this model"
        if isinstance(error, RepositoryNotFoundError):
            private = "your account may not see it" if has_token else f"if it is private, {log_in}"
            return f"the hub has no model {repo}, or it is private; check the name at {page}; {private}"
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            if status in (401, 403):
                why = "the token that is set is not accepted" if has_token else "it wants an account"
                return f"the hub refuses {repo} with status {status}: {why}; {log_in}, and pull again"
            if status == 404:
                return f"the hub no longer has a file of {repo} that it listed; pull again"
            later = "; it asks to wait: try again in some minutes" if status == 429 else "; try again later"
            return f"the hub answers {status} for {repo}{later}"
        if isinstance(error, HFValidationError):
            return f"{repo} is not a name that the hub can have: {error}; give org/repo"
        return f"the hub at {self.endpoint} gave no usable answer for {repo} ({_reason(error)}); try again later"


def _hexadecimal(text: str | None, length: int) -> str | None:
    """A checksum in lower case; None for anything else."""
    return text.lower() if text and re.fullmatch(rf"[0-9a-fA-F]{{{length}}}", text) else None


def _transport() -> ModuleType:
    """The HTTP library under huggingface_hub, whose errors it lets pass: httpx up to 1.x, httpx2 since."""
    from huggingface_hub.errors import HfHubHTTPError

    base = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    return import_module(base.__module__.partition(".")[0])


def _place(status: int, content_range: str) -> int:
    """Offset in the file of the beginning of the answer."""
    if status != 206:
        return 0
    unit, _, rest = content_range.partition(" ")
    start = rest.partition("-")[0]
    if unit != "bytes" or not start.isdigit():
        raise ConnectionLost("the hub does not say which part of the file it sends")
    return int(start)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


Received = Callable[[int], None]
"""Called with how many bytes of the file are here."""
_READ_BYTES = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_path(blob: Path) -> Path:
    """Path of a file while it is received: beside the blob, as earlier versions of huggingface_hub name it."""
    return blob.with_name(f"{blob.name}.incomplete")


def held_bytes(cache: Path, repository: Repository, file: StoredFile) -> int:
    """Bytes of a file that are here already."""
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
    Raises: DownloadError. Arrived bytes are kept, unless their checksum is wrong.
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
    # Unbuffered, so that after any failure the file has a good beginning.
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
        disk.sync(out)


def mismatch(path: Path, file: StoredFile, checked: Received) -> str:
    """The difference of a file on disk from what the hub says of it, in words; empty if there is none."""
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
            "continues with what has arrived"
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

    progress: called with MB done. Raises: OSError where one cannot be read.
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
