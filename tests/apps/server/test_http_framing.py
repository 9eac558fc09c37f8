"""Bytes that two programs may frame differently: refused wherever they stand and however packets split them."""

import itertools
import json

import pytest
from local_servers import STORY, read_all

from localinfer.apps.server.transport.connection import FramingCheck

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Some: a b\r\n\r\n"
CHAT = json.dumps({"messages": STORY, "max_tokens": 1}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WITH_LENGTH = POST + b"Content-Length: %d\r\n\r\n" % len(CHAT) + CHAT
LINES_IN_BODY = b"POST /x HTTP/1.1\r\nContent-Length: 8\r\n\r\n\n\n\r\r \r\n\n"
CHUNKS = b"4;a=b\r\n\n\r\n\n\r\n" + b"%x\r\n%b\r\n" % (len(CHAT), CHAT) + b"0\r\nX-After: yes\r\n\r\n"
WITH_CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS
SOUND = {"head": HEAD, "length": WITH_LENGTH, "lines in a body": LINES_IN_BODY, "chunks": WITH_CHUNKS}


def is_sound(*packets: bytes) -> bool:
    check = FramingCheck()
    return all(check.feed(packet) == len(packet) for packet in packets) and not check.has_fault


def faulty_heads(head: bytes) -> list[bytes]:
    """The head with a lone line end at every position, and with every line but the last folded."""
    lone = [head[:at] + end + head[at:] for at in range(len(head) - 1) for end in (b"\n", b"\r")]
    folds = [at for at in range(len(head) - 2) if head[at - 2 : at] == b"\r\n"]
    return [*lone, *(head[:at] + space + head[at:] for at in folds for space in (b" ", b"\t"))]


@pytest.mark.parametrize("request_bytes", SOUND.values(), ids=list(SOUND))
def test_sound_requests_pass_however_they_are_split(request_bytes):
    twice = request_bytes * 2 + HEAD
    assert is_sound(twice)
    assert is_sound(*(twice[i : i + 1] for i in range(len(twice))))
    for at in range(len(twice)):
        assert is_sound(twice[:at], twice[at:])


def test_lone_line_ends_and_folded_lines_are_found_at_every_position_and_split():
    for faulty in faulty_heads(HEAD):
        assert not is_sound(faulty), faulty
        assert not is_sound(WITH_LENGTH + faulty), faulty
        assert not is_sound(WITH_CHUNKS + faulty), faulty
        for at in range(len(faulty)):
            assert not is_sound(faulty[:at], faulty[at:]), (faulty[:at], faulty[at:])


def test_lines_of_chunks_and_after_them_may_not_end_in_two_ways():
    start = WITH_CHUNKS.index(b"\r\n\r\n") + 4
    lines = [at for at in range(start, len(WITH_CHUNKS)) if WITH_CHUNKS[at : at + 2] == b"\r\n"]
    in_data = {WITH_CHUNKS.index(b"\n\r\n\n") + 1}
    assert len(lines) > 1
    for at in set(lines) - in_data:
        for end in (b"\n", b"\r", b"\n\r", b"\r\r\n"):
            faulty = WITH_CHUNKS[:at] + end + WITH_CHUNKS[at + 2 :] + HEAD
            assert not is_sound(faulty), faulty
            assert not is_sound(*(faulty[i : i + 1] for i in range(len(faulty))))


def test_what_stands_before_a_fault_counts_as_sound():
    check = FramingCheck()
    assert check.feed(HEAD + b"GET / HTTP/1.1\nHost: a\r\n\r\n") == len(HEAD)
    assert check.has_fault


def test_nothing_with_two_readings_is_answered(served):
    for faulty in faulty_heads(HEAD):
        reply = served.exchange(faulty)
        assert reply.count(b"HTTP/1.1 ") == reply.count(b"HTTP/1.1 400") == 1, faulty
        assert b"connection: close" in reply


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_fault_that_begins_a_packet_is_refused(served, end):
    for at in range(0, len(HEAD) - 1, 5):
        with served.connect() as connection:
            connection.sendall(HEAD[:at])
            connection.sendall(end + HEAD[at:])
            assert b"HTTP/1.1 200" not in read_all(connection)


def test_fault_after_a_request_is_refused_after_its_answer(served):
    hidden = b"GET /version HTTP/1.1\nHost: localhost\n\n"
    for first in (HEAD, WITH_LENGTH, WITH_CHUNKS.replace(b"4;a=b\r\n\n\r\n\n\r\n", b"")):
        reply = served.exchange(first + hidden)
        assert [reply.count(b"HTTP/1.1 %d" % status) for status in (200, 400)] == [1, 1], reply
        assert b'"version"' not in reply


def test_chunk_with_two_readings_ends_its_request(served):
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    for end, text in itertools.product((b"\n", b"\r"), (b"%x" % len(CHAT), b"1;a")):
        reply = served.exchange(head + text + end + CHAT + b"\r\n0\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 400"), reply
        assert reply.count(b"HTTP/1.1 ") == 1
