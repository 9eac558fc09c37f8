"""Perplexity and divergence against a plain computation, and the text that ships."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.apps.cli import main
from localinfer.apps.evaluate.measure import (
    QUESTIONS,
    Comparison,
    Perplexity,
    SanityAnswer,
    ask,
    compare,
    measure_perplexity,
)
from localinfer.apps.evaluate.report import comparison_record, render_answers, render_comparison, render_summary
from localinfer.apps.evaluate.texts import evaluation_text
from localinfer.errors import ContextLengthError, RequestError
from tests.models.small_models import write_small_llama

VOCAB, CONTEXT = 300, 64


class FakeTokenizer:
    """One id per byte, after a token for the beginning."""

    adds_bos, bos_token_id = True, 1

    def encode(self, text: str) -> list[int]:
        return [1, *text.encode()]


class FakeModel:
    """Logits that depend on the token and on its place in the chunk, plus noise of its own."""

    context_length, vocab_size = CONTEXT, VOCAB

    def __init__(self, noise: float, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or FakeTokenizer()
        generator = np.random.default_rng(1)
        self.table = generator.standard_normal((VOCAB, VOCAB)).astype(np.float32) * 3
        self.table += noise * np.random.default_rng(2).standard_normal((VOCAB, VOCAB)).astype(np.float32)
        self.seen: list[np.ndarray] = []

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        self.seen.append(token_ids)
        return self.table[token_ids] + np.arange(len(token_ids), dtype=np.float32)[:, None] / CONTEXT


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def expected(models: list[FakeModel], text: str) -> np.ndarray:
    """Per scored position: divergence of the second from the first, and the true token's probability in both."""
    token_ids = [1, *text.encode()]
    found = []
    for start in range(0, len(token_ids) - CONTEXT + 1, CONTEXT):
        chunk = token_ids[start : start + CONTEXT]
        given = np.array([1, *chunk[1:]])
        for position in range(CONTEXT // 2, CONTEXT - 1):
            first, second = (softmax(model.logits(given)[position]) for model in models)
            true = chunk[position + 1]
            found.append([(first * np.log(first / second)).sum(), first[true], second[true]])
    return np.array(found)


def test_compare_scores_the_second_half_of_each_chunk() -> None:
    text = evaluation_text()[: 3 * CONTEXT + 20]
    base, candidate = FakeModel(0), FakeModel(0.3)
    wanted = expected([FakeModel(0), FakeModel(0.3)], text)
    found = compare(base, candidate, text, context_length=CONTEXT)  # type: ignore[arg-type]
    assert found.num_tokens == 3 * (CONTEXT // 2 - 1)
    np.testing.assert_allclose(found.divergences, wanted[:, 0], rtol=1e-5, atol=1e-9)
    assert found.mean == pytest.approx(wanted[:, 0].mean())
    assert found.standard_error == pytest.approx(wanted[:, 0].std(ddof=1) / np.sqrt(len(wanted)))
    assert found.quantile(0.99) == pytest.approx(np.quantile(wanted[:, 0], 0.99))
    assert found.base.perplexity == pytest.approx(np.exp(-np.log(wanted[:, 1]).mean()), rel=1e-6)
    assert found.candidate.perplexity == pytest.approx(np.exp(-np.log(wanted[:, 2]).mean()), rel=1e-6)
    assert found.probability_change == pytest.approx(np.sqrt(((wanted[:, 2] - wanted[:, 1]) ** 2).mean()), rel=1e-5)
    assert 0.5 < found.same_top < 1
    assert all(seen[0] == 1 and len(seen) == CONTEXT for seen in base.seen)


def test_a_model_does_not_differ_from_itself() -> None:
    found = compare(FakeModel(0), FakeModel(0), evaluation_text(), context_length=CONTEXT, max_chunks=2)  # type: ignore[arg-type]
    assert (found.mean, found.same_top, found.probability_change) == (0, 1, 0)
    assert found.base == found.candidate


def test_perplexity_is_that_of_the_comparison_and_reports_progress() -> None:
    calls: list[tuple[str, int, int]] = []
    text = evaluation_text()
    found = measure_perplexity(
        FakeModel(0),
        text,
        context_length=CONTEXT,
        max_chunks=3,
        progress=lambda *call: calls.append(call),  # type: ignore[arg-type]
    )
    both = compare(FakeModel(0), FakeModel(1), text, context_length=CONTEXT, max_chunks=3)  # type: ignore[arg-type]
    assert found == both.base
    assert calls == [("measuring", index, 3) for index in range(3)]


def test_texts_and_models_that_do_not_fit_are_refused() -> None:
    class Other(FakeTokenizer):
        def encode(self, text: str) -> list[int]:
            return [1, *(byte + 1 for byte in text.encode())]

    model: Any = FakeModel(0)
    with pytest.raises(RequestError, match="6 tokens, but one chunk takes 64"):
        measure_perplexity(model, "short", context_length=CONTEXT)
    with pytest.raises(ContextLengthError, match="context of 64"):
        measure_perplexity(model, evaluation_text())
    other: Any = FakeModel(0, Other())
    with pytest.raises(RequestError, match="different tokens"):
        compare(model, other, evaluation_text(), context_length=CONTEXT)
    with pytest.raises(RequestError, match="check the path"):
        evaluation_text("no such file")


def test_the_text_is_long_enough_for_four_chunks_of_any_vocabulary() -> None:
    text = evaluation_text()
    assert len(text.split()) > 1600
    assert text.isprintable() or set(text) - set("\n") <= set(filter(str.isprintable, text))


def test_text_that_is_not_utf_8_is_refused(tmp_path: Any) -> None:
    (tmp_path / "text").write_bytes(b"good \xff bad")
    with pytest.raises(RequestError, match="not UTF-8 .* at byte 5"):
        evaluation_text(tmp_path / "text")


def test_reports_hold_every_figure() -> None:
    divergences = np.array([0.00005, 0.0005, 0.005, 0.05, 0.5, 5.0])
    found = Comparison(divergences, 0.5, 0.125, Perplexity(4, 0.5, 6), Perplexity(5, 0.6, 6))
    text = render_comparison(found)
    assert text.count("16.7 %") == 6
    for figure in (
        "mean       0.925925",
        "median     0.027500",
        "largest    5.000000",
        "50.00",
        "ratio 1.2500",
        "12.50 %",
    ):
        assert figure in text
    assert "KL divergence 0.92592" in render_summary(found)
    record = comparison_record(found)
    assert record["kl_divergence_nats"]["max"] == 5
    assert record["candidate"] == {"perplexity": 5, "standard_error": 0.6, "num_tokens": 6}


def test_questions_are_asked_one_by_one_and_judged_by_their_answers() -> None:
    class Chatty:
        def chat(self, messages: list[dict[str, str]], **options: Any) -> Any:
            assert len(messages) == 1
            assert options["temperature"] == 0
            answer = "Mercury, I think.\n" if "planet" in messages[0]["content"] else "I do not know."
            return type("Completion", (), {"text": answer})

    calls: list[tuple[str, int, int]] = []
    answers = ask(Chatty(), progress=lambda *call: calls.append(call))  # type: ignore[arg-type]
    assert calls == [("asking", index, 10) for index in range(10)]
    assert [answer.is_right for answer in answers].count(True) == 1
    assert len(QUESTIONS) == 10
    assert SanityAnswer(QUESTIONS[2], "It is 42.").is_right
    assert render_answers(answers, answers).endswith("right answers: 1 -> 1 of 10")


def test_chunks_longer_than_the_trained_context_are_refused_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_small_llama(tmp_path / "model.gguf")
    assert main(["perplexity", str(path)]) == 2
    error = capsys.readouterr().err
    assert "chunks have 512 tokens" in error and "was trained for 128; give a --context-length" in error
    assert main(["perplexity", str(path), "--context-length", "512"]) == 2
    assert "was trained for 128" not in capsys.readouterr().err.split("error: ")[1]
