"""Reading server-sent events in tests, strictly: every byte has to be where the format puts it."""

import json
from typing import Any

import httpx

DONE = "[DONE]"


def post_stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream; asserts that it ends with `[DONE]` and holds nothing but data frames."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    frames = response.content.decode("utf-8").split("\n\n")
    assert frames.pop() == "", "the last frame ends with a blank line, and nothing follows"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    payloads = [frame.removeprefix("data: ") for frame in frames]
    assert payloads.pop() == DONE
    return [json.loads(payload) for payload in payloads]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text that the deltas of one choice make together."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream whose frames have names; asserts that each is the type of what it holds."""
    assert response.status_code == 200, response.text
    assert response.text.endswith("\n\n")
    events = []
    for frame in response.content.decode("utf-8").split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
