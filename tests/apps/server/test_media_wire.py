"""Pictures by every API of the server, and what it says of a model that reads them."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_imports import import_or_skip

import localinfer
from localinfer.apps.server.router.model_folder import model_source
from localinfer.apps.server.transport.settings import ServerSettings
from tests.apps.server.local_servers import serving
from tests.support.seeing_model import PICTURE_ROWS, picture_file, seeing_demo, sound_file

pytestmark = pytest.mark.system
pytest.importorskip("PIL", reason="Pillow is an optional package")
DATA = base64.b64encode(picture_file()).decode()
URL = f"data:image/png;base64,{DATA}"
SOUND = base64.b64encode(sound_file()).decode()
TEXT = "What is it?"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server whose model sees."""
    source = model_source(seeing_demo(tmp_path_factory.mktemp("seeing")))
    assert source is not None
    llm = localinfer.load(source.path, threads=1, disk_cache=False)
    with (
        llm,
        serving(ServerSettings(port=0), sources=[source], load=lambda _: llm) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        yield client


def openai(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": TEXT}]}]}


def anthropic(block: Any) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": [{"role": "user", "content": [block, {"type": "text", "text": TEXT}]}]}


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "image_url": ("/v1/chat/completions", openai({"type": "image_url", "image_url": {"url": URL, "detail": "low"}})),
    "image_url as text": ("/v1/chat/completions", openai({"type": "image_url", "image_url": URL})),
    "input_image": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": TEXT}],
                }
            ]
        },
    ),
    "a block": ("/v1/messages", anthropic(BLOCK)),
    "images of a chat": ("/api/chat", {"messages": [{"role": "user", "content": TEXT, "images": [DATA]}]}),
    "images of a prompt": ("/api/generate", {"prompt": TEXT, "images": [DATA]}),
}


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage", answer)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    cached = usage.get("cache_read_input_tokens") or 0
    return next(usage[name] for name in names if name in usage) + cached


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    limits: dict[str, Any] = {"/v1/chat/completions": {"max_tokens": 4}, "/v1/responses": {"max_output_tokens": 4}}
    ollama = {"stream": False, "options": {"num_predict": 4}}
    more = limits.get(path, ollama if path.startswith("/api") else {})
    return client.post(path, json={"model": "demo-f16", **body, **more})


@pytest.mark.parametrize("way", WAYS)
def test_a_picture_comes_by_every_api(seeing: httpx.Client, way: str) -> None:
    path, body = WAYS[way]
    answer = post(seeing, path, body)
    assert answer.status_code == 200, answer.text
    expected = post(seeing, *WAYS["image_url"]).json()
    assert prompt_tokens(answer.json()) == prompt_tokens(expected)
    text = {"messages": [{"role": "user", "content": TEXT}]}
    assert prompt_tokens(expected) == prompt_tokens(post(seeing, "/v1/chat/completions", text).json()) + PICTURE_ROWS


def test_results_of_tools_may_be_pictures(seeing: httpx.Client) -> None:
    tool = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
    asked: list[Any] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
    ]

    def tokens(content: Any) -> int:
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}
        body = {"max_tokens": 4, "tools": [tool], "messages": [*asked, result]}
        answer = post(seeing, "/v1/messages", body)
        assert answer.status_code == 200, answer.text
        return prompt_tokens(answer.json())

    assert tokens([BLOCK, {"type": "text", "text": "so"}]) == tokens("so") + PICTURE_ROWS


@pytest.mark.parametrize(
    ("way", "part", "words"),
    [
        ("image_url", {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "--allow-media-urls"),
        ("image_url", {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "fetches nothing"),
        ("image_url", {"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "no base64"),
        ("image_url", {"type": "image_url"}, "is missing"),
        ("image_url", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "unknown format"),
        ("image_url", {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}, "is a sound"),
        ("image_url", {"type": "image", "path": "/etc/passwd"}, "is missing"),
        ("image_url", {"type": "video_url", "video_url": {"url": URL}}, "of type 'video_url'"),
        (
            "a block",
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}},
            "no base64",
        ),
    ],
)
def test_what_is_no_picture_is_refused_with_its_part(seeing: httpx.Client, way: str, part: Any, words: str) -> None:
    path = WAYS[way][0]
    answer = post(seeing, path, (openai if way == "image_url" else anthropic)(part))
    assert answer.status_code == 400 and words in answer.text and "messages[0]" in answer.text


def test_what_a_model_reads_is_told(seeing: httpx.Client) -> None:
    (model,) = seeing.get("/v1/models").json()["data"]
    assert "vision" in model["capabilities"] and "audio" not in model["capabilities"]
    assert seeing.get("/props").json()["modalities"] == {"vision": True, "video": False, "audio": False}
    assert "vision" in seeing.post("/api/show", json={"model": "demo-f16"}).json()["capabilities"]


def test_tokens_of_pictures_are_counted_before(seeing: httpx.Client) -> None:
    path, body = WAYS["a block"]
    counted = seeing.post(f"{path}/count_tokens", json={"model": "demo-f16", "messages": body["messages"]}).json()
    assert counted["input_tokens"] == prompt_tokens(post(seeing, path, body).json())


def completed(client: httpx.Client, prompt: Any) -> httpx.Response:
    return client.post("/completion", json={"prompt": prompt, "n_predict": 4, "temperature": 0})


def test_markers_of_a_prompt_take_the_files_beside_it_in_order(seeing: httpx.Client) -> None:
    other = base64.b64encode(picture_file(1)).decode()
    text = completed(seeing, "See  and ").json()["tokens_evaluated"]
    prompts = [
        {"prompt_string": "See <__media__> and <__media__>", "multimodal_data": files}
        for files in ([DATA, other], [other, DATA])
    ]
    both = completed(seeing, prompts)
    assert both.status_code == 200, both.text
    for one in both.json():
        assert text <= one["tokens_evaluated"] - 2 * PICTURE_ROWS <= text + 2
        assert one["prompt"].replace(" ", "").endswith("Seeand")
    again = completed(seeing, prompts[0]).json()
    assert again["content"] == both.json()[0]["content"] and again["timings"]["prompt_n"] == 1
    assert completed(seeing, {"prompt_string": "<__media__>", "multimodal_data": [DATA]}).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt_string": "a <__media__>", "multimodal_data": [DATA, DATA]}, "1 times, and multimodal_data 2 files"),
        ({"prompt_string": "a", "multimodal_data": [DATA]}, "0 times, and multimodal_data 1 files"),
        ({"prompt_string": "<__media__>", "multimodal_data": DATA}, "in a list"),
        ({"multimodal_data": [DATA]}, "prompt_string"),
        ({"prompt_string": "<__media__>", "multimodal_data": [5]}, "prompt.multimodal_data[0] is no file"),
        ({"prompt_string": "<__media__>", "multimodal_data": ["?"]}, "no base64"),
        ({"prompt_string": "<__media__>", "multimodal_data": ["AAAA"]}, "unknown format"),
        (
            ["a", {"prompt_string": "<__media__>", "multimodal_data": [SOUND]}],
            "prompt[1].multimodal_data[0] is a sound",
        ),
    ],
)
def test_files_of_a_prompt_that_cannot_be_read_are_named(seeing: httpx.Client, prompt: Any, words: str) -> None:
    answer = completed(seeing, prompt)
    assert answer.status_code == 400 and words in answer.text, answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/embeddings"])
def test_routes_of_words_refuse_files_of_a_prompt(seeing: httpx.Client, path: str) -> None:
    name = {"/v1/completions": "prompt", "/tokenize": "content"}.get(path, "input")
    beside = seeing.post(path, json={name: "a", "multimodal_data": [DATA]})
    inside = seeing.post(path, json={name: {"prompt_string": "<__media__>", "multimodal_data": [DATA]}})
    assert inside.status_code == 400 and inside.json()["error"]["param"] == name
    assert beside.status_code == 400 and beside.json()["error"]["param"] == "multimodal_data", beside.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_leftovers")
class TestClients:
    """Clients of other people, unmodified."""

    def test_openai(self, seeing: httpx.Client) -> None:
        openai = import_or_skip("openai")
        with openai.OpenAI(base_url=f"{seeing.base_url}/v1", api_key="none") as client:
            messages = WAYS["image_url"][1]["messages"]
            reply = client.chat.completions.create(model="demo-f16", messages=messages, max_tokens=4)
            assert reply.usage.prompt_tokens > PICTURE_ROWS and reply.choices[0].message.content
            response = client.responses.create(
                model="demo-f16", input=WAYS["input_image"][1]["input"], max_output_tokens=4
            )
            assert response.usage.input_tokens == reply.usage.prompt_tokens

    def test_anthropic(self, seeing: httpx.Client) -> None:
        anthropic = import_or_skip("anthropic")
        with anthropic.Anthropic(base_url=str(seeing.base_url), api_key="none") as client:
            messages = WAYS["a block"][1]["messages"]
            reply = client.messages.create(model="demo-f16", max_tokens=4, messages=messages)
            usage = reply.usage
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > PICTURE_ROWS

    def test_ollama(self, seeing: httpx.Client, tmp_path: Path) -> None:
        ollama = import_or_skip("ollama")
        (tmp_path / "photo.png").write_bytes(picture_file())
        client = ollama.Client(host=str(seeing.base_url))
        message = {"role": "user", "content": TEXT, "images": [str(tmp_path / "photo.png")]}
        reply = client.chat(model="demo-f16", messages=[message], options={"num_predict": 4})
        assert reply.prompt_eval_count > PICTURE_ROWS
        made = client.generate(model="demo-f16", prompt=TEXT, images=[picture_file()], options={"num_predict": 4})
        assert made.prompt_eval_count == reply.prompt_eval_count

    def test_langchain(self, seeing: httpx.Client) -> None:
        langchain = import_or_skip("langchain_openai")
        chat = langchain.ChatOpenAI(base_url=f"{seeing.base_url}/v1", api_key="none", model="demo-f16", max_tokens=4)
        blocks = [
            {"type": "text", "text": TEXT},
            {"type": "image", "base64": DATA, "mime_type": "image/png"},
            {"type": "image_url", "image_url": {"url": URL}},
        ]
        reply = chat.invoke([{"role": "user", "content": blocks}])
        assert reply.usage_metadata["input_tokens"] > 2 * PICTURE_ROWS


ASKED = {"a": {"type": "noul", "instructions": "Is it red?"}, "b": {"type": "score", "criteria": ["bad", "good"]}}
ASSET = {"type": "image", "format": "png", "data_base64": DATA}


def system_one(client: httpx.Client, files: dict[str, bytes] | None = None, **members: Any) -> httpx.Response:
    body = {"questions": ASKED, "model": "jev-latest", **members}
    if files is None:
        return client.post("/v1/systemone", json=body)
    parts: dict[str, Any] = {"request": (None, json.dumps(body), "application/json")}
    return client.post("/v1/systemone", files={**parts, **{name: (name, data) for name, data in files.items()}})


def test_system_one_reads_assets(seeing: httpx.Client) -> None:
    picture, other = picture_file(), picture_file(seed=3)
    link = {"type": "input_image", "image_url": URL}
    content = [{"type": "input_text", "text": "Before "}, link, {"type": "input_text", "text": " behind."}]
    questions = [{"type": "predicate", "instructions": "Is it red?"}]
    input_items = [{"role": "user", "content": content}]
    wanted = seeing.post("/v1/decisions", json={"input": input_items, "questions": questions}).json()
    coded = system_one(seeing, state="Before <x> behind.", assets={"<x>": ASSET})
    assert coded.status_code == 200, coded.text
    assert coded.json()["answers"]["a"]["noul"] == wanted["answers"][0]["probability"]
    form = system_one(
        seeing, {"asset-0": picture}, state="Before <x> behind.", assets={"<x>": {"type": "image", "part": "asset-0"}}
    )
    assert form.json()["answers"] == coded.json()["answers"]
    plain = system_one(seeing, state="Before <x> behind.")
    assert plain.json()["answers"] != coded.json()["answers"]
    # One begins as another, and both are inside of JSON.
    two = {"<x>": {"part": "p"}, "<x>y": {"part": "q"}}
    state = {"photo": "<x>", "other \N{CAT}": ["<x>y", "z"]}
    first = system_one(seeing, {"p": picture, "q": other}, state=state, assets=two)
    swapped = system_one(seeing, {"p": other, "q": picture}, state=state, assets=two)
    assert (first.status_code, swapped.status_code) == (200, 200), first.text
    assert first.json()["answers"] != swapped.json()["answers"]


WRONG_ASSETS: dict[str, tuple[dict[str, bytes] | None, dict[str, Any], list[str]]] = {
    "empty": (None, {"assets": {}}, ["assets"]),
    "without a name": (None, {"assets": {" ": ASSET}}, ["assets"]),
    "no object": (None, {"assets": {"x": 3}}, ["assets", "x"]),
    "another type": (None, {"assets": {"x": {**ASSET, "type": "video"}}}, ["assets", "x"]),
    "another format": (None, {"assets": {"x": {**ASSET, "format": "gif"}}}, ["assets", "x"]),
    "no data": (None, {"assets": {"x": {"type": "image"}}}, ["assets", "x"]),
    "no base64": (None, {"assets": {"x": {"data_base64": "%"}}}, ["assets", "x"]),
    "no picture": (None, {"assets": {"x": {"data_base64": "YWJj"}}}, ["assets", "x"]),
    "a part outside of a form": (None, {"assets": {"x": {"part": "p"}}}, ["assets", "x"]),
    "a part that is missing": ({"p": b"a"}, {"assets": {"x": {"part": "q"}}}, ["assets", "x"]),
    "a part twice": ({"p": b"a"}, {"assets": {"x": {"part": "p"}, "y": {"part": "p"}}}, ["assets", "y"]),
    "a part for nothing": ({"p": b"a"}, {}, ["assets"]),
    "in a question": (
        None,
        {"assets": {"x": ASSET}, "questions": {"a": {"type": "noul", "instructions": ["as x?"]}}},
        ["questions", "a", "instructions"],
    ),
    "in an option": (
        None,
        {"assets": {"x": ASSET}, "questions": {"a": {"type": "choice", "criteria": {"b": None, "c": "x"}}}},
        ["questions", "a", "criteria"],
    ),
    "a box": (None, {"assets": {"x": ASSET}, "questions": {"a": {"type": "box"}}}, ["questions", "a", "type"]),
}


@pytest.mark.parametrize("name", WRONG_ASSETS)
def test_system_one_names_what_assets_have_wrong(seeing: httpx.Client, name: str) -> None:
    files, members, place = WRONG_ASSETS[name]
    reply = system_one(seeing, files, **{"state": "See x.", **members})
    assert reply.status_code == 422, reply.text
    (detail,) = reply.json()["detail"]
    assert detail["loc"] == ["body", *place], detail


def test_system_one_refuses_forms_without_a_request_and_models_that_see_nothing(
    seeing: httpx.Client, http: httpx.Client
) -> None:
    lost = seeing.post("/v1/systemone", files={"p": ("p", b"a")})
    assert (lost.status_code, "named request" in lost.text) == (422, True)
    blind = system_one(http, state="x", assets={"x": ASSET})
    assert blind.status_code == 422 and blind.json()["detail"][0]["loc"][:2] == ["body", "assets"], blind.text
