"""Folders of transformers made for decisions: their prompts and scores beside transformers' own, and beside NumPy."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import RequestError, UnsupportedFormatError
from localinfer.generation.questions import Choice, Question, Score, YesNo, YesNoAnswer
from tests.generation.test_decision_heads import listed
from tests.support.checkpoint_files import HIDDEN, LLAMA_CONFIG, added_token, llama_weights, write_folder

TEMPLATE = (
    "{{- '<|im_start|>' ~ (state if state is string else state|tojson) ~ '<|split|>the ' ~ question.type -}}\n"
    "{{- ' ' ~ (question.instructions|tojson) -}}\n"
    "{%- for option in question.options %}\n"
    "{{- '\\n' ~ question.labels[loop.index0] ~ ') ' ~ option ~ ': ' ~ question.descriptions[loop.index0]|tojson }}\n"
    "{%- endfor -%}\n"
    "{{- '<|im_end|>\\n' ~ question.name ~ ':<|mark|> behind' -}}"
)
SETTINGS: dict[str, Any] = {
    "labels": {"choice": ["d", "c", "b", "a"], "score": ["0", "1", "2"]},
    "temperature": {"noul": 2.0, "choice": 0.5},
    "noul_options": ["false", "true"],
    "sanitize_control_tokens": True,
    "adapter": None,
}
OFFSETS, SOFTCAP, ROWS = {"noul": 0, "score": 2, "choice": 5}, 3.0, 9
STATES: list[Any] = ["the day <|im_end|> the <|split|>x", {"who": "Tom", "a": ["cat", "<|im_start|>the"], "é": 3}]
REQUEST: dict[str, dict[str, Any]] = {
    "lost": {"type": "noul", "instructions": "Is the ball lost?", "criteria": {"true": "it is gone", "false": None}},
    "who": {
        "type": "choice",
        "instructions": {"b": 1, "a": "<|im_end|>"},
        "criteria": {"Tom": "a <|mark|> boy", "Lily": None, "Max": ["x"]},
    },
    "mood": {"type": "score", "instructions": None, "criteria": ["not", {"z": 1}, "very"]},
}
QUESTIONS: dict[str, Question] = {
    "lost": YesNo(instructions="Is the ball lost?", yes="it is gone"),
    "who": Choice(
        instructions={"b": 1, "a": "<|im_end|>"}, options={"Tom": "a <|mark|> boy", "Lily": None, "Max": ["x"]}
    ),
    "mood": Score(levels=["not", {"z": 1}, "very"]),
}


def tokenizer_document() -> tuple[dict[str, Any], int]:
    """Bytes, a few merges and control tokens; the number of tokens."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in kept] + [chr(256 + place) for place in range(256 - len(kept))]
    merges = [["Y", "e"], ["Ye", "s"], ["N", "o"], ["t", "h"], ["th", "e"], ["Ġ", "t"], ["Ġt", "h"], ["Ġth", "e"]]
    texts = [*letters, *map("".join, merges)]
    special = [added_token(len(texts) + place, text) for place, text in enumerate(("<|im_start|>", "<|im_end|>"))]
    spelled = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": spelled,
        "post_processor": None,
        "decoder": spelled,
        "model": {"type": "BPE", "vocab": {text: index for index, text in enumerate(texts)}, "merges": merges},
    }
    return document, len(texts) + len(special)


def write(folder: Path, kind: str, settings: dict[str, Any] = SETTINGS, template: str | None = TEMPLATE) -> Path:
    """Write a folder of random weights; kind: causal or jev."""
    document, size = tokenizer_document()
    generator = np.random.default_rng(5)
    weights = llama_weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = generator.standard_normal((size, HIDDEN)).astype(np.float32) / 4
    config = {**LLAMA_CONFIG, "vocab_size": size, "max_position_embeddings": 512}
    if kind == "jev":
        del weights["lm_head.weight"]
        weights["weight"] = generator.standard_normal((ROWS, HIDDEN)).astype(np.float32) / 4
        weights["proj.bias"] = generator.standard_normal(ROWS).astype(np.float32)
        config = {
            "model_type": "jev",
            "architectures": ["JevForDecision"],
            "hidden_size": HIDDEN,
            "text_config": config,
        }
        config |= {"num_verbalizers": ROWS, "offsets": OFFSETS, "softcap": SOFTCAP}
    spelling = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    write_folder(folder, weights, config, tokenizer=document, tokenizer_config=spelling, decision=settings)
    if template is not None:
        (folder / "decision_template.jinja").write_text(template)
    return folder


JOINT = (
    "{{- '<|im_start|>' ~ state ~ '<|split|>the ' -}}\n"
    "{%- for q in questions %}{{ '<|split|>' ~ q.name ~ ' ' ~ q.type ~ q.instructions|tojson ~ q.options|join(',') }}\n"
    "{{- '<|im_end|>:<|mark|>the' -}}{% endfor -%}"
)


@dataclass
class Loaded:
    kind: str
    folder: Path
    llm: localinfer.LLM


@pytest.fixture(scope="module", params=["causal", "jev"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = write(tmp_path_factory.mktemp("decision") / request.param, request.param)
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        yield Loaded(request.param, folder, llm)


def probabilities(llm: localinfer.LLM, state: Any) -> dict[str, list[float]]:
    answers = llm.decide(state, QUESTIONS).answers
    return {name: [one.probability] if isinstance(one, YesNoAnswer) else listed(one) for name, one in answers.items()}


def prompt_ids(llm: localinfer.LLM, state: Any, name: str) -> list[int]:
    """The oracle: ids of a prompt up to the mark, its parts encoded one by one."""
    asked = REQUEST[name]
    criteria, kind = asked["criteria"], asked["type"]
    criteria = {str(level): one for level, one in enumerate(criteria)} if kind == "score" else criteria
    criteria = {key: criteria[key] for key in ("false", "true")} if kind == "noul" else criteria
    labels = {"noul": ["Yes", "No"], **SETTINGS["labels"]}[kind]

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    lines = "".join(
        f"\n{label}) {key}: {written(one)}" for label, (key, one) in zip(labels, criteria.items(), strict=False)
    )
    parts = [("<|im_start|>", True), (state if isinstance(state, str) else written(state), False)]
    parts += [
        (f"the {kind} {written(asked['instructions'])}{lines}", False),
        ("<|im_end|>", True),
        (f"\n{name}:", False),
    ]
    return [
        one for text, special in parts for one in llm.tokenizer.encode(text, add_special=False, parse_special=special)
    ]


@pytest.mark.parametrize("state", STATES, ids=["text", "object"])
def test_answers_are_those_of_the_token_before_the_mark(loaded: Loaded, state: Any) -> None:
    found = probabilities(loaded.llm, state)
    for name in QUESTIONS:
        check_scores(loaded.kind, loaded.llm, prompt_ids(loaded.llm, state, name), name, found[name])


def check_scores(kind: str, llm: localinfer.LLM, ids: list[int], name: str, found: list[float]) -> None:
    """Compare an answer with the scores at the end of a prompt."""
    temperature, count = {"lost": (2.0, 2), "who": (0.5, 3), "mood": (1.0, 3)}[name]
    asked = REQUEST[name]["type"]
    if kind == "causal":
        labels = {"noul": ["Yes", "No"], **SETTINGS["labels"]}[asked][:count]
        tokens = [llm.tokenizer.encode(label, add_special=False)[0] for label in labels]
        scores = llm.logits(ids)[-1].astype(np.float64)[tokens]
    else:
        generator = np.random.default_rng(5)
        for _ in range(2):
            generator.standard_normal((tokenizer_document()[1], HIDDEN))
        weight = generator.standard_normal((ROWS, HIDDEN)).astype(np.float32) / 4
        bias = generator.standard_normal(ROWS).astype(np.float32)
        last = llm.embed(ids, pooling="none", normalize=False)[-1].astype(np.float64)
        rows = slice(OFFSETS[asked], OFFSETS[asked] + count)
        scores = SOFTCAP * np.tanh((weight[rows] @ last + bias[rows]) / SOFTCAP)
    weights = np.exp(scores / temperature)
    wanted = (weights / weights.sum()).tolist()
    assert found == pytest.approx(wanted[1:] if asked == "noul" else wanted, rel=1e-6)
    assert max(wanted) - min(wanted) > 1e-3


def test_answers_do_not_depend_on_company_or_cache(loaded: Loaded) -> None:
    together = loaded.llm.decide(STATES[0], QUESTIONS)
    for name, question in QUESTIONS.items():
        loaded.llm.clear_cache()
        for _ in range(2):
            assert loaded.llm.decide(STATES[0], {name: question}).answers[name] == together.answers[name]
    again = loaded.llm.decide(STATES[0], dict(reversed(QUESTIONS.items())))
    assert again.answers == together.answers and again.cached_tokens > 0


def test_answers_are_those_of_transformers(loaded: Loaded) -> None:
    pytest.importorskip("transformers.decision", exc_type=ImportError)
    for state in STATES:
        compare_with_transformers(loaded, state)


def compare_with_transformers(loaded: Loaded, state: Any) -> None:
    """Compare answers with its pipeline's."""
    transformers = pytest.importorskip("transformers")
    made = {"model": str(loaded.folder)}
    if loaded.kind == "jev":
        tokenizer = transformers.AutoTokenizer.from_pretrained(loaded.folder)
        made = {"model": transformers.JevForDecision.from_pretrained(loaded.folder), "tokenizer": tokenizer}
    wanted = transformers.pipeline("decision", **made)({"state": state, "questions": REQUEST})
    for name, found in probabilities(loaded.llm, state).items():
        one = wanted[name]
        expected = [one["noul"]] if one["type"] == "noul" else list(one["probabilities"].values())
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_more_options_than_labels_are_refused(loaded: Loaded) -> None:
    many = Choice(instructions="Which?", options=dict.fromkeys("abcdefgh"))
    with pytest.raises(RequestError, match="8 options.*labels for 4"):
        loaded.llm.decide("x", {"who": many})
    with pytest.raises(RequestError, match="leave it out"):
        loaded.llm.decide("x", QUESTIONS, orders=2)


@pytest.mark.parametrize("kind", ["causal", "jev"])
def test_a_template_of_all_questions_is_read_at_each_mark(kind: str, tmp_path: Path) -> None:
    options = {"lost": "false,true", "who": "Tom,Lily,Max", "mood": "0,1,2"}
    folder = write(tmp_path / kind, kind, template=JOINT)
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        state, encode = STATES[0], partial(llm.tokenizer.encode, add_special=False)
        found = llm.decide(state, QUESTIONS)
        ids = [*encode("<|im_start|>", parse_special=True), *encode(state), *encode("the ")]
        for number, (name, asked) in enumerate(REQUEST.items()):
            ids += encode("the") if number else []
            written = json.dumps(asked["instructions"])
            ids += encode(f"{name} {asked['type']}{written}{options[name]}")
            ids += [*encode("<|im_end|>", parse_special=True), *encode(":")]
            check_scores(kind, llm, ids, name, probabilities(llm, state)[name])
        assert found.prompt_tokens == len(ids) and found.computed_tokens <= len(ids) + 2 * 16
        assert llm.decide(state, QUESTIONS).answers == found.answers


@pytest.mark.parametrize("kind", ["causal", "jev"])
def test_such_a_template_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.decision", exc_type=ImportError)
    folder = write(tmp_path / kind, kind, template=JOINT)
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        compare_with_transformers(Loaded(kind, folder, llm), STATES[0])


@pytest.mark.parametrize(
    ("changes", "template", "match"),
    [
        ({"adapter": "lora"}, TEMPLATE, "adapter is 'lora'"),
        ({"sanitize_control_tokens": False}, TEMPLATE, "sanitize_control_tokens is not true"),
        ({"version": 2}, TEMPLATE, "version is not known"),
        ({"noul_options": ["yes", "no"]}, TEMPLATE, "noul_options is "),
        ({"temperature": {"noul": 0}}, TEMPLATE, "temperature is "),
        ({"labels": {"noul": "Yes"}}, TEMPLATE, "labels is "),
        ({"labels": {"noul": ["Yes", "Maybe"]}}, TEMPLATE, "labels .* not each another token"),
        ({"labels": {"noul": ["Yes", "Yes"]}}, TEMPLATE, "labels .* not each another token"),
        ({}, None, "no decision_template.jinja"),
        ({}, "<|mark|>{{ question }}", "writes nothing before"),
        ({}, "{{ questions }}<|mark|>", "writes nothing before <.mark.> number 2"),
        ({"head": "judge_config"}, TEMPLATE, "judge_config.json"),
        ({"head": "decision_config"}, TEMPLATE, "decision_config.json"),
        ({"head": "adapter_config"}, TEMPLATE, "adapter_config.json"),
    ],
)
def test_what_is_not_run_is_named(tmp_path: Path, changes: dict[str, Any], template: str | None, match: str) -> None:
    head = changes.get("head")
    settings = {**SETTINGS, **{name: value for name, value in changes.items() if name != "head"}}
    folder = write(tmp_path, "causal", settings, template)
    if head is not None:
        (folder / f"{head}.json").write_text("{}")
    with localinfer.load(folder, threads=1) as llm, pytest.raises(UnsupportedFormatError, match=match):
        llm.decide("x", {"lost": QUESTIONS["lost"], "again": QUESTIONS["lost"]})


@pytest.mark.parametrize("change", [{"offsets": {"noul": 0}}, {"offsets": {**OFFSETS, "score": 9}}, {"softcap": -1.0}])
def test_heads_without_a_meaning_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write(tmp_path, "jev")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with localinfer.load(folder, threads=1) as llm, pytest.raises(UnsupportedFormatError, match="proj.weight has"):
        llm.decide("x", {"lost": QUESTIONS["lost"], "again": QUESTIONS["lost"]})
