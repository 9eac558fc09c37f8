"""The `localinfer bench` command and its subcommands."""

import copy
from collections.abc import Callable
from typing import Any

import click

from localinfer.apps.cli.options import found_model
from localinfer.terminal import Progress

Record = dict[str, Any]
PEERS = ("llama-cpp-python", "openvino-genai", "ik-llama-cpp-python", "mistralrs")
"""Engines to compare with, by their distributions, as `worker.py` of `localinfer/apps/bench` has them."""


class _Bench(click.Group):
    """Runs the plain benchmark, with its own options, where the first argument is not a subcommand.

    `bench MODEL --serve` is `bench serve MODEL`, and likewise for every subcommand.
    """

    allow_interspersed_args = True

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        options = args[: args.index("--")] if "--" in args else args
        flags = [word for word in options if word.startswith("--") and word[2:] in self.commands]
        names = [word for word in args[:1] if word in self.commands] + [flag[2:] for flag in flags]
        words = [word for word in args[bool(args) and args[0] in self.commands :] if word not in flags]
        if len(set(names)) > 1:
            context = click.Context(self, parent, info_name)
            raise click.UsageError(f"--{names[0]} and --{names[1]} exclude each other; leave one of them out.", context)
        try:
            if not names:
                return super().make_context(info_name, words, parent, **extra)
            return self.commands[names[0]].make_context(f"{info_name} {names[0]}", words, parent, **extra)
        except click.NoSuchOption as error:
            others = {"": self, **self.commands}
            owners = [name for name in others if any(error.option_name in one.opts for one in others[name].params)]
            if names and owners:
                message = f"{error.option_name} has no meaning with --{names[0]}; leave it out."
                raise click.UsageError(message, error.ctx) from None
            if owners:
                flags_of_owners = " or ".join(f"--{owner}" for owner in owners)
                subcommands = " or ".join(f"`localinfer {info_name} {owner}`" for owner in owners)
                message = f"{error.option_name} is for {flags_of_owners}; use {subcommands}."
                raise click.UsageError(message, error.ctx) from None
            raise


def _stream_counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in value.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise click.BadParameter(f"{value!r} is not a list of numbers of streams; give some, such as 1,2,4,8.")
    return found


def _refuse_gpu(context: click.Context, parameter: click.Parameter, value: str) -> None:
    if value != "cpu":
        raise click.UsageError(
            f"--device {value} is for plain `localinfer bench`, --stream and --serve, without --compare; leave it out."
        )


def _number(name: str, description: str, default: float | None = None, **other: Any) -> click.Option:
    settings = {"type": click.IntRange(min=1), "metavar": "N", "show_default": default is not None, **other}
    return click.Option([name], default=default, help=description, **settings)


def _limit(name: str, description: str, default: float) -> click.Option:
    return _number(name, description, default, type=click.FloatRange(min=0, min_open=True), metavar="MS")


def _unused(option: click.Option, callback: Callable[..., Any] | None = None) -> click.Option:
    """A hidden option that a subcommand accepts and ignores, because the other subcommands have it."""
    hidden = copy.copy(option)
    hidden.hidden, hidden.expose_value, hidden.callback = True, False, callback
    return hidden


_MODEL = click.Argument(["model"], metavar="MODEL", callback=found_model)
_ANY_MODEL = click.Argument(["model"], metavar="[MODEL]", required=False, callback=found_model)
_PROMPT_OF_CHAT = _number("--prompt", "Tokens of the first message.", 384)
_DECODE_OF_CHAT = _number("--decode", "Tokens of each reply; 4 or more.", 64, type=click.IntRange(min=4))
_ROUNDS = _number("--repetitions", "Rounds over all configurations; figures are their medians.", 3)
_PROMPT = _number("--prompt", "Tokens to prefill.", 512)
_DECODE = _number("--decode", "Tokens to decode.", 128)
_CONTEXT = _number("--context", "Tokens in the context before decoding.", 32)
_REPETITIONS = _number("--repetitions", "Runs; figures are their medians.", 5)
_THREADS = _number("--threads", "CPU threads. Default: the library's choice.")
_DEVICE = click.Option(
    ["--device"],
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where localinfer computes.",
)
_COMPARE = click.Option(
    ["--compare"],
    type=click.Choice(PEERS),
    help="Compare with this engine, alternating with localinfer, on the same file and threads.",
)
_PEER_PYTHON = click.Option(
    ["--peer-python"], metavar="PATH", help="Python interpreter that has the other engine. Default: this one."
)
_DRAFT = click.Option(
    ["--draft"],
    metavar="MODEL",
    callback=found_model,
    help="A much smaller model of the same vocabulary, or one made for the model, in place of draft layers.",
)
_CONCURRENCY = click.Option(
    ["--concurrency"],
    callback=_stream_counts,
    default="1,2,4,8",
    show_default=True,
    metavar="N,N,...",
    help="Concurrent streams.",
)
_REQUESTS = _number("--requests", "Requests per stream.", 4)
_SLO_TTFT = _limit("--slo-ttft", "Goodput objective: time to the first token, in milliseconds.", 1000.0)
_SLO_ITL = _limit("--slo-itl", "Goodput objective: mean inter-token latency of a reply.", 100.0)
_OUTPUT = click.Option(["--output"], metavar="FILE", help="PNG chart to write; needs `pip install 'localinfer[plot]'`.")
_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object, with every sample.")

_COMPARED = [_MODEL, _PROMPT, _DECODE, _CONTEXT, _REPETITIONS, _THREADS, _DEVICE, _COMPARE, _PEER_PYTHON, _JSON]
_SPECULATION = [_MODEL, _DECODE, _REPETITIONS, _THREADS, _DRAFT, _JSON, _unused(_PROMPT), _unused(_CONTEXT)]
_ROOFLINE = [_PROMPT, _CONTEXT, _THREADS, _OUTPUT, _JSON, _unused(_DECODE), _unused(_REPETITIONS)]
_ABLATION = [_ANY_MODEL, _PROMPT_OF_CHAT, _DECODE_OF_CHAT, _ROUNDS, _THREADS, _OUTPUT, _JSON]
_SERVE = [_MODEL, _PROMPT, _DECODE, _THREADS, _DEVICE, _CONCURRENCY, _REQUESTS, _SLO_TTFT, _SLO_ITL, _OUTPUT, _JSON]


@click.group("bench", cls=_Bench, params=_COMPARED, invoke_without_command=True, subcommand_metavar="")
def bench_command(**options: Any) -> None:
    """Measure how fast MODEL runs here, and how near to the machine's limits.

    Prints a table, or with --json one object. Close other programs: whatever else computes or reads memory lowers the
    figures. `bench MODEL --serve` is the same as `bench serve MODEL`, and likewise for the other commands below.
    """
    from localinfer.apps.bench.decode import run_bench
    from localinfer.apps.bench.report import render_bench, render_gpu

    if options["device"] == "cpu":
        _measure(run_bench, render_bench, **options)
        return
    if options["compare"] is not None:
        raise click.UsageError("--device cuda has no --compare by itself; leave --compare out, or add --stream.")
    from localinfer.apps.bench.gpu import run_gpu_bench

    _measure(run_gpu_bench, render_gpu, **options)


@bench_command.command("stream", params=_COMPARED)
def stream_command(**options: Any) -> None:
    """Measure streamed completions, text to text; one thread unless --threads is given."""
    from localinfer.apps.bench.decode import run_stream_bench
    from localinfer.apps.bench.report import render_stream

    _measure(run_stream_bench, render_stream, **options)


def _measure(
    run: Callable[..., Record],
    render: Callable[[Record], str],
    *,
    compare: str | None,
    peer_python: str | None,
    as_json: bool,
    **measured: Any,
) -> None:
    from localinfer.apps.bench.decode import BenchSettings

    if peer_python is not None and compare is None:
        raise click.UsageError(f"--peer-python is for --compare; add --compare {PEERS[0]}.")
    settings = BenchSettings(peer=compare, peer_python=peer_python, **measured)
    with Progress() as progress:
        record = run(settings, progress)
    _print(record, render, as_json)


def _print(record: Record, render: Callable[[Record], str], as_json: bool) -> None:
    from localinfer.apps.bench.report import render_json

    click.echo(render_json(record) if as_json else render(record))


@bench_command.command("speculation", params=[*_SPECULATION, _unused(_DEVICE, _refuse_gpu)])
def speculation_command(draft: str | None, as_json: bool, **measured: Any) -> None:
    """Measure the speedup of speculative decoding, on new and on repeated text.

    Drafts are those of n-grams, and of a draft model, or else of the model's own draft layers (MTP), if it has some.
    """
    from localinfer.apps.bench.decode import BenchSettings
    from localinfer.apps.bench.report import render_speculation
    from localinfer.apps.bench.speculation import run_speculation_bench

    with Progress() as progress:
        record = run_speculation_bench(BenchSettings(**measured), draft, progress)
    _print(record, render_speculation, as_json)


@bench_command.command("roofline", params=[_ANY_MODEL, *_ROOFLINE, _unused(_DEVICE, _refuse_gpu)])
def roofline_command(model: str | None, output: str | None, as_json: bool, **measured: Any) -> None:
    """Measure the machine's roofline, and MODEL's ops under it.

    The chart is written to roofline.png, unless --json or --output is given.
    """
    from localinfer.apps.bench.charts import check_chart, roofline_figure, save_figure
    from localinfer.apps.bench.report import render_roofline
    from localinfer.apps.bench.roofline import measure_roofline

    path = output if output is not None or as_json else "roofline.png"
    if path is not None:
        check_chart(path, inputs=[] if model is None else [model])
    with Progress() as progress:
        record = measure_roofline(model, progress=progress, **measured)
    _print(record, render_roofline, as_json)
    if path is not None:
        save_figure(roofline_figure(record), path)
        click.echo(f"drawn: {path}", err=True)


@bench_command.command("ablation", params=[*_ABLATION, _unused(_CONTEXT), _unused(_DEVICE, _refuse_gpu)])
def ablation_command(model: str | None, output: str | None, as_json: bool, **measured: Any) -> None:
    """Measure what each optimisation is worth, one at a time, on MODEL or the demo model.

    From float16 weights on one thread, without reuse, drafts or batching, each is switched on in turn, and then each
    off from the whole. The chart is written to ablation.png, unless --json or --output is given.
    """
    from localinfer.apps.bench.ablation import run_ablation
    from localinfer.apps.bench.charts import ablation_figure, check_chart, save_figure
    from localinfer.apps.bench.decode import BenchSettings
    from localinfer.apps.bench.report import render_ablation
    from localinfer.loading.options import model_path

    path = output if output is not None or as_json else "ablation.png"
    if path is not None:
        check_chart(path, inputs=[] if model is None else [model])
    with Progress() as progress:
        record = run_ablation(BenchSettings(model=str(model_path(model)), **measured), progress)
    _print(record, render_ablation, as_json)
    if path is not None:
        save_figure(ablation_figure(record), path)
        click.echo(f"drawn: {path}", err=True)


@bench_command.command("serve", params=_SERVE)
def serve_command(
    model: str, slo_ttft: float, slo_itl: float, output: str | None, as_json: bool, **measured: Any
) -> None:
    """Measure the server under load, over HTTP.

    Ends with exit code 1 if a request failed, or a text differed under load.
    """
    from localinfer.apps.bench.charts import check_chart, save_figure, serve_figure
    from localinfer.apps.bench.figures import Objective
    from localinfer.apps.bench.report import render_serve
    from localinfer.apps.bench.serve import ServeSettings, run_serve_bench

    if output is not None:
        check_chart(output, inputs=[model])
    objective = Objective(first_token_seconds=slo_ttft / 1e3, interval_seconds=slo_itl / 1e3)
    with Progress() as progress:
        record = run_serve_bench(ServeSettings(model=model, objective=objective, **measured), progress)
    _print(record, render_serve, as_json)
    if output is not None:
        save_figure(serve_figure(record), output)
        click.echo(f"drawn: {output}", err=True)
    if record["num_failed"] or record["same_text"]["different"]:
        raise click.exceptions.Exit(1)
