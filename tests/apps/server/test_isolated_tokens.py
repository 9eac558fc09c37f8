"""Two tokens of a server that keeps them apart: nothing that one is told depends on what the other has sent."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_servers import ServedModel, serving

import localinfer
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import AccessToken, ServerSettings, parse_tokens
from localinfer.errors import RequestError
from localinfer.llm import LLM
from localinfer.storage.response_store import ResponseStoreOptions
from tests.support.limits import wait_until

TOKENS = parse_tokens("alice: sk-a\nbob: sk-b\nsk-c\n")
SECRET = "Agnes"
STORY = f"The plans of {SECRET} for the north wing are these. " + "She counts every stone, and waits for rain. " * 8
CHAT = [{"role": "system", "content": STORY}, {"role": "user", "content": "Say one word."}]
TEXT = {"prompt": STORY, "max_tokens": 4, "temperature": 0}


def settings(folder: Path, **more: Any) -> ServerSettings:
    kept = ResponseStoreOptions(folder / "responses")
    more = {"isolates_cache": True, "tokens": TOKENS, **more}
    return ServerSettings(port=0, slot_folder=folder / "slots", num_slots=4, kept_responses=kept, **more)


def loader(folder: Path) -> Any:
    def load(source: ModelSource) -> LLM:
        options: dict[str, Any] = {"disk_cache": True, "disk_cache_folder": folder / "cache"}
        return localinfer.load(source.path, threads=1, kv_memory=32 << 20, **options)

    return load


def client_of(running: ServedModel, token: AccessToken) -> httpx.Client:
    return running.client(headers={"authorization": f"Bearer {token.value}"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("isolated")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ServedModel]:
    with serving(settings(folder), load=loader(folder)) as served:
        yield served


@pytest.fixture(scope="module")
def alice(running: ServedModel) -> Iterator[httpx.Client]:
    with client_of(running, TOKENS[0]) as client:
        yield client


@pytest.fixture(scope="module")
def bob(running: ServedModel) -> Iterator[httpx.Client]:
    with client_of(running, TOKENS[1]) as client:
        yield client


def asked(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def openai(reply: dict[str, Any]) -> tuple[int, Any]:
    choice = reply["choices"][0]
    said = choice.get("text") or choice["message"]["content"]
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], said


def llama(reply: dict[str, Any]) -> tuple[int, Any]:
    return reply["timings"]["cache_n"], reply["content"]


ROUTES = {
    "/v1/chat/completions": ({"messages": CHAT, "max_tokens": 4, "temperature": 0}, openai),
    "/v1/completions": (TEXT, openai),
    "/v1/responses": (
        {"instructions": STORY, "input": "Say.", "max_output_tokens": 4, "temperature": 0},
        lambda it: (it["usage"]["input_tokens_details"]["cached_tokens"], it["output"][0]["content"][0]["text"]),
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": STORY}], "max_tokens": 4, "temperature": 0},
        lambda it: (it["usage"]["cache_read_input_tokens"], it["content"][0]["text"]),
    ),
    "/api/chat": (
        {"model": "demo", "messages": CHAT, "stream": False, "options": {"num_predict": 4, "temperature": 0}},
        lambda it: (it["prompt_eval_cached_count"], it["message"]["content"]),
    ),
    "/api/generate": (
        {"model": "demo", "prompt": STORY, "stream": False, "options": {"num_predict": 4, "temperature": 0}},
        lambda it: (it["prompt_eval_cached_count"], it["response"]),
    ),
    "/completion": (TEXT, llama),
}


@pytest.mark.parametrize("route", ROUTES)
def test_no_api_tells_of_a_prompt_that_another_token_has_sent(route: str, alice: httpx.Client, bob: httpx.Client):
    body, read = ROUTES[route]
    mark = route.replace("/", " ") + ": "

    def marked(value: Any) -> Any:
        """The same request with another beginning for each route."""
        if isinstance(value, str):
            return mark + value if value == STORY else value
        if isinstance(value, dict):
            return {name: marked(one) for name, one in value.items()}
        return [marked(one) for one in value] if isinstance(value, list) else value

    body = marked(body)
    first = asked(alice, route, body)
    cached, said = read(first)
    again, _ = read(asked(alice, route, body))
    assert again > cached + 40
    other = asked(bob, route, body)
    cached_of_bob, said_to_bob = read(other)
    # What all chats of a token begin with may be its own already, but for the story.
    assert cached_of_bob <= cached + 8 and said_to_bob == said
    timings = other.get("timings", {})
    assert SECRET not in str(timings.get("cache_miss", "")) and read(asked(bob, route, body))[0] >= again - 1


def test_reason_of_a_miss_quotes_nobody_else(running: ServedModel, alice: httpx.Client, bob: httpx.Client):
    mark = "A reason. "
    asked(alice, "/v1/completions", {**TEXT, "prompt": mark + STORY})
    with client_of(running, TOKENS[2]) as carol:
        guess = {**TEXT, "prompt": f"{mark}The plans of Berta for the south wing are"}
        reply = asked(carol, "/v1/completions", guess)
        assert reply["timings"]["cache_miss"] == "nothing was cached yet"
        own = asked(carol, "/v1/completions", {**guess, "prompt": f"{mark}The plans of Carla"})
        differs = f"the text differs at token {own['timings']['cache_n']}"
        assert own["timings"]["cache_miss"] == differs and own["timings"]["cache_n"] > 4
    told = asked(bob, "/v1/completions", guess)
    assert SECRET not in str(told) and told["timings"]["cache_n"] < 4


def test_fill_in_and_vectors_tell_nothing_of_another_token(alice: httpx.Client, bob: httpx.Client):
    hole = {"input_prefix": STORY, "input_suffix": "end", "n_predict": 2}
    answers = [client.post("/infill", json=hole) for client in (alice, bob)]
    assert len({answer.status_code for answer in answers}) == 1
    if answers[0].status_code == 200:
        assert answers[1].json()["timings"]["cache_n"] == 0
    vectors = [asked(client, "/v1/embeddings", {"input": STORY}) for client in (alice, bob)]
    assert vectors[0] == vectors[1]


def test_salts_of_requests_keep_the_texts_of_one_token_apart(alice: httpx.Client, bob: httpx.Client):
    body = {**TEXT, "prompt": "Salted. " + STORY}
    cached = [
        openai(asked(client, "/v1/completions", {**body, **salt}))[0]
        for client, salt in (
            (alice, {"cache_salt": "one"}),
            (alice, {"cache_salt": "two"}),
            (bob, {"cache_salt": "one"}),
            (alice, {}),
            (alice, {"cache_salt": "one"}),
        )
    ]
    assert max(cached[:4]) < 4 and cached[4] > 60
    refused = alice.post("/v1/completions", json={**body, "cache_salt": ""})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_kept_responses_and_conversations_are_found_by_their_own_token(
    folder: Path, alice: httpx.Client, bob: httpx.Client
):
    made = asked(alice, "/v1/responses", {"input": STORY, "max_output_tokens": 2})["id"]
    kept = asked(alice, "/v1/conversations", {"items": [{"role": "user", "content": STORY}]})["id"]
    paths = (f"/v1/responses/{made}", f"/v1/responses/{made}/input_items", f"/v1/conversations/{kept}")
    for path in (*paths, f"/v1/conversations/{kept}/items"):
        assert alice.get(path).status_code == 200
        missing, none = bob.get(path), bob.get(path.replace(made, "resp_" + "0" * 24).replace(kept, "conv_" + "0" * 24))
        assert missing.status_code == none.status_code == 404
        named = (missing.text.replace(made, "ID").replace(kept, "ID"), none.text)
        assert named[0] == re.sub(r"(resp|conv)_0{24}", "ID", named[1]), "that it exists can be told"
    goes_on = {"input": "And?", "max_output_tokens": 2, "previous_response_id": made}
    assert bob.post("/v1/responses", json=goes_on).status_code == 400
    assert bob.post(f"/v1/responses/{made}/cancel").status_code == 404
    assert bob.delete(f"/v1/responses/{made}").status_code == bob.delete(f"/v1/conversations/{kept}").status_code == 404
    assert asked(alice, "/v1/responses", goes_on)["status"] in ("completed", "incomplete")
    assert alice.delete(f"/v1/responses/{made}").status_code == 200


def test_slots_are_saved_restored_and_erased_by_their_own_token(folder: Path, alice: httpx.Client, bob: httpx.Client):
    body = {**TEXT, "prompt": "In a slot. " + STORY, "id_slot": 1}
    asked(alice, "/completion", body)
    assert bob.post("/slots/1?action=save", json={"filename": "one"}).status_code == 400
    assert asked(bob, "/slots/1?action=erase", {})["n_erased"] == 0
    saved = asked(alice, "/slots/1?action=save", {"filename": "one"})["n_saved"]
    assert saved > 60 and asked(alice, "/slots/1?action=erase", {})["n_erased"] > 40
    assert bob.post("/slots/0?action=restore", json={"filename": "one"}).status_code == 400
    assert asked(alice, "/slots/1?action=restore", {"filename": "one"})["n_restored"] == saved
    assert llama(asked(bob, "/completion", body))[0] < 4 and llama(asked(alice, "/completion", body))[0] > 60
    names = [path.name for path in (folder / "slots").rglob("*")]
    assert not any(word in name for name in names for word in ("alice", "bob", "sk-"))


def test_running_replies_are_seen_and_stopped_by_their_own_token(
    running: ServedModel, alice: httpx.Client, bob: httpx.Client
):
    endless = {**TEXT, "max_tokens": 100_000, "ignore_eos": True, "context_shift": True, "stream": True, "id_slot": 2}
    with client_of(running, TOKENS[0]) as reader, reader.stream("POST", "/completion", json=endless) as stream:
        lines = stream.iter_lines()
        next(lines)
        (reply,) = alice.get("/requests").json()
        assert bob.get("/requests").json() == []
        shown, seen = ([slot for slot in client.get("/slots").json()][2] for client in (alice, bob))
        assert shown["id_task"] == reply["id"] and seen["is_processing"]
        assert set(seen) == {"id", "n_ctx", "speculative", "is_processing"}
        assert bob.post(f"/requests/{reply['id']}/cancel").status_code == 404
        assert alice.post(f"/requests/{reply['id']}/cancel").status_code == 200
    wait_until(lambda: alice.get("/requests").json() == [], 10)


def test_disk_keeps_tokens_apart_after_a_restart_by_their_names(tmp_path: Path):
    body = {**TEXT, "prompt": "On disk. " + STORY}
    found: list[tuple[int, Any]] = []
    with serving(settings(tmp_path), load=loader(tmp_path)) as running:
        for token in TOKENS:
            with client_of(running, token) as client:
                found.append(openai(asked(client, "/v1/completions", body)))
    renewed = parse_tokens("# other lines and tokens\nbob: sk-new\nsk-d\nsk-c\ncarol: sk-e\nalice: sk-a2")
    with serving(settings(tmp_path, tokens=renewed), load=loader(tmp_path)) as running:
        for token in renewed:
            with client_of(running, token) as client:
                reply = asked(client, "/v1/completions", body)
                assert SECRET not in str(reply["timings"].get("cache_miss", ""))
                found.append(openai(reply))
    assert len({said for _, said in found}) == 1
    # Bob, somebody without a name whose token is new, the one who had that token before, Carol, Alice.
    assert [cached > 60 for cached, _ in found] == [False] * 3 + [True, False, True, False, True]
    assert max(cached for cached, _ in found[:3]) == 0
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() + path.name.encode() for path in files)
    assert len(files) > 5 and not any(word in content for word in (b"alice", b"bob", b"sk-"))


def test_without_isolation_tokens_share_and_with_it_there_must_be_tokens(tmp_path: Path):
    body = {**TEXT, "prompt": "Shared. " + STORY}
    with serving(settings(tmp_path, isolates_cache=False)) as running:
        cached = []
        for token in TOKENS[:2]:
            with client_of(running, token) as client:
                cached.append(openai(asked(client, "/v1/completions", body))[0])
    assert cached[0] == 0 and cached[1] > 60
    with pytest.raises(RequestError, match="--token-file"):
        ServerSettings(isolates_cache=True)


def test_identity_is_of_the_name_and_without_one_of_the_token():
    first, second = parse_tokens("alice: a\nb\n"), parse_tokens("b\nalice: c\n")
    assert first[0].identity == second[1].identity and first[1].identity == second[0].identity
    assert first[0].identity != first[1].identity and "b" not in first[1].identity.split()[1:]
    assert AccessToken("token-1", "x").identity != AccessToken("token-1", "x", is_named=False).identity
