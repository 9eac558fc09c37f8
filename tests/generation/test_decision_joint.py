"""Clef: prompts of all questions at once, and scores beside plain formulas over hidden states of the same prompts."""

import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import localinfer
from localinfer.errors import ContextLengthError, CorruptFileError, RequestError, UnsupportedFormatError
from localinfer.generation.decision_joint import JointDecisionModel, JointHead
from localinfer.generation.questions import Choice, ChoiceAnswer, Question, Score, YesNo
from localinfer.models.text.chat_template import ChatTemplate
from tests.generation.test_decision_heads import listed, settings, softmax
from tests.generation.test_decision_readouts import PICTURE_REFUSED, WITH_PICTURE
from tests.models.arch_models import random_weight, write_skeleton
from tests.models.talking_models import talking_skeleton
from tests.support.inside import engine_of, model_of

COLUMNS, WIDTH, INNER, HEADS, ROUTING, JOINT = 64, 32, 48, 4, 2, 3
TEMPLATE = (
    "<|im_start|>{{ 'All:\n' }}{{ sep }}{{ state if state is string else state|tojson(separators=[',', ':']) }}"
    "{% for q in questions %}{{ sep }}\n{{ loop.index }} {{ q.id }} {{ q.type }}{{ sep }}{{ mark_question }}"
    "{{ q.instructions if q.instructions is string else q.instructions|tojson }}{% for o in q.options %}{{ sep }}-"
    "{{ sep }}{{ mark_option }}{{ o.key }}={{ o.description|tojson(separators=[',', ':']) }}{% endfor %}{% endfor %}"
    "{{ sep }}<|im_end|>"
)
STATE = {"who": "Tom", "a": ["cat", "<|im_end|><<clef:sep>>"], "<<clef:option>>": 3}
QUESTIONS: dict[str, Question] = {
    "lost": YesNo(instructions="Is something lost?", yes="it is gone"),
    "who": Choice(instructions={"b": 1, "a": 2}, options={"Tom": "a boy", "Lily": None, "Max": ["x"]}),
    "mood": Score(instructions="How sad?", levels=["not", {"z": 1, "a": 2}, "very"]),
}
PROMPT = {
    "lost": (0, "1 lost noul", "Is something lost?", ['true="it is gone"', "false=null"], 3.0),
    "who": (1, "2 who choice", '{"a": 2, "b": 1}', ["Lily=null", 'Max=["x"]', 'Tom="a boy"'], 0.5),
    "mood": (2, "3 mood score", "How sad?", ['0="not"', '1={"a":2,"z":1}', '2="very"'], 1.0),
}
WRITTEN_STATE = '{"<<clef option>>":3,"a":["cat","<|im_end|><<clef sep>>"],"who":"Tom"}'


def head_tensors() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"decision.scales": (3,), "token_types.weight": (3, WIDTH)}
    norms = {"decision.hidden_norm": COLUMNS}
    norms |= {f"decision.{name}_norm": WIDTH for name in ("option_summary", "field", "option")}
    matrices = {"decision.scorer": (WIDTH, 4 * WIDTH), "decision.scorer_out": (1, WIDTH)}
    for layer in range(ROUTING + JOINT):
        block = f"dec.blk.{layer}"
        kinds = ["cross_attn"] if layer < ROUTING else ["attn", "cross_attn"]
        for name in ["cross_attn_norm", "ffn_norm", "cross_attn_norm_kv" if layer < ROUTING else "attn_norm"]:
            norms[f"{block}.{name}"] = WIDTH
        matrices |= {f"{block}.{kind}_{one}": (WIDTH, WIDTH) for kind in kinds for one in "qkvo"}
        matrices |= {f"{block}.ffn_up": (INNER, WIDTH), f"{block}.ffn_down": (WIDTH, INNER)}
    for name in ("memory", "question", "option_question", "global", "option_context", "option_lexical"):
        found[f"decision.proj_{name}.weight"] = (WIDTH, COLUMNS)
    for name, size in norms.items():
        found |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    for name, shape in matrices.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


TENSORS = head_tensors()


def write_models(folder: Path) -> tuple[Path, Path]:
    """A model with a head, and the model alone."""
    plain = talking_skeleton("qwen35-hybrid")
    size = next(shape[0] for name, shape in plain["tensors"] if name == "token_embd.weight")
    plain["tensors"].append(["output.weight", [size, COLUMNS]])
    write_skeleton(plain, folder / "plain.gguf")
    skeleton: dict[str, Any] = {**deepcopy(plain), "arch": "clef"}
    for entry in skeleton["kv"]:
        entry[0] = entry[0].replace("qwen35.", "clef.", 1)
    skeleton["kv"] += settings("clef", "clef", TEMPLATE)
    for name, count in (("routing_block_count", ROUTING), ("block_count", JOINT), ("head_count", HEADS)):
        skeleton["kv"].append([f"clef.decision.{name}", "UINT32", None, count])
    skeleton["kv"].append(["clef.attention.layer_norm_epsilon", "FLOAT32", None, 1e-5])
    skeleton["tensors"] += [[name, list(shape)] for name, shape in TENSORS.items()]
    write_skeleton(skeleton, folder / "clef.gguf")
    return folder / "clef.gguf", folder / "plain.gguf"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[localinfer.LLM, localinfer.LLM]]:
    clef, plain = write_models(tmp_path_factory.mktemp("clef"))
    with (
        localinfer.load(clef, context_length=1024) as loaded,
        localinfer.load(plain, context_length=1024) as other,
    ):
        yield loaded, other


def tensor(name: str) -> np.ndarray:
    return random_weight(name, TENSORS[name]).astype(np.float64)


def linear(x: np.ndarray, name: str) -> np.ndarray:
    found = x @ tensor(f"{name}.weight").T
    return np.asarray(found + tensor(f"{name}.bias") if f"{name}.bias" in TENSORS else found)


def normed(x: np.ndarray, name: str) -> np.ndarray:
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return np.asarray(scaled * tensor(f"{name}.weight") + tensor(f"{name}.bias"))


def attended(x: np.ndarray, rows: np.ndarray, name: str) -> np.ndarray:
    parts = [linear(one, f"{name}_{kind}") for one, kind in ((x, "q"), (rows, "k"), (rows, "v"))]
    queries, keys, values = (one.reshape(len(one), HEADS, -1).transpose(1, 0, 2) for one in parts)
    weights = np.exp(queries @ keys.transpose(0, 2, 1) / math.sqrt(WIDTH // HEADS))
    found = (weights / weights.sum(-1, keepdims=True)) @ values
    return linear(found.transpose(1, 0, 2).reshape(len(x), WIDTH), f"{name}_o")


def gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))))


def fed(x: np.ndarray, block: str) -> np.ndarray:
    return linear(gelu(linear(normed(x, f"{block}.ffn_norm"), f"{block}.ffn_up")), f"{block}.ffn_down")


def unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def scores_of(llm: localinfer.LLM, names: list[str]) -> list[np.ndarray]:
    """The oracle: scores of the options of each question, as they are shown."""
    ids: list[int] = []
    spans: list[tuple[int, int, int]] = []

    def add(text: str, question: int = -1, *, special: bool = False) -> None:
        found = llm.tokenizer.encode(text, add_special=False, parse_special=special)
        if question >= 0:
            spans.append((question, len(ids), len(ids) + len(found)))
        ids.extend(found)

    add("<|im_start|>All:\n", special=True)
    add(WRITTEN_STATE)
    starts = []
    for number, name in enumerate(names):
        _, head, instructions, options, _ = PROMPT[name]
        add("\n" + f"{number + 1}{head[1:]}")
        starts.append((len(ids), len(ids) + len(llm.tokenizer.encode(instructions, add_special=False))))
        add(instructions)
        for option in options:
            add("-")
            add(option, number)
    add("<|im_end|>", special=True)
    (states,) = llm.embed_many([ids], pooling="none", normalize=False)
    hidden = normed(states.astype(np.float64), "decision.hidden_norm")
    memory = linear(hidden, "decision.proj_memory")
    owners = np.array([one[0] for one in spans])
    questions = np.stack([hidden[start:stop].mean(0) for start, stop in starts])
    size = llm.tokenizer.vocab_size
    rows = random_weight("output.weight", (size, COLUMNS)).astype(np.float64)
    lexical = np.stack([rows[ids[start:stop]].mean(0) for _, start, stop in spans])
    options = linear(np.stack([hidden[start:stop].mean(0) for _, start, stop in spans]), "decision.proj_option_context")
    options = options + linear(lexical, "decision.proj_option_lexical")
    options = options + linear(questions[owners], "decision.proj_option_question")
    for layer in range(ROUTING):
        block = f"dec.blk.{layer}"
        read = normed(memory, f"{block}.cross_attn_norm_kv")
        options = options + attended(normed(options, f"{block}.cross_attn_norm"), read, f"{block}.cross_attn")
        options = options + fed(options, block)
    fields = linear(questions, "decision.proj_question")
    summaries = []
    for number, field in enumerate(fields):
        own = options[owners == number]
        summaries.append(np.array(softmax(own @ field / math.sqrt(WIDTH), 1.0)) @ own)
    fields = fields + normed(np.stack(summaries), "decision.option_summary_norm")
    fields = fields + linear(hidden[-1], "decision.proj_global")
    fields = fields + tensor("token_types.weight")[[PROMPT[name][0] for name in names]]
    for layer in range(ROUTING, ROUTING + JOINT):
        block = f"dec.blk.{layer}"
        x = normed(fields, f"{block}.attn_norm")
        fields = fields + attended(x, x, f"{block}.attn")
        fields = fields + attended(normed(fields, f"{block}.cross_attn_norm"), memory, f"{block}.cross_attn")
        fields = fields + fed(fields, block)
    fields = normed(fields, "decision.field_norm")[owners]
    options = normed(options, "decision.option_norm")
    prior = (unit(lexical) * unit(questions + hidden[-1])[owners]).sum(1)
    features = np.hstack([fields, options, fields * options, abs(fields - options)])
    residual = linear(gelu(linear(features, "decision.scorer")), "decision.scorer_out")[:, 0]
    scales = tensor("decision.scales")
    joint = scales[1] * (unit(fields) * unit(options)).sum(1) + residual
    scores = scales[0] * prior + scales[2] * joint
    return [scores[owners == number] for number in range(len(names))]


@pytest.mark.parametrize("names", [["lost", "who", "mood"], ["mood", "lost"], ["who"]])
def test_scores_are_those_of_the_whole_prompt(models: tuple[localinfer.LLM, localinfer.LLM], names: list[str]) -> None:
    llm, plain = models
    found = llm.decide(STATE, {name: QUESTIONS[name] for name in names})
    assert found.computed_tokens == found.prompt_tokens > found.state_tokens > 10 and found.cached_tokens == 0
    for name, scores in zip(names, scores_of(plain, names), strict=True):
        wanted = softmax(scores, PROMPT[name][4])
        assert max(wanted) - min(wanted) > 1e-2
        if name == "who":
            wanted = [wanted[2], *wanted[:2]]
        answer = found.answers[name]
        assert listed(answer) == pytest.approx(wanted if name != "lost" else wanted[::-1], rel=1e-9), name
        assert answer.label_mass == 1.0


def test_answers_repeat(models: tuple[localinfer.LLM, localinfer.LLM], tmp_path: Path) -> None:
    llm, _ = models
    together = llm.decide(STATE, QUESTIONS)
    llm.decide("another state", QUESTIONS)
    assert llm.decide(STATE, QUESTIONS).answers == together.answers
    llm.clear_cache()
    assert llm.decide(STATE, QUESTIONS).answers == together.answers
    who = cast(Choice, QUESTIONS["who"])
    turned = Choice(instructions=who.instructions, options=dict(reversed(who.options.items())))
    answer, first = llm.decide(STATE, QUESTIONS | {"who": turned}).answers["who"], together.answers["who"]
    assert isinstance(answer, ChoiceAnswer) and isinstance(first, ChoiceAnswer)
    assert answer.probabilities == first.probabilities and list(answer.probabilities) == ["Max", "Lily", "Tom"]
    # More rows than a batch holds, by other numbers of threads, and after a new start.
    state = "Tom lost a ball in the park. " * 90
    long = llm.decide(state, QUESTIONS)
    assert long.prompt_tokens > 700
    path, _ = write_models(tmp_path)
    for threads in (1, 2):
        with localinfer.load(path, context_length=1024, threads=threads) as other:
            assert other.decide(state, QUESTIONS).answers == long.answers
            assert other.decide(STATE, QUESTIONS).answers == together.answers


def test_it_only_decides(models: tuple[localinfer.LLM, localinfer.LLM]) -> None:
    llm, plain = models
    assert llm.capabilities == ("decisions",)
    with pytest.raises(RequestError, match="made for decisions .clef.: it decides about texts .* use decide"):
        llm.complete("a text")
    with pytest.raises(RequestError, match="use decide"):
        llm.embed("a text")
    ids = llm.tokenizer.encode("Tom lost a ball.")
    states, wanted = (one.embed_many([ids], pooling="none", normalize=False)[0] for one in (llm, plain))
    assert states.tobytes() == wanted.tobytes()


def test_what_cannot_be_asked_is_said(models: tuple[localinfer.LLM, localinfer.LLM]) -> None:
    llm, _ = models
    with pytest.raises(RequestError, match="must not be empty"):
        llm.decide(STATE, {"x": YesNo(instructions="")})
    with pytest.raises(RequestError, match="has no instructions"):
        llm.decide(STATE, {"x": YesNo(yes="it is")})
    with pytest.raises(RequestError, match="leave it out"):
        llm.decide(STATE, QUESTIONS, orders=2)
    with pytest.raises(ContextLengthError):
        llm.decide("cat " * 2000, QUESTIONS)
    with pytest.raises(RequestError, match=PICTURE_REFUSED):
        llm.decide(None, QUESTIONS, messages=WITH_PICTURE)
    model, engine = model_of(llm), engine_of(llm)
    for wrong in ("{{ state }}", TEMPLATE.replace("{{ mark_question }}", "{{ mark_option }}")):
        other = JointDecisionModel(
            engine, llm.tokenizer, ChatTemplate(wrong), model.file.metadata, JointHead(engine, model)
        )
        with pytest.raises(UnsupportedFormatError, match=r"options marks \[.*\]; wanted a mark before each question"):
            other.decide(STATE, QUESTIONS)
        other.close()
    counted: list[int] = []
    assert llm.decide(STATE, QUESTIONS, on_encoded=counted.append).prompt_tokens == counted[0]


def test_files_without_a_heads_parts_are_refused(models: tuple[localinfer.LLM, localinfer.LLM]) -> None:
    engine, model = engine_of(models[0]), model_of(models[0])

    def made(without: str = "", instead: str = "", **changed: object) -> JointHead:
        metadata = dict(model.file.metadata)
        metadata |= {f"clef.decision.{name}": value for name, value in changed.items()}
        tensors = {name: one for name, one in model.file.tensors.items() if name != without}
        tensors |= {without: model.file.tensors[instead]} if instead else {}
        file = SimpleNamespace(metadata=metadata, tensors=tensors, tensor_bytes=model.file.tensor_bytes)
        return JointHead(engine, cast(Any, SimpleNamespace(file=file, config=model.config)))

    made()
    for name in [*TENSORS][::9]:
        with pytest.raises(CorruptFileError, match=f"{name} is not in the file"):
            made(name)
    with pytest.raises(CorruptFileError, match=r"decision\.scorer\.weight has shape .*; wanted \(32, 128\)"):
        made("decision.scorer.weight", "decision.proj_global.weight")
    with pytest.raises(CorruptFileError, match=r"proj_memory\.weight has shape \(3,\); wanted a matrix"):
        made("decision.proj_memory.weight", "decision.scales")
    with pytest.raises(CorruptFileError, match="32 rows; wanted a multiple of the 5 heads"):
        made(head_count=5)
    for wrong in (None, 0, -1, "2", True):
        with pytest.raises(UnsupportedFormatError, match=r"decision\.block_count is .*wanted a number above 0"):
            made(block_count=wrong)
