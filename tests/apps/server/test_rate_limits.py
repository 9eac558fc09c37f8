"""Tokens with names, and what each may ask for in a minute."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from local_servers import STORY, ServedModel, serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.replies.clients import RateLimiter, Reservation
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import AccessToken, Quota, ServerSettings, matching_token, parse_tokens
from localinfer.errors import RequestError
from tests.support.limits import wait_until

PATH = "/v1/chat/completions"
TOKENS = parse_tokens("alice: first\nbob: second\nthird\n")
ASK = {"model": "says", "messages": STORY, "temperature": 0}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_tokens_of_a_file_have_names_and_stand_alone_on_a_line():
    tokens = parse_tokens("# who may ask\n\nalice:  sk-1\nsk-2  \n  bob@work: a:b\nhttp://x\n")
    assert [(one.name, one.value) for one in tokens] == [
        ("alice", "sk-1"),
        ("token-4", "sk-2"),
        ("bob@work", "a:b"),
        ("http", "//x"),
    ]
    assert matching_token("sk-2", tokens) is tokens[1]
    assert matching_token("alice: sk-1", tokens) is matching_token("", tokens) is None
    assert "sk-1" not in repr(tokens)


@pytest.mark.parametrize("before", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("line", "name", "quota"),
    [
        ("alice: KEY", "alice", Quota()),
        ("alice:KEY", "alice", Quota()),
        ("KEY", "token-2", Quota()),
        ("alice: KEY max_running=2", "alice", Quota(max_running=2)),
        ("alice: KEY\tmax-running=2,  min_priority=-5", "alice", Quota(max_running=2, min_priority=-5)),
        ("alice: KEY [max_running=2 min_priority=-5]", "alice", Quota(max_running=2, min_priority=-5)),
        ("alice: KEY [ max_running=2 ]", "alice", Quota(max_running=2)),
        ("KEY max_queued=0", "token-2", Quota(max_queued=0)),
        ("KEY []", "token-2", Quota()),
    ],
)
def test_limits_of_a_line_are_read_with_brackets_and_without(before, line, name, quota):
    (token,) = parse_tokens(f"{before}# who may ask\n  {line}\r\n")
    assert (token.name, token.value, token.quota) == (name, "KEY", quota)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("alice: KEY [max_running=2", "a bracket .* missing"),
        ("alice: KEY max_running=2]", "a bracket .* missing"),
        ("alice: KEY max_running=2 [min_priority=1]", "a bracket .* missing"),
        ("alice: KEY[max_running=2]", "a limit where the token"),
        ("alice: KEY,max_running=2", "a limit where the token"),
        ("alice: max_running=2", "a limit where the token"),
        ("alice: [max_running=2]", "a limit where the token"),
        ("max-running=2", "a limit where the token"),
        ("alice: KEY # of the laptop", "a comment .* line of its own"),
        ("alice: KEY max_running=2 # of the laptop", "a comment .* line of its own"),
        ("alice: KEY [max_running=2] # of the laptop", "a comment .* line of its own"),
        ("alice: KEY #", "a comment .* line of its own"),
        ("alice: two words", "white space"),
        ("two words", "white space"),
        ("two\u00a0words", "white space"),
        ("Jo Do: KEY", "white space"),
        ("j\u00f6rg: KEY", "white space in the token or its name"),
        ("alice KEY", "white space"),
        ("alice:", "a name and no token"),
        ("alice: KEY max_running", "white space"),
        ("alice: KEY max_running=2 max_queued", "no limit of a token"),
        ("alice: KEY max_running = 2", "white space"),
        ("alice: KEY max_running=2 max_running=3", "no limit of a token"),
        ("alice: KEY max_runing=2", "no limit of a token"),
        ("alice: KEY max_running=two", "no limit of a token"),
        ("alice: KEY max_running=0", "max_running is 0"),
        ("alice: KEY max_running=1.5", "no limit of a token"),
        ("gr\u00fc\u00dfe", "no header can hold"),
        ("KEY\x07", "no header can hold"),
    ],
)
def test_a_line_that_is_no_token_is_refused_with_its_number(line, told):
    with pytest.raises(RequestError, match=f"line 2: .*{told}.*") as refused:
        parse_tokens(f"# who may ask\n{line}\nbob: other\n")
    assert "KEY" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"), [("", "no token"), ("# none\n", "no token"), ("a: x\na: y", "line 2"), ("x\ny: x", "line 2")]
)
def test_wrong_token_files_are_refused(text, told):
    with pytest.raises(RequestError, match=told):
        parse_tokens(text)


def test_requests_come_back_with_time_for_each_token_on_its_own():
    clock = Clock()
    settings = ServerSettings(requests_per_minute=2)
    limiter = RateLimiter(lambda: settings, clock)
    assert limiter.admit("a")["x-ratelimit-remaining-requests"] == "1"
    last = limiter.admit("a")
    assert (last["x-ratelimit-remaining-requests"], last["x-ratelimit-reset-requests"]) == ("0", "1m0s")
    clock.now += 10.5
    with pytest.raises(ApiError) as refused:
        limiter.admit("a")
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.headers["retry-after"] == "20"
    assert refused.value.headers["x-ratelimit-limit-requests"] == "2"
    limiter.admit("b")
    clock.now += 19.5
    limiter.admit("a")
    settings = ServerSettings(requests_per_minute=10)
    assert limiter.admit("a")["x-ratelimit-limit-requests"] == "10"
    settings = ServerSettings()
    assert limiter.admit("a") == {}


def test_what_is_owed_is_waited_for():
    clock = Clock()
    limiter = RateLimiter(lambda: ServerSettings(tokens_per_minute=600), clock)
    limiter.admit("a")
    limiter.charge("a", 700)
    with pytest.raises(ApiError) as refused:
        limiter.admit("a")
    assert refused.value.headers["retry-after"] == "11"
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "0"
    assert refused.value.headers["x-ratelimit-reset-tokens"] == "1m10s"
    assert limiter.admit("b")["x-ratelimit-remaining-tokens"] == "600"
    clock.now += 11
    assert limiter.admit("a")["x-ratelimit-remaining-tokens"] == "10"
    clock.now += 1000
    assert limiter.admit("a")["x-ratelimit-remaining-tokens"] == "600"


def left_of(limiter: RateLimiter, token: str = "a") -> int:
    return int(limiter.headers(token)["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(
    ("least", "most", "taken"),
    [
        (100, 100, 100),
        (600, 600, 600),
        (10, 5000, 600),
        (10, 300, 300),
        # What is larger than the limit takes a full bucket.
        (5000, 9000, 600),
        (0, 0, 0),
    ],
)
def test_tokens_are_reserved_before_and_what_was_not_used_comes_back(least, most, taken):
    clock = Clock()
    limiter = RateLimiter(lambda: ServerSettings(tokens_per_minute=600), clock)
    for used in (0, 7, taken, taken + 50):
        reservation = Reservation(limiter, "a")
        reservation.reserve(least, most)
        assert left_of(limiter) == 600 - taken
        reservation.settle(used)
        reservation.settle(used)
        assert left_of(limiter) == max(0, 600 - used)
        assert used < 600 or limiter.headers("a")["x-ratelimit-reset-tokens"] == f"1m{used // 10 - 60}s"
        # Once it is settled nothing is taken any more, whoever still checks its prompt.
        reservation.reserve(least, most)
        assert left_of(limiter) == max(0, 600 - used)
        clock.now += 1000


def test_requests_at_one_time_take_no_more_than_is_there():
    limiter = RateLimiter(lambda: ServerSettings(tokens_per_minute=1000), Clock())
    together, taken = threading.Barrier(16), []

    def ask(number: int) -> None:
        reservation = Reservation(limiter, "a")
        together.wait()
        for _ in range(20):
            try:
                reservation.reserve(30, 30)
            except ApiError as refused:
                assert refused.status == 429 and "30 tokens" in refused.message
                assert refused.headers["retry-after"] == "2", "10 are left"
            else:
                taken.append(30)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, range(16)))
    assert sum(taken) == 990 and left_of(limiter) == 10


@pytest.fixture(scope="module")
def limited() -> Iterator[ServedModel]:
    settings = ServerSettings(
        port=0, tokens=TOKENS, requests_per_minute=3, tokens_per_minute=60, allowed_origins=("http://a.example",)
    )
    with serving(settings, sources=scripted_sources("says"), load=loader({"says": b"Hello."})) as running:
        yield running


def client_of(limited: ServedModel, token: str) -> httpx.Client:
    return limited.client(headers={"authorization": f"Bearer {token}"})


def test_a_token_over_its_limit_is_refused_and_another_is_not(limited):
    with client_of(limited, "first") as alice, client_of(limited, "second") as bob:
        answers = [alice.post(PATH, json={**ASK, "stream": streams}) for streams in (True, False)]
        answers.append(alice.post("/v1/embeddings", json={"model": "none", "input": 5}))
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert left == ["2", "1", "0"], "streams, wrong requests and whole replies count alike"
        used = answers[1].json()["usage"]["total_tokens"]
        remaining = [int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in answers]
        assert (remaining[0], answers[0].headers["x-ratelimit-limit-tokens"]) == (0, "60"), "it may take all"
        assert remaining[2] < 60 - used // 2
        refused = alice.post(PATH, json=ASK, headers={"origin": "http://a.example"})
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert "x-ratelimit-reset-requests" in refused.headers["access-control-expose-headers"]
        # What costs nothing, and stopping what runs, is never refused.
        for path in ("/health", "/v1/models", "/metrics"):
            assert alice.get(path).status_code == 200
        assert alice.post("/v1/requests/none/cancel", json={}).status_code == 404
        assert bob.post(PATH, json=ASK).headers["x-ratelimit-remaining-requests"] == "2"


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer fourth"}, {"authorization": "Bearer alice: first"}])
def test_only_the_tokens_of_the_file_are_taken(limited, header):
    with limited.client() as client:
        assert client.get("/v1/models", headers=header).status_code == 401
        assert client.get("/v1/models", headers={"x-api-key": "third"}).status_code == 200


def test_other_machines_are_answered_with_any_named_token():
    with pytest.raises(RequestError, match="--token-file"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", tokens=(AccessToken("a", "b"),)).access_tokens[0].name == "a"
    with pytest.raises(RequestError, match="requests_per_minute"):
        ServerSettings(requests_per_minute=0)


EMBEDDINGS = {
    "/v1/embeddings": {"input": "word " * 300},
    "/embedding": {"content": "word " * 300},
    "/api/embed": {"model": "demo", "input": ["word " * 150] * 2},
    "/api/embeddings": {"model": "demo", "prompt": "word " * 300},
}


def test_what_is_only_read_counts_too():
    """A text longer than the limit is owed for minutes, by every API for vectors, each with a token of its own."""
    tokens = parse_tokens("\n".join(f"one-{number}" for number in range(len(EMBEDDINGS))))
    with serving(ServerSettings(port=0, tokens=tokens, tokens_per_minute=60)) as running:
        for token, (path, body) in zip(tokens, EMBEDDINGS.items(), strict=True):
            with client_of(running, token.value) as client:
                assert client.post(path, json=body).status_code == 200, path
                refused = client.post(path, json=body)
                assert (refused.status_code, int(refused.headers["retry-after"]) > 60) == (429, True), path


def test_a_reply_in_the_background_is_taken_from_who_asked_for_it():
    scripts = {"says": b"x" * 200}
    settings = ServerSettings(port=0, tokens=TOKENS, tokens_per_minute=60)
    with (
        serving(settings, sources=scripted_sources("says"), load=loader(scripts)) as running,
        client_of(running, "first") as alice,
        client_of(running, "second") as bob,
    ):
        asked = {"model": "says", "input": "hi", "background": True, "temperature": 0}
        begun = alice.post("/v1/responses", json=asked)
        assert (begun.status_code, begun.json()["status"] in ("queued", "in_progress")) == (200, True)
        path = f"/v1/responses/{begun.json()['id']}"
        assert wait_until(lambda: alice.get(path).json()["status"] == "completed")
        assert alice.get(path).json()["usage"]["output_tokens"] > 100
        assert wait_until(lambda: alice.post(PATH, json=ASK).status_code == 429)
        assert bob.post(PATH, json=ASK).status_code == 200


@pytest.fixture
def counted() -> Iterator[ServedModel]:
    """A server of 500 tokens a minute, whose model says `a`, waits to be let go on, and says `b`; the clock stands."""
    gate = threading.Event()
    scripts = {"waits": [ord("a"), gate, ord("b")], "says": b"Hello."}
    settings = ServerSettings(port=0, tokens=TOKENS, tokens_per_minute=500)
    with serving(settings, sources=scripted_sources(*scripts), load=loader(scripts)) as running:
        limiter = running.server.service.limiter
        limiter._clock = Clock()
        running.gate, running.left = gate, lambda: left_of(limiter, "alice")
        try:
            yield running
        finally:
            gate.set()


def test_texts_at_one_time_take_no_more_than_is_there_and_give_back_what_they_did_not_use(counted):
    body = {**ASK, "model": "waits", "max_tokens": 63, "stream": True, "stream_options": {"include_usage": True}}
    with client_of(counted, "first") as alice, ExitStack() as stack:
        used = alice.post(PATH, json={**ASK, "max_tokens": 60}).json()["usage"]["total_tokens"]
        assert counted.left() == 500 - used, "it ended early"
        before, streams, refused = counted.left(), [], None
        while refused is None and len(streams) < 40:
            answer = stack.enter_context(alice.stream("POST", PATH, json=body))
            if answer.status_code == 200:
                streams.append(answer)
            else:
                answer.read()
                refused = answer
        each = (before - counted.left()) // len(streams)
        assert len(streams) == before // each and before - counted.left() == each * len(streams) and each > 63
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
        assert f"may take {each} tokens" in error["message"] and int(refused.headers["retry-after"]) > 0
        # One that leaves has used its prompt, and what was sent.
        streams.pop().close()
        assert wait_until(lambda: counted.left() >= before - each * (len(streams) + 1) + 60)
        gone = before - each * len(streams) - counted.left()
        counted.gate.set()
        used = 0
        for answer in streams:
            told = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
            used += told[-1]["usage"]["total_tokens"]
        assert wait_until(lambda: not counted.server.service.replies())
        assert counted.left() == before - used - gone


@pytest.mark.parametrize(
    "more",
    [
        {"model": "none"},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "word " * 2000}]},
        {"max_tokens": 501},
        {"n": 2, "max_tokens": 240},
        {"logit_bias": {"100000": 1}},
    ],
)
def test_what_is_refused_takes_no_tokens(counted, more):
    with client_of(counted, "first") as alice:
        assert alice.post(PATH, json={**ASK, "max_tokens": 5}).status_code == 200
        left = counted.left()
        answer = alice.post(PATH, json={**ASK, **more})
        assert answer.status_code in (400, 404, 429), answer.text
        assert counted.left() == left == int(answer.headers["x-ratelimit-remaining-tokens"])


def test_several_texts_of_a_prompt_are_reserved_before_the_first_token(counted):
    with client_of(counted, "first") as alice:
        one = alice.post(PATH, json={**ASK, "max_tokens": 9}).json()["usage"]
        two = alice.post(PATH, json={**ASK, "max_tokens": 9, "n": 2}).json()["usage"]
        assert counted.left() == 500 - one["total_tokens"] - two["total_tokens"]
        assert two["prompt_tokens"] == one["prompt_tokens"]
