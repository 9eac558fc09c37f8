"""The limit of connections, and the system's of open files: kept in a burst, and outlived."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable

import httpx
import pytest
from local_servers import serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server.transport.sockets import affordable_connections
from tests.support.limits import seconds
from tests.support.warm_python import WarmPython

LIMIT = 8


def count_open(connections: Iterable[socket.socket]) -> int:
    """How many the server has not closed: those that neither end nor have something to read."""
    num_open = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            while connection.recv(1 << 12):
                pass
        except BlockingIOError:
            num_open += 1
        except OSError:
            pass
    return num_open


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: "], ids=["idle", "half a head"])
def test_burst_of_connections_stays_within_the_limit(sent):
    settings = ServerSettings(port=0, max_connections=LIMIT, header_seconds=60)
    with serving(settings, sources=scripted_sources("a"), load=loader({"a": b"Yes."})) as running:
        opened = []
        try:
            for _ in range(150):
                opened.append(running.connect())
                if sent:
                    opened[-1].send(sent)
            with running.client() as client:
                assert client.get("/health").status_code == 200
                assert count_open(opened) <= LIMIT
        finally:
            for connection in opened:
                connection.close()


def test_limit_of_connections_keeps_below_that_of_open_files():
    resource = pytest.importorskip("resource")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < affordable_connections(10**9) < max(soft, 10)
    assert affordable_connections(1) == 1


FEW_FILES = """
import asyncio.constants, os, resource, sys
asyncio.constants.ACCEPT_RETRY_DELAY = 0.1  # after a connection that cannot be taken
from localinfer.apps.cli import serve as cli_serve
from localinfer.apps.cli import main
say = cli_serve._say_ready
def say_and_limit(line):
    most = len(os.listdir("/proc/self/fd")) + 6
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    say(line)
cli_serve._say_ready = say_and_limit
sys.exit(main(sys.argv[1:]))
"""
"""A server that may open six files more once it answers."""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors as Linux shows them")
def test_server_without_free_descriptors_says_so_and_goes_on(runtime_folder):
    words = ["serve", "--port", "0", "--socket", str(runtime_folder / "few.sock"), "--threads", "1", "--no-disk-cache"]
    process = WarmPython(
        [sys.executable, "-c", FEW_FILES, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None
        opened = [socket.create_connection(("127.0.0.1", int(found[1])), timeout=10) for _ in range(15)]
        for connection in opened:
            connection.close()
        assert httpx.get(f"{found[0]}/health", timeout=seconds(15), trust_env=False).status_code == 200
        assert process.poll() is None
    finally:
        process.terminate()
        _, said = process.communicate(timeout=seconds(15))
    assert "Traceback" not in said
    assert said.count("no more connections can be taken") == 1
    assert process.returncode == 0
