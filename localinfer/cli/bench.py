"""The `localinfer bench` command."""

from typing import Any

import click

from localinfer.progress import Progress

_COUNT = click.IntRange(min=1)
_MILLISECONDS = click.FloatRange(min=0, min_open=True)
_SERVE_ONLY = ("concurrency", "requests", "slo_ttft", "slo_itl")
_NOT_SERVE = ("context", "repetitions")


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Read whole numbers, separated by commas."""
    try:
        found = tuple(int(word) for word in value.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise click.BadParameter(f"{value!r} is not a list of numbers of streams; give some, such as 1,2,4,8.")
    return found


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
    help="Where localinfer computes; a GPU is measured by itself, or with --stream or --serve.",
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
@click.option("--serve", is_flag=True, help="Measure the server under load, over HTTP, as more and more streams run.")
@click.option(
    "--concurrency",
    callback=_numbers,
    default="1,2,4,8",
    show_default=True,
    metavar="N,N,...",
    help="With --serve: streams at one time.",
)
@click.option(
    "--requests", type=_COUNT, default=4, show_default=True, metavar="N", help="With --serve: requests of each stream."
)
@click.option(
    "--slo-ttft",
    type=_MILLISECONDS,
    default=1000.0,
    show_default=True,
    metavar="MS",
    help="With --serve: a reply in time has its first token within so many milliseconds,",
)
@click.option(
    "--slo-itl",
    type=_MILLISECONDS,
    default=100.0,
    show_default=True,
    metavar="MS",
    help="and the next ones, in the mean, every so many. Goodput counts replies in time.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="PNG that --roofline or --serve draws, with `pip install 'localinfer[plot]'`. Default: roofline.png for "
    "--roofline without --json, else none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every sample.")
def bench_command(
    model: str | None,
    compare: str | None,
    stream: bool,
    speculation: bool,
    draft: str | None,
    roofline: bool,
    serve: bool,
    output: str | None,
    as_json: bool,
    **measured: Any,
) -> None:
    """Measure how fast MODEL runs on this machine, and how near to what the machine can do.

    A table, or with --json one object, goes to stdout. Close what else is running: everything else that computes or
    reads memory lowers the figures. --serve ends with exit code 1 if a request failed, or a text differed under load.
    """
    from localinfer.bench.report import render_bench, render_json, render_roofline, render_speculation, render_stream

    _check(model, compare, stream, roofline, output if not serve else None, measured["peer_python"])
    load = {name: measured.pop(name) for name in _SERVE_ONLY}
    _check_speculation(speculation, draft, compare is not None or stream or roofline or serve)
    _check_serve(serve, compare is not None or stream or roofline)
    if serve:
        assert model is not None, "checked above"
        _serve(model, output, as_json, {**measured, **load})
        return
    on_gpu = measured["device"] != "cpu" and not stream
    if on_gpu and (compare is not None or speculation or roofline):
        raise click.UsageError(
            "--device cuda is measured by itself; leave --compare, --speculation and --roofline out, or add --stream."
        )
    if roofline:
        render, record = render_roofline, _roofline(model, output, as_json, measured)
    else:
        from localinfer.bench.decode import BenchSettings, run_bench, run_stream_bench

        assert model is not None, "checked above"
        settings = BenchSettings(model=model, peer=compare, **measured)
        render, run = (render_stream, run_stream_bench) if stream else (render_bench, run_bench)
        with Progress() as progress:
            if speculation:
                from localinfer.bench.speculation import run_speculation_bench

                render, record = render_speculation, run_speculation_bench(settings, draft, progress)
            elif on_gpu:
                from localinfer.bench.gpu import run_gpu_bench
                from localinfer.bench.report import render_gpu

                render, record = render_gpu, run_gpu_bench(settings, progress)
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
        raise click.UsageError("--output is where --roofline or --serve draws; add one of them.")
    if peer_python is not None and compare is None:
        raise click.UsageError("--peer-python is for --compare; add --compare llama-cpp-python.")


def _check_speculation(speculation: bool, draft: str | None, has_other: bool) -> None:
    if speculation and has_other:
        raise click.UsageError(
            "--speculation is measured alone; leave --compare, --stream, --roofline and --serve out."
        )
    if draft is not None and not speculation:
        raise click.UsageError("--draft is for --speculation; add it.")


def _check_serve(serve: bool, has_other: bool) -> None:
    if serve and has_other:
        raise click.UsageError("--serve is measured alone; leave --compare, --stream and --roofline out.")
    context = click.get_current_context()
    for name in _NOT_SERVE if serve else _SERVE_ONLY:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            way_out = "has no meaning with --serve; leave it out." if serve else "is for --serve; add it."
            raise click.UsageError(f"{option} {way_out}")


def _serve(model: str, output: str | None, as_json: bool, measured: dict[str, Any]) -> None:
    from localinfer.bench.load_figures import Objective
    from localinfer.bench.report import render_json
    from localinfer.bench.serve import ServeSettings, run_serve_bench
    from localinfer.bench.serve_report import render_serve

    if output is not None:
        from localinfer.bench.roofline_chart import require_matplotlib
        from localinfer.files import check_output

        check_output(output, inputs=[model])
        require_matplotlib()
    settings = ServeSettings(
        model=model,
        objective=Objective(first_token_seconds=measured["slo_ttft"] / 1e3, interval_seconds=measured["slo_itl"] / 1e3),
        **{name: measured[name] for name in ("concurrency", "requests", "prompt", "decode", "threads", "device")},
    )
    with Progress() as progress:
        record = run_serve_bench(settings, progress)
    click.echo(render_json(record) if as_json else render_serve(record))
    if output is not None:
        from localinfer.bench.serve_chart import draw_serve

        draw_serve(record, output)
        click.echo(f"drawn: {output}", err=True)
    if record["num_failed"] or record["same_text"]["different"]:
        raise click.exceptions.Exit(1)


def _roofline(model: str | None, output: str | None, as_json: bool, measured: dict[str, Any]) -> dict[str, Any]:
    from localinfer.bench.roofline import measure_roofline
    from localinfer.bench.roofline_chart import draw_roofline, require_matplotlib
    from localinfer.files import check_output

    path = output if output is not None or as_json else "roofline.png"
    if path is not None:
        check_output(path, inputs=[] if model is None else [model])
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
