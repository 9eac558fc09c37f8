"""Who gives way when all places for connections are taken: half requests, never whole ones, the owner or /health."""

import json
import os
import socket
import threading
from dataclasses import dataclass, field

import pytest
from local_servers import read_all, serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.transport.connection import OWNER_PLACES, bound_guests, make_room, seconds_behind
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server.transport.sockets import has_unix_sockets
from tests.support.limits import wait_until

LIMIT = 8
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}


@dataclass(eq=False)
class FakeConnection:
    """kind: idle, receiving or whole. behind: seconds."""

    kind: str = "whole"
    behind: float = 0.0
    since: float = 0.0
    is_owners: bool = False
    is_guest: bool = False
    is_dropped: bool = False
    is_draining: bool = False
    ended: list[str] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return self.kind == "idle"

    @property
    def is_receiving(self) -> bool:
        return self.kind == "receiving"

    def seconds_behind(self) -> float:
        return self.behind

    def drop(self) -> None:
        self.is_dropped = True
        self.ended.append("dropped")

    def give_way(self) -> None:
        self.is_draining = True
        self.ended.append("gave way")


def ended(connections):
    return [one for one in connections if one.ended]


def test_old_idle_connection_ends_before_a_late_body_and_that_before_a_new_connection():
    newcomer, old = FakeConnection("idle"), FakeConnection("idle", behind=5.0, since=1.0)
    late, fast = FakeConnection("receiving", behind=9.0, since=2.0), FakeConnection("receiving", behind=-3.0)
    fresh = FakeConnection("idle", behind=0.01, since=3.0)
    others = [late, fresh, FakeConnection(), old, fast]
    for expected in (old, late, fresh, fast):
        assert make_room(newcomer, [newcomer, *others], len(others))
        (found,) = ended(others)
        assert found is expected
        others = [one for one in others if one is not found]
    assert not make_room(newcomer, [newcomer, *others], len(others))


def test_body_at_a_fair_pace_is_not_late():
    assert seconds_behind(2.0, 2 << 20) <= 0
    assert seconds_behind(20.0, 1 << 20) > seconds_behind(10.0, 1 << 20) > 0


def test_owner_has_places_that_others_cannot_take_and_takes_no_more_from_them():
    whole = [FakeConnection() for _ in range(LIMIT)]
    owners = [FakeConnection(is_owners=True) for _ in range(OWNER_PLACES)]
    assert make_room(owners[0], [*whole, *owners], LIMIT)
    one_more = FakeConnection(is_owners=True)
    assert not make_room(one_more, [*whole, *owners, one_more], LIMIT)
    assert make_room(one_more, [*whole[1:], *owners, one_more], LIMIT)
    half = FakeConnection("receiving", behind=1.0)
    assert make_room(one_more, [*whole[1:], half, *owners, one_more], LIMIT)
    assert half.ended == ["gave way"]


def test_connections_that_are_read_to_be_thrown_away_and_guests_are_few():
    newcomer = FakeConnection("idle")
    drained = [FakeConnection(is_draining=True, since=float(index)) for index in range(40)]
    for _ in range(40):
        assert make_room(newcomer, [newcomer, *drained], 1)
    left = [one for one in drained if not one.is_dropped]
    assert len(left) == 16 and left == drained[-16:]
    guests = [FakeConnection("idle", is_guest=True, since=float(index)) for index in range(12)]
    asking = FakeConnection(is_guest=True, since=-1.0)
    for _ in range(12):
        bound_guests([asking, *guests])
    assert not asking.ended and len(ended(guests)) == 5


@pytest.fixture
def full(runtime_folder):
    """A server of few places whose one model waits until it is told to answer."""
    going = threading.Event()

    def load(source):
        going.wait(30)
        return loader({"a": b"Yes."})(source)

    path = runtime_folder / "places.sock" if has_unix_sockets() else None
    settings = ServerSettings(port=0, socket_path=path, max_connections=LIMIT)
    with serving(settings, sources=scripted_sources("a"), load=load) as running:
        try:
            yield running, going
        finally:
            going.set()


def half_body(running) -> socket.socket:
    connection = running.connect()
    connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    return connection


def whole_request(running) -> socket.socket:
    body = json.dumps(CHAT).encode()
    connection = running.connect()
    connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def num_connections(running) -> int:
    return len(running.server._server.server_state.connections)


def test_half_bodies_give_way_to_requests_and_are_told_so(full):
    running, going = full
    opened = [half_body(running) for _ in range(LIMIT)]
    connections = running.server._server.server_state.connections
    assert wait_until(lambda: sum(one.is_receiving for one in list(connections)) == LIMIT)
    opened += [half_body(running) for _ in range(2 * LIMIT)]
    try:
        going.set()
        with running.client() as client:
            assert client.get("/health").status_code == 200
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        told = read_all(opened[0], 3)
        assert told.startswith(b"HTTP/1.1 503") and b"too_many_connections" in told and b"retry-after" in told
    finally:
        for connection in opened:
            connection.close()


def test_whole_requests_keep_their_places_beside_health_and_the_owner(full):
    running, going = full
    waiting = [whole_request(running) for _ in range(LIMIT)]
    assert wait_until(lambda: num_connections(running) == LIMIT)
    try:
        with running.client() as client:
            assert client.get("/health").status_code == 200
            refused = client.get("/v1/models")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert refused.headers["connection"] == "close"
        if running.socket_path is not None:
            with running.client(unix=True) as client:
                assert client.get("/v1/models").status_code == 200
        going.set()
        assert all(read_all(one, 15).startswith(b"HTTP/1.1 200") for one in waiting)
        with running.client() as client:
            assert client.get("/v1/models").status_code == 200
    finally:
        for connection in waiting:
            connection.close()
    assert os.name == "nt" or running.socket_path is not None
