"""Compaction of `/v1/responses`: by a trigger, by its own route, and what comes back of it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from event_frames import named_events
from local_servers import ServedModel, serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.transport.settings import AccessToken, ServerSettings
from localinfer.storage.response_store import ResponseStoreOptions

PATH = "/v1/responses"
ASK = {"model": "summary", "temperature": 0, "max_output_tokens": 200}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
SAID: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be exact."},
    {"role": "user", "content": "Find the ball."},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is in the park."}]},
    {"role": "user", "content": "Whose is it?"},
]
TRIGGER = {"type": "compaction_trigger"}


@pytest.fixture(scope="module")
def summing(runtime_folder: Path) -> Any:
    """A client of a server whose model answers with a summary, behind reasoning that nobody keeps."""
    scripts: dict[str, Any] = {"summary": b"<think>\nHm.\n</think>\n\nThe ball of Tom is in the park."}
    with (
        serving(ServerSettings(port=0), sources=scripted_sources(*scripts), load=loader(scripts)) as running,
        running.client() as client,
    ):
        yield client


def post(client: httpx.Client, items: list[Any], path: str = PATH, **more: Any) -> dict[str, Any]:
    reply = client.post(path, json={**ASK, "input": items, **more})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def count(client: httpx.Client, items: list[Any], **more: Any) -> int:
    reply = client.post(f"{PATH}/input_tokens", json={"model": "summary", "input": items, **more})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["input_tokens"])


def shortened(text: str) -> dict[str, str]:
    """The message that stands for a compaction."""
    begin = "The conversation so far was shortened to this summary, from which you continue:"
    return {"role": "user", "content": f"{begin}\n\n{text}"}


SUMMARY = "The ball of Tom is in the park."


def test_a_trigger_is_answered_by_one_compaction(summing: httpx.Client) -> None:
    reply = post(summing, [*SAID, TRIGGER], tools=[TOOL], text={"format": {"type": "json_object"}})
    (item,) = reply["output"]
    assert reply["status"] == "completed" and sorted(item) == ["encrypted_content", "id", "type"]
    assert item["type"] == "compaction" and item["id"].startswith("cmp_")
    assert "Tom" not in item["encrypted_content"]
    more = {"role": "user", "content": "And now?"}
    assert count(summing, [*SAID, TRIGGER, item, more]) == count(summing, [SAID[0], shortened(SUMMARY), more])
    assert count(summing, [item, more]) == count(summing, [shortened(SUMMARY), more])
    assert count(summing, [{**item, "type": "compaction_summary", "id": None}]) == count(summing, [shortened(SUMMARY)])


def test_it_is_streamed_as_one_item(summing: httpx.Client) -> None:
    events = named_events(summing.post(PATH, json={**ASK, "input": [*SAID, TRIGGER], "stream": True}))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "output_item.done", "completed")
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    (item,) = events[-1]["response"]["output"]
    assert events[-2]["item"] == item and count(summing, [item]) == count(summing, [shortened(SUMMARY)])


def test_the_route_keeps_the_messages_of_the_user(summing: httpx.Client) -> None:
    reply = post(summing, SAID, f"{PATH}/compact")
    assert (reply["object"], sorted(reply)) == (
        "response.compaction",
        ["created_at", "id", "object", "output", "usage"],
    )
    first, second, item = reply["output"]
    assert [one["content"][0]["text"] for one in (first, second)] == ["Find the ball.", "Whose is it?"]
    assert item["type"] == "compaction"
    more = {"role": "user", "content": "And now?"}
    assert count(summing, [*reply["output"], more]) == count(summing, [SAID[1], SAID[3], shortened(SUMMARY), more])


def test_a_kept_conversation_continues_from_its_compaction(summing: httpx.Client) -> None:
    first = post(summing, SAID[:2])
    short = post(summing, [TRIGGER], previous_response_id=first["id"])
    more = {"role": "user", "content": "And now?"}
    counted = count(summing, [more], previous_response_id=short["id"])
    assert counted == count(summing, [SAID[0], shortened(SUMMARY), more])
    begun = summing.post("/v1/conversations", json={"items": SAID}).json()
    post(summing, [TRIGGER], conversation=begun["id"])
    assert count(summing, [more], conversation=begun["id"]) == counted


def test_what_was_not_sealed_here_is_refused(summing: httpx.Client) -> None:
    (item,) = post(summing, [*SAID, TRIGGER])["output"]
    sealed = item["encrypted_content"]
    swapped = "A" if sealed[40] != "A" else "B"
    for content in (f"{sealed[:40]}{swapped}{sealed[41:]}", "gAAAAABelsewhere", "", None, 3):
        reply = summing.post(PATH, json={**ASK, "input": [{"type": "compaction", "encrypted_content": content}]})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "compaction_unreadable", "input[0]"), content
    reply = summing.post(PATH, json={**ASK, "input": [TRIGGER]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
    reply = summing.post(
        "/v1/decisions", json={"input": [item], "questions": [{"type": "predicate", "instructions": "?"}]}
    )
    assert reply.status_code == 400 and "/v1/responses" in reply.text


def test_only_its_owner_brings_it_back_and_the_key_outlives_the_server(tmp_path: Path) -> None:
    scripts: dict[str, Any] = {"summary": SUMMARY.encode()}
    tokens = tuple(AccessToken(name, f"{name}-secret") for name in ("alice", "bob"))
    kept = ResponseStoreOptions(tmp_path / "responses")
    settings = ServerSettings(port=0, kept_responses=kept, tokens=tokens, isolates_cache=True)

    def started() -> Any:
        return serving(settings, sources=scripted_sources(*scripts), load=loader(scripts))

    def client_of(running: ServedModel, name: str) -> httpx.Client:
        return running.client(headers={"authorization": f"Bearer {name}-secret"})

    with started() as running, client_of(running, "alice") as alice, client_of(running, "bob") as bob:
        (item,) = post(alice, [*SAID, TRIGGER])["output"]
        assert count(alice, [item]) == count(alice, [shortened(SUMMARY)])
        refused = bob.post(PATH, json={**ASK, "input": [item]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "compaction_unreadable")
    with started() as running, client_of(running, "alice") as alice:
        assert count(alice, [item]) == count(alice, [shortened(SUMMARY)])


def test_the_conversation_is_not_read_again(served: ServedModel) -> None:
    said = [{"role": "user", "content": "Tell me of the cat. " * 12}]
    with served.client() as client:
        first = client.post(PATH, json={"input": said, "max_output_tokens": 4, "store": False}).json()
        reply = client.post(PATH, json={"input": [*said, *first["output"], TRIGGER], "max_output_tokens": 4}).json()
        usage = reply["usage"]
        assert reply["status"] == "incomplete" and json.dumps(reply["output"]).count("compaction") == 1
        again = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] - 32
        assert again < usage["input_tokens"] - first["usage"]["input_tokens"] + 32


CHAT = "/v1/chat/completions"


def counted(metrics: str, name: str) -> float:
    """A counter of `/metrics`, over all models."""
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"localinfer_{name}_total"))


def test_a_server_that_compacts_sums_a_long_history_up_once(tmp_path: Path) -> None:
    """Its clients send all of it each time, by any API; a restart changes nothing, and another client finds nothing."""
    scripts: dict[str, Any] = {"summary": b"The gist."}
    tokens = tuple(AccessToken(name, f"{name}-secret") for name in ("alice", "bob"))
    kept = ResponseStoreOptions(tmp_path / "responses")
    settings = ServerSettings(port=0, kept_responses=kept, tokens=tokens, isolates_cache=True, compacts_chats=True)
    said = [{"role": "system", "content": "Be exact."}]
    for number in range(6):
        said += [{"role": "user", "content": f"{number} " * 300}, {"role": "assistant", "content": "Well."}]
    said.append({"role": "user", "content": "And now?"})

    def asked(client: httpx.Client, messages: list[Any], path: str = CHAT, **more: Any) -> dict[str, Any]:
        member = "input" if path == PATH else "messages"
        body = {"model": "summary", "temperature": 0, "max_tokens": 50, member: messages, **more}
        if path == PATH:
            body["max_output_tokens"] = body.pop("max_tokens")
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        usage: dict[str, Any] = reply.json()["usage"]
        return usage

    def client_of(running: ServedModel, name: str) -> httpx.Client:
        return running.client(headers={"authorization": f"Bearer {name}-secret"})

    def started() -> Any:
        return serving(settings, sources=scripted_sources(*scripts), load=loader(scripts))

    with started() as running, client_of(running, "alice") as alice, client_of(running, "bob") as bob:
        first = asked(alice, said)
        assert first["compaction"].pop("cached_tokens") == 0
        assert first["compaction"].pop("prompt_tokens") > 3000 > 1000 > first["prompt_tokens"]
        assert first["compaction"] == {"messages": 10, "completion_tokens": 10}
        said += [{"role": "assistant", "content": "The gist."}, {"role": "user", "content": "And then?"}]
        none = {"messages": 10, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
        later = asked(alice, said)
        assert later["compaction"] == none
        assert later["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"]
        assert asked(alice, said, PATH)["compaction"] == none
        assert asked(alice, said[1:], "/v1/messages", system="Be exact.")["compaction"] == none
        before = alice.get("/metrics").text
        written = asked(bob, said)
        assert written["compaction"]["completion_tokens"] == 10
        for name, count in (
            ("summaries", 1),
            ("prompt_tokens", written["prompt_tokens"] + written["compaction"]["prompt_tokens"]),
            ("completion_tokens", written["completion_tokens"] + 10),
        ):
            assert counted(alice.get("/metrics").text, name) - counted(before, name) == count, name
        edited = [said[0], {"role": "user", "content": "Another. " * 70}, *said[2:]]
        events = named_events(alice.post(PATH, json={**ASK, "input": edited, "stream": True}))
        assert events[-1]["response"]["usage"]["compaction"]["completion_tokens"] == 10
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "The gist."
        short = alice.post("/api/chat", json={"model": "summary", "messages": said[-1:], "stream": False})
        assert short.json()["message"]["content"] == "The gist."
        refused = alice.post(CHAT, json={"model": "summary", "messages": [{"role": "user", "content": "x" * 5000}]})
        assert refused.status_code == 400 and "context" in refused.json()["error"]["message"]
    with started() as running, client_of(running, "alice") as alice:
        assert asked(alice, said)["compaction"] == none
