"""Who may ask: hosts, origins, content types and tokens, each refused before anything runs."""

import httpx
import pytest
from local_servers import STORY, serving
from scripted_models import loader, scripted_sources
from starlette.responses import Response
from starlette.testclient import TestClient

from localinfer.apps.server.transport.connection import SecurityMiddleware
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import RequestError

PATH = "/v1/chat/completions"
BODY = {"messages": STORY, "max_tokens": 1}
ALLOWED = "http://localhost:3000"


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "127.0.0.1:8080", "[::1]", "[::1]:8080"])
def test_loopback_hosts_are_answered(http, host):
    assert http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil", "evil.example:8080", "127.0.0.1.evil", "localhost.evil", "localhost:80@evil", "", "[::2]", "10.0.0.1"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_foreign_hosts_are_refused(http, host, method):
    response = http.request(method, PATH, headers={"host": host}, json=BODY)
    assert response.status_code == 403
    assert error_of(response)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "file://", "http://localhost.evil", "http://localhost"]
)
@pytest.mark.parametrize("method", ["POST", "OPTIONS", "GET"])
def test_foreign_origins_are_refused(http, origin, method):
    response = http.request(method, PATH, headers={"origin": origin}, json=BODY)
    assert response.status_code == 403
    assert error_of(response)["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in response.headers


def test_pages_of_other_sites_are_refused_without_an_origin(tcp):
    assert tcp.get("/v1/models", headers={"sec-fetch-site": "cross-site"}).status_code == 403


def test_allowed_origin_gets_what_it_asks_for(tcp):
    preflight = tcp.options(
        PATH,
        headers={
            "origin": ALLOWED,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-stainless-lang",
            "access-control-request-private-network": "true",
        },
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == ALLOWED
    assert preflight.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-lang"
    assert "access-control-allow-private-network" not in preflight.headers
    reply = tcp.post(PATH, json=BODY, headers={"origin": ALLOWED})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ALLOWED
    assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize("is_allowed", [False, True])
def test_private_network_is_granted_to_allowed_pages_only_where_asked_for(is_allowed):
    settings = ServerSettings(port=0, allowed_origins=(ALLOWED,), allows_private_network=is_allowed)
    client = TestClient(SecurityMiddleware(Response("inner"), settings), base_url="http://localhost")
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    granted = client.options(PATH, headers={"origin": ALLOWED, **asked}).headers
    assert granted.get("access-control-allow-private-network") == ("true" if is_allowed else None)
    refused = client.options(PATH, headers={"origin": "http://evil.example", **asked})
    assert refused.status_code == 403
    assert not any(name.startswith("access-control") for name in refused.headers)


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonx"],
)
def test_bodies_that_are_not_json_are_refused(http, kind):
    response = http.post(PATH, content=b'{"messages":[]}', headers={"content-type": kind})
    assert response.status_code == 415
    assert error_of(response)["code"] == "not_json"


def test_json_with_a_charset_is_json(tcp):
    response = tcp.post(PATH, content=b"{}", headers={"content-type": "application/json; charset=utf-8"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages" or "messages" in error_of(response)["message"]


def test_unknown_paths_and_methods_have_the_one_shape(http):
    missing = http.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["type"]) == (404, "not_found_error")
    wrong = http.get(PATH)
    assert (wrong.status_code, error_of(wrong)["type"]) == (405, "not_found_error")
    assert wrong.headers["allow"] == "POST"


def test_token_is_wanted_on_tcp_and_not_on_the_unix_socket(runtime_folder):
    path = runtime_folder / "token.sock"
    settings = ServerSettings(port=0, token="s3cret", socket_path=path)
    with serving(settings, sources=scripted_sources("demo"), load=loader({"demo": b"Hi."})) as running:
        with running.client() as client:
            refused = client.get("/v1/models")
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
            assert client.get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
            assert client.get("/v1/models", headers={"x-api-key": "s3cret"}).status_code == 200
            assert client.get("/health").status_code == 200
        with running.client(unix=True) as client:
            assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_other_addresses_need_a_token(host):
    with pytest.raises(RequestError, match="token"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, token="x").host == host


@pytest.mark.parametrize("origin", ["app://obsidian.md", "chrome-extension://abcdefghijklmnop", "file://", "null"])
def test_pages_of_applications_and_extensions_may_be_allowed(origin):
    settings = ServerSettings(port=0, allowed_origins=(origin,))
    with serving(settings) as running, running.client() as client:
        reply = client.post(PATH, json=BODY, headers={"origin": origin, "sec-fetch-site": "cross-site"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, origin)
        others = {"app://obsidian.md", "null"} - {origin}
        for other in others:
            assert client.post(PATH, json=BODY, headers={"origin": other}).status_code == 403


def test_page_is_open_and_nothing_is_where_it_is_switched_off():
    for serves_page, with_token, without in ((True, 200, 200), (False, 404, 401)):
        settings = ServerSettings(port=0, token="s3cret", serves_page=serves_page)
        with serving(settings) as running, running.client(headers={"accept": "text/html"}) as client:
            assert client.get("/").status_code == without
            assert client.get("/", headers={"authorization": "Bearer s3cret"}).status_code == with_token
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize("origin", ["*", "localhost:3000", "http://localhost:3000/", "app://", "Null", "a b://c"])
def test_origins_that_would_match_nothing_or_all_are_refused(origin):
    with pytest.raises(RequestError, match="origin"):
        ServerSettings(allowed_origins=(origin,))
