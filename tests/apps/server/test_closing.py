"""A server that is closed from another thread, at any moment of its life, ends before its sockets go."""

import threading
import time

import pytest
from scripted_models import loader, scripted_sources

from localinfer.apps.server.app import LocalServer
from localinfer.apps.server.router.models import ModelRegistry
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import ClosedError
from tests.support.limits import seconds

SCRIPTS = {"one": b"Hi."}


def make_server() -> LocalServer:
    def make_registry(metrics):
        return ModelRegistry(scripted_sources(*SCRIPTS), loader(SCRIPTS), lambda source: None, metrics)

    return LocalServer(ServerSettings(socket_path=None, port=0), make_registry)


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 5, 10, 20, 50, 200])
def test_a_server_closed_while_another_thread_runs_it_ends_first(milliseconds):
    server, errors = make_server(), []
    started = threading.Event()

    def run() -> None:
        started.set()
        try:
            server.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(seconds(10))
    time.sleep(milliseconds / 1000)
    server.close()
    thread.join(seconds(30))
    assert not thread.is_alive()
    assert all(isinstance(error, ClosedError) for error in errors), errors


def test_a_closed_server_does_not_run():
    server = make_server()
    server.close()
    server.close()
    with pytest.raises(ClosedError, match="closed before it ran"):
        server.run()


def test_a_server_may_be_closed_by_the_thread_that_runs_it():
    server, ready = make_server(), []

    def close() -> None:
        ready.append(True)
        server.close()

    server.run(on_ready=close)
    assert ready == [True]
    with pytest.raises(ClosedError):
        server.run()
