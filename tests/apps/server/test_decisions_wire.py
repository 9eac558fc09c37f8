"""`/v1/systemone` and `/v1/decisions`: their answers are the library's, their errors those of each API."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from client_imports import import_or_skip
from local_servers import serving

import localinfer
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.http import SYSTEM_ONE, ApiError
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.generation.questions import Choice, ChoiceAnswer, Score, ScoreAnswer, YesNo, YesNoAnswer
from localinfer.llm import LLM
from tests.generation.test_decision_readouts import write_d1
from tests.support.limits import seconds

STATE = {"text": "The dog ran to Tom. Tom was happy to see it again, and they played.", "mood": ["happy"]}
QUESTIONS: dict[str, dict[str, Any]] = {
    "ran.far": {"type": "noul", "instructions": "Did it run?", "criteria": {"true": "It ran.", "false": None}},
    "who": {
        "type": "choice",
        "instructions": {"ask": "Who ran?"},
        "criteria": {"the dog": None, "Tom \N{CAT}": "a boy"},
    },
    "mood": {"type": "score", "criteria": ["sad", {"a": "little"}, "happy"]},
}
SAME = {
    "ran.far": YesNo(instructions="Did it run?", yes="It ran."),
    "who": Choice(instructions={"ask": "Who ran?"}, options={"the dog": None, "Tom \N{CAT}": "a boy"}),
    "mood": Score(levels=["sad", {"a": "little"}, "happy"]),
}


def ask(client: httpx.Client, **members: Any) -> httpx.Response:
    return client.post("/v1/systemone", json={"state": STATE, "questions": QUESTIONS, "model": "jev-latest", **members})


def test_system_one_answers_as_the_library_does(http: httpx.Client, llm: LLM) -> None:
    wanted = llm.decide(STATE, SAME)
    reply = ask(http, x_trace=7, seed=3)
    assert reply.status_code == 200
    body = reply.json()
    assert sorted(body) == ["answers", "model", "usage"]
    yes, who, mood = (wanted.answers[name] for name in SAME)
    assert isinstance(yes, YesNoAnswer) and isinstance(who, ChoiceAnswer) and isinstance(mood, ScoreAnswer)
    assert body["answers"] == {
        "ran.far": {"type": "noul", "noul": yes.probability, "x_label_mass": yes.label_mass},
        "who": {
            "type": "choice",
            "choice": who.choice,
            "probabilities": dict(who.probabilities),
            "confidence": who.confidence,
            "x_label_mass": who.label_mass,
        },
        "mood": {
            "type": "score",
            "score": mood.score,
            "legend": {"0": "sad", "1": {"a": "little"}, "2": "happy"},
            "probabilities": {str(index): one for index, one in enumerate(mood.probabilities)},
            "confidence": mood.confidence,
            "x_label_mass": mood.label_mass,
        },
    }
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (wanted.prompt_tokens, 0)
    assert usage["x_state_tokens"] == wanted.state_tokens
    assert ask(http).json()["usage"]["x_cached_tokens"] > 0
    turned = ask(http, orders=2, questions={"who": QUESTIONS["who"]}).json()["answers"]["who"]
    averaged = llm.decide(STATE, {"who": SAME["who"]}, orders=2).answers["who"]
    assert isinstance(averaged, ChoiceAnswer) and turned["probabilities"] == dict(averaged.probabilities)


def test_models_made_for_decisions_need_no_state_or_are_refused_by_name(tmp_path: Path) -> None:
    sources = [ModelSource(kind, write_d1(tmp_path / f"{kind}.gguf", kind), 0) for kind in ("lfm2-d1", "gliner")]

    def load(source: ModelSource) -> LLM:
        return localinfer.load(source.path, threads=1, context_length=2048)

    with load(sources[0]) as llm:
        wanted = llm.decide(None, {"so": YesNo(instructions="Is it so?")}).answers["so"]
    assert isinstance(wanted, YesNoAnswer)
    body = {"questions": {"so": {"type": "noul", "instructions": "Is it so?"}}, "model": "lfm2-d1"}
    with serving(ServerSettings(port=0), sources=sources, load=load) as running, running.client() as client:
        reply = client.post("/v1/systemone", json={**body, "state": None})
        assert reply.status_code == 200 and reply.json()["answers"]["so"]["noul"] == wanted.probability
        for members, place in ((body, "state"), ({**body, "state": "x", "model": "gliner"}, "model")):
            reply = client.post("/v1/systemone", json=members)
            assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body", place]), reply.text
        assert "a head of type 'gliner', which is not run; wanted " in reply.json()["detail"][0]["msg"]
        reply = client.post("/v1/decisions", json={"input": "x", "questions": OPENAI, "model": "gliner"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
        listed = client.get("/v1/models").json()
    assert [one["id"] for one in listed["data"]] == ["lfm2-d1", "gliner"]
    assert [one["name"] for one in listed["models"]] == ["lfm2-d1"]


def test_models_that_answer_are_listed(http: httpx.Client) -> None:
    body = http.get("/v1/models").json()
    assert [one["name"] for one in body["models"]] == [one["id"] for one in body["data"]]
    assert all(len(one["release_date"]) == 10 and one["description"] for one in body["models"])


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"state": None}, ["state"]),
    ({"questions": None}, ["questions"]),
    ({"questions": {}}, ["questions"]),
    ({"questions": {"": QUESTIONS["who"]}}, ["questions"]),
    ({"questions": {"a": {"instructions": "So?"}}}, ["questions", "a", "type"]),
    ({"questions": {"a": {"type": "box", "instructions": "Where?"}}}, ["questions", "a", "type"]),
    ({"questions": {"a": {"type": "noul"}}}, ["questions", "a", "instructions"]),
    ({"questions": {"a": {"type": "choice", "criteria": {}}}}, ["questions", "a", "criteria"]),
    ({"questions": {"a": {"type": "score", "criteria": {"0": "b", "1": "c"}}}}, ["questions", "a", "criteria"]),
    ({"questions": {str(index): QUESTIONS["mood"] for index in range(401)}}, ["questions"]),
    ({"assets": {"a": {"type": "image"}}}, ["assets", "a"]),
    ({"orders": 0}, ["orders"]),
    ({"messages": [{"role": "user", "content": "a"}]}, ["messages"]),
]


@pytest.mark.parametrize(("members", "place"), WRONG, ids=lambda one: str(one)[:40])
def test_system_one_names_what_a_body_has_wrong(http: httpx.Client, members: dict[str, Any], place: list[str]) -> None:
    reply = ask(http, **members)
    assert reply.status_code == 422, reply.text
    (detail,) = reply.json()["detail"]
    assert detail["loc"][0] == "body" and detail["loc"][1:] == place
    assert isinstance(detail["msg"], str) and isinstance(detail["type"], str)


def test_system_one_says_other_errors_in_its_own_words(http: httpx.Client) -> None:
    broken = http.post("/v1/systemone", content=b'{"state": ', headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["detail"][0]["loc"]) == (422, ["body"])
    long = ask(http, state="cat " * 20_000)
    assert long.status_code == 422 and long.json()["detail"][0]["loc"] == ["body", "state"]
    body = ApiError(401, "the token is missing").body(SYSTEM_ONE)
    assert body == {"detail": {"error_type": "authentication_error", "message": "the token is missing"}}
    assert ApiError(400, "no").response("/decisions").status_code == 400


OPENAI = [
    {"type": "predicate", "name": "ran", "instructions": "Did it run?"},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Who"}, {"type": "input_json", "data": {"is": "it"}}],
        "choices": [{"value": True, "description": "a boy"}, {"value": "true"}, {"value": "no"}],
    },
    {
        "type": "score",
        "name": "mood",
        "instructions": "How happy?",
        "levels": [{"label": "a"}, {"label": "b", "description": "c"}],
    },
]
SAME_OPENAI = {
    "0": YesNo(instructions="Did it run?"),
    "1": Choice(instructions='Who\n{"is": "it"}', options={"true": "a boy", '"true"': None, '"no"': None}),
    "2": Score(instructions="How happy?", levels=["a", "b: c"]),
}


def decide(client: httpx.Client, **members: Any) -> httpx.Response:
    return client.post("/v1/decisions", json={"input": "The dog ran.", "questions": OPENAI, "model": None, **members})


def test_decisions_answer_in_openais_shape(http: httpx.Client, llm: LLM) -> None:
    found = llm.decide("The dog ran.", SAME_OPENAI)
    yes, who, mood = found.answers.values()
    assert isinstance(yes, YesNoAnswer) and isinstance(who, ChoiceAnswer) and isinstance(mood, ScoreAnswer)
    body = decide(http).json()
    probabilities = list(who.probabilities.values())
    assert body["answers"] == [
        {"type": "predicate", "name": "ran", "probability": yes.probability},
        {
            "type": "choice",
            "name": None,
            "choice": [True, "true", "no"][probabilities.index(max(probabilities))],
            "confidence": who.confidence,
            "probabilities": [
                {"value": value, "probability": one}
                for value, one in zip([True, "true", "no"], probabilities, strict=True)
            ],
        },
        {
            "type": "score",
            "name": "mood",
            "score": mood.score,
            "confidence": mood.confidence,
            "probabilities": [
                {"value": index, "label": "ab"[index], "probability": one}
                for index, one in enumerate(mood.probabilities)
            ],
        },
    ]
    assert body["usage"]["input_tokens"] == body["usage"]["total_tokens"] == found.prompt_tokens


def test_decisions_read_a_conversation(http: httpx.Client, llm: LLM) -> None:
    said = [
        {"role": "system", "content": "Be exact."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look: "}, {"type": "input_json", "data": {"a": 1}}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I see."}]},
    ]
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "text", "text": '{"a": 1}'}]},
        {"role": "assistant", "content": "I see."},
    ]
    wanted = llm.decide(None, {"": YesNo(instructions="So?")}, messages=messages).answers[""]
    asked = [{"type": "predicate", "instructions": "So?"}]
    (answer,) = decide(http, input=said, questions=asked).json()["answers"]
    assert isinstance(wanted, YesNoAnswer) and answer["probability"] == wanted.probability


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"questions": []}, "questions"),
        ({"input": []}, "input"),
        ({"questions": [{"type": "noul", "instructions": "So?"}]}, "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{"type": "predicate", "instructions": "So?", "name": 3}]}, "questions[0].name"),
        ({"questions": [{"type": "choice", "instructions": "So?", "choices": "ab"}]}, "questions[0].choices"),
        ({"questions": [{"type": "choice", "instructions": "So?", "choices": [{"value": "a"}]}]}, "questions[0]"),
        (
            {"questions": [{"type": "choice", "instructions": "So?", "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices",
        ),
        (
            {"questions": [{"type": "score", "instructions": "So?", "levels": [{"label": "a"}, {"label": 1}]}]},
            "questions[0].levels[1].label",
        ),
        (
            {"questions": [{"type": "predicate", "instructions": [{"type": "input_image"}]}]},
            "questions[0].instructions[0]",
        ),
    ],
    ids=lambda one: str(one)[:50],
)
def test_decisions_name_what_is_wrong(http: httpx.Client, members: dict[str, Any], param: str) -> None:
    reply = decide(http, **members)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_openais_client_reads_decisions(http: httpx.Client) -> None:
    openai = import_or_skip("openai")
    if not hasattr(openai.OpenAI, "decisions"):
        pytest.skip("this version of openai has no decisions")
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", http_client=http, max_retries=0) as client:
        found = client.decisions.create(model="demo", input="The dog ran.", questions=OPENAI)
    assert [one.type for one in found.answers] == ["predicate", "choice", "score"]


def test_jevcompat_finds_the_server_conformant() -> None:
    runner = pytest.importorskip("jevcompat.runner", reason="jevcompat, which tests such servers, is not installed")

    def load(source: ModelSource) -> LLM:
        return localinfer.load(source.path, context_length=8192)

    with serving(ServerSettings(port=0), load=load) as running:
        report = runner.run(running.url, timeout=seconds(60))
    assert report.verdict == "conformant", [one for one in report.results if one.status == "fail"]
    assert report.summary()["SHOULD"]["failed"] == 0
