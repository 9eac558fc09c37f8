"""A drafter that fails is switched off and says so: the text is the one without it, token for token."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.engine.speculation.costs import DraftFloor, VerificationCosts
from localinfer.engine.speculation.draft_model import DraftModel
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.errors import ClosedError, ModelFileError, OutOfMemoryError, RequestError
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from localinfer.loading.options import model_path
from localinfer.quant.gguf.reader import read_gguf
from tests.engine.fakes import PAGE_BYTES, FakeModel, fake_model, hashed_logits
from tests.engine.speculation.test_speculation import PROMPT, ROWS, TokenIds

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"seed": 2, "logit_bias": {259: 3.0}, "repetition_penalty": 1.3},
]
ERRORS: list[Exception] = [
    ModelFileError("logits that are not finite"),
    OutOfMemoryError("no room"),
    ClosedError("the model was closed"),
    RequestError("wrong"),
    MemoryError(),
    RuntimeError("device lost"),
    AssertionError(),
    IndexError("index"),
    ZeroDivisionError("division"),
    OSError(5, "input/output error"),
]


def wide_model(logits_of: Callable[[TokenIds, int], Any] = hashed_logits, **sizes: Any) -> FakeModel:
    return fake_model(logits_of, max_batch_rows=8, max_output_rows=ROWS, **sizes)


def speculation(ngram: NgramDrafter | None, model: DraftModel | None = None) -> Speculation:
    costs = VerificationCosts([1.0] * ROWS)
    floor = DraftFloor(costs, most_credit=math.inf)
    return Speculation(costs, ngram=ngram, model=model, floor=floor, clock=lambda: 0.0)


def answers(drafting: Speculation | None, **options: Any) -> list[Completion]:
    with LLM(wide_model(), speculation=drafting) as llm:  # type: ignore[arg-type]
        return [llm.complete(PROMPT, **request, **options) for request in REQUESTS]


def texts(completions: Sequence[Completion]) -> list[tuple[list[int], str, str]]:
    return [(one.token_ids, one.text, one.finish_reason) for one in completions]


@cache
def plain_texts() -> list[tuple[list[int], str, str]]:
    """What is said without drafts."""
    return texts(answers(None))


def draft_model(logits_of: Callable[[TokenIds, int], Any] = hashed_logits, **sizes: Any) -> DraftModel:
    kv_memory = sizes.pop("kv_memory", None)
    model = DraftModel(wide_model(logits_of, **sizes), target_vocab_size=260, kv_memory=kv_memory)
    model.seconds_per_token = 0.0
    return model


def failing(error: Exception, length: int) -> Callable[[TokenIds, int], Any]:
    """Logits of a draft model that fails at a length of the text."""

    def logits(history: TokenIds, vocab_size: int) -> Any:
        if history.size >= length:
            raise error
        return hashed_logits(history, vocab_size)

    return logits


@pytest.mark.parametrize("length", [5, 20])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_draft_model_of_damaged_weights_is_switched_off(value: float, length: int) -> None:
    def damaged(history: TokenIds, vocab_size: int) -> Any:
        row = hashed_logits(history, vocab_size)
        row[7] = value if history.size >= length else row[7]
        return row

    drafting = speculation(None, draft_model(damaged))
    found = answers(drafting)
    assert texts(found) == plain_texts()
    assert drafting.model is None
    for one in found:
        assert len(one.stats.notices) == 1
        assert "the draft model was switched off" in one.stats.notices[0]
        assert "not finite" in one.stats.notices[0]


@pytest.mark.parametrize(
    ("error", "length"), list(zip(ERRORS, [5, 30] * 5, strict=True)), ids=[type(error).__name__ for error in ERRORS]
)
def test_whatever_a_draft_model_raises_the_text_is_as_without_it(error: Exception, length: int) -> None:
    drafting = speculation(NgramDrafter(), draft_model(failing(error, length)))
    found = answers(drafting)
    assert texts(found) == plain_texts()
    notice = found[-1].stats.notices[0]
    assert "draft" in notice and (str(error) or type(error).__name__) in notice or "kv_memory" in notice


def test_a_draft_model_that_was_closed_is_switched_off() -> None:
    model = draft_model()
    model.close()
    found = answers(speculation(None, model))
    assert texts(found) == plain_texts()
    assert "switched off" in found[0].stats.notices[0]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"kv_memory": 4 * PAGE_BYTES, "context_length": 16}, "context of 16 tokens is full"),
        ({"context_length": 20}, "context of 20 tokens is full"),
        ({"context_length": 5}, "context of 5 tokens is full"),
        ({"vocab_size": 200}, "does not know"),
    ],
)
def test_a_draft_model_that_is_too_small_leaves_off_and_says_so(sizes: dict[str, Any], words: str) -> None:
    drafting = speculation(None, draft_model(**sizes))
    found = answers(drafting)
    assert texts(found) == plain_texts()
    assert drafting.model is not None, "another text may be short enough"
    assert any(words in notice for one in found for notice in one.stats.notices)


class Nonsense:
    """A drafter from history that does what none should."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0

    def begin(self, prediction: TokenIds, salt: bytes) -> "Nonsense":
        if self.kind == "begin":
            raise RuntimeError("cannot begin")
        return self

    @property
    def match_length(self) -> int:
        if self.kind == "length":
            raise RuntimeError("no length")
        return 0 if self.kind == "zero" else 9

    def draft(self, tokens: TokenIds, out: TokenIds) -> int:
        self.calls += 1
        if self.kind == "draft" and self.calls > 3:
            raise MemoryError
        out[:] = {"beyond": 260, "far": 2**31 - 1, "negative": -1}.get(self.kind, 5)
        return {"many": out.size + 1, "minus": -1}.get(self.kind, out.size)


@pytest.mark.parametrize("kind", ["begin", "length", "draft", "beyond", "far", "negative", "many", "minus", "zero"])
def test_whatever_a_drafter_from_history_does_the_text_is_as_without_it(kind: str) -> None:
    drafting = speculation(Nonsense(kind))
    found = answers(drafting)
    assert texts(found) == plain_texts()
    if kind != "zero":
        assert drafting.ngram is None
        assert "drafts from former text were switched off" in found[-1].stats.notices[0]


@pytest.mark.parametrize(
    "prediction",
    [[], [257], [5] * 10_000, list(range(256)) * 3, "", "x" * 500, np.zeros(0, np.int32), [259] * 3],
    ids=["nothing", "end", "long", "all", "no text", "text", "no array", "roles"],
)
def test_whatever_is_predicted_the_text_is_the_same(prediction: Any) -> None:
    assert texts(answers(speculation(NgramDrafter()), prediction=prediction)) == plain_texts()


@pytest.mark.parametrize("prediction", [[260], [-1], [2**40], ["a"], [1.5], 5, {"a": 1}, [[1]], b"ab"])
def test_a_prediction_that_is_none_is_refused_by_its_name(prediction: Any) -> None:
    with (
        LLM(wide_model(), speculation=speculation(NgramDrafter())) as llm,  # type: ignore[arg-type]
        pytest.raises(RequestError, match="prediction"),
    ):
        llm.stream(PROMPT, prediction=prediction)


def test_an_error_of_the_model_comes_after_the_tokens_that_it_computes_without_drafts() -> None:
    def told(drafting: Speculation | None) -> tuple[list[int], str]:
        model = wide_model()
        model.program.fails_at = {20}
        tokens: list[int] = []
        with LLM(model, speculation=drafting) as llm:  # type: ignore[arg-type]
            try:
                tokens.extend(event.token_id for event in llm.stream(PROMPT, temperature=0))
            except MemoryError as error:
                return tokens, str(error)
        return tokens, "nothing was raised"

    plain = told(None)
    assert len(plain[0]) == 17 and plain[1] == "scripted failure"

    class Right(Nonsense):
        def draft(self, tokens: TokenIds, out: TokenIds) -> int:
            found = np.array([*PROMPT, *plain[0], *[1] * 20], np.int32)[tokens.size : tokens.size + out.size]
            out[: found.size] = found
            return int(found.size)

    assert told(speculation(Right("right"))) == plain


def test_a_draft_file_with_nan_in_its_weights_changes_no_text(tmp_path: Path) -> None:
    source = model_path(None)
    data = bytearray(source.read_bytes())
    with read_gguf(source) as file:
        norm = file.tensor_bytes("output_norm.weight").tobytes()
    start = data.index(norm)
    data[start : start + 4] = np.array([np.nan], np.float32).tobytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
    with localinfer.load(threads=1, speculation=None) as llm:
        plain = llm.complete("Once upon a time", **options)
    with localinfer.load(threads=1, draft=damaged) as llm:
        for _ in range(3):
            found = llm.complete("Once upon a time", **options)
            assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
