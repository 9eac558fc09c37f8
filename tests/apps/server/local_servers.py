"""Servers in a thread of this process, and how tests reach them."""

import math
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import localinfer
from localinfer.apps.server.app import LocalServer
from localinfer.apps.server.operation.observation import Metrics
from localinfer.apps.server.router.model_folder import ModelSource, measure_need
from localinfer.apps.server.router.models import ModelRegistry
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.engine.speculation.costs import DraftFloor, VerificationCosts
from localinfer.engine.speculation.verify import Speculation
from localinfer.llm import LLM
from localinfer.loading.drafters import make_speculation
from localinfer.loading.options import model_path
from localinfer.models.load.loader import Model
from tests.support.limits import seconds, wait_until

MODEL = ModelSource("demo", model_path(None), 1_700_000_000)
START_SECONDS = 30.0
STORY = [{"role": "user", "content": "Tell me a story."}]


class ServedModel:
    """A running server and how to reach it."""

    def __init__(self, server: LocalServer, thread: threading.Thread) -> None:
        self.server = server
        self.thread = thread
        self.port = server.port
        self.socket_path = server.settings.socket_path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, *, unix: bool = False, **options: Any) -> httpx.Client:
        # Reading the system's certificates would take longer than most tests.
        transport = httpx.HTTPTransport(uds=str(self.socket_path), verify=False) if unix else None
        url = "http://localhost" if unix else self.url
        return httpx.Client(
            base_url=url, transport=transport, timeout=seconds(15), trust_env=False, verify=False, **options
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def exchange(self, request: bytes) -> bytes:
        """Send bytes and read what comes until the server closes or falls silent."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection, seconds(0.3))


def read_all(connection: socket.socket, seconds: float = 1.2) -> bytes:
    received = bytearray()
    connection.settimeout(seconds)
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except (TimeoutError, ConnectionResetError):
        pass
    return bytes(received)


@contextmanager
def serving(
    settings: ServerSettings,
    *,
    sources: list[ModelSource] | None = None,
    load: Callable[[ModelSource], LLM] | None = None,
    **registry: Any,
) -> Iterator[ServedModel]:
    """A server for as long as the context lasts."""

    def load_demo(source: ModelSource) -> LLM:
        return localinfer.load(source.path, threads=1, kv_memory=64 << 20)

    def make_registry(metrics: Metrics) -> ModelRegistry:
        found = [MODEL] if sources is None else sources
        options = {"strict": settings.strict_model, **registry}
        return ModelRegistry(
            found, load or load_demo, lambda source: measure_need(source.path, "f16"), metrics, **options
        )

    with LocalServer(settings, make_registry, preloads=load is None) as server:
        errors: list[BaseException] = []
        is_ready = threading.Event()

        def run() -> None:
            try:
                server.run(on_ready=is_ready.set)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="server under test")
        thread.start()
        try:
            wait_until(lambda: is_ready.is_set() or not thread.is_alive(), START_SECONDS)
            assert is_ready.is_set(), f"the server did not start: {describe(thread, errors)}"
            yield ServedModel(server, thread)
        finally:
            server.stop()
            thread.join(seconds(START_SECONDS))
            assert not thread.is_alive(), f"the server did not stop: {describe(thread, errors)}"
            assert not errors, describe(thread, errors)


@contextmanager
def serving_drafting() -> Iterator[ServedModel]:
    """A server of the demo model that tries every draft that earlier text suggests: no clock says that it costs."""

    def make(option: str, model: Model, draft: None, **options: Any) -> Speculation:
        made = make_speculation(option, model, draft, **options)
        costs = VerificationCosts([1.0] * (made.costs.max_draft_tokens + 1))
        floor = DraftFloor(costs, most_credit=math.inf)
        return Speculation(costs, ngram=made.ngram, model=None, floor=floor, clock=lambda: 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localinfer.loading.drafters.make_speculation", make)
        llm = localinfer.load(MODEL.path, threads=1, kv_memory=64 << 20, speculation="ngram")
    with llm, serving(ServerSettings(port=0), load=lambda source: llm) as running:
        yield running


def describe(thread: threading.Thread, errors: list[BaseException]) -> str:
    """What a server ended with, or where it is."""
    if errors:
        return "".join(traceback.format_exception(errors[0]))
    frame = sys._current_frames().get(thread.ident or 0)
    return "it has ended" if frame is None else "it is here:\n" + "".join(traceback.format_stack(frame))
