"""One server on the demo model for all tests of its socket, in a thread of this process, on TCP and a Unix socket."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from local_servers import ServedModel, serving

from localinfer.server.settings import ServerSettings
from localinfer.server.sockets import has_unix_sockets


@pytest.fixture(scope="session")
def runtime_folder() -> Iterator[Path]:
    """A short path: that of a Unix socket is limited."""
    with tempfile.TemporaryDirectory(prefix="li-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def served(runtime_folder: Path) -> Iterator[ServedModel]:
    path = runtime_folder / "server.sock" if has_unix_sockets() else None
    settings = ServerSettings(
        socket_path=path, port=0, header_seconds=0.5, body_seconds=1.0, allowed_origins=("http://localhost:3000",)
    )
    with serving(settings) as running:
        yield running


@pytest.fixture(params=["tcp", "unix"])
def http(request: pytest.FixtureRequest, served: ServedModel) -> Iterator[httpx.Client]:
    """A client of the session's server, once over each socket."""
    if request.param == "unix" and served.socket_path is None:
        pytest.skip("this system has no Unix sockets for Python")
    with served.client(unix=request.param == "unix") as client:
        yield client


@pytest.fixture
def tcp(served: ServedModel) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
