"""One server on the demo model for all tests of its socket, in a thread of this process, on TCP and a Unix socket."""

import gc
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from local_servers import MODEL, ServedModel, serving
from scripted_models import loader, scripted_sources

import localinfer
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server.transport.sockets import has_unix_sockets
from localinfer.llm import LLM
from tests.api.encoder_models import write_encoder


@pytest.fixture(scope="session")
def runtime_folder() -> Iterator[Path]:
    """A short path: that of a Unix socket is limited."""
    with tempfile.TemporaryDirectory(prefix="li-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def served(runtime_folder: Path) -> Iterator[ServedModel]:
    path = runtime_folder / "server.sock" if has_unix_sockets() else None
    settings = ServerSettings(
        socket_path=path,
        port=0,
        header_seconds=0.3,
        body_seconds=0.4,
        slow_reader_seconds=0.3,
        max_body_bytes=4 << 20,
        allowed_origins=("http://localhost:3000",),
    )
    with serving(settings) as running:
        yield running


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The demo model by itself, as what the server says is compared with."""
    with localinfer.load(MODEL.path, threads=1, kv_memory=32 << 20) as loaded:
        yield loaded


@pytest.fixture(params=["tcp", "unix"])
def http(request: pytest.FixtureRequest, served: ServedModel) -> Iterator[httpx.Client]:
    """A client of the session's server, once over each socket."""
    if request.param == "unix" and served.socket_path is None:
        pytest.skip("this system has no Unix sockets for Python")
    with served.client(unix=request.param == "unix") as client:
        yield client


SCRIPTS = {
    "letters": b"abcdefghijkl",
    "unicode": "Grüße 😀 日本.".encode(),
    "stops": b"One two END of it.",
    "thinking": b"<think>\nHm, well.\n</think>\n\nYes.",
    "calls": b"<think>\nHm.\n</think>\n\nI look."
    b'\n<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call>'
    b'\n<tool_call>\n{"name": "count", "arguments": {"to": 3}}\n</tool_call>',
    "failing": [*b"abc", ValueError("a secret of /home/somebody")],
}


@pytest.fixture(scope="session")
def scripted(runtime_folder: Path) -> Iterator[httpx.Client]:
    """A client of a server whose models say what SCRIPTS has for their names."""
    with (
        serving(ServerSettings(port=0), sources=scripted_sources(*SCRIPTS), load=loader(SCRIPTS)) as running,
        running.client() as client,
    ):
        yield client


@pytest.fixture
def tcp(served: ServedModel) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="module")
def own_leftovers() -> Iterator[None]:
    """What other people's clients leave open is collected here, not in the midst of a test of something else."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with a reranker and an embedding model."""
    folder = tmp_path_factory.mktemp("encoders")
    sources = [
        ModelSource("ranker", write_encoder(folder, "bert-reranker"), 1_700_000_000),
        ModelSource("embedder", write_encoder(folder, "bert-encoder"), 1_700_000_000),
    ]

    def load(source: ModelSource) -> LLM:
        return localinfer.load(source.path, threads=1)

    with serving(ServerSettings(port=0), sources=sources, load=load) as running, running.client() as client:
        yield client


@pytest.fixture(scope="module")
def ranker(encoders: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with localinfer.load(write_encoder(tmp_path_factory.mktemp("alone"), "bert-reranker"), threads=1) as llm:
        yield llm
