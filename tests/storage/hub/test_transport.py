"""Errors of the HTTP library under huggingface_hub, which is another one from line to line of its versions."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError

from localinfer.errors import DownloadError, HubUnreachableError
from localinfer.storage.hub import download as hub_client
from localinfer.storage.hub.download import ConnectionLost
from tests.storage.hub.conftest import CONTENT, REPO
from tests.support.limits import seconds
from tests.support.warm_python import run_copy

TRANSPORT = hub_client._transport()
FAILED = sorted(
    {
        error
        for error in vars(TRANSPORT).values()
        if isinstance(error, type) and issubclass(error, Exception) and error.__name__ != "CookieConflict"
    },
    key=lambda error: error.__name__,
)
"""All that a request may raise; no cookie is asked for by its name."""


def made(error: type[Exception]) -> Exception:
    """One of these errors: most take a message alone, and some more or nothing."""
    request = TRANSPORT.Request("GET", "http://127.0.0.1:9/")
    for arguments in (
        {"message": "planted"},
        {"message": "planted", "request": request, "response": TRANSPORT.Response(500)},
        {},
    ):
        try:
            return error(**arguments)
        except TypeError:
            continue
    raise AssertionError(f"{error} takes other arguments")


def test_the_transport_is_the_one_that_the_hub_sends_with() -> None:
    assert isinstance(get_session(), TRANSPORT.Client)
    assert issubclass(HfHubHTTPError, TRANSPORT.HTTPError)
    assert len(FAILED) > 20


def test_sources_name_no_transport() -> None:
    folder = Path(hub_client.__file__).parent
    named = [path.name for path in folder.glob("*.py") if re.search(r"import (httpx|requests)", path.read_text())]
    assert named == []


def raised_by(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_errors_while_listing_are_the_hubs(hub, monkeypatch: pytest.MonkeyPatch) -> None:
    client = hub.client()
    for error in FAILED:
        if issubclass(error, TRANSPORT.StreamError):
            # Nothing is streamed there.
            continue
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", Mock(side_effect=made(error)))
        raised = raised_by(lambda: client.repository(REPO))
        assert isinstance(raised, DownloadError), error
        assert isinstance(raised, HubUnreachableError) == issubclass(error, TRANSPORT.TransportError), error


@pytest.mark.parametrize("at_start", [True, False], ids=["asked", "half read"])
def test_errors_of_a_download_are_the_hubs(hub, at_start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost on the way may be asked for again; anything else ends the download in words."""
    client = hub.client()
    repository = client.repository(REPO)
    [file] = [file for file in repository.files if file.path == "Tiny-Q4_K_M.gguf"]
    retried = (TRANSPORT.TransportError, TRANSPORT.StreamError, TRANSPORT.DecodingError)

    def download(error: Exception) -> None:
        with client.opened(repository, file, 0) as (_, pieces):
            next(pieces)
            raise error

    for error in FAILED:
        if at_start:
            monkeypatch.setattr(get_session(), "stream", Mock(side_effect=made(error)))
        raised = raised_by(lambda error=error: download(made(error)))  # type: ignore[misc]
        assert isinstance(raised, ConnectionLost if issubclass(error, retried) else DownloadError), error


def test_the_rest_of_a_file_is_read_at_its_place(hub) -> None:
    client = hub.client()
    repository = client.repository(REPO)
    [file] = [file for file in repository.files if file.path == "Tiny-Q4_K_M.gguf"]
    with client.opened(repository, file, 1001) as (start, pieces):
        assert start == 1001
        assert b"".join(pieces) == CONTENT[1001:]


@pytest.mark.parametrize("endpoint", ["http://[bad", "http://x:99999999", "http://x:0", "nonsense", "ftp://x", "http:"])
def test_an_address_that_is_none_is_named_with_the_way_out(endpoint: str) -> None:
    """Importing huggingface_hub fails at some of them, so a process of its own starts with each."""
    words = [sys.executable, "-m", "localinfer", "pull", "org/repo"]
    result = run_copy(words, env={**os.environ, "HF_ENDPOINT": endpoint}, timeout=seconds(60))
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "HF_ENDPOINT" in result.stderr and endpoint in result.stderr
