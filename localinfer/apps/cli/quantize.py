"""The `localinfer quantize` command."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localinfer.apps.cli.options import COUNT, device_option, model_argument, option, threads_option
from localinfer.apps.evaluate.texts import read_calibration
from localinfer.errors import LocalinferError, OutOfMemoryError
from localinfer.terminal import Progress, with_time_left

if TYPE_CHECKING:
    from localinfer.apps.evaluate.measure import Comparison
    from localinfer.apps.quantize import Method

_LEAST_HELD_BACK = 8000
"""Held-back characters that fill at least one chunk; with fewer the bundled text is used for measuring."""


@click.command("quantize")
@model_argument("source")
@click.argument("target", metavar="TARGET")
@option(
    "--type type_name",
    "TYPE",
    "Preset, such as Q8_0, Q4_K_S or MXFP4_MOE; F16 or BF16: plain numbers.",
    default="Q4_K_M",
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
    type_name: str,
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
    calibration, it resumes after the last finished layer.
    """
    from localinfer.apps.evaluate.report import render_quantization, render_summary
    from localinfer.apps.evaluate.texts import evaluation_text
    from localinfer.apps.quantize import quantize

    if method in ("rtn", "gptq", "awq") and imatrix is not None:
        raise click.UsageError(f"--method {method} uses no importance file; leave --imatrix out.")
    if (method == "rtn" or imatrix is not None) and (calibration is not None or save_imatrix is not None):
        raise click.UsageError("Nothing is calibrated this way; leave --calibration and --save-imatrix out.")
    content = evaluation_text(text)
    if text is None and calibration is not None:
        held_back = read_calibration(calibration).held_back
        content = held_back if len(held_back) >= _LEAST_HELD_BACK else content
    with Progress() as progress:
        model = quantize(
            source,
            target,
            type=type_name,
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
