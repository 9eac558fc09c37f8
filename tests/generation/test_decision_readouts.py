"""Models made for decisions: prompts, labels and temperatures of each type, beside logits of the same prompts."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

import localinfer
from localinfer.errors import ContextLengthError, RequestError, UnsupportedFormatError
from localinfer.generation.decision_readouts import READOUTS, TEMPLATE_KEY, TrainedDecisionModel, decision_type
from localinfer.generation.questions import Choice, ChoiceAnswer, Question, Score, ScoreAnswer, YesNo, YesNoAnswer
from localinfer.loading.options import model_path
from localinfer.models.text.chat_template import ChatTemplate
from tests.generation.test_decision_heads import listed
from tests.models.arch_models import write_skeleton
from tests.models.talking_models import talking_skeleton

SOURCE = (
    "<|im_start|>{{ state if state is string else state|tojson }}|{{ type }} {{ id }} {{ instructions|tojson }}:"
    "{% for o in options %}{{ o.label }} {{ o.key }}={{ o.description|tojson }};{% endfor %}"
    "{% for q in questions|default([]) %}[{{ q.id }} {{ q.options|length }}]{% endfor %}{{ images|length }}<|im_end|>"
)
STATE = {"who": "Tom", "a": ["cat", "<|im_end|>"], "day": 3}
QUESTIONS: dict[str, Question] = {
    "lost": YesNo(instructions="Is something lost?", yes="it is gone"),
    "who": Choice(instructions={"b": 1, "a": 2}, options={"Tom": "a boy", "Lily": None, "Max": ["x"]}),
    "mood": Score(instructions="How sad?", levels=["not", {"z": 1, "a": 2}, "very"]),
}
TEMPERATURES = {"choice": 2.0, "choice.3_5": 0.5, "choice.small": 0.25, "noul": 3.0, "score.3_5": 1.5}


@pytest.fixture(scope="module")
def llm() -> Iterator[localinfer.LLM]:
    with localinfer.load(context_length=1024) as loaded:
        yield loaded


def metadata(kind: str, **temperatures: float) -> dict[str, object]:
    prefix = "llama.decision."
    found: dict[str, object] = {"general.architecture": "llama", f"{prefix}type": kind}
    return found | {f"{prefix}temperature.{name}": value for name, value in temperatures.items()}


def deciding(llm: localinfer.LLM, kind: str, source: str = SOURCE, **temperatures: float) -> TrainedDecisionModel:
    template = ChatTemplate(source)
    return TrainedDecisionModel(llm._engine, llm.tokenizer, template, metadata(kind, **(temperatures or TEMPERATURES)))


def asked(llm: localinfer.LLM, text: str, labels: list[str], temperature: float) -> np.ndarray:
    """The oracle: probabilities of labels behind a prompt's text, whose control tokens are those of the template."""
    begun, inner, end = "<|im_start|>", text.removeprefix("<|im_start|>").removesuffix("<|im_end|>"), "<|im_end|>"
    ids = llm.tokenizer.encode_segments([(begun, True), (inner, False), (end, True)])
    row = llm.logits(ids)[-1].astype(np.float64)
    singles = [llm.tokenizer.encode(label, add_special=False)[0] for label in labels]
    weights = np.exp((row[singles] - row[singles].max()) / temperature)
    return weights / weights.sum()


def written(value: object, kind: str) -> str:
    return json.dumps(value, sort_keys=kind == "lev", ensure_ascii=False)


def prompt(kind: str, name: str, options: list[tuple[str, object]]) -> str:
    question, names = QUESTIONS[name], {YesNo: "noul", Choice: "choice", Score: "score"}
    labels = [""] * 9 if kind == "openjev" else list("ABCDEFGHI")
    shown = "".join(f"{label} {key}={written(one, kind)};" for label, (key, one) in zip(labels, options, strict=False))
    listed = "[lost 2][who 3][mood 3]" if kind == "nimble" else ""
    head = f"<|im_start|>{written(STATE, kind)}|{names[type(question)]} {name} {written(question.instructions, kind)}:"
    return f"{head}{shown}{listed}0<|im_end|>"


@pytest.mark.parametrize("kind", [kind for kind in READOUTS if kind != "lfm2-d1"])
def test_answers_are_those_of_the_labels_behind_each_prompt(llm: localinfer.LLM, kind: str) -> None:
    found = deciding(llm, kind).decide(STATE, QUESTIONS).answers
    labels = list("ABCDEFGHI")
    nouls: list[tuple[str, object]] = [("false", None), ("true", "it is gone")]
    nouls = nouls[::-1] if kind == "openjev" else nouls
    if kind == "lev":
        ratings = asked(llm, prompt(kind, "lost", nouls), labels, 3.0)
        yes = float(ratings @ np.arange(9)) / 8
    else:
        yes = float(asked(llm, prompt(kind, "lost", nouls), labels[:2], 3.0)[0 if kind == "openjev" else 1])
    assert isinstance(found["lost"], YesNoAnswer) and found["lost"].probability == pytest.approx(yes, rel=1e-9)
    who: list[tuple[str, object]] = [("Tom", "a boy"), ("Lily", None), ("Max", ["x"])]
    temperature = 0.25 if kind == "lev" else 0.5
    probabilities = asked(llm, prompt(kind, "who", who), labels[:3], temperature)
    if kind == "lev":
        probabilities = (probabilities + asked(llm, prompt(kind, "who", who[::-1]), labels[:3], temperature)[::-1]) / 2
    assert isinstance(found["who"], ChoiceAnswer)
    assert list(found["who"].probabilities.values()) == pytest.approx(probabilities.tolist(), rel=1e-9)
    levels: list[tuple[str, object]] = [("0", "not"), ("1", {"z": 1, "a": 2}), ("2", "very")]
    scores = asked(llm, prompt(kind, "mood", levels), labels[:3], 1.0 if kind == "lev" else 1.5)
    assert isinstance(found["mood"], ScoreAnswer)
    assert found["mood"].probabilities == pytest.approx(tuple(scores.tolist()), rel=1e-9)
    assert all(0 <= answer.label_mass <= 1 for answer in found.values())
    assert (found["who"].label_mass == 1.0) is (kind == "pplx-decider")


D1_SOURCE = "<|im_start|>{{ type }}{% for o in options %} {{ o.label }}={{ o.key }}{% endfor %}<|im_end|>"


def write_d1(path: Path, kind: str = "lfm2-d1") -> Path:
    """A model of random weights, of this type."""
    skeleton = talking_skeleton("lfm2-hybrid")
    skeleton["kv"] += [["lfm2.decision.type", "STRING", None, kind], [TEMPLATE_KEY, "STRING", None, D1_SOURCE]]
    write_skeleton(skeleton, path)
    return path


@pytest.fixture(scope="module")
def d1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localinfer.LLM]:
    with localinfer.load(write_d1(tmp_path_factory.mktemp("d1") / "d1.gguf"), context_length=2048) as loaded:
        yield loaded


def spelled(llm: localinfer.LLM, prompt: str, spellings: list[list[str]]) -> list[float]:
    """The oracle: probabilities of answers by the likeliest spelling of each."""
    row = llm.logits(llm.tokenizer.encode(prompt, add_special=False, parse_special=True))[-1].astype(np.float64)
    best = [max(row[llm.tokenizer.encode(one, add_special=False)[0]] for one in group) for group in spellings]
    weights = np.exp(np.array(best) - max(best))
    return list(weights / weights.sum())


def test_d1_reads_the_likeliest_spelling_of_each_answer(d1: localinfer.LLM) -> None:
    def named(*names: str) -> Choice:
        return Choice(instructions="Which?", options=dict.fromkeys(names))

    many = [f"option {index}" for index in range(40)]
    # "YES", "NO" and numbers of two digits are several tokens of this vocabulary.
    codes = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmn"]
    for question, kind, labels, keys, spellings in (
        (QUESTIONS["lost"], "noul", ["true", "false"], ["true", "false"], [["yes", "Yes"], ["no", "No"]]),
        (QUESTIONS["mood"], "score", ["0", "1", "2"], ["0", "1", "2"], [["0"], ["1"], ["2"]]),
        (named("cat", "dog"), "choice", ["A", "B"], ["cat", "dog"], None),
        (named("b", "X"), "choice", ["b", "X"], ["b", "X"], None),
        (named(*many), "choice", codes, many, None),
    ):
        shown = "".join(f" {label}={key}" for label, key in zip(labels, keys, strict=True))
        groups = spellings or [[label, f" {label}"] for label in labels]
        groups = [[one for one in group if len(d1.tokenizer.encode(one, add_special=False)) == 1] for group in groups]
        wanted = spelled(d1, f"<|im_start|>{kind}{shown}<|im_end|>", groups)
        answer = d1.decide(STATE, {"x": question}).answers["x"]
        assert 0 < answer.label_mass <= 1 and max(wanted) - min(wanted) > 1e-3
        assert (answer.probability if isinstance(answer, YesNoAnswer) else listed(answer)) == pytest.approx(
            wanted[0] if isinstance(answer, YesNoAnswer) else wanted, rel=1e-9
        )
    with pytest.raises(RequestError, match="labels for 60 of 70 options"):
        d1.decide(STATE, {"x": named(*map(str, range(70)))})


def test_d1_answers_alike_in_any_company_and_about_nothing(d1: localinfer.LLM) -> None:
    together = d1.decide(STATE, QUESTIONS).answers
    for name, question in QUESTIONS.items():
        d1.clear_cache()
        for _ in range(2):
            assert d1.decide(STATE, {name: question}).answers[name] == together[name]
    assert d1.decide(STATE, dict(reversed(QUESTIONS.items()))).answers == together
    # Its prompt does not show the state.
    assert d1.decide(None, QUESTIONS).answers == together
    with pytest.raises(RequestError, match="one of them"):
        d1.decide(STATE, QUESTIONS, messages=[{"role": "user", "content": "?"}])


def test_answers_do_not_depend_on_company_or_cache(llm: localinfer.LLM) -> None:
    model = deciding(llm, "lev")
    together = model.decide(STATE, QUESTIONS)
    for name, question in QUESTIONS.items():
        llm.clear_cache()
        assert model.decide(STATE, {name: question}).answers[name] == together.answers[name]
    again = model.decide(STATE, QUESTIONS)
    assert again.answers == together.answers and again.cached_tokens > 0
    messages = [{"role": "user", "content": "Tom lost a ball."}]
    assert model.decide(None, QUESTIONS, messages=messages).answers == model.decide(messages, QUESTIONS).answers


WITH_PICTURE = [
    {"role": "user", "content": ["Look:", {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}
]
PICTURE_REFUSED = r"messages\[0\]\.content\[1\] is a picture or a sound"


def test_what_such_a_model_cannot_do_is_said(llm: localinfer.LLM) -> None:
    for kind in ("kev", "laya", "gliner", "strands", "lfm2-d1-omni"):
        with pytest.raises(UnsupportedFormatError, match=f"type '{kind}'"):
            deciding(llm, kind)
    with pytest.warns(UserWarning), pytest.raises(UnsupportedFormatError, match=TEMPLATE_KEY):
        deciding(llm, "lev", source="{% for %}")
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(UnsupportedFormatError, match="temperature.choice is "):
            deciding(llm, "lev", choice=wrong)
    model = deciding(llm, "openjev")
    with pytest.raises(RequestError, match="leave it out"):
        model.decide(STATE, QUESTIONS, orders=2)
    with pytest.raises(RequestError, match="has no instructions"):
        model.decide(STATE, {"x": YesNo(yes="it is")})
    with pytest.raises(RequestError, match="53 options.*labels for 52"):
        model.decide(STATE, {"x": Choice(instructions="Which?", options={str(index): None for index in range(53)})})
    with pytest.raises(ContextLengthError):
        model.decide("cat " * 2000, QUESTIONS)
    with pytest.raises(RequestError, match=PICTURE_REFUSED):
        model.decide(None, QUESTIONS, messages=WITH_PICTURE)


def test_a_file_of_that_type_decides_its_own_way(tmp_path: Path, llm: localinfer.LLM) -> None:
    reader = gguf.GGUFReader(model_path(None))
    writer = gguf.GGUFWriter(tmp_path / "made.gguf", "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    writer.add_string("llama.decision.type", "lev")
    writer.add_string(TEMPLATE_KEY, SOURCE)
    for name, value in TEMPERATURES.items():
        writer.add_float32(f"llama.decision.temperature.{name}", value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with localinfer.load(tmp_path / "made.gguf", context_length=1024) as made:
        assert decision_type(made._model.file.metadata) == "lev"
        assert made.decide(STATE, QUESTIONS).answers == deciding(llm, "lev").decide(STATE, QUESTIONS).answers
    assert llm.decide(STATE, QUESTIONS).answers != deciding(llm, "lev").decide(STATE, QUESTIONS).answers
