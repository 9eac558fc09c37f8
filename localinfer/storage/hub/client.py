"""What is asked of the hub: the files of a repository, and their bytes from a place on; its errors in words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import NoReturn
from urllib.parse import urlsplit

from localinfer.errors import DownloadError, HubUnreachableError
from localinfer.storage.hub.places import HUB
from localinfer.storage.hub.variants import Repository, StoredFile, is_safe_path, parse_reference

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
    """Whether to ask nothing."""
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
        """The bytes of a file from `start` on: the place where they begin, 0 if the server ignores it, and the bytes.

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
        """Check the endpoint before huggingface_hub is imported, which reads HF_ENDPOINT by itself and fails at it."""
        if self.is_offline:
            raise HubUnreachableError("HF_HUB_OFFLINE forbids asking the hub; unset it to pull")
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
    """Where in the file the answer begins."""
    if status != 206:
        return 0
    unit, _, rest = content_range.partition(" ")
    start = rest.partition("-")[0]
    if unit != "bytes" or not start.isdigit():
        raise ConnectionLost("the hub does not say which part of the file it sends")
    return int(start)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
