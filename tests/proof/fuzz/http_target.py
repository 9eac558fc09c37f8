"""Requests to a server: heads, framing, bodies of every route, and clients that leave; all on real sockets.

An input is a JSON object: `connections`, which are open at the same time, each with `requests` that are sent one after
the other, `cuts` (how many bytes each packet has) and `leaves` (after how many bytes of answers the client closes, null
for never). A request has a `line`, `headers`, a `body` (text of Latin-1 characters, or any other value as JSON),
`framing` ("length", "chunked", "none", or a length that may be wrong). MARK in it becomes a text that no other request
has, which the model says again; ID the last name that the server gave to something of this connection.
"""

import json
import threading
import time
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil

from localinfer.apps.server.routes import BODIES, describe
from tests.proof.fuzz.echo_service import MARK_SIZE, SAYS, EchoService, compile_kernels, echo_service
from tests.proof.fuzz.json_mutation import HALVES, VALUES, any_text, change, changed_text, read, simpler, written
from tests.proof.fuzz.target import Limits, Target
from tests.proof.fuzz.wire_client import Answer, Conversation

MARK, ID = "@MARK@", "@ID@"
_SMALL = {"max_tokens": 8, "max_output_tokens": 16, "max_completion_tokens": 8, "n_predict": 8, "num_predict": 8}
_METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "PO ST")
_PATHS = (
    *(
        "/",
        "/health",
        "/v1/health",
        "/version",
        "/v1/models",
        "/models/echo",
        "/metrics",
        "/slots",
        "/props",
        "/api/tags",
    ),
    *("/openapi.json", "/tokenizer_info", "/requests", "/lora-adapters", "/api/ps", "/v1/models/../../etc/passwd"),
    *(f"/v1/responses/{ID}", f"/v1/responses/{ID}/input_items?limit=2&order=asc", f"/v1/conversations/{ID}"),
    *(f"/v1/conversations/{ID}/items", f"/v1/conversations/{ID}/items/{ID}", f"/v1/responses/{ID}?stream=true"),
    *(f"/v1/requests/{ID}/cancel", f"/v1/responses/{ID}/cancel", f"/v1/requests/{ID}", "//", "/%00", "/%ff", "/v1/"),
    *("/slots/0?action=erase", "/slots/0?action=save", "/slots/999?action=restore", "/slots/-1", "/models/load"),
    *("/models/unload", "*", "http://localhost/health", "/v1/v1/chat/completions", "/api/blobs/sha256:0", "/?a=%zz"),
)
_BODILESS = ("/models/load", "/models/unload", "/props", "/slots/1?action=erase", "/api/delete", "/reranking")
_HEADERS = (
    *(
        ("Connection", "close"),
        ("Connection", "keep-alive, close"),
        ("Expect", "100-continue"),
        ("Host", "evil.example"),
    ),
    *(("Origin", "http://localhost:3000"), ("Origin", "null"), ("Sec-Fetch-Site", "cross-site"), ("Cookie", "a=b")),
    *(("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=utf-16"), ("Upgrade", "websocket")),
    *(
        ("Authorization", "Bearer é"),
        ("X-Api-Key", "x" * 9000),
        ("Accept-Encoding", "gzip"),
        ("Transfer-Encoding", "x"),
    ),
    *(
        ("X-Stainless-Raw-Response", "1"),
        ("anthropic-version", "2023-06-01"),
        ("Range", "bytes=0-1"),
        ("TE", "trailers"),
    ),
    *(("Content-Length", "0"), ("Content-Length", "+5"), ("Content-Encoding", "gzip"), ("traceparent", "00-zz")),
)
_ALLOWED_CODES = frozenset(
    "model_loading queue_full insufficient_memory model_unloaded too_many_connections not_supported overloaded".split()
)
_ANSWER_SECONDS = 40.0
_MOST_GROWTH = 400 << 20
_MOST_THREADS = 120
_numbers = count(1)


def corpus() -> list[bytes]:
    """A sound request of every route, streamed ones too, and some that keep connections busy."""
    made = [_input(_post(path, body)) for path, body in sorted(_bodies().items())]
    streamed = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/completion", "/api/chat")
    made += [_input(_post(path, {**_bodies()[path], "stream": True})) for path in streamed]
    made += [_input(_get(path)) for path in _PATHS]
    made += [_input(_post(path, {"model": "echo", "documents": ["a"], "query": "b"})) for path in _BODILESS]
    made.append(_input(_post("/v1/responses", _bodies()["/v1/responses"]), _get(f"/v1/responses/{ID}")))
    made.append(_input(_get("/health"), _post("/v1/chat/completions", {}), _get("/version")))
    chunked = {**_post("/v1/chat/completions", _bodies()["/v1/chat/completions"]), "framing": "chunked"}
    made.append(_input(chunked, _get("/health")))
    return made


def _input(*requests: dict[str, Any]) -> bytes:
    return written({"connections": [{"requests": list(requests), "cuts": [], "leaves": None}]})


def _get(path: str) -> dict[str, Any]:
    return {"line": f"GET {path} HTTP/1.1", "headers": [["Host", "localhost"]], "body": "", "framing": "none"}


def _post(path: str, body: Any) -> dict[str, Any]:
    headers = [["Host", "localhost"], ["Content-Type", "application/json"]]
    return {"line": f"POST {path} HTTP/1.1", "headers": headers, "body": body, "framing": "length"}


@cache
def _bodies() -> dict[str, Any]:
    """By route, a body that is answered."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Say {MARK}"}]
    tool = {
        "name": "get",
        "description": "x",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    chat = {"model": "echo", "messages": messages}
    tools = [{"type": "function", "function": tool}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}}}
    text = {"model": "echo", "prompt": f"Say {MARK}|"}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"Say {MARK}"}]}
    return {
        "/v1/chat/completions": {**chat, "max_tokens": 40, "tools": tools, "logprobs": True, "n": 2, "stop": ["x"]},
        "/chat/completions": {**chat, "max_tokens": 12, "response_format": form, "temperature": 0.5, "seed": 3},
        "/v1/chat/completions/input_tokens": chat,
        "/v1/completions": {**text, "max_tokens": 40, "logprobs": 2, "echo": True, "suffix": None},
        "/v1/embeddings": {"model": "demo", "input": [f"{MARK}", "b"]},
        "/v1/rerank": {"model": "demo", "query": MARK, "documents": ["a", {"text": "b"}], "top_n": 1},
        "/v1/responses": {
            "model": "echo",
            "input": [item],
            "max_output_tokens": 40,
            "store": True,
            "instructions": "x",
        },
        "/v1/responses/input_tokens": {"model": "echo", "input": MARK},
        "/v1/conversations": {"items": [item], "metadata": {"a": "b"}},
        "/v1/messages": {"model": "echo", "max_tokens": 40, "messages": messages[1:], "system": "Be brief."},
        "/v1/messages/count_tokens": {"model": "echo", "messages": messages[1:]},
        "/tokenize": {"content": MARK, "with_pieces": True},
        "/detokenize": {"tokens": [97, 98, 256]},
        "/apply-template": chat,
        "/completion": {"prompt": f"Say {MARK}|", "n_predict": 40, "n_probs": 1, "id_slot": 0},
        "/infill": {"input_prefix": MARK, "input_suffix": "b", "n_predict": 4},
        "/embedding": {"model": "demo", "content": MARK},
        "/api/chat": {**chat, "stream": False, "options": {"num_predict": 40}, "keep_alive": -1},
        "/api/generate": {**text, "stream": False, "raw": True, "options": {"num_predict": 40, "stop": ["x"]}},
        "/api/embed": {"model": "demo", "input": [MARK]},
        "/api/embeddings": {"model": "demo", "prompt": MARK},
        "/api/show": {"model": "echo", "verbose": True},
        "/api/pull": {"model": "org/repo", "stream": False},
        "/api/copy": {"source": "a", "destination": "b"},
        "/api/create": {"model": "a", "from": "b"},
        "/api/push": {"model": "a"},
    }


@cache
def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = describe()["components"]["schemas"]
    return found


def mutate(random: Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Change bodies by their routes' own members, heads, framing, the cuts of packets, and when clients leave."""
    document = read(data)
    connections = document.get("connections") if isinstance(document, dict) else None
    if not isinstance(connections, list) or not connections or len(written(document)) > 200_000:
        return random.choice(corpus)
    if random.random() < 0.3 and len(connections) < 4:
        connections.append(read(random.choice(corpus))["connections"][0])
    connection = random.choice(connections)
    if random.random() < 0.1:
        connection["cuts"] = [random.choice((1, 2, 7, 50, 1000)) for _ in range(random.choice((1, 3, 30)))]
    if random.random() < 0.15:
        connection["leaves"] = random.choice((None, 0, 1, 50, 300, 2000))
    requests = connection.get("requests")
    if not isinstance(requests, list) or not requests:
        return written(document)
    if random.random() < 0.2 and len(requests) < 5:
        requests.append(random.choice(read(random.choice(corpus))["connections"][0]["requests"]))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        request = random.choice(requests)
        if isinstance(request, dict):
            _change_request(random, request)
    return written(document)


def _change_request(random: Random, request: dict[str, Any]) -> None:
    kind = random.random()
    body = request.get("body")
    if kind < 0.65 and isinstance(body, dict):
        _change_body(random, str(request.get("line")), body)
    elif kind < 0.75:
        line = f"{random.choice(_METHODS)} {random.choice((*_PATHS, *BODIES))} HTTP/1.1"
        request["line"] = line if random.random() < 0.7 else changed_text(random, str(request.get("line")), _PATHS)
    elif kind < 0.87:
        headers = request.setdefault("headers", [])
        if isinstance(headers, list):
            made = list(random.choice(_HEADERS))
            made = [
                changed_text(random, text, ("\r\n", "\n", "\x00", ":")) if random.random() < 0.1 else text
                for text in made
            ]
            headers.insert(random.randrange(len(headers) + 1), made)
            if random.random() < 0.15:
                del headers[random.randrange(len(headers))]
    elif kind < 0.93:
        request["framing"] = random.choice(("length", "chunked", "chunked", "none", 0, 5, -1, 10**12, "1 2"))
    else:
        text = body if isinstance(body, str) else json.dumps(body)
        request["body"] = changed_text(
            random, text, ("{", "[" * 70, '"', "\\ud800", "NaN", "1e999", "null", "\xff", "9" * 400)
        )


def _change_body(random: Random, line: str, body: dict[str, Any]) -> None:
    path = line.split(" ")[1] if line.count(" ") > 1 else ""
    record = BODIES.get(path) or BODIES.get(f"/v1{path}")
    schema = _schemas().get(record.__name__, {}) if record is not None else {}
    names = sorted(schema.get("properties", {}))
    if names and random.random() < 0.6:
        name = random.choice(names)
        body[name] = _value(random, schema["properties"][name], 0)
    else:
        texts = (
            MARK,
            "<end>",
            "<|im_end|>",
            "<begin>",
            *HALVES,
            ID,
            "echo",
            "demo",
            "user",
            "assistant",
            "tool",
            "text",
        )
        change(random, body, [*_bodies().values()], values=VALUES, pieces=(*texts, *names))
    for name, most in _SMALL.items():
        if isinstance(body.get(name), int) and random.random() < 0.8:
            body[name] = min(body[name], most * 5)


def _value(random: Random, schema: dict[str, Any], depth: int) -> Any:
    """Mostly what a schema asks for."""
    while "$ref" in schema:
        schema = _schemas()[schema["$ref"].rpartition("/")[2]]
    if random.random() < 0.1 or depth > 6:
        return random.choice(VALUES)
    if "anyOf" in schema:
        return _value(random, random.choice(schema["anyOf"]), depth + 1)
    if "enum" in schema:
        return random.choice(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            names = [
                name for name in schema["properties"] if name in schema.get("required", ()) or random.random() < 0.2
            ]
            return {name: _value(random, schema["properties"][name], depth + 1) for name in names}
        case "object":
            return {any_text(random): random.choice(VALUES) for _ in range(random.randrange(3))}
        case "array":
            return [_value(random, schema.get("items", {}), depth + 1) for _ in range(random.randrange(3))]
        case "string":
            return random.choice((MARK, "", "a", "auto", "echo", ID, any_text(random)))
        case "integer":
            return random.choice((schema.get("minimum", -3), schema.get("maximum", 9), 0, 1, 2, 8, -1, 64, 10**6))
        case "number":
            return random.choice((schema.get("minimum", -3), schema.get("maximum", 9), 0, 0.5, 1, 1e9, -0.0))
        case "boolean":
            return random.random() < 0.5
    return random.choice(VALUES)


def run(data: bytes, folder: Path) -> str:
    """Send the requests, read the answers, and see that the server is as before. Raises what is a finding."""
    document = read(data)
    connections = document.get("connections") if isinstance(document, dict) else None
    if not isinstance(connections, list):
        return "no input"
    service = echo_service()
    service.faults.found.clear()
    clients = [Client(service.port, connection) for connection in connections[:4] if isinstance(connection, dict)]
    threads = [threading.Thread(target=client.talk) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not service.faults.found, "\n".join(service.faults.found)
    statuses = [status for client in clients for status in client.check()]
    deadline = time.monotonic() + _ANSWER_SECONDS
    while service.replies():
        assert time.monotonic() < deadline, f"{len(service.replies())} replies go on though their clients have left"
        time.sleep(0.001)
    _check_service(service)
    # Those that are refused alone are what the framework counts as refused.
    found = sorted(set(statuses))
    return f"{'refused' if found and min(found) >= 400 else 'answered'}: {' '.join(map(str, found))}"


def _check_service(service: EchoService) -> None:
    body = {**_post("/v1/chat/completions", {"model": "echo", "messages": [{"role": "user", "content": MARK}]})}
    client = Client(service.port, {"requests": [body]})
    client.talk()
    (answer,) = client.conversation.answers
    text = json.loads(answer.body)["choices"][0]["message"]["content"] if answer.status == 200 else answer.body
    assert text == client.marks[0] * SAYS, f"a good request is answered {answer.status} {text!r:.500}"
    assert not service.faults.found, "\n".join(service.faults.found)
    service.num_cases += 1
    if service.num_cases % 100 == 0:
        process = psutil.Process()
        memory = process.memory_info().rss
        service.least_memory = min(service.least_memory, memory) or memory
        assert memory < service.least_memory + _MOST_GROWTH, f"{memory >> 20} MiB after {service.num_cases} cases"
        assert threading.active_count() < _MOST_THREADS, f"{threading.active_count()} threads"


class Client:
    """One connection, and what its answers have to be. marks: by request."""

    def __init__(self, port: int, connection: dict[str, Any]) -> None:
        requests = connection.get("requests")
        self._requests = [one for one in requests if isinstance(one, dict)][:6] if isinstance(requests, list) else []
        self.marks = [f"zq[{next(_numbers):08x}]" for _ in self._requests]
        cuts = connection.get("cuts")
        sizes = [size for size in cuts if type(size) is int and size > 0][:50] if isinstance(cuts, list) else []
        leaves = connection.get("leaves")
        self.conversation = Conversation(port, sizes, leaves if type(leaves) is int else None)

    def talk(self) -> None:
        """Send every request; each waits for the answer before it where it needs a name out of it."""
        with self.conversation as conversation:
            for request, mark in zip(self._requests, self.marks, strict=True):
                needs_name = ID in json.dumps(request)
                if needs_name:
                    conversation.read_answers(1)
                name = _last_name(conversation.answers) if needs_name else ""
                conversation.send(_bytes_of(request, mark, name))
            conversation.finish(_ANSWER_SECONDS)

    def check(self) -> list[int]:
        """The statuses of all answers. Raises: AssertionError for one that must not be."""
        conversation = self.conversation
        assert conversation.fault is None, f"{conversation.fault}: {conversation.received[-500:]!r}"
        whole = bytes(conversation.received)
        start = whole.find(b"zq[")
        while start >= 0:
            mark = whole[start : start + MARK_SIZE].decode("latin-1")
            is_whole = len(mark) == MARK_SIZE and mark.endswith("]") and mark != "zq[00000000]"
            assert not is_whole or mark in self.marks, f"{mark} is another request's: {whole[:1000]!r}"
            start = whole.find(b"zq[", start + 1)
        for answer in conversation.answers:
            _check_answer(answer)
        return [answer.status for answer in conversation.answers]


def _bytes_of(request: dict[str, Any], mark: str, name: str) -> bytes:
    body, framing = request.get("body"), request.get("framing")
    raw = body.encode("latin-1", "replace") if isinstance(body, str) else written(body)
    # In a name that is escaped, it stays one text.
    raw = raw.replace(MARK.encode(), mark.encode()).replace(ID.encode(), name.encode())
    line = str(request.get("line")).replace(ID, name).replace(MARK, mark)
    pairs = request.get("headers")
    headers = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2] if isinstance(pairs, list) else []
    head = [line, *(f"{key}: {value}" for key, value in headers)]
    if framing == "chunked":
        head.append("Transfer-Encoding: chunked")
        pieces = [raw[start : start + 100] for start in range(0, len(raw), 100)]
        raw = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    elif framing == "none":
        raw = b""
    else:
        head.append(f"Content-Length: {len(raw) if framing == 'length' else framing}")
    return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + raw


def _last_name(answers: list[Answer]) -> str:
    for answer in reversed(answers):
        value = read(answer.body)
        if isinstance(value, dict) and isinstance(value.get("id"), str):
            return str(value["id"])
    return "none"


def _check_answer(answer: Answer) -> None:
    shown = f"{answer.status}: {answer.body[:1500]!r}"
    assert 200 <= answer.status < 600, shown
    assert b"Traceback" not in answer.body and b"site-packages" not in answer.body, shown
    if answer.status < 400 or answer.is_cut or not answer.body:
        return
    error = msgspec.json.decode(answer.body)["error"]
    if isinstance(error, str):
        assert error and (answer.status != 500 or "HF_HUB_OFFLINE" in error), shown
        return
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str), shown
    assert error["param"] is None or isinstance(error["param"], str), shown
    assert error["code"] is None or isinstance(error["code"], str), shown
    assert answer.status < 500 or error["code"] in _ALLOWED_CODES, shown
    # What is wrong with a request is told by the member's name; what the model lacks is no member's fault.
    names_fault = error["param"] or error["code"] or "this model" in error["message"]
    assert answer.status != 400 or names_fault or error["type"] != "invalid_request_error", shown


def _prepare() -> None:
    _bodies(), _schemas()
    _check_service(echo_service())
    # No case waits for its kernels to be compiled.
    compile_kernels()


TARGET = Target("http", corpus, mutate, run, Limits(memory_constant=256 << 20), _prepare, simpler)
