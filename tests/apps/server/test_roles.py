"""Prompts that a prefill server computes and a decode server continues: the same bytes, whatever fails on the way."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_servers import ServedModel, serving
from role_servers import COMPLETION, STORY, decoding, handovers, loaded, loader, prefilling, sent

from localinfer.apps.server.transport.settings import PrefillAddress, ServerSettings, parse_tokens
from localinfer.errors import RequestError
from tests.support.inside import engine_of
from tests.support.limits import seconds, wait_until

CHAT = [{"role": "system", "content": STORY * 2}, {"role": "user", "content": "What did the dog find?"}]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """A server of role both, which computes all itself."""
    with serving(ServerSettings(port=0), load=loader(tmp_path_factory.mktemp("alone"))) as running:
        yield running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedModel, ServedModel]]:
    """A prefill server, and a decode server that asks it by TCP."""
    folder = tmp_path_factory.mktemp("shared")
    with prefilling(folder) as prefill, decoding(folder, prefill.url) as decode:
        yield prefill, decode


REQUESTS = {
    "completion": ("/v1/completions", {"prompt": "A " + STORY * 3, **COMPLETION}),
    "stream": (
        "/v1/completions",
        {"prompt": "B " + STORY * 3, **COMPLETION, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "several": ("/v1/completions", {"prompt": "C " + STORY * 3, **COMPLETION, "n": 3}),
    "token ids": ("/v1/completions", {"prompt": list(range(5, 205)), **COMPLETION}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 12, "seed": 3, "logprobs": True}),
    "next turn": (
        "/v1/chat/completions",
        {
            "messages": [*CHAT, {"role": "assistant", "content": "A ball."}, {"role": "user", "content": STORY}],
            "max_tokens": 12,
            "seed": 3,
        },
    ),
    "salted": ("/v1/completions", {"prompt": "D " + STORY * 3, **COMPLETION, "cache_salt": "mine"}),
}


@pytest.mark.parametrize("name", list(REQUESTS))
def test_a_prompt_handed_over_is_answered_with_the_bytes_of_one_process(
    name: str, alone: ServedModel, pair: tuple[ServedModel, ServedModel]
) -> None:
    path, body = REQUESTS[name]
    before = handovers(pair[1]).get("handed_over", 0)
    assert sent(pair[1], path, body) == sent(alone, path, body)
    after = handovers(pair[1])
    assert after.get("handed_over", 0) == before + 1
    assert not after.get("failed")


def test_a_repeated_prompt_and_a_short_one_are_not_handed_over(pair: tuple[ServedModel, ServedModel]) -> None:
    body = {"prompt": "E " + STORY * 3, "max_tokens": 1}
    sent(pair[1], "/v1/completions", body)
    before = handovers(pair[1])
    again = json.loads(sent(pair[1], "/v1/completions", body))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
    sent(pair[1], "/v1/completions", {"prompt": "F is short", "max_tokens": 1})
    assert handovers(pair[1]) == before


def test_a_prefill_server_computes_what_is_new_of_a_conversation_only(pair: tuple[ServedModel, ServedModel]) -> None:
    """And its pages of the beginning, which the decode server has too, count as cached."""
    begun = "G " + STORY * 2
    sent(pair[1], "/v1/completions", {"prompt": begun, "max_tokens": 1})
    usage = json.loads(sent(pair[1], "/v1/completions", {"prompt": begun + STORY * 2, "max_tokens": 1}))["usage"]
    assert 32 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] // 2 + 8


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
        ("/v1/messages", {"messages": CHAT[1:], "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/generate", {"model": "demo", "prompt": "Hi"}),
        ("/completion", {"prompt": "Hi"}),
        ("/infill", {"input_prefix": "Hi", "input_suffix": "Ho"}),
    ],
)
def test_a_prefill_server_refuses_to_generate(
    path: str, body: dict[str, Any], pair: tuple[ServedModel, ServedModel]
) -> None:
    with pair[0].client() as client:
        response = client.post(path, json=body)
        assert response.status_code == 501
        assert "--role prefill" in response.text
        assert client.post("/tokenize", json={"content": "Hi"}).status_code == 200


def test_only_a_prefill_server_has_the_route(alone: ServedModel, pair: tuple[ServedModel, ServedModel]) -> None:
    for running in (alone, pair[1]):
        with running.client() as client:
            assert client.post("/prefill", json={"token_ids": [5], "fingerprint": {}}).status_code == 404


def prefill_body(running: ServedModel, **more: Any) -> dict[str, Any]:
    parts = dict(loaded(running).handover_fingerprint().parts)
    return {"token_ids": list(range(5, 205)), "fingerprint": parts, **more}


def test_the_route_says_what_is_wrong_with_a_request(tmp_path: Path) -> None:
    with prefilling(tmp_path) as running, running.client() as client:
        body = prefill_body(running)
        lines = [json.loads(line) for line in client.post("/prefill", json=body).text.splitlines()]
        told = {"prompt_tokens": 200, "cached_tokens": 0, "stored_tokens": 199, "problem": None, "has_failed": False}
        assert lines[-1] == told
        for wrong, status, words in [
            ({"salt": "zz"}, 400, "salt"),
            ({"salt": "ab"}, 400, "salt"),
            ({"token_ids": []}, 400, "no tokens"),
            ({"token_ids": [1 << 30]}, 400, "vocabulary"),
            ({"token_ids": [5] * 100_000}, 400, "context"),
            ({"branch_tokens": [-1]}, 400, "branch_tokens"),
            ({"fingerprint": {"weights": "other"}}, 409, "weights"),
            ({"fingerprints": 1}, 400, "no member"),
        ]:
            response = client.post("/prefill", json={**body, **wrong})
            assert (response.status_code, words in response.text) == (status, True), response.text


def test_the_route_asks_for_a_token_and_a_known_host(tmp_path: Path) -> None:
    with prefilling(tmp_path, tokens=parse_tokens("decode: sk-d")) as running, running.client() as client:
        body = prefill_body(running)
        assert client.post("/prefill", json=body).status_code == 401
        shown = {"authorization": "Bearer sk-d"}
        assert client.post("/prefill", json=body, headers=shown).status_code == 200
        assert client.post("/prefill", json=body, headers={**shown, "host": "evil.example"}).status_code == 403
        assert client.post("/prefill", content=b"{}", headers=shown).status_code == 415
        with decoding(tmp_path, running.url) as decode:
            sent(decode, "/v1/completions", {"prompt": "A " + STORY * 3, "max_tokens": 1})
            assert handovers(decode) == {"failed": 1, "computed_here": 1}
        with decoding(tmp_path, running.url, handover={"token": "sk-d"}) as decode:
            sent(decode, "/v1/completions", {"prompt": "B " + STORY * 3, "max_tokens": 1})
            assert handovers(decode) == {"handed_over": 1}


def test_clients_that_are_kept_apart_stay_apart(tmp_path: Path, runtime_folder: Path, alone: ServedModel) -> None:
    tokens = parse_tokens("alice: sk-a\nbob: sk-b\n")
    body = {"prompt": "A " + STORY * 3, **COMPLETION}
    path = runtime_folder / "prefill.sock"
    with (
        prefilling(tmp_path, socket_path=path) as running,
        decoding(tmp_path, f"unix:{running.socket_path}", tokens=tokens, isolates_cache=True) as decode,
    ):
        wanted = sent(alone, "/v1/completions", {**body, "cache_salt": "nobody's"})
        assert sent(decode, "/v1/completions", body, authorization="Bearer sk-a") == wanted
        # Another client's request finds nothing of it, neither there nor here.
        assert sent(decode, "/v1/completions", body, authorization="Bearer sk-b") == wanted
        assert sent(decode, "/v1/completions", body, authorization="Bearer sk-a") != wanted


def test_several_prompts_are_computed_at_one_time(alone: ServedModel, pair: tuple[ServedModel, ServedModel]) -> None:
    bodies = [{"prompt": f"{number} {STORY * 3}", **COMPLETION} for number in range(4)]
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = sent(pair[1], "/v1/completions", bodies[number])

    at_once(ask, range(4))
    assert answers == {number: sent(alone, "/v1/completions", body) for number, body in enumerate(bodies)}
    assert not handovers(pair[1]).get("failed")


def test_prompts_are_computed_in_turn_among_their_owners(tmp_path: Path) -> None:
    """What the scheduler is fair to is the client of the decode server, not that server."""
    with prefilling(tmp_path) as running:
        body, prefill, owners = prefill_body(running), loaded(running), ["a", "a", "b"]

        def ask(number: int) -> None:
            with running.client() as client:
                client.post("/prefill", json={**body, "owner": owners[number]})

        with engine_of(prefill).exclusive_cache():
            asking = threading.Thread(target=at_once, args=(ask, range(3)))
            asking.start()
            assert wait_until(lambda: prefill.engine_stats.waiting == 3)
            found = sorted(str(request.owner) for request in engine_of(prefill).scheduler.requests())
        asking.join(seconds(30))
        assert found == ["127.0.0.1 a", "127.0.0.1 a", "127.0.0.1 b"]


def at_once(ask: Callable[[int], None], numbers: range) -> None:
    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(30))


@pytest.mark.parametrize(
    "name", ["8080", "https://host", "http://", "http://host/v1", "http://host:port", "unix:", "http://a@b"]
)
def test_an_address_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="http://HOST:PORT"):
        PrefillAddress(name)


def test_a_path_that_no_socket_can_have_is_refused_at_once() -> None:
    assert PrefillAddress(f"unix:/{'x' * 102}").path == Path(f"/{'x' * 102}")
    with pytest.raises(RequestError, match="has 108 bytes.*shorter"):
        PrefillAddress(f"unix:/{'x' * 107}")


def test_addresses_are_read() -> None:
    address = PrefillAddress("http://[::1]:9000/")
    assert (address.host, address.port, address.path) == ("::1", 9000, None)
    assert PrefillAddress("unix:/run/x.sock").path == Path("/run/x.sock")
