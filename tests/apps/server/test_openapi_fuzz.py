"""Bodies made from our own description of the routes, right, nearly right and wrong: never a fault of the server."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from localinfer.apps.server.routes import BODIES, describe

DESCRIPTION = describe()
SCHEMAS = DESCRIPTION["components"]["schemas"]
SMALL = {"max_tokens": 2, "max_output_tokens": 2, "max_completion_tokens": 2, "n": 1, "best_of": 1, "keep_alive": -1}
SMALL |= {"n_predict": 2, "n_cmpl": 1}
SMALL_OPTIONS = {"num_predict": 2}
"""Of Ollama's requests, among their options."""
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly what a schema asks for."""
    schema = resolve(schema)
    if "anyOf" in schema:
        return st.one_of([st.deferred(lambda one=one: values(one)) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            members = {name: values(one) for name, one in schema["properties"].items()}
            wanted = {name: members.pop(name) for name in schema.get("required", ())}
            small = {name: value for name, value in SMALL_OPTIONS.items() if name in members}
            return st.fixed_dictionaries(wanted, optional=members).map(lambda drawn: drawn | small)
        case "array" if "prefixItems" in schema:
            return st.tuples(*map(values, schema["prefixItems"])).map(list)
        case "array" if "items" in schema:
            return st.lists(st.deferred(lambda: values(schema["items"])), max_size=2)
        case "string":
            return st.text(max_size=6)
        case "integer":
            return st.integers(schema.get("minimum", -3), min(schema.get("maximum", 9), 4100))
        case "number":
            return st.floats(schema.get("minimum", -3), schema.get("maximum", 9))
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return ANYTHING


@st.composite
def bodies(draw: st.DrawFn, members: dict[str, st.SearchStrategy[Any]], required: list[str]) -> dict[str, Any]:
    """A body that is right, with some members left out and some made wrong."""
    names = draw(st.lists(st.sampled_from(sorted(members)), max_size=4, unique=True))
    body = {name: draw(members[name]) for name in dict.fromkeys([*required, *names])}
    for name in draw(st.lists(st.sampled_from(sorted(members)), max_size=1)):
        body[name] = draw(ANYTHING)
    # Long replies would only take time.
    body |= {name: value for name, value in SMALL.items() if name in members}
    if "options" in members and body.get("options") is None:
        body["options"] = SMALL_OPTIONS
    return body


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_body_makes_the_server_fail(tcp, path):
    schema = resolve(SCHEMAS[BODIES[path].__name__])
    members = {name: values(one) for name, one in schema["properties"].items()}

    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(bodies(members, schema.get("required", [])))
    def send(body: dict[str, Any]) -> None:
        response = tcp.post(path, json=body)
        assert response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            if path == "/v1/systemone":
                (detail,) = response.json()["detail"]
                assert response.status_code == 422 and detail["loc"][0] == "body" and isinstance(detail["msg"], str)
                return
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert isinstance(error, str)
                return
            assert isinstance(error["message"], str)
            assert isinstance(error["type"], str)
            assert error["param"] is None or isinstance(error["param"], str)
            assert error["code"] is None or isinstance(error["code"], str)

    send()


def test_description_names_every_route_that_there_is(http, served):
    found = http.get("/openapi.json").json()
    assert found == DESCRIPTION
    for path, methods in found["paths"].items():
        response = http.request(next(iter(methods)).upper(), path, json={})
        assert response.status_code in (200, 422 if path == "/v1/systemone" else 400), path
