"""Priorities, quotas of tokens and the objective for the first token, as clients meet them."""

import json
import threading
from dataclasses import replace

import pytest
from local_servers import STORY, serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.replies.clients import RateLimiter
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import Quota, ServerSettings, parse_tokens
from localinfer.engine.engine import Engine
from localinfer.errors import RequestError
from localinfer.generation.ttft import TtftPrediction, TtftPredictor
from tests.support.limits import wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def asked(monkeypatch):
    """The options of each generation that an engine is asked for."""
    options_of_all = []
    generate = Engine.generate

    def noted(engine, *args, **options):
        options_of_all.append(options)
        return generate(engine, *args, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    return options_of_all


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": STORY, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 3}),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": STORY, "max_tokens": 3}),
        ("/completion", {"prompt": "Once", "n_predict": 3}),
    ],
)
def test_a_priority_reaches_the_engine_and_changes_no_token(served, tcp, asked, path, body):
    body = {**body, "temperature": 0}
    answers = [tcp.post(path, json={**body, **more}) for more in ({}, {"priority": -5}, {"priority": 7})]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [options["priority"] for options in asked] == [0, -5, 7]
    texts = {json.dumps(answer.json().get("choices") or answer.json().get("content")) for answer in answers}
    assert len(texts) == 1
    refused = tcp.post(path, json={**body, "priority": 1 << 31})
    assert (refused.status_code, "priority" in refused.text) == (400, True)


def test_a_line_of_the_token_file_may_have_limits_of_its_own():
    text = "alice: first [max_running=2 max-queued=0, tokens_per_minute=500]\nsecond min_priority=-1\n"
    alice, second = parse_tokens(text)
    assert (alice.value, alice.quota) == ("first", Quota(max_running=2, max_queued=0, tokens_per_minute=500))
    assert (second.value, second.quota) == ("second", Quota(min_priority=-1))
    settings = ServerSettings(tokens=(alice, second), tokens_per_minute=900, running_per_token=7, min_priority=3)
    assert settings.quotas["alice"] == replace(alice.quota, min_priority=3)
    assert settings.quotas["token-2"].max_running == 7
    assert settings.quotas["token-2"].min_priority == -1
    assert settings.quotas[""].tokens_per_minute == 900


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({}, {"": None}),
        ({"token": "one"}, {"": None, "token": None}),
        (
            {"tokens": parse_tokens("alice: a\nb\nbob: c min_priority=-5")},
            {"alice": 0, "token-2": 0, "bob": -5, "": None},
        ),
        ({"tokens": parse_tokens("alice: a"), "token": "one"}, {"alice": 0, "token": 0}),
        ({"tokens": parse_tokens("alice: a"), "min_priority": -3}, {"alice": -3, "": -3}),
        ({"tokens": parse_tokens("alice: a min_priority=0"), "min_priority": 3}, {"alice": 0, "": 3}),
    ],
)
def test_with_named_tokens_none_holds_others_back_unless_it_is_said(settings, least):
    found = ServerSettings(**settings)
    assert {token: found.quotas[token].min_priority for token in least} == least


@pytest.mark.parametrize(
    "wrong", [{"running_per_token": 0}, {"queued_per_token": -1}, {"min_priority": 2**31}, {"ttft_objective": -1.0}]
)
def test_wrong_limits_of_settings_are_refused(wrong):
    with pytest.raises(RequestError):
        ServerSettings(**wrong)


def test_a_token_has_the_limits_by_the_minute_of_its_line():
    settings = ServerSettings(tokens=parse_tokens("alice: first [requests_per_minute=1]\nbob: second\n"))
    limiter = RateLimiter(lambda: settings)
    assert limiter.admit("alice")["x-ratelimit-limit-requests"] == "1"
    assert limiter.admit("bob") == {}
    with pytest.raises(ApiError):
        limiter.admit("alice")


TOKENS = parse_tokens(
    "batch: first [max_running=1 max_queued=1 min_priority=5]\nperson: second\nthird [min_priority=-2]\n"
)
ASK = {"model": "says", "messages": STORY, "temperature": 0}


@pytest.fixture
def gated():
    """A server of three tokens whose model says `a`, waits to be let go on, and says `b`."""
    gate = threading.Event()
    scripts = {"waits": [ord("a"), gate, ord("b")], "says": b"yes"}
    settings = ServerSettings(port=0, tokens=TOKENS)
    with serving(settings, sources=scripted_sources(*scripts), load=loader(scripts)) as running:
        running.gate = gate
        try:
            yield running
        finally:
            gate.set()


def client_of(running, token):
    client = running.client()
    client.headers["authorization"] = f"Bearer {token}"
    return client


def test_a_token_may_not_be_more_urgent_than_its_line_says(gated):
    with client_of(gated, "first") as batch, client_of(gated, "third") as third, client_of(gated, "second") as person:
        refused = batch.post(CHAT, json={**ASK, "priority": 4})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (403, "priority_not_allowed", "priority")
        assert "is 5" in error["message"]
        asked = {"model": "says", "messages": STORY, "stream": False, "options": {"priority": 4}}
        assert batch.post("/api/chat", json=asked).status_code == 403
        assert batch.post(CHAT, json={**ASK, "priority": 5}).status_code == 200
        assert third.post(CHAT, json={**ASK, "priority": -3}).status_code == 403
        assert person.post(CHAT, json={**ASK, "priority": -1}).status_code == 403
        assert person.post(CHAT, json={**ASK, "priority": 0}).status_code == 200


def test_who_asks_for_no_priority_gets_the_most_urgent_that_it_may_have(gated, asked):
    for token in ("first", "second", "third"):
        with client_of(gated, token) as client:
            assert client.post(CHAT, json=ASK).status_code == 200
    assert [options["priority"] for options in asked] == [5, 0, 0]
    assert [options["owner"].max_running for options in asked] == [1, None, None]
    assert len({options["owner"] for options in asked}) == 3


def test_texts_of_a_token_run_and_wait_as_many_as_its_line_allows(gated):
    with client_of(gated, "first") as batch, client_of(gated, "second") as person:
        body = {**ASK, "model": "waits", "stream": True}
        with batch.stream("POST", CHAT, json=body) as first:
            lines = first.iter_lines()
            assert any('"a"' in line for line in lines)
            with batch.stream("POST", CHAT, json=body) as second:
                refused = batch.post(CHAT, json=body)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"]) == (429, "queue_full")
                assert "1 may be generated and 1 wait" in error["message"] and refused.headers["retry-after"]
                with person.stream("POST", CHAT, json=body) as other:
                    gated.gate.set()
                    assert '"b"' in "".join(other.iter_lines())
                assert '"b"' in "".join(lines) and '"b"' in "".join(second.iter_lines())
        assert batch.post(CHAT, json={**ASK, "n": 3}).status_code == 429
        assert batch.post(CHAT, json={**ASK, "n": 2}).status_code == 200


def test_a_tokens_first_text_is_taken_whatever_others_have_asked_for():
    # The only text that the limit allows waits at the gate.
    gate = threading.Event()
    scripts = {"waits": [ord("a"), gate, ord("b")], "says": b"yes"}
    settings = ServerSettings(port=0, tokens=parse_tokens("flood: first\nperson: second"), max_generations=2)
    with (
        serving(settings, sources=scripted_sources(*scripts), load=loader(scripts)) as running,
        client_of(running, "first") as flood,
        client_of(running, "second") as person,
    ):
        try:
            with flood.stream("POST", CHAT, json={**ASK, "model": "waits", "stream": True, "n": 2}) as first:
                assert first.status_code == 200
                assert flood.post(CHAT, json=ASK).json()["error"]["code"] == "queue_full"
                assert person.post(CHAT, json={**ASK, "n": 2}).json()["error"]["code"] == "queue_full"
                assert person.post(CHAT, json=ASK).status_code == 200
        finally:
            gate.set()


def test_an_objective_for_the_first_token_refuses_what_would_come_later(served, tcp, monkeypatch):
    predicted = 9.0

    def predict(predictor, *args):
        predictor.num_predicted += 1
        return TtftPrediction(predicted, 0.1)

    monkeypatch.setattr(TtftPredictor, "predict", predict)
    body = {"messages": STORY, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    with tcp.stream("POST", CHAT, json={**body, "stream": True}) as running, served.client() as other:
        lines = running.iter_lines()
        assert next(lines)
        refused = other.post(CHAT, json=body, headers={"x-slo-ttft-ms": "1500"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["predicted_ttft_seconds"]) == (429, "ttft_objective", 9.0)
        assert "predicted in 9 seconds, and wanted within 1.5" in error["message"]
        assert refused.headers["retry-after"] == "8"
        anthropic = other.post(
            "/v1/messages", json={"messages": STORY, "max_tokens": 5}, headers={"x-slo-ttft-ms": "1500"}
        )
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
        accepted = other.post(CHAT, json={**body, "max_tokens": 2, "n": 2}, headers={"x-slo-ttft-ms": "9000"})
        assert accepted.status_code == 200
        assert sum(1 for _ in lines) > 100, "who runs is never refused"
    for wrong in ("soon", "0", "-1", "1.5"):
        assert tcp.post(CHAT, json={**body, "max_tokens": 2}, headers={"x-slo-ttft-ms": wrong}).status_code == 400
    text = tcp.get("/metrics").text
    assert 'localinfer_ttft_refusals_total{model="demo"} 2.0' in text
    assert 'localinfer_ttft_prediction_ratio{model="demo",quantile="0.9"}' in text
    assert 'localinfer_ttft_prediction_error_seconds{model="demo",quantile="0.5"}' in text


def test_the_objective_of_the_server_holds_for_who_says_nothing_and_not_in_the_background(asked):
    settings = ServerSettings(port=0, ttft_objective=2.5)
    scripts = {"says": b"yes"}
    with (
        serving(settings, sources=scripted_sources("says"), load=loader(scripts)) as running,
        running.client() as client,
    ):
        assert client.post(CHAT, json={**ASK, "n": 2}).status_code == 200
        assert client.post(CHAT, json=ASK, headers={"x-slo-ttft-ms": "250"}).status_code == 200
        assert client.post("/v1/responses", json={"model": "says", "input": "a", "background": True}).status_code == 200
        assert wait_until(lambda: len(asked) == 4)
        for path, more in (("/completion", {"n_cmpl": 2}), ("/v1/completions", {"n": 2})):
            assert client.post(path, json={"model": "says", "prompt": "a|", **more}).status_code == 200
    assert [options["ttft_objective"] for options in asked] == [2.5, None, 0.25, None, 2.5, None, 2.5, None]
