"""`localinfer decide`: what it reads, prints, writes and refuses."""

import io
import json
import sys
from pathlib import Path

import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.generation.questions import Choice, ChoiceAnswer, Score, ScoreAnswer, YesNo, YesNoAnswer
from localinfer.models import demo

DEMO = str(Path(demo.__file__).parent / "demo-f16.gguf")
QUESTIONS = {
    "lost": {"type": "noul", "instructions": "Is it lost?"},
    "who": {"type": "choice", "criteria": {"Tom": None, "Lily": "a girl"}},
    "mood": {"type": "score", "criteria": ["sad", "happy"]},
}
SAME = {
    "lost": YesNo(instructions="Is it lost?"),
    "who": Choice(options={"Tom": None, "Lily": "a girl"}),
    "mood": Score(levels=["sad", "happy"]),
}


@pytest.fixture
def questions(tmp_path: Path) -> str:
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(QUESTIONS), encoding="utf-8")
    return str(file)


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["decide", DEMO, *words, "--threads", "1"]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    return [json.loads(line) for line in captured.out.splitlines()]


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["decide", DEMO, *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_each_state_and_question_is_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, questions: str, tmp_path: Path
) -> None:
    states = ["The ball is gone.", '{"ball": ["gone"]}', "3", '{"ball']
    with localinfer.load(threads=1) as llm:
        wanted = [llm.decide(one, SAME).answers for one in (states[0], {"ball": ["gone"]}, "3", '{"ball')]
    rows = rows_of(capsys, "-q", questions, *states)
    assert [(row["index"], row["question"]) for row in rows] == [(index, name) for index in range(4) for name in SAME]
    for row in rows:
        answer = wanted[row["index"]][row["question"]]  # type: ignore[index]
        assert row["label_mass"] == answer.label_mass
        match answer:
            case YesNoAnswer():
                assert row["probabilities"] == {"yes": answer.probability, "no": 1 - answer.probability}
                assert row["answer"] == ("yes" if answer.probability >= 0.5 else "no")
            case ChoiceAnswer():
                assert (row["answer"], row["probabilities"]) == (answer.choice, dict(answer.probabilities))
                assert row["probability"] == answer.probabilities[answer.choice]
            case ScoreAnswer():
                assert row["score"] == answer.score and row["confidence"] == answer.confidence
                assert row["probabilities"] == {str(index): one for index, one in enumerate(answer.probabilities)}
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(states)))
    assert rows_of(capsys, "-q", questions) == rows
    file, output = tmp_path / "states.txt", tmp_path / "rows.jsonl"
    file.write_text("\n".join(states[1:]) + "\n", encoding="utf-8")
    assert rows_of(capsys, "-q", questions, states[0], "-f", str(file), "-o", str(output)) == []
    assert [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] == rows


def test_a_state_may_have_any_separator_but_a_line_feed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    states = ['{"ball": "gone\u2028away"}', "It is lost.\x0cIt is red."]
    file = tmp_path / "states.txt"
    file.write_text("".join(f"{state}\n" for state in states), encoding="utf-8")
    rows = rows_of(capsys, "--ask", "Is it lost?", "-f", str(file))
    assert len(rows) == 2 and rows == rows_of(capsys, "--ask", "Is it lost?", *states)


def test_one_question_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    (yes,) = rows_of(capsys, "--ask", "Is it lost?", "The ball is gone.")
    (choice,) = rows_of(capsys, "--ask", "Who?", "--option", "Tom", "--option", "Lily", "The ball is gone.")
    (score,) = rows_of(capsys, "--ask", "How?", "--level", "sad", "--level", "happy", "The ball is gone.")
    assert yes["answer"] in ("yes", "no") and choice["answer"] in ("Tom", "Lily") and score["answer"] in ("0", "1")
    (turned,) = rows_of(
        capsys, "--ask", "Who?", "--option", "Tom", "--option", "Lily", "--orders", "2", "The ball is gone."
    )
    assert turned["probabilities"] != choice["probabilities"]


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_labelled_states_are_measured_and_fitted_to(
    capsys: pytest.CaptureFixture[str], questions: str, tmp_path: Path, method: str
) -> None:
    examples, fitted = tmp_path / "examples.jsonl", tmp_path / "fitted.json"
    lines = [
        {"state": f"Tom lost ball {number}.", "expected": {"lost": number % 3 > 0, "who": "Tom", "mood": number % 2}}
        for number in range(6)
    ]
    examples.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"state": "a", "expected": {}}]), "utf-8")
    words = ["-q", questions, "--examples", str(examples), "--fit", str(fitted), "--method", method]
    assert main(["decide", DEMO, *words]) == 0
    printed = capsys.readouterr().out
    assert printed.count("6 examples") == 3 and printed.count(f"calibrated ({method}") == 3 and "accuracy" in printed
    assert list(json.loads(fitted.read_text("utf-8"))["questions"]) == list(QUESTIONS)
    plain = rows_of(capsys, "-q", questions, "Tom lost it.")
    calibrated = rows_of(capsys, "-q", questions, "Tom lost it.", "--calibration", str(fitted))
    assert all(one["probabilities"] != other["probabilities"] for one, other in zip(plain, calibrated, strict=True))
    assert [one["uncalibrated"] for one in calibrated] == [one["probabilities"] for one in plain]
    assert "asked for" in error_of(capsys, "-q", questions, "a", "--calibration", str(fitted), "--orders", "2")
    assert [one["label_mass"] for one in plain] == [one["label_mass"] for one in calibrated]


def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], questions: str, tmp_path: Path) -> None:
    broken, listed, examples = tmp_path / "broken.json", tmp_path / "list.json", tmp_path / "examples.jsonl"
    broken.write_text("{", "utf-8")
    listed.write_text('{"a": {"type": "box"}}', "utf-8")
    assert "one of --questions FILE and --ask" in error_of(capsys, "a")
    assert "one of --questions FILE and --ask" in error_of(capsys, "-q", questions, "--ask", "b", "a")
    assert "is not JSON" in error_of(capsys, "-q", str(broken), "a")
    assert "question 'a': type is" in error_of(capsys, "-q", str(listed), "a")
    assert "cannot be read" in error_of(capsys, "-q", str(tmp_path / "none"), "a")
    assert "go with --ask" in error_of(capsys, "-q", questions, "--option", "b", "a")
    assert "give one kind" in error_of(capsys, "--ask", "b", "--option", "c", "--level", "d", "a")
    assert "give 2 to 255" in error_of(capsys, "--ask", "b", "--option", "c", "a")
    assert "--fit needs --examples" in error_of(capsys, "-q", questions, "--fit", str(tmp_path / "fitted"), "a")
    for line, words in (
        ("{", "line 1 is not JSON"),
        ('{"state": "a"}', "no expected answers"),
        ('{"expected": {}}', "no state"),
        ('{"state": "a", "expected": {"b": 1}}', "no question here"),
        ('{"state": "a", "expected": {"who": "Max"}}', "'who': the expected answer"),
    ):
        examples.write_text(line, "utf-8")
        assert words in error_of(capsys, "-q", questions, "--examples", str(examples)), line
    examples.write_text("", "utf-8")
    assert "has no line" in error_of(capsys, "-q", questions, "--examples", str(examples))
    assert "leave STATE" in error_of(capsys, "-q", questions, "--examples", str(examples), "a")
    assert "state 2 of 2" in error_of(capsys, "-q", questions, "a", "cat " * 3000)
