"""The `localinfer decide` command: typed questions about states, answered by probabilities, as rows of JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.embed import lines_of, model_for_texts, read_texts
from localinfer.apps.cli.options import COUNT, devices_option, model_argument, option, threads_option
from localinfer.apps.evaluate.texts import read_text
from localinfer.errors import LocalinferError, RequestError
from localinfer.terminal import Progress, check_text, with_time_left

if TYPE_CHECKING:
    from localinfer.generation.decision_calibration import CalibrationReport, Example
    from localinfer.generation.questions import Answer, Decisions, Question
    from localinfer.llm import LLM

_ONLY = "answer"
"""Name of the question that --ask asks."""
_BAR = 40
_METHODS = ("temperature", "isotonic")


@click.command("decide")
@model_argument("model")
@click.argument("states", metavar="[STATE]...", nargs=-1)
@option("-q --questions", "FILE", "Ask the questions of FILE: a JSON object of name and question.")
@option("--ask", "TEXT", "Ask one question, whose answer is yes or no unless --option or --level is given.")
@option("--option options", "NAME", "An option that --ask chooses from; may be repeated.", multiple=True)
@option("--level levels", "TEXT", "A level that --ask rates by, the lowest first; may be repeated.", multiple=True)
@option("-f --file files", "FILE", "Read a state from each line of FILE; may be repeated.", multiple=True)
@option("--orders", "N", "Ask choices in N orders of their options, and average.", type=COUNT, default=1)
@option("--examples", "FILE", "Measure on labelled states: lines of JSON with the members state and expected.")
@option("--fit", "FILE", "Write a calibration that is fitted to --examples to FILE.")
@option(
    "--method", None, "Kind of that calibration.", type=click.Choice(["temperature", "isotonic"]), default="temperature"
)
@option("--calibration", "FILE", "Calibrate answers as FILE says, which --fit wrote.")
@option("-o --output", "FILE", "Write the rows to FILE.")
@option("-c --context-length", "N", "Maximum tokens of a state and a question. Default: as trained.", type=COUNT)
@devices_option
@threads_option
def decide_command(
    model: str,
    states: tuple[str, ...],
    questions: str | None,
    ask: str | None,
    options: tuple[str, ...],
    levels: tuple[str, ...],
    files: tuple[str, ...],
    orders: int,
    examples: str | None,
    fit: str | None,
    method: str,
    calibration: str | None,
    output: str | None,
    context_length: int | None,
    device: str,
    threads: int | None,
) -> None:
    """Answer typed questions about states by probabilities, without generating text.

    Without STATE and --file, each line of standard input is a state. A state is text, or JSON if it reads as an object,
    a list or a quoted text. Prints a line of JSON for each state and question. A question of --questions is
    {"type": "noul", "choice" or "score", "instructions": ..., "criteria": ...}, as the server's /v1/systemone reads it.

    With --examples, prints how often answers are right, and how well their probabilities say so: accuracy, expected
    calibration error and a table of reliability, as they are and as calibrated by the other half of the examples.
    """
    from localinfer.generation.decision_calibration import DecisionCalibration, fit_each
    from localinfer.system.files import check_output

    asked = _questions(questions, ask, options, levels)
    inputs = [one for one in (model, questions, examples, calibration, *files) if one is not None]
    for written in (output, fit):
        if written is not None:
            check_output(written, inputs=inputs)
    if fit is not None and examples is None:
        raise RequestError("--fit needs --examples, labelled states to fit to")
    fitted = None if calibration is None else DecisionCalibration.from_json(_json_file(calibration, "--calibration"))
    if examples is not None:
        if states or files or output is not None or fitted:
            raise RequestError("--examples has states of its own; leave STATE, --file, -o and --calibration out")
        labelled = _labelled(examples, asked)
        with model_for_texts(model, device, context_length, threads) as (llm, progress):
            found, digest = _examples(llm, labelled, asked, orders, progress)
        _report(found, method)
        if fit is not None:
            DecisionCalibration(digest, fit_each(asked, found, method=method, orders=orders)).save(fit)
        return
    wanted = [_state(text) for text in read_texts(states, files, "STATE")]
    with (
        model_for_texts(model, device, context_length, threads) as (llm, progress),
        _rows(output) as write,
    ):
        report = with_time_left(progress)
        for index, state in enumerate(wanted):
            report("deciding", index, len(wanted))
            decided = _decided(llm, index, len(wanted), state, asked, orders=orders, calibration=fitted)
            for name, answer in decided.answers.items():
                raw = decided.uncalibrated.get(name)
                extra = {} if raw is None else {"uncalibrated": _row(asked[name], raw)["probabilities"]}
                write({"index": index, "question": name, **_row(asked[name], answer), **extra})


def _questions(
    file: str | None, ask: str | None, options: Sequence[str], levels: Sequence[str]
) -> "dict[str, Question]":
    from localinfer.generation.questions import Choice, Score, YesNo, checked_question, read_question

    if (file is None) == (ask is None):
        raise RequestError("give the questions as one of --questions FILE and --ask TEXT")
    if file is None:
        assert ask is not None
        if options and levels:
            raise RequestError("--option makes a choice and --level a rating; give one kind")
        instructions = check_text(ask, "--ask")
        made: Question = YesNo(instructions=instructions)
        if options:
            made = Choice(instructions=instructions, options=dict.fromkeys(options))
        elif levels:
            made = Score(instructions=instructions, levels=levels)
        return {_ONLY: checked_question(made)}
    if options or levels:
        raise RequestError("--option and --level go with --ask; questions of a file have their own criteria")
    value = _json_file(file, "--questions")
    if not isinstance(value, dict) or not value:
        raise RequestError(f"{file} is no JSON object of questions by name; see `localinfer decide --help`")
    found = {}
    for name, question in value.items():
        try:
            found[name] = read_question(question)
        except RequestError as error:
            raise RequestError(f"{file}: question {name!r}: {error}") from None
    return found


def _json_file(file: str, name: str) -> Any:
    try:
        return json.loads(read_text(file, option=f"{name}: ", encoding="utf-8-sig"))
    except ValueError as error:
        raise RequestError(f"{name}: {file} is not JSON ({error})") from None


def _state(text: str) -> Any:
    """A state as JSON, where it reads so; a number or a word of JSON is text."""
    if text.lstrip()[:1] in ("{", "[", '"'):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _labelled(file: str, questions: "Mapping[str, Question]") -> list[tuple[Any, dict[str, int]]]:
    """States, and the indices of the right answers of some questions each."""
    from localinfer.generation.decision_calibration import right_answer

    found = []
    for number, line in enumerate(lines_of(read_text(file, option="--examples: ", encoding="utf-8-sig")), 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{file}, line {number} is not JSON ({error})") from None
        expected = value.get("expected") if isinstance(value, dict) else None
        if not isinstance(expected, dict) or "state" not in value:
            found_members = f"{file}, line {number} has no state, or no expected answers by question"
            raise RequestError(f'{found_members}; write {{"state": ..., "expected": {{"question": answer}}}}')
        right = {}
        for name, answer in expected.items():
            if name not in questions:
                raise RequestError(f"{file}, line {number} expects an answer to {name!r}, which is no question here")
            try:
                right[name] = right_answer(questions[name], answer)
            except RequestError as error:
                raise RequestError(f"{file}, line {number}, {name!r}: {error}") from None
        found.append((value["state"], right))
    if not found:
        raise RequestError(f"{file} has no line; give labelled states")
    return found


def _examples(
    llm: "LLM",
    labelled: Sequence[tuple[Any, Mapping[str, int]]],
    questions: "Mapping[str, Question]",
    orders: int,
    progress: Progress,
) -> "tuple[dict[str, list[Example]], str]":
    """The model's probabilities for labelled states, by question, and the model's digest."""
    from localinfer.generation.decision_calibration import Example
    from localinfer.generation.questions import probabilities_of

    report = with_time_left(progress)
    found: dict[str, list[Example]] = {}
    digest = ""
    for index, (state, right) in enumerate(labelled):
        report("deciding", index, len(labelled))
        asked = {name: questions[name] for name in right}
        if asked:
            decided = _decided(llm, index, len(labelled), state, asked, orders=orders)
            digest = decided.model
            for name, answer in decided.answers.items():
                found.setdefault(name, []).append(Example(probabilities_of(answer), right[name]))
    return found, digest


def _decided(
    llm: "LLM", index: int, count: int, state: Any, questions: "Mapping[str, Question]", **options: Any
) -> "Decisions":
    try:
        return llm.decide(state, questions, **options)
    except LocalinferError as error:
        if count == 1:
            raise
        raise RequestError(f"state {index + 1} of {count}: {error}") from None


def _row(question: "Question", answer: "Answer") -> dict[str, Any]:
    """The members of a row that say the answer: the likeliest one, its probability, and all of them."""
    from localinfer.generation.questions import Choice, ScoreAnswer, YesNo, YesNoAnswer, probabilities_of

    probabilities = probabilities_of(answer)
    best = max(range(len(probabilities)), key=lambda index: probabilities[index])
    names: list[str] = [str(level) for level in range(len(probabilities))]
    if isinstance(question, YesNo):
        names = ["yes", "no"]
    elif isinstance(question, Choice):
        names = list(question.options)
    row: dict[str, Any] = {"answer": names[best], "probability": probabilities[best]}
    if isinstance(answer, ScoreAnswer):
        row["score"] = answer.score
    if not isinstance(answer, YesNoAnswer):
        row["confidence"] = answer.confidence
    row["label_mass"] = answer.label_mass
    return {**row, "probabilities": dict(zip(names, probabilities, strict=True))}


def _report(found: "Mapping[str, Sequence[Example]]", method: str) -> None:
    from localinfer.generation.decision_calibration import LEAST_EXAMPLES, cross_measure, measure

    for name, examples in found.items():
        click.echo(f"{name}: {len(examples)} examples")
        _print_report("as it is", measure(examples))
        if len(examples) >= LEAST_EXAMPLES:
            _print_report(f"calibrated ({method}, each half by the other)", cross_measure(examples, method))
        else:
            click.echo(f"  too few to calibrate: at least {LEAST_EXAMPLES} are needed")


def _print_report(title: str, report: "CalibrationReport") -> None:
    quality = f"calibration error {report.error:.3f}, log loss {report.log_loss:.3f}"
    click.echo(f"  {title}: accuracy {report.accuracy:.3f}, {quality}")
    click.echo("    probability  answers  right")
    for tenth, (count, _, share) in enumerate(report.tenths):
        if count:
            bar = "#" * round(_BAR * share)
            click.echo(f"    {tenth / 10:.1f} to {(tenth + 1) / 10:.1f}   {count:>7}  {share:>5.2f}  {bar}")


@contextmanager
def _rows(output: str | None) -> Iterator[Any]:
    """A function that writes a row; a file appears once it is whole."""
    from localinfer.system.files import OutputFile

    if output is None:
        yield lambda row: click.echo(json.dumps(row, ensure_ascii=False))
        return
    with OutputFile(Path(output)) as file:
        yield lambda row: file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
