"""The `localinfer quantize` command, and `compare` and `perplexity`, which measure models."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.options import (
    COUNT,
    device_option,
    flag,
    model_argument,
    option,
    options_group,
    threads_option,
)
from localinfer.apps.evaluate.texts import read_calibration
from localinfer.errors import LocalinferError, OutOfMemoryError, RequestError
from localinfer.terminal import Progress, with_time_left

if TYPE_CHECKING:
    from localinfer.apps.evaluate.measure import Comparison, SanityAnswer
    from localinfer.apps.quantize import Method
    from localinfer.llm import LLM


_LEAST_HELD_BACK = 8000
"""Held-back characters that fill at least one chunk; with fewer the bundled text is used for measuring."""


@click.command("quantize")
@model_argument("source")
@click.argument("target", metavar="TARGET")
@option(
    "--type type_name",
    "TYPE",
    "Preset, such as Q8_0, Q4_K_S or MXFP4_MOE; F16 or BF16: plain numbers. Default: Q4_K_M; Q8_0 of encoders.",
)
@option(
    "--method",
    None,
    "rtn: round to nearest; imatrix: weight errors by importance; gptq: compensate errors in later columns; awq: gptq "
    "after activation-aware scaling. auto: imatrix if --imatrix is given, else gptq below 8 bits, else rtn.",
    type=click.Choice(["auto", "rtn", "imatrix", "gptq", "awq"]),
    default="auto",
)
@option("--calibration", "PATH", "Text file, or folder of text files, to calibrate on. Default: bundled.")
@option("--calibration-tokens", "N", "Tokens of the calibration text to use.", type=COUNT, default=16384)
@option("--imatrix", "FILE", "Importance matrix, as written by llama-imatrix.")
@option("--save-imatrix", "FILE", "Write the importance matrix of the calibration text.")
@threads_option
@device_option("Where to calibrate; auto: a GPU if torch finds one, else the CPU.")
@option("--text", "FILE", "Text to measure the loss on. Default: bundled.")
@option("--chunks", "N", "Chunks of 512 tokens to measure the loss on; 0: none.", type=click.IntRange(min=0), default=4)
def quantize_command(
    source: str,
    target: str,
    type_name: str | None,
    method: "Method",
    calibration: str | None,
    calibration_tokens: int,
    imatrix: str | None,
    save_imatrix: str | None,
    threads: int | None,
    device: str,
    text: str | None,
    chunks: int,
) -> None:
    """Quantize SOURCE, a GGUF file or a Hugging Face folder, to the GGUF file TARGET.

    Types and sizes are those of llama.cpp's presets, and every GGUF runtime reads the file. At the end both models are
    compared on a text that was not used for calibration. If the same command is run again after an interrupted
    calibration, it resumes after the last finished layer. SOURCE may be a file of encoders for pictures or sounds
    (mmproj): their products are rounded to Q8_0, and the loss is that of embeddings.
    """
    from localinfer.apps.evaluate.report import render_quantization, render_summary
    from localinfer.apps.evaluate.texts import evaluation_text
    from localinfer.apps.quantize import quantize

    if method in ("rtn", "gptq", "awq") and imatrix is not None:
        raise click.UsageError(f"--method {method} uses no importance file; leave --imatrix out.")
    if (method == "rtn" or imatrix is not None) and (calibration is not None or save_imatrix is not None):
        raise click.UsageError("Nothing is calibrated this way; leave --calibration and --save-imatrix out.")
    from localinfer.apps.quantize_encoders import is_encoders

    if is_encoders(source):
        given = {"--imatrix": imatrix, "--save-imatrix": save_imatrix, "--calibration": calibration, "--text": text}
        named = next((name for name, value in given.items() if value is not None), None)
        if named is not None or method not in ("auto", "rtn"):
            raise click.UsageError(
                f"{named or '--method'} is for language models; {source} has encoders. Leave it out."
            )
        _quantize_encoders(source, target, type_name, threads, measures=chunks > 0)
        return
    content = evaluation_text(text)
    if text is None and calibration is not None:
        held_back = read_calibration(calibration).held_back
        content = held_back if len(held_back) >= _LEAST_HELD_BACK else content
    with Progress() as progress:
        model = quantize(
            source,
            target,
            type="Q4_K_M" if type_name is None else type_name,
            method=method,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            imatrix=imatrix,
            save_imatrix=save_imatrix,
            threads=threads,
            device=device,
            progress=with_time_left(progress),
        )
    click.echo(render_quantization(model))
    if not chunks:
        return
    try:
        found = _measure(source, target, content, chunks, threads)
    except LocalinferError as error:
        # The file is complete; only the comparison is missing.
        click.echo(f"loss not measured: {error}")
        return
    click.echo(f"against the source: {render_summary(found)}")


def _quantize_encoders(source: str, target: str, type_name: str | None, threads: int | None, *, measures: bool) -> None:
    from localinfer.apps.evaluate.report import render_quantization
    from localinfer.apps.quantize_encoders import DEFAULT_TYPE, embedding_loss, quantize_encoders

    with Progress() as progress:
        written = quantize_encoders(
            source, target, type=type_name or DEFAULT_TYPE, threads=threads, progress=with_time_left(progress)
        )
    click.echo(render_quantization(written))
    if measures:
        loss = embedding_loss(source, target, threads=threads)
        click.echo(f"against the source: embeddings differ by {loss:.1e} of their squared size")


def _measure(source: str, target: str, text: str, chunks: int, threads: int | None) -> "Comparison":
    import localinfer
    from localinfer.apps.evaluate.measure import CONTEXT_LENGTH, compare
    from localinfer.system.machine_limits import memory_limits

    needed = sum(_size(path) for path in (source, target))
    available = memory_limits().available_bytes
    if needed > available:
        raise OutOfMemoryError(
            f"both models together need {needed:,} bytes of memory, and {available:,} are free; compare them elsewhere "
            "with `localinfer compare`"
        )
    with (
        Progress() as progress,
        localinfer.load(source, threads=threads, speculation=None, progress=progress) as first,
        localinfer.load(target, threads=threads, speculation=None, progress=progress) as second,
    ):
        length = min(CONTEXT_LENGTH, first.context_length)
        report = with_time_left(progress)
        return compare(first, second, text, context_length=length, max_chunks=chunks, progress=report)


def _size(model: str) -> int:
    path = Path(model)
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


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
@option(
    "--image images",
    "PATH",
    "Compare answers about this picture, or those in this folder, and no text; may be repeated. --chunks: so many.",
    multiple=True,
)
@option("--mmproj", "FILE", "Encoders of BASE, and of CANDIDATE. Default: those beside each.")
@option("--candidate-mmproj", "FILE", "Encoders of CANDIDATE, where others.")
def compare_command(
    base: str,
    candidate: str,
    text: str | None,
    context_length: int,
    chunks: int | None,
    threads: int | None,
    as_json: bool,
    questions: bool | None,
    images: tuple[str, ...],
    mmproj: str | None,
    candidate_mmproj: str | None,
) -> None:
    """Measure the KL divergence of a quantized CANDIDATE from BASE, the model before quantization.

    TEXT is a file that neither was calibrated on; the default is a bundled text. With --image BASE describes each
    picture, and its words are what both predict.
    """
    from localinfer.apps.evaluate import report
    from localinfer.apps.evaluate.measure import LONGEST_ANSWER, compare, compare_pictures
    from localinfer.apps.evaluate.texts import evaluation_text, picture_files

    encoders = [mmproj or "auto", candidate_mmproj or mmproj or "auto"]
    if images:
        if text is not None:
            raise RequestError("TEXT and --image are two measurements; give one of them")
        pictures = picture_files(images)[:chunks]
    elif mmproj is not None or candidate_mmproj is not None:
        raise RequestError("encoders (--mmproj, --candidate-mmproj) are compared on pictures; add --image")
    content = "" if images else evaluation_text(text)
    if images and questions is None:
        questions = False
    # A sanity check may be longer than a chunk of --context-length.
    if questions is None and context_length < 2 * LONGEST_ANSWER:
        questions = False
    length = max(context_length, 2 * LONGEST_ANSWER) if questions else context_length
    with (
        Progress() as progress,
        _load(base, length, threads, progress, encoders[0] if images else None) as first,
        _load(candidate, length, threads, progress, encoders[1] if images else None) as second,
    ):
        told = with_time_left(progress)
        if images:
            found = compare_pictures(first, second, pictures, progress=told)
        else:
            found = compare(first, second, content, context_length=context_length, max_chunks=chunks, progress=told)
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


def _load(model: str, context_length: int, threads: int | None, progress: Progress, mmproj: str | None = None) -> "LLM":
    """Load a model to be measured; mmproj: the encoders of one that is shown pictures, whose sizes decide what it holds
    unless --context-length was given."""
    import localinfer

    options: Any = {"threads": threads, "speculation": None, "progress": progress, "mmproj": mmproj or "off"}
    source = click.get_current_context().get_parameter_source("context_length")
    if source is click.core.ParameterSource.DEFAULT:
        if mmproj is not None:
            return localinfer.load(model, **options)
        _check_context(model, context_length)
    return localinfer.load(model, context_length=context_length, **options)


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
