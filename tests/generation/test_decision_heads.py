"""Models that decide by heads: prompts, and scores beside formulas over hidden states of the same prompts."""

import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import localinfer
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.errors import CorruptFileError, RequestError, UnsupportedFormatError
from localinfer.generation import decision_readouts
from localinfer.generation.decision import decision_model
from localinfer.generation.decision_heads import MaskHead, PointerHead
from localinfer.generation.decision_readouts import TEMPLATE_KEY, flat_text
from localinfer.generation.questions import Answer, Choice, ChoiceAnswer, Question, Score, ScoreAnswer, YesNo
from tests.models.arch_models import random_weight, skeletons, write_skeleton
from tests.models.talking_models import talking_skeleton
from tests.support.inside import engine_of, model_of

STATE = {"who": "Tom", "a": ["cat", "<|box_end|>"], "day": 3}
QUESTIONS: dict[str, Question] = {
    "lost": YesNo(instructions="Is something lost?", yes="it is gone"),
    "who": Choice(instructions={"b": 1, "a": 2}, options={"Tom": "a boy", "Lily": None, "Max": ["x"]}),
    "mood": Score(instructions="How sad?", levels=["not", {"z": 1, "a": 2}, "very"]),
}
TEMPERATURES = {"choice": 2.0, "choice.3_5": 0.5, "noul": 3.0}


def settings(arch: str, kind: str, template: str) -> list[list[Any]]:
    found: list[list[Any]] = [
        [f"{arch}.decision.type", "STRING", None, kind],
        [TEMPLATE_KEY, "STRING", None, template],
    ]
    return found + [[f"{arch}.decision.temperature.{name}", "FLOAT32", None, one] for name, one in TEMPERATURES.items()]


def listed(answer: Answer) -> list[float]:
    if isinstance(answer, ChoiceAnswer | ScoreAnswer):
        found = answer.probabilities
        return list(found.values() if isinstance(answer, ChoiceAnswer) else cast(tuple[float, ...], found))
    return [1 - answer.probability, answer.probability]


def softmax(scores: np.ndarray, temperature: float) -> list[float]:
    weights = np.exp((scores - scores.max()) / temperature)
    return list(weights / weights.sum())


def check_company(llm: localinfer.LLM) -> None:
    """Answers are the same numbers alone, in another order, from the cache and without it."""
    together = llm.decide(STATE, QUESTIONS)
    assert all(answer.label_mass == 1.0 for answer in together.answers.values())
    for name, question in QUESTIONS.items():
        llm.clear_cache()
        for _ in range(2):
            assert llm.decide(STATE, {name: question}).answers[name] == together.answers[name]
    turned = dict(reversed(QUESTIONS.items()))
    assert llm.decide(STATE, turned).answers == together.answers
    llm.decide("another state", QUESTIONS)
    assert llm.decide(STATE, QUESTIONS).answers == together.answers


SIZE, WIDTH = 16, 64
KEV_CONTROLS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|box_start|>", "<|box_end|>"]
KEV_TEMPLATE = (
    "<|fim_prefix|>{{ state }}<|fim_middle|>{{ type }} {{ instructions }}{% for o in options %}<|box_start|>"
    "{{ o.key }}={{ o.description }}<|box_end|>{% endfor %}<|fim_suffix|>"
)
KEV_PROMPTS = {
    "lost": ("noul Is something lost?", ["false=None", "true=it is gone"], 3.0),
    "who": ("choice b: 1\na: 2", ["Tom=a boy", "Lily=None", "Max=- x"], 0.5),
    "mood": ("score How sad?", ["0=not", "1=z: 1\na: 2", "2=very"], 1.0),
}


@pytest.fixture(scope="module")
def kev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localinfer.LLM]:
    path = tmp_path_factory.mktemp("kev") / "kev.gguf"
    skeleton = talking_skeleton("qwen35-hybrid", KEV_CONTROLS)
    skeleton["kv"] += [*settings("qwen35", "kev", KEV_TEMPLATE), ["qwen35.embedding_length_out", "UINT32", None, 32]]
    skeleton["tensors"] += [["cls.output.weight", [2 * SIZE, WIDTH]], ["cls.output.bias", [2 * SIZE]]]
    write_skeleton(skeleton, path)
    with localinfer.load(path, context_length=1024) as loaded:
        yield loaded


def kev_scores(llm: localinfer.LLM, head: str, options: list[str]) -> np.ndarray:
    """The oracle: products of rows of the prompt's hidden states."""
    state = "who: Tom\na:\n  - cat\n  - <\u00a6box_end\u00a6>\nday: 3"
    boxes = "".join(f"<|box_start|>{one}<|box_end|>" for one in options)
    ids = llm.tokenizer.encode(
        f"<|fim_prefix|>{state}<|fim_middle|>{head}{boxes}<|fim_suffix|>", add_special=False, parse_special=True
    )
    (states,) = llm.embed_many([ids], pooling="none", normalize=False)
    weight, bias = random_weight("cls.output.weight", (2 * SIZE, WIDTH)), random_weight("cls.output.bias", (2 * SIZE,))
    rows = states.astype(np.float64) @ weight.T.astype(np.float64) + bias
    ends = np.flatnonzero(np.array(ids) == llm.tokenizer.encode("<|box_end|>", add_special=False, parse_special=True))
    return np.asarray(rows[ends, SIZE:] @ rows[-1, :SIZE] / math.sqrt(SIZE))


def test_kev_points_from_the_last_row_to_ends_of_options(kev: localinfer.LLM) -> None:
    found = kev.decide(STATE, QUESTIONS)
    for name, (head, options, temperature) in KEV_PROMPTS.items():
        wanted = softmax(kev_scores(kev, head, options), temperature)
        assert max(wanted) - min(wanted) > 1e-3
        assert listed(found.answers[name]) == pytest.approx(wanted, rel=1e-9), name


def test_kev_answers_alike_in_any_company(kev: localinfer.LLM) -> None:
    check_company(kev)


def test_kev_reads_a_state_once(kev: localinfer.LLM) -> None:
    kev.clear_cache()
    state = "Tom lost a ball in the park. " * 60
    first = kev.decide(state, {"lost": QUESTIONS["lost"]})
    again = kev.decide(state, {"mood": QUESTIONS["mood"]})
    assert first.cached_tokens == 0 and again.state_tokens > 300
    assert again.state_tokens - again.cached_tokens < 16, "whole pages are cached"
    assert again.computed_tokens == again.prompt_tokens - again.cached_tokens


def test_more_rows_than_a_batch_holds_are_read_in_parts(kev: localinfer.LLM) -> None:
    options = {f"option {index}": "the ball that Tom lost in the park" for index in range(60)}
    asked: dict[str, Question] = {"which": Choice(instructions="Which?", options=options), **QUESTIONS}
    found = kev.decide("short", asked)
    assert found.prompt_tokens > 700
    assert found.answers["which"] == kev.decide("short", {"which": asked["which"]}).answers["which"]


def test_a_closed_head_gives_up_its_program(kev: localinfer.LLM) -> None:
    head = PointerHead(engine_of(kev), model_of(kev))
    (end,) = kev.tokenizer.encode("<|box_end|>", add_special=False, parse_special=True)
    prompt = head.lay_out([5, 6, end, 7, end, 8], 2, "noul")
    first = head.score([prompt], CacheHints()).scores[0].tolist()
    program = weakref.ref(head._text_program())
    head.close()
    assert program() is None
    assert head.score([prompt], CacheHints()).scores[0].tolist() == first
    head.close()


def test_texts_are_flat() -> None:
    cases: list[tuple[Any, str]] = [
        (None, ""),
        (True, "True"),
        (1.5, "1.5"),
        ("<|a|> <|b c|>", "<\u00a6a\u00a6> <|b c|>"),
        ([], ""),
        ([1, None, " x", ["y", ["z"]]], "- 1\n- \n- x\n- - y\n  - - z"),
        ({"a": {"b": [1]}, "c": None, "d": False}, "a:\n  b:\n    - 1\nc: \nd: False"),
        ([{"a": 1, "b": {"c": 2}}], "- a: 1\n  b:\n    c: 2"),
    ]
    for value, text in cases:
        assert flat_text(value) == text, value
    with pytest.raises(RequestError):
        flat_text(math.nan)


def test_files_without_a_heads_parts_are_refused(kev: localinfer.LLM) -> None:
    engine, model = engine_of(kev), model_of(kev)

    def made(*names: tuple[str, str], tokenizer: Any = model.tokenizer) -> PointerHead:
        """The head of a file with these tensors, each that of a name in the whole one."""
        held = dict(names)
        tensors = {name: model.file.tensors[one] for name, one in names}
        file = SimpleNamespace(tensors=tensors, tensor_bytes=lambda name: model.file.tensor_bytes(held[name]))
        return PointerHead(engine, cast(Any, SimpleNamespace(tokenizer=tokenizer, file=file, config=model.config)))

    weight, bias = "cls.output.weight", "cls.output.bias"
    for names, error in (
        ([], r"cls\.output\.weight is not in the file"),
        ([(weight, weight)], r"cls\.output\.bias is not in the file"),
        ([(weight, "output_norm.weight")], "wanted an even number of rows of 64"),
        ([(weight, weight), (bias, "output_norm.weight")], r"cls\.output\.bias has shape"),
    ):
        with pytest.raises(CorruptFileError, match=error):
            made(*names)
    with pytest.raises(UnsupportedFormatError, match="box_end.* is 3 tokens"):
        made(tokenizer=SimpleNamespace(encode=lambda *_, **__: [1, 2, 3]))
    (end,) = kev.tokenizer.encode("<|box_end|>", add_special=False, parse_special=True)
    for ids in ([1, 2], [end], [1, end, end]):
        with pytest.raises(UnsupportedFormatError, match="the prompt of 1 options has"):
            made((weight, weight), (bias, bias)).lay_out(ids, 1, "noul")
    with pytest.raises(RequestError, match="has no instructions"):
        kev.decide(STATE, {"x": YesNo(yes="it is")})
    with pytest.raises(RequestError, match="leave it out"):
        kev.decide(STATE, QUESTIONS, orders=2)


LAYA_CONTROLS = ["[CLS]", "[SEP]", "[MASK]"]
LAYA_TEMPLATE = (
    "[CLS]{{ type }}? {{ instructions if instructions is string else instructions|tojson }}[SEP]{% for o in options %}"
    "[MASK] {{ o.key }}={{ o.description|tojson }}{% endfor %}[SEP]"
    "{{ state if state is string else state|tojson }}[SEP]"
)
LAYA_STATE = {"who": "Tom", "a": ["cat", "[MASK][SEP]"], "day": 3}
LAYA_PROMPTS = {
    "lost": (2, "noul? Is something lost?", ["false=null", 'true="it is gone"'], 3.0),
    "who": (0, 'choice? {"b": 1, "a": 2}', ['Tom="a boy"', "Lily=null", 'Max=["x"]'], 0.5),
    "mood": (1, "score? How sad?", ['0="not"', '1={"z": 1, "a": 2}', '2="very"'], 1.0),
}
ENCODER_LAYERS, HEAD_LAYERS, HEADS, INNER = 5, 2, 4, 128


def head_tensors(first: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a head whose layers follow the encoder's."""
    found: dict[str, tuple[int, ...]] = {
        "token_types.weight": (3, WIDTH),
        **{f"cls.{name}": shape for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))},
        **{f"cls.norm.{name}": (WIDTH,) for name in ("weight", "bias")},
        "cls.output.weight": (1, WIDTH),
        "cls.output.bias": (1,),
    }
    for layer in range(first, first + HEAD_LAYERS):
        for matrix, size in {
            "attn_qkv": (3 * WIDTH, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
        }.items():
            found |= {f"blk.{layer}.{matrix}.weight": size, f"blk.{layer}.{matrix}.bias": size[:1]}
    return found


@pytest.fixture(scope="module")
def laya(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[localinfer.LLM, localinfer.LLM]]:
    """The model, and its encoder alone."""
    folder = tmp_path_factory.mktemp("laya")
    skeleton = talking_skeleton("modern-bert-encoder", LAYA_CONTROLS)
    first = next(entry[3] for entry in skeleton["kv"] if entry[0] == "tokenizer.ggml.tokens").index("[CLS]")
    roles = (("seperator", first + 1), ("mask", first + 2))
    skeleton["kv"] += [[f"tokenizer.ggml.{role}_token_id", "UINT32", None, token_id] for role, token_id in roles]
    write_skeleton(skeleton, folder / "encoder.gguf")
    for entry in skeleton["kv"]:
        if entry[0] == "modern-bert.block_count":
            entry[3] = ENCODER_LAYERS + HEAD_LAYERS
        elif entry[0] == "modern-bert.feed_forward_length":
            entry[1:] = ["ARRAY", "INT32", [96] * ENCODER_LAYERS + [INNER] * HEAD_LAYERS]
    skeleton["kv"] += settings("modern-bert", "laya", LAYA_TEMPLATE)
    numbers = (("block_count", HEAD_LAYERS), ("max_head_tokens", 256))
    skeleton["kv"] += [[f"modern-bert.decision.{name}", "UINT32", None, value] for name, value in numbers]
    skeleton["tensors"] += [[name, list(shape)] for name, shape in head_tensors(ENCODER_LAYERS).items()]
    write_skeleton(skeleton, folder / "laya.gguf")
    with (
        localinfer.load(folder / "laya.gguf", context_length=1024) as loaded,
        localinfer.load(folder / "encoder.gguf", context_length=1024) as encoder,
    ):
        yield loaded, encoder


def normed(x: np.ndarray, name: str) -> np.ndarray:
    """Layer norm over rows, by the weight and bias of this name."""
    centred = x - x.mean(axis=1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    return np.asarray(scaled * tensor(f"{name}.weight") + tensor(f"{name}.bias"))


def tensor(name: str) -> np.ndarray:
    shape = (head_tensors(ENCODER_LAYERS) | head_tensors(OMNI_LAYERS))[name]
    return random_weight(name, shape).astype(np.float64)


def product(x: np.ndarray, name: str) -> np.ndarray:
    return np.asarray(x @ tensor(f"{name}.weight").T + tensor(f"{name}.bias"))


def laya_scores(encoder: localinfer.LLM, kind: int, head: str, options: list[str]) -> np.ndarray:
    """The oracle: the encoder's states, through the head's layers and its scorer."""
    segments = [("[CLS]", True), (head, False), ("[SEP]", True)]
    for option in options:
        segments += [("[MASK]", True), (f" {option}", False)]
    segments += [("[SEP]", True), ('{"who": "Tom", "a": ["cat", " [SEP]"], "day": 3}', False), ("[SEP]", True)]
    ids = encoder.tokenizer.encode_segments(segments)
    (states,) = encoder.embed_many([ids], pooling="none", normalize=False)
    (mask,) = encoder.tokenizer.encode("[MASK]", add_special=False, parse_special=True)
    return head_scores(states.astype(np.float64), kind, np.array(ids) == mask, ENCODER_LAYERS)


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention of all rows to all, float64[T, heads * size] of float64[heads, T, size] each."""
    weights = np.exp(queries @ keys.transpose(0, 2, 1) / math.sqrt(queries.shape[2]))
    attended = (weights / weights.sum(axis=2, keepdims=True)) @ values
    return np.asarray(attended.transpose(1, 0, 2).reshape(queries.shape[1], -1))


def head_scores(states: np.ndarray, kind: int, masks: np.ndarray, first: int) -> np.ndarray:
    """The head's layers, from `first` on, and its scorer, over an encoder's states float64[T, WIDTH]."""
    x = states + tensor("token_types.weight")[kind]
    for layer in range(first, first + HEAD_LAYERS):
        block, size = f"blk.{layer}", WIDTH // HEADS
        parts = product(normed(x, f"{block}.attn_norm"), f"{block}.attn_qkv").reshape(len(x), 3, HEADS, size)
        x = x + product(attend(*parts.transpose(1, 2, 0, 3)), f"{block}.attn_output")
        inner = np.maximum(product(normed(x, f"{block}.ffn_norm"), f"{block}.ffn_up"), 0.0)
        x = x + product(inner, f"{block}.ffn_down")
    x = product(normed(x[masks], "cls.norm"), "cls")
    x = 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
    return product(x, "cls.output").reshape(-1)


def test_laya_scores_the_mask_of_each_option(laya: tuple[localinfer.LLM, localinfer.LLM]) -> None:
    llm, encoder = laya
    found = llm.decide(LAYA_STATE, QUESTIONS)
    for name, (kind, head, options, temperature) in LAYA_PROMPTS.items():
        wanted = softmax(laya_scores(encoder, kind, head, options), temperature)
        assert max(wanted) - min(wanted) > 1e-2
        assert listed(found.answers[name]) == pytest.approx(wanted, rel=1e-3), name
    assert found.computed_tokens == found.prompt_tokens + 2 * found.state_tokens


def test_laya_answers_alike_in_any_company(laya: tuple[localinfer.LLM, localinfer.LLM]) -> None:
    check_company(laya[0])


def test_laya_only_decides(laya: tuple[localinfer.LLM, localinfer.LLM]) -> None:
    llm, _ = laya
    assert llm.capabilities == ("decisions",)
    with pytest.raises(RequestError, match="use decide"):
        llm.embed("a text")
    with pytest.raises(RequestError, match="it decides about texts and generates none; use decide"):
        llm.complete("a text")
    with pytest.raises(RequestError, match="no reranker"):
        llm.rerank("a query", ["a text"])
    assert llm.embed("a text", pooling="none").shape[1] == WIDTH


def test_options_and_questions_are_cut_as_in_training(laya: tuple[localinfer.LLM, localinfer.LLM]) -> None:
    engine, model = engine_of(laya[0]), model_of(laya[0])

    def made(without: str = "", **changed: object) -> MaskHead:
        metadata = dict(model.file.metadata)
        metadata |= {f"modern-bert.decision.{name}": value for name, value in changed.items()}
        tensors = {name: one for name, one in model.file.tensors.items() if name != without}
        file = SimpleNamespace(metadata=metadata, tensors=tensors)
        stand_in = SimpleNamespace(tokenizer=model.tokenizer, file=file, config=model.config)
        return MaskHead(engine, cast(Any, stand_in))

    cls, sep, mask = (laya[0].tokenizer.encode(one, add_special=False, parse_special=True)[0] for one in LAYA_CONTROLS)
    for most, question, options, kept_question, kept_options in (
        (256, 20, [60, 5, 48, 49], 20, [48, 5, 48, 48]),
        (256, 300, [3, 3], 248, [3, 3]),
        (64, 30, [30, 2, 30], 29, [15, 2, 15]),
        (20, 30, [10] * 10, 8, [3] * 10),
        (20, 5, [10] * 10, 5, [3] * 10),
        (10, 30, [1, 1], 8, [1, 1]),
    ):
        ids = [cls, *[50] * question, sep]
        wanted = [cls, *[50] * kept_question, sep]
        places = []
        for number, (size, kept) in enumerate(zip(options, kept_options, strict=True)):
            ids += [mask, *[100 + number] * size]
            places.append(len(wanted))
            wanted += [mask, *[100 + number] * kept]
        end = [sep, *[70] * 40, sep]
        found = made(max_head_tokens=most).lay_out([*ids, *end], len(options), "score")
        assert found.token_ids.tolist() == [*wanted, *end], (most, question, options)
        assert found.places == tuple(places) and found.kind == 1
    wrong_forms = [cls, 5, sep, mask, 6, sep, 7], [cls, mask, 5, sep, 6, sep], [cls, 5, sep, mask, 6, mask, sep, 7, sep]
    for ids in ([], *wrong_forms):
        with pytest.raises(UnsupportedFormatError, match="the prompt of 1 options has"):
            made().lay_out(ids, 1, "noul")
    for wrong in (None, 0, -1, "256", True):
        with pytest.raises(UnsupportedFormatError, match=r"decision\.max_head_tokens is .*wanted a number above 0"):
            made(max_head_tokens=wrong)
    for name in ("cls.weight", "cls.norm.bias", "token_types.weight", "cls.output.weight"):
        with pytest.raises(CorruptFileError, match=f"{name} is not in the file"):
            made(name)


OMNI_LAYERS, OMNI_KV_HEADS = 6, (0, 0, 2, 0, 1, 0)
OMNI_CONTROLS = ["<|startoftext|>", "<|mask|>", *(f"<|reserved_{number}|>" for number in range(7, 12))]
OMNI_TEMPLATE = (
    "{% for image in images %}{{ image }}{% endfor %}{{ sep }}<|startoftext|><|reserved_7|>{{ sep }}{{ mark_state }}"
    "{% if state is string %}{{ state }}{% elif state is not none %}{{ state | tojson }}{% elif audio %}{}{% endif %}"
    "{{ sep }}{{ mark_question }}<|reserved_8|>"
    "{{ instructions if instructions is string else instructions | tojson }}"
    "{% for o in options %}{{ sep }}<|reserved_9|><|mask|>{{ sep }}{{ mark_option }} {{ o.key }}="
    "{{ o.description | tojson }}{{ sep }}<|reserved_10|>{% endfor %}{{ sep }}<|reserved_11|>"
)
OMNI_STATE = {"who": "Tom", "a": ["cat", "<|mask|>"], "<|day|>": "<<d1omni:sep>>"}
OMNI_PROMPTS = {
    "lost": (2, "Is something lost?", ["false=null", 'true="it is gone"'], 3.0),
    "who": (0, '{"b": 1, "a": 2}', ['Tom="a boy"', "Lily=null", 'Max=["x"]'], 0.5),
    "mood": (1, "How sad?", ['0="not"', '1={"z": 1, "a": 2}', '2="very"'], 1.0),
}


def omni_skeleton() -> dict[str, Any]:
    """An encoder of convolutions that see both sides and of attention, without a head."""
    skeleton = talking_skeleton("lfm2-hybrid", OMNI_CONTROLS)
    skeleton["kv"].append(["lfm2.attention.causal", "BOOL", None, False])
    return skeleton


OMNI_SHAPES = {name: tuple(shape) for name, shape in omni_skeleton()["tensors"]}


def omni_tensor(name: str) -> np.ndarray:
    return random_weight(name, OMNI_SHAPES[name], skeletons()["lfm2-hybrid"]["init"]).astype(np.float64)


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localinfer.LLM]:
    path, skeleton = tmp_path_factory.mktemp("omni") / "omni.gguf", omni_skeleton()
    tokens = next(entry[3] for entry in skeleton["kv"] if entry[0] == "tokenizer.ggml.tokens")
    for entry in skeleton["kv"]:
        if entry[0] == "lfm2.block_count":
            entry[3] = OMNI_LAYERS + HEAD_LAYERS
        elif entry[0] == "lfm2.feed_forward_length":
            entry[1:] = ["ARRAY", "INT32", [96] * OMNI_LAYERS + [INNER] * HEAD_LAYERS]
        elif entry[0] == "lfm2.attention.head_count_kv":
            entry[3] = [*OMNI_KV_HEADS, *[HEADS] * HEAD_LAYERS]
    skeleton["kv"] += [
        *settings("lfm2", "lfm2-d1-omni", OMNI_TEMPLATE),
        ["lfm2.decision.block_count", "UINT32", None, HEAD_LAYERS],
        ["lfm2.attention.layer_norm_epsilon", "FLOAT32", None, 1e-5],
        ["tokenizer.ggml.mask_token_id", "UINT32", None, tokens.index("<|mask|>")],
    ]
    skeleton["tensors"] += [[name, list(shape)] for name, shape in head_tensors(OMNI_LAYERS).items()]
    write_skeleton(skeleton, path)
    with localinfer.load(path, context_length=1024) as loaded:
        yield loaded


def rms(x: np.ndarray, name: str) -> np.ndarray:
    """Root-mean-square norm over the last axis."""
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * omni_tensor(f"{name}.weight"))


def rotated(x: np.ndarray) -> np.ndarray:
    """Heads float64[T, heads, size] by their positions, the halves of a head being pairs."""
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None, None] * 1e6 ** (-np.arange(half) / half)
    first, second, cos, sin = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def omni_states(ids: list[int]) -> np.ndarray:
    """The oracle: states of the encoder, float64[T, WIDTH]."""
    x = omni_tensor("token_embd.weight")[ids]
    size = WIDTH // HEADS
    for layer, kv_heads in enumerate(OMNI_KV_HEADS):
        block = f"blk.{layer}"
        read = rms(x, f"{block}.attn_norm")
        if kv_heads:
            queries, keys, values = (
                (read @ omni_tensor(f"{block}.attn_{letter}.weight").T).reshape(len(x), -1, size) for letter in "qkv"
            )
            queries, keys = (
                rotated(rms(one, f"{block}.attn_{letter}_norm")) for letter, one in (("q", queries), ("k", keys))
            )
            heads = [one.transpose(1, 0, 2).repeat(HEADS // one.shape[1], axis=0) for one in (queries, keys, values)]
            x = x + attend(*heads) @ omni_tensor(f"{block}.attn_output.weight").T
        else:
            before, behind, inner = np.split(read @ omni_tensor(f"{block}.shortconv.in_proj.weight").T, 3, axis=1)
            padded, taps = np.pad(before * inner, ((1, 1), (0, 0))), omni_tensor(f"{block}.shortconv.conv.weight")
            mixed = sum(taps[:, tap] * padded[tap : tap + len(x)] for tap in range(3))
            x = x + (behind * mixed) @ omni_tensor(f"{block}.shortconv.out_proj.weight").T
        read = rms(x, f"{block}.ffn_norm")
        gate, up = (read @ omni_tensor(f"{block}.ffn_{name}.weight").T for name in ("gate", "up"))
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ omni_tensor(f"{block}.ffn_down.weight").T
    return rms(x, "token_embd_norm")


def test_omni_scores_the_mask_of_each_option(omni: localinfer.LLM) -> None:
    encode = omni.tokenizer.encode_segments
    (mask,) = omni.tokenizer.encode("<|mask|>", add_special=False, parse_special=True)
    found = omni.decide(OMNI_STATE, QUESTIONS)
    state = '{"who": "Tom", "a": ["cat", "<\u00a6mask\u00a6>"], "<\u00a6day\u00a6>": "<<d1omni sep>>"}'
    for name, (kind, asked, options, temperature) in OMNI_PROMPTS.items():
        ids = [*encode([("<|startoftext|><|reserved_7|>", True)]), *encode([(state, False)])]
        ids += encode([("<|reserved_8|>", True), (asked, False)])
        for option in options:
            ids += [*encode([("<|reserved_9|><|mask|>", True)]), *encode([(f" {option}", False)])]
            ids += encode([("<|reserved_10|>", True)])
        ids += encode([("<|reserved_11|>", True)])
        wanted = softmax(head_scores(omni_states(ids), kind, np.array(ids) == mask, OMNI_LAYERS), temperature)
        assert max(wanted) - min(wanted) > 1e-2
        assert listed(found.answers[name]) == pytest.approx(wanted, rel=1e-3), name
    assert omni.decide(None, QUESTIONS).answers != found.answers, "a question may be asked about nothing"


def test_omni_answers_alike_in_any_company(omni: localinfer.LLM) -> None:
    check_company(omni)
    assert omni.capabilities == ("decisions",)


def test_omni_cuts_long_texts_as_in_training(omni: localinfer.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a ball in the park " * 400
    (mask,) = omni.tokenizer.encode("<|mask|>", add_special=False, parse_special=True)
    monkeypatch.setattr(decision_readouts, "_MOST_TOKENS", 2000)
    decider = cast(Any, decision_model(engine_of(omni), model_of(omni), cast(Any, None)))._model
    for count, most_option, most_question in ((2, 45, 96), (4, 29, 128), (30, 22, 752)):
        question = Choice(instructions=long, options={f"{number} {long}": None for number in range(count)})
        ids = decider._encode(long, "x", question, {"x": question})
        places = np.flatnonzero(np.array(ids) == mask)
        assert set(np.diff(places)) == {most_option + 3}
        assert len(ids) == 2000 and places.size == count
        first = ids.index(omni.tokenizer.encode("<|reserved_8|>", add_special=False, parse_special=True)[0])
        assert places[0] - 1 - first == most_question


def test_an_encoder_of_convolutions_embeds(tmp_path: Path) -> None:
    write_skeleton(omni_skeleton(), tmp_path / "encoder.gguf")
    with localinfer.load(tmp_path / "encoder.gguf", context_length=256) as llm:
        texts = [llm.tokenizer.encode(text) for text in ("a", "Tom lost a ball.", "Where is it? " * 12)]
        for ids, states in zip(texts, llm.embed_many(texts, pooling="none", normalize=False), strict=True):
            np.testing.assert_allclose(states, omni_states(ids), rtol=2e-3, atol=2e-3)
