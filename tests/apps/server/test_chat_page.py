"""The chat page as it is served: its policy, its caching, and who else may ask since it may."""

import base64
import hashlib
import re
from collections.abc import Iterator

import httpx
import pytest
from local_servers import ServedModel, serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.transport.settings import ServerSettings

MODELS = "/v1/models"
VISIT = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.fixture
def tcp(served: ServedModel) -> Iterator[httpx.Client]:
    """A client that asks for HTML, as browsers do."""
    with served.client(headers={"accept": "text/html,*/*;q=0.8"}) as client:
        yield client


def policy_of(response: httpx.Response) -> dict[str, str]:
    directives = response.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (directive.partition(" ") for directive in directives)}


def test_page_is_one_file_that_may_ask_nobody_but_this_server(tcp: httpx.Client) -> None:
    response = tcp.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "same-origin"
    policy = policy_of(response)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    # Nothing is named that a browser would fetch, but by the links of model texts, which are made by the script.
    assert not re.search(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?!data:)', response.text)
    assert "innerHTML" not in response.text and "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")


def test_policy_has_the_hashes_of_what_is_served_and_no_more(tcp: httpx.Client) -> None:
    response = tcp.get("/")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert contents and len(contents) == response.text.count(f"<{tag}")
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert policy_of(response)[directive].split() == [f"'sha256-{digest}'" for digest in digests]
    assert " style=" not in response.text and not re.search(r"<[^>]* on\w+=", response.text.partition("<script>")[0])


def test_page_is_sent_again_only_if_it_changed(tcp: httpx.Client) -> None:
    response = tcp.get("/")
    assert response.headers["cache-control"] == "no-cache"
    again = tcp.get("/", headers={"if-none-match": f'"other", W/{response.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == response.headers["content-security-policy"]
    assert tcp.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_head_has_the_headers_alone(tcp: httpx.Client) -> None:
    page, head = tcp.get("/"), tcp.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(page.content))
    assert head.headers["etag"] == page.headers["etag"]


def test_own_page_may_ask_under_each_name_of_this_machine(served: ServedModel, tcp: httpx.Client) -> None:
    for host in (f"127.0.0.1:{served.port}", f"localhost:{served.port}", "localhost:9999", "[::1]:8080", "localhost"):
        asked = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        response = tcp.get(MODELS, headers=asked)
        assert response.status_code == 200, host
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "origin", "site"),
    [
        # A name that a page has rebound to this machine.
        ("evil.example:8080", "http://evil.example:8080", "same-origin"),
        ("localhost.evil:8080", "http://localhost.evil:8080", "same-origin"),
        # Other programs of this machine, and another name of it.
        ("localhost:8080", "http://localhost:3001", "same-site"),
        ("localhost:8080", "http://127.0.0.1:8080", "cross-site"),
        ("localhost:8080", "https://localhost:8080", "same-site"),
        ("localhost:8080", "http://localhost:8080.evil", "cross-site"),
        ("localhost:8080", "null", "cross-site"),
        # What no browser says.
        ("localhost:8080", "http://localhost:8080", "cross-site"),
    ],
)
def test_pages_of_others_are_still_refused(tcp: httpx.Client, host: str, origin: str, site: str) -> None:
    for method, path in (("GET", MODELS), ("GET", "/"), ("POST", "/v1/chat/completions")):
        headers = {"host": host, "origin": origin, "sec-fetch-site": site}
        assert tcp.request(method, path, headers=headers, json={}).status_code == 403


def test_no_page_asks_through_the_unix_socket(served: ServedModel) -> None:
    if served.socket_path is None:
        pytest.skip("this system has no Unix sockets for Python")
    with served.client(unix=True) as client:
        assert client.get(MODELS, headers={"origin": "http://localhost"}).status_code == 403


def test_links_of_other_pages_lead_to_the_page_and_nowhere_else(tcp: httpx.Client) -> None:
    response = tcp.get("/", headers=VISIT)
    assert response.status_code == 200
    assert response.headers["cross-origin-opener-policy"] == "same-origin"
    assert tcp.get(MODELS, headers=VISIT).status_code == 403
    assert tcp.get("/", headers=VISIT | {"sec-fetch-dest": "iframe"}).status_code == 403
    assert tcp.get("/", headers=VISIT | {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}).status_code == 403
    assert tcp.post("/", headers=VISIT, json={}).status_code == 403


def test_page_asks_for_the_token_itself() -> None:
    settings = ServerSettings(port=0, token="s3cret")
    with (
        serving(settings, sources=scripted_sources("demo"), load=loader({"demo": b"Hi."})) as running,
        running.client(headers={"origin": running.url}) as client,
    ):
        assert client.get("/").status_code == 200
        assert client.get(MODELS).status_code == 401
        assert client.get("/v1").status_code == 401
        assert client.get(MODELS, headers={"authorization": "Bearer s3cret"}).status_code == 200
