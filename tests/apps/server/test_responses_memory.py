"""What the API of responses keeps: responses and conversations, what continues them, and what is kept of that."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from event_frames import named_events
from local_servers import serving

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.storage.response_store import ResponseStore, ResponseStoreOptions
from localinfer.system.folders import make_private
from tests.support.limits import wait_until

PATH = "/v1/responses"
ASK = {"input": "Tell me a story.", "max_output_tokens": 6, "temperature": 0}
MORE = {"input": "Go on.", "max_output_tokens": 4, "temperature": 0}
NEW = {"input": "Tell me a story about a lamp.", "max_output_tokens": 6, "temperature": 0}
"""What no other test asks: none has made the model read more of its reply."""
ASK_MORE = {"role": "user", "content": "Go on."}
Post = Callable[..., dict[str, Any]]


@pytest.fixture
def post(tcp: httpx.Client) -> Post:
    def send(path: str = PATH, **members: Any) -> dict[str, Any]:
        response = tcp.post(path, json=members)
        assert response.status_code == 200, response.text
        return response.json()

    return send


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


def text_of(reply: dict[str, Any]) -> str:
    return "".join(part["text"] for item in reply["output"] for part in item["content"])


def test_continued_response_is_that_to_the_whole_conversation_and_is_cached_to_the_token(tcp, post):
    first = post(**NEW)
    items = [{"role": "user", "content": NEW["input"]}, *first["output"]]
    prompt = tcp.post(f"{PATH}/input_tokens", json={"input": items}).json()["input_tokens"]
    continued = post(**MORE, previous_response_id=first["id"])
    # All of the first prompt and its reply but for the last token, which was never computed, and what ends a reply.
    first_tokens = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert continued["usage"]["input_tokens_details"]["cached_tokens"] == first_tokens - 1
    assert prompt > first_tokens
    sent = post(**{**MORE, "input": [*items, {"role": "user", "content": "Go on."}]})
    assert text_of(continued) == text_of(sent)
    assert continued["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
    assert continued["previous_response_id"] == first["id"]


def test_response_is_kept_as_it_was_answered_streamed_or_whole(http):
    whole = http.post(PATH, json={**ASK, "metadata": {"a": "b"}}).json()
    assert http.get(f"{PATH}/{whole['id']}").json() == whole
    streamed = named_events(http.post(PATH, json={**ASK, "stream": True}))[-1]["response"]
    assert http.get(f"{PATH}/{streamed['id']}").json() == streamed
    assert streamed["store"] is True


def test_deleted_response_is_gone_and_so_is_what_continues_it(tcp, post):
    first = post(**ASK)
    second = post(**MORE, previous_response_id=first["id"])
    deleted = tcp.delete(f"{PATH}/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    assert error_of(tcp.get(f"{PATH}/{first['id']}")) == (404, "id", "response_not_found")
    assert error_of(tcp.delete(f"{PATH}/{first['id']}")) == (404, "id", "response_not_found")
    for response_id in (first["id"], second["id"], "resp_1", "../../etc/passwd"):
        refused = tcp.post(PATH, json={**MORE, "previous_response_id": response_id})
        assert error_of(refused) == (400, "previous_response_id", "previous_response_not_found")
    assert first["id"] in tcp.post(PATH, json={**MORE, "previous_response_id": second["id"]}).text


def test_what_is_not_to_be_stored_is_not(tcp, post):
    reply = post(**ASK, store=False)
    assert reply["store"] is False
    assert tcp.get(f"{PATH}/{reply['id']}").status_code == 404
    for member in ({"background": True}, {"conversation": "conv_1"}):
        refused = tcp.post(PATH, json={**ASK, "store": False, **member})
        assert error_of(refused)[:2] == (400, next(iter(member)))


def test_input_items_are_all_that_the_model_was_given(tcp, post):
    first = post(**ASK)
    second = post(**MORE, previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    listed = tcp.get(path, params={"order": "asc"}).json()
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    assert listed["data"][1] == first["output"][0]
    assert listed["data"][2]["content"] == [{"type": "input_text", "text": "Go on."}]
    ids = [item["id"] for item in listed["data"]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[-1], False)
    assert [item["id"] for item in tcp.get(path).json()["data"]] == ids[::-1]
    page = tcp.get(path, params={"order": "asc", "limit": 1, "after": ids[0]}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([ids[1]], True)
    for bad in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}):
        assert error_of(tcp.get(path, params=bad))[:2] == (400, next(iter(bad)))


def test_item_is_referred_to_by_its_id(tcp, post):
    first = post(**ASK)
    said = {"role": "user", "content": ASK["input"]}
    asked = {"role": "user", "content": "Go on."}
    by_id = [said, {"type": "item_reference", "id": first["output"][0]["id"]}, asked]
    whole = [said, first["output"][0], asked]
    assert text_of(post(**{**MORE, "input": by_id})) == text_of(post(**{**MORE, "input": whole}))
    refused = tcp.post(PATH, json={**MORE, "input": [{"id": "msg_0"}, asked]})
    assert error_of(refused) == (404, "input[0]", "item_not_found")


def test_conversation_grows_by_what_is_said(tcp, post):
    begun = post(
        "/v1/conversations",
        items=[{"role": "system", "content": "Speak of dogs, which no other test does."}],
        metadata={"topic": "dogs"},
    )
    path = f"/v1/conversations/{begun['id']}"
    first = post(**ASK, conversation=begun["id"])
    assert first["conversation"] == {"id": begun["id"]}
    second = post(**MORE, conversation={"id": begun["id"]})
    listed = tcp.get(f"{path}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in listed] == ["system", "user", "assistant", "user", "assistant"]
    assert listed[2] == first["output"][0]
    first_tokens = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == first_tokens - 1
    given = tcp.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert given == listed[:4]
    # A response of the conversation can be continued outside of it.
    beside = post(**MORE, previous_response_id=first["id"])
    assert text_of(beside) == text_of(second)
    both = tcp.post(PATH, json={**MORE, "conversation": begun["id"], "previous_response_id": first["id"]})
    assert error_of(both)[:2] == (400, "conversation")
    assert tcp.get(path).json() == begun


def test_conversation_and_its_items_are_changed_and_deleted(tcp, post):
    begun = post("/v1/conversations")
    path = f"/v1/conversations/{begun['id']}"
    added = post(f"{path}/items", items=[{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}])
    one, two = added["data"]
    assert tcp.get(f"{path}/items/{one['id']}").json() == one
    assert tcp.delete(f"{path}/items/{one['id']}").json()["id"] == begun["id"]
    assert tcp.get(f"{path}/items").json()["data"] == [two]
    assert error_of(tcp.get(f"{path}/items/{one['id']}")) == (404, "item_id", "item_not_found")
    assert post(path, metadata={"a": "b"})["metadata"] == {"a": "b"}
    # A conversation whose items were changed is given as it is now.
    post(**ASK, conversation=begun["id"])
    tcp.delete(f"{path}/items/{two['id']}")
    reply = post(**MORE, conversation=begun["id"])
    given = tcp.get(f"{PATH}/{reply['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["content"][0]["text"] for item in given if item["role"] == "user"] == [ASK["input"], "Go on."]
    assert tcp.delete(path).json() == {"id": begun["id"], "object": "conversation.deleted", "deleted": True}
    assert error_of(tcp.get(path)) == (404, "id", "conversation_not_found")
    assert error_of(tcp.post(PATH, json={**ASK, "conversation": begun["id"]})) == (
        404,
        "conversation",
        "conversation_not_found",
    )
    refused = tcp.post("/v1/conversations", json={"items": [{"type": "no_such_item"}]})
    assert error_of(refused)[:2] == (400, "items[0]")


def test_response_of_a_conversation_whose_last_one_was_deleted_can_be_continued(tcp, post):
    conversation = post("/v1/conversations")["id"]
    first = post(**ASK, conversation=conversation)
    assert tcp.delete(f"{PATH}/{first['id']}").status_code == 200
    second = post(**MORE, conversation=conversation)
    third = post(**MORE, previous_response_id=second["id"])
    listed = tcp.get(f"{PATH}/{third['id']}/input_items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in listed[::2]] == [ASK["input"], "Go on.", "Go on."]
    assert text_of(second) == listed[3]["content"][0]["text"]
    fourth = post(**MORE, conversation=conversation)
    assert post(**MORE, previous_response_id=fourth["id"])["status"] == "incomplete"


def test_response_is_written_before_the_conversation_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written: list[str] = []
    put = ResponseStore.put
    monkeypatch.setattr(ResponseStore, "put", lambda store, *given: (written.append(given[0]), put(store, *given)))
    settings = ServerSettings(port=0, kept_responses=ResponseStoreOptions(tmp_path))
    with serving(settings) as running, running.client() as http:
        conversation = http.post("/v1/conversations", json={}).json()["id"]
        response = http.post(PATH, json={**ASK, "conversation": conversation}).json()["id"]
    assert written == [f"{conversation}.json", f"{response}.json", f"{conversation}.json"]


def test_what_was_answered_is_in_files_before_the_answer_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    work_off = ResponseStore._work_off
    monkeypatch.setattr(ResponseStore, "_work_off", lambda store, name: (time.sleep(0.05), work_off(store, name)))
    folder = tmp_path / "responses"
    settings = ServerSettings(port=0, kept_responses=ResponseStoreOptions(folder))
    with serving(settings) as running, running.client() as http:
        conversation = http.post("/v1/conversations", json={}).json()["id"]
        assert (folder / f"{conversation}.json").exists()
        whole = http.post(PATH, json=ASK).json()["id"]
        assert (folder / f"{whole}.json").exists()
        with http.stream("POST", PATH, json={**ASK, "stream": True}) as stream:
            last = next(line for line in stream.iter_lines() if line.startswith("event: response.incomplete"))
            assert last and len(list(folder.glob("resp_*.json"))) == 2
        http.delete(f"{PATH}/{whole}")
        http.delete(f"/v1/conversations/{conversation}")
        assert len(list(folder.iterdir())) == 1


def test_tokens_of_a_prompt_are_counted_before_it_is_sent(post):
    reply = post(**ASK, instructions="Be brief.")
    asked = {"input": ASK["input"], "instructions": "Be brief."}
    counted = post(f"{PATH}/input_tokens", **asked, enable_thinking=True)
    assert counted == {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}
    more = post(f"{PATH}/input_tokens", input="Go on.", previous_response_id=reply["id"])
    assert more["input_tokens"] == post(**MORE, previous_response_id=reply["id"])["usage"]["input_tokens"]


def test_background_response_is_made_while_nobody_listens(tcp, post):
    begun = post(**{**ASK, "max_output_tokens": 30}, background=True)
    assert begun["status"] == "in_progress"
    path = f"{PATH}/{begun['id']}"
    wait_until(lambda: tcp.get(path).json()["status"] != "in_progress", 20)
    ended = tcp.get(path).json()
    assert ended["usage"]["output_tokens"] == 30
    assert text_of(ended) == text_of(post(**{**ASK, "max_output_tokens": 30}))
    # It was not streamed.
    assert error_of(tcp.get(path, params={"stream": "true"}))[:2] == (400, "stream")
    # What has ended stays as it is.
    assert tcp.post(f"{path}/cancel", json={}).json() == ended


def test_stream_of_a_background_response_goes_on_where_it_was_left(tcp):
    with tcp.stream("POST", PATH, json={**ASK, "max_output_tokens": 40, "background": True, "stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        seen = [next(lines) for _ in range(5)]
    begun = httpx.Response(200, text=seen[0].removeprefix("data: ")).json()["response"]
    path = f"{PATH}/{begun['id']}"
    # Once while it may still run, and once from what is kept.
    for _ in range(2):
        rest = named_events(tcp.get(path, params={"stream": "true", "starting_after": 4}))
        assert [event["sequence_number"] for event in rest] == list(range(5, 5 + len(rest)))
        assert rest[-1]["response"] == tcp.get(path).json()
        wait_until(lambda: tcp.get(path).json()["status"] != "in_progress", 20)
    everything = named_events(tcp.get(path, params={"stream": "true"}))
    deltas = "".join(event["delta"] for event in everything if event["type"].endswith("text.delta"))
    assert deltas == text_of(tcp.get(path).json())
    assert error_of(tcp.get(path, params={"stream": "true", "starting_after": "x"}))[:2] == (400, "starting_after")


def test_background_response_is_stopped(tcp, post):
    begun = post(**{**ASK, "max_output_tokens": 2000}, background=True, ignore_eos=True)
    path = f"{PATH}/{begun['id']}"
    cancelled = tcp.post(f"{path}/cancel", json={}).json()
    assert cancelled["status"] == "cancelled"
    assert tcp.get(path).json() == cancelled
    begun = post(**{**ASK, "max_output_tokens": 2000}, background=True, ignore_eos=True)
    assert tcp.delete(f"{PATH}/{begun['id']}").json()["deleted"]
    assert tcp.get(f"{PATH}/{begun['id']}").status_code == 404


def test_background_response_that_a_stopping_server_ended_says_so(tmp_path):
    kept = ResponseStoreOptions(tmp_path / "responses")
    settings = ServerSettings(port=0, kept_responses=kept, shutdown_seconds=0)
    endless = {**ASK, "max_output_tokens": 10**6, "ignore_eos": True, "truncation": "auto", "background": True}
    with serving(settings) as running, running.client() as client:
        begun = client.post(PATH, json=endless).json()
    with serving(settings) as running, running.client() as client:
        ended = client.get(f"{PATH}/{begun['id']}").json()
    assert (ended["status"], ended["error"]["code"]) == ("failed", "shutting_down")


def test_instructions_are_of_one_request(post):
    first = post(**ASK, instructions="Be brief.")
    without = post(**{**ASK, "input": [{"role": "user", "content": ASK["input"]}, *first["output"], ASK_MORE]})
    second = post(**{**MORE, "input": [ASK_MORE]}, previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] == without["usage"]["input_tokens"]
    assert second["instructions"] is None
    assert post(**ASK, previous_response_id="")["previous_response_id"] is None


def test_responses_and_conversations_outlive_the_server(tmp_path):
    options = ResponseStoreOptions(tmp_path / "responses")
    settings = ServerSettings(port=0, kept_responses=options)
    with serving(settings) as running, running.client() as client:
        first = client.post(PATH, json=ASK).json()
        begun = client.post("/v1/conversations", json={"items": [{"role": "user", "content": "One."}]}).json()
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in options.folder.iterdir()}
    assert modes == {".json": 0o600}
    with serving(settings) as running, running.client() as client:
        assert client.get(f"{PATH}/{first['id']}").json() == first
        continued = client.post(PATH, json={**MORE, "previous_response_id": first["id"]}).json()
        assert continued["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        assert len(client.get(f"/v1/conversations/{begun['id']}/items").json()["data"]) == 1
        # Damage is as good as absence.
        next(options.folder.glob(f"{first['id']}*")).write_bytes(b"{")
        assert client.get(f"{PATH}/{first['id']}").status_code == 404


def test_server_that_keeps_nothing_says_so(tmp_path):
    folder = tmp_path / "responses"
    settings = ServerSettings(port=0, kept_responses=ResponseStoreOptions(folder, max_bytes=0))
    with serving(settings) as running, running.client() as client:
        reply = client.post(PATH, json=ASK).json()
        assert reply["store"] is False
        for path, body in (
            (PATH, {**MORE, "previous_response_id": reply["id"]}),
            (PATH, {**MORE, "background": True}),
            ("/v1/conversations", {}),
        ):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
            assert "--no-store" in refused.text
        assert "--no-store" in client.get(f"{PATH}/{reply['id']}").text
    assert not folder.exists()


def test_folder_that_others_may_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "responses"
    assert make_private(folder) is None
    folder.chmod(0o777)
    settings = ServerSettings(port=0, kept_responses=ResponseStoreOptions(folder))
    with serving(settings) as running, running.client() as client:
        reply = client.post(PATH, json=ASK).json()
        assert client.get(f"{PATH}/{reply['id']}").json() == reply
    assert "kept in memory only" in caplog.text
    assert not list(folder.iterdir())
