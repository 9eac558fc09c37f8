"""The `localinfer bench` command."""

from typing import Any

import click

from localinfer.progress import Progress

_COUNT = click.IntRange(min=1)


@click.command("bench")
@click.argument("model", metavar="MODEL", required=False)
@click.option("--prompt", type=_COUNT, default=512, show_default=True, metavar="N", help="Tokens to prefill.")
@click.option("--decode", type=_COUNT, default=128, show_default=True, metavar="N", help="Tokens to decode.")
@click.option(
    "--context", type=_COUNT, default=32, show_default=True, metavar="N", help="Tokens before those that are decoded."
)
@click.option(
    "--repetitions", type=_COUNT, default=5, show_default=True, metavar="N", help="Figures are medians of as many runs."
)
@click.option("--threads", type=_COUNT, metavar="N", help="CPU threads. Default: what the library chooses.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where localinfer computes; a GPU is measured with --stream.",
)
@click.option(
    "--compare",
    type=click.Choice(["llama-cpp-python"]),
    help="Measure this engine too, in turns with localinfer, on the same file and threads.",
)
@click.option("--peer-python", metavar="PATH", help="Python that has the other engine. Default: this one.")
@click.option("--stream", is_flag=True, help="Measure streamed completions, text to text; one thread unless told.")
@click.option("--speculation", is_flag=True, help="Measure what drafts bring, on new text and on text said before.")
@click.option("--draft", metavar="FILE", help="With --speculation: a much smaller model of the same vocabulary.")
@click.option(
    "--roofline", is_flag=True, help="Measure the machine's two ceilings, and where each op of MODEL is under them."
)
@click.option(
    "--output", metavar="FILE", help="Where --roofline draws its chart. Default: roofline.png; with --json, none."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every sample.")
def bench_command(
    model: str | None,
    compare: str | None,
    stream: bool,
    speculation: bool,
    draft: str | None,
    roofline: bool,
    output: str | None,
    as_json: bool,
    **measured: Any,
) -> None:
    """Measure how fast MODEL runs on this machine, and how near to what the machine can do.

    A table, or with --json one object, goes to stdout. Close what else is running: everything else that computes or
    reads memory lowers the figures.
    """
    from localinfer.bench_report import render_bench, render_json, render_roofline, render_speculation, render_stream

    _check(model, compare, stream, roofline, output, measured["peer_python"])
    if measured["device"] != "cpu" and not stream:
        raise click.UsageError("--device cuda is measured from text to text; add --stream.")
    _check_speculation(speculation, draft, compare is not None or stream or roofline)
    if roofline:
        render, record = render_roofline, _roofline(model, output, as_json, measured)
    else:
        from localinfer.bench import BenchSettings, run_bench, run_stream_bench

        assert model is not None, "checked above"
        settings = BenchSettings(model=model, peer=compare, **measured)
        render, run = (render_stream, run_stream_bench) if stream else (render_bench, run_bench)
        with Progress() as progress:
            if speculation:
                from localinfer.bench_speculation import run_speculation_bench

                render, record = render_speculation, run_speculation_bench(settings, draft, progress)
            else:
                record = run(settings, progress)
    click.echo(render_json(record) if as_json else render(record))


def _check(
    model: str | None, compare: str | None, stream: bool, roofline: bool, output: str | None, peer_python: str | None
) -> None:
    if model is None and not roofline:
        raise click.UsageError("Missing argument 'MODEL': the GGUF file to measure.")
    if roofline and (compare is not None or stream):
        raise click.UsageError("--roofline measures localinfer's ops; leave --compare and --stream out.")
    if output is not None and not roofline:
        raise click.UsageError("--output is where --roofline draws; add --roofline.")
    if peer_python is not None and compare is None:
        raise click.UsageError("--peer-python is for --compare; add --compare llama-cpp-python.")


def _check_speculation(speculation: bool, draft: str | None, has_other: bool) -> None:
    if speculation and has_other:
        raise click.UsageError("--speculation is measured alone; leave --compare, --stream and --roofline out.")
    if draft is not None and not speculation:
        raise click.UsageError("--draft is for --speculation; add it.")


def _roofline(model: str | None, output: str | None, as_json: bool, measured: dict[str, Any]) -> dict[str, Any]:
    from localinfer.roofline import measure_roofline
    from localinfer.roofline_chart import draw_roofline, require_matplotlib

    path = output if output is not None or as_json else "roofline.png"
    if path is not None:
        require_matplotlib()
    with Progress() as progress:
        record = measure_roofline(
            model,
            threads=measured["threads"],
            prompt=measured["prompt"],
            context=measured["context"],
            progress=progress,
        )
    if path is not None:
        draw_roofline(record, path)
        click.echo(f"drawn: {path}", err=True)
    return record
