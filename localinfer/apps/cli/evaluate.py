"""The `localinfer compare` and `localinfer perplexity` commands."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from localinfer.apps.cli.options import COUNT, flag, model_argument, option, options_group, threads_option
from localinfer.errors import LocalinferError, RequestError
from localinfer.terminal import Progress, with_time_left

if TYPE_CHECKING:
    from localinfer.apps.evaluate.measure import SanityAnswer
    from localinfer.llm import LLM

_measuring_options = options_group(
    click.argument("text", metavar="[TEXT]", required=False),
    option("--context-length", "N", "Tokens per chunk.", type=click.IntRange(min=4), default=512),
    option("--chunks", "N", "Stop after N chunks. Default: the whole text.", type=COUNT),
    threads_option,
    flag("--json as_json", "Print one JSON object."),
)


@click.command("perplexity")
@model_argument("model")
@_measuring_options
def perplexity_command(
    model: str, text: str | None, context_length: int, chunks: int | None, threads: int | None, as_json: bool
) -> None:
    """Measure MODEL's perplexity on the file TEXT, or on a bundled text.

    Chunks do not overlap, and only the second half of each is scored, as in llama.cpp's tool.
    """
    from localinfer.apps.evaluate.measure import measure_perplexity
    from localinfer.apps.evaluate.report import render_json, render_perplexity
    from localinfer.apps.evaluate.texts import evaluation_text

    content = evaluation_text(text)
    with Progress() as progress, _load(model, context_length, threads, progress) as llm:
        found = measure_perplexity(
            llm, content, context_length=context_length, max_chunks=chunks, progress=with_time_left(progress)
        )
    if as_json:
        click.echo(render_json(asdict(found)))
    else:
        click.echo(f"perplexity {render_perplexity(found)} over {found.num_tokens:,} predictions")


@click.command("compare")
@model_argument("base")
@model_argument("candidate")
@_measuring_options
@click.option(
    "--questions/--no-questions",
    default=None,
    help="Also run ten sanity checks: questions with known answers. Default: if BASE has a chat template and "
    "--context-length holds an answer.",
)
def compare_command(
    base: str,
    candidate: str,
    text: str | None,
    context_length: int,
    chunks: int | None,
    threads: int | None,
    as_json: bool,
    questions: bool | None,
) -> None:
    """Measure the KL divergence of a quantized CANDIDATE from BASE, the model before quantization.

    TEXT is a file that neither was calibrated on; the default is a bundled text.
    """
    from localinfer.apps.evaluate import report
    from localinfer.apps.evaluate.measure import LONGEST_ANSWER, compare
    from localinfer.apps.evaluate.texts import evaluation_text

    content = evaluation_text(text)
    # A sanity check may be longer than a chunk of --context-length.
    if questions is None and context_length < 2 * LONGEST_ANSWER:
        questions = False
    length = max(context_length, 2 * LONGEST_ANSWER) if questions else context_length
    with (
        Progress() as progress,
        _load(base, length, threads, progress) as first,
        _load(candidate, length, threads, progress) as second,
    ):
        found = compare(
            first,
            second,
            content,
            context_length=context_length,
            max_chunks=chunks,
            progress=with_time_left(progress),
        )
        asked = _ask(first, second, questions, progress)
    answers = asked if isinstance(asked, tuple) else None
    if as_json:
        record = report.comparison_record(found)
        if answers is not None:
            record["right_answers"] = [sum(answer.is_right for answer in one) for one in answers]
        click.echo(report.render_json(record))
        return
    click.echo(report.render_comparison(found))
    if answers is not None:
        click.echo(f"\n{report.render_answers(*answers)}")
    elif isinstance(asked, str):
        click.echo(f"\nsanity checks not run: {asked}")


def _ask(
    first: "LLM", second: "LLM", questions: bool | None, progress: Progress
) -> "tuple[list[SanityAnswer], list[SanityAnswer]] | str | None":
    """Both models' answers; the error as text if the checks failed; None if they are off or `first` cannot chat."""
    from localinfer.apps.evaluate.measure import ask

    if not (first.has_chat_template if questions is None else questions):
        return None
    try:
        return ask(first, progress=with_time_left(progress)), ask(second, progress=with_time_left(progress))
    except LocalinferError as error:
        if questions:
            raise
        # A template that refuses a plain question must not lose the figures.
        return str(error)


def _load(model: str, context_length: int, threads: int | None, progress: Progress) -> "LLM":
    import localinfer

    source = click.get_current_context().get_parameter_source("context_length")
    if source is click.core.ParameterSource.DEFAULT:
        _check_context(model, context_length)
    return localinfer.load(model, context_length=context_length, threads=threads, speculation=None, progress=progress)


def _check_context(model: str, context_length: int) -> None:
    """Refuse a default context that the model was not trained for."""
    from localinfer.models.load.loader import open_model_file, read_config

    file = open_model_file(model)
    try:
        trained = read_config(file).context_length
    finally:
        file.close()
    if context_length > trained:
        raise RequestError(
            f"chunks have {context_length} tokens, and {model} was trained for {trained}; give a --context-length of "
            "that or less"
        )
