"""The `localinfer` command. Heavy modules are imported inside the command that needs them, so `--help` is instant."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from localinfer.apps.cli.bench import bench_command
from localinfer.apps.cli.cache import cache_command
from localinfer.apps.cli.chat import chat_command
from localinfer.apps.cli.completion import VARIABLE, complete, completion_command
from localinfer.apps.cli.decide import decide_command
from localinfer.apps.cli.doctor import doctor_command
from localinfer.apps.cli.embed import embed_command, rerank_command
from localinfer.apps.cli.help import ALL_HELP, GroupedCommand, first_sentence
from localinfer.apps.cli.launch import launch_command
from localinfer.apps.cli.mcp import mcp_command
from localinfer.apps.cli.messages import (
    begin_crash_reports,
    in_options,
    library_error,
    one_line,
    send_messages_to_stderr,
    unknown_command,
    usage_error,
    with_notes,
    wrapped_for,
)
from localinfer.apps.cli.models import (
    certify_command,
    list_command,
    pull_command,
    rm_command,
    show_command,
    warmup_command,
)
from localinfer.apps.cli.options import (
    COUNT,
    LoadOptions,
    config_model_named,
    constraint_options,
    flag,
    load_options,
    load_with,
    model_option,
    option,
    sampling_options,
    takes_config,
)
from localinfer.apps.cli.quantize import compare_command, perplexity_command, quantize_command
from localinfer.apps.cli.serve import ServeProcess, serve_command
from localinfer.apps.cli.sessions import sessions_command
from localinfer.apps.cli.standard_streams import ReadyLine, open_missing_streams, sidecar_streams
from localinfer.errors import LocalinferError, RequestError
from localinfer.generation.options import Constraint
from localinfer.system import interruption
from localinfer.system.interruption import EXIT_INTERRUPTED
from localinfer.system.parent_watch import ParentWatcher
from localinfer.terminal import ModelOutput, check_text, describe_stats, dim, prepare_streams

EXIT_BAD_INPUT = 2
EXIT_BROKEN_PIPE = 141
_NO_PROMPT = "no prompt: type `localinfer run -p TEXT`, or pipe a text into `localinfer run`"


def _show_version(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        from localinfer.kernels.versions import installed_version

        click.echo(f"localinfer {installed_version('localinfer')}")
        context.exit()


class _Commands(click.Group):
    """The commands, with suggestions for one that is not known.

    Refuses with an error where importing a library would abort the process for lack of memory.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            raise click.UsageError(unknown_command(args[0], args[1:], self), ctx)
        found = super().resolve_command(ctx, args)
        if not {"-h", "--help", ALL_HELP} & set(found[2]):
            from localinfer.kernels.address_space import require_libraries

            require_libraries(with_llvm=found[0] not in ("show", "sessions"))
            if isinstance(ctx.obj, ServeProcess) and ctx.obj.owns_process:
                begin_crash_reports(args[0])
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with the whole first sentence of its help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(one.help or "")) for name, one in sorted(self.commands.items())])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option(
    "--offline",
    is_flag=True,
    help="Reach nothing but this machine, whatever asks; the variable LOCALINFER_OFFLINE says the same.",
)
@click.pass_context
def localinfer_command(context: click.Context, offline: bool) -> None:
    """Run quantized language models locally.

    Without -m, commands use the model that your configuration file names, or else the small bundled demo model, which
    shows that everything works. `localinfer` alone says where that file is, and what to type first.
    """
    if offline:
        from localinfer.system.offline import begin

        begin()
    if context.invoked_subcommand is None:
        from localinfer.apps.cli.help import welcome
        from localinfer.kernels.versions import installed_version

        click.echo(welcome(installed_version("localinfer"), can_pull="pull" in localinfer_command.commands))


@localinfer_command.command("run", cls=GroupedCommand)
@option("-p --prompt", "TEXT", "Text to continue; '-' or a pipe reads standard input.")
@option("-n --max-tokens", "N", "Maximum tokens to add.", type=COUNT, default=256)
@load_options
@takes_config()
@sampling_options
@constraint_options
@option("--beams num_beams", "N", "Beam search with N beams instead of sampling.", type=COUNT)
@option("--stop", "TEXT", "Stop before this text; may be repeated.", multiple=True)
@flag("--ignore-eos", "Continue past the model's end-of-text token.")
@flag("--context-shift", "At the end of the context, continue with its recent half.")
@flag("--stats", "Report token counts, cache use and speed on stderr.")
@flag("--raw", "Leave out the note on a terminal that an instruct model answers with `chat -p`.")
def run_command(
    options: LoadOptions,
    prompt: str | None,
    max_tokens: int,
    num_beams: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    context_shift: bool,
    stats: bool,
    raw: bool,
    constraint: Constraint | None,
    **sampling: Any,
) -> None:
    """Continue a text.

    Only the completion goes to stdout, as it is generated. The prompt is used as it is, without the model's chat
    template: for an answer to a question, see `localinfer chat -p`. One newline at the end of a prompt from standard
    input is dropped.
    """
    text = _input_text(prompt, "the prompt", missing=_NO_PROMPT)
    for stop_text in stop:
        check_text(stop_text, "--stop")
    if num_beams is not None and (stop or context_shift or stats or constraint is not None):
        raise RequestError(
            "--beams cannot be combined with --stop, --context-shift, --stats or an output constraint; leave one of "
            "them out"
        )
    output = ModelOutput(sys.stdout, is_terminal=sys.stdout.isatty())
    with load_with(options) as llm:
        if llm.has_chat_template and not raw and sys.stderr.isatty():
            click.echo(dim(_ask_instead(options["model"]), sys.stderr), err=True)
        if num_beams is not None:
            found = llm.beam_search(text, num_beams=num_beams, max_tokens=max_tokens, ignore_eos=ignore_eos)
            output.write(found[0].text if found else "")
            if sys.stdout.isatty():
                output.end_line()
            return
        with llm.stream(
            text,
            max_tokens=max_tokens,
            stop=list(stop),
            ignore_eos=ignore_eos,
            context_shift=context_shift,
            constraint=constraint,
            **sampling,
        ) as stream:
            try:
                for event in stream:
                    output.write(event.text)
            finally:
                if sys.stdout.isatty():
                    output.end_line()
        if stats:
            click.echo(describe_stats(stream.stats), err=True)


@localinfer_command.command("tokenize")
@model_option
@takes_config()
@click.argument("text", required=False)
@flag("--ids", "Print only the ids, on one line.")
@flag("--no-special", "Do not add begin- or end-of-text tokens.")
@flag("--parse-special", "Parse the names of special tokens in TEXT as those tokens.")
def tokenize_command(model: str | None, text: str | None, ids: bool, no_special: bool, parse_special: bool) -> None:
    """Split TEXT into the model's tokens, one line each: id, then text.

    '-' or a pipe reads standard input; one newline at its end is dropped.
    """
    import localinfer
    from localinfer.storage.hub.installed import find_model

    source = _input_text(text, "TEXT", missing="no text: pass TEXT, or pipe it into standard input")
    tokenizer = localinfer.load_tokenizer(None if model is None else find_model(model))
    token_ids = tokenizer.encode(source, add_special=not no_special, parse_special=parse_special)
    if ids:
        click.echo(" ".join(map(str, token_ids)))
        return
    for token_id in token_ids:
        click.echo(f"{token_id}\t{tokenizer.decode([token_id])!r}")


for one in (
    chat_command,
    show_command,
    bench_command,
    cache_command,
    certify_command,
    completion_command,
    decide_command,
    doctor_command,
    embed_command,
    rerank_command,
    launch_command,
    mcp_command,
    pull_command,
    list_command,
    rm_command,
    quantize_command,
    compare_command,
    perplexity_command,
    serve_command,
    sessions_command,
    warmup_command,
):
    localinfer_command.add_command(one)
for one in (decide_command, embed_command, rerank_command, quantize_command, compare_command, perplexity_command):
    # Their models are arguments, and their contexts are not those of a chat.
    takes_config("threads")(one)


def _ask_instead(model: str | None) -> str:
    named = "" if model is None else f"-m {shlex.quote(model)} "
    return (
        "note: run continues the text as it is, and this is an instruct model; for an answer, type "
        f"`localinfer chat {named}-p TEXT` (--raw leaves this note out)"
    )


def _input_text(argument: str | None, what: str, *, missing: str) -> str:
    """The text of an argument, or of standard input where the argument is '-' or absent and input is piped."""
    if argument is not None and argument != "-":
        return check_text(argument, what)
    if argument is None and sys.stdin.isatty():
        raise RequestError(missing)
    return check_text(sys.stdin.read().removesuffix("\n").removesuffix("\r"), "standard input")


def _fail(message: str, error: BaseException, ready_line: ReadyLine | None) -> int:
    print(wrapped_for(sys.stderr, f"error: {one_line(message)}"), file=sys.stderr)
    if ready_line is not None:
        kind = type(error).__name__ if isinstance(error, LocalinferError | OSError) else "UsageError"
        ready_line.tell_error("OutOfMemoryError" if isinstance(error, MemoryError) else kind, one_line(message))
    return EXIT_BAD_INPUT


def _close_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush cannot fail again."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _invoke(words: list[str], process: ServeProcess) -> int:
    """Run the command without click's own handling of errors and Ctrl-C, which prints more than one line."""
    try:
        with localinfer_command.make_context("localinfer", words, obj=process) as context, config_model_named(context):
            localinfer_command.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return 0


def main(arguments: Sequence[str] | None = None, *, watch: ParentWatcher | None = None) -> int:
    """Run one command and return its exit code. watch: of the parent, if it has begun.

    0: success. 2: bad input, described in one line on stderr. 3: a reply of `chat -p` was cut. 130: interrupted by
    Ctrl-C. 141: stdout is a broken pipe.
    """
    open_missing_streams()
    prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    with sidecar_streams(words) as ready_line:
        return _run(words, ServeProcess(owns_process=arguments is None, ready_line=ready_line, watch=watch))


def _run(words: list[str], process: ServeProcess) -> int:
    command = localinfer_command.commands.get(words[0] if words else "", localinfer_command)
    send_messages_to_stderr(command)
    ready_line = process.ready_line
    try:
        with interruption.Interrupting():
            is_completing = process.owns_process and VARIABLE in os.environ and complete(localinfer_command)
            code = 0 if is_completing else _invoke(words, process)
            sys.stdout.flush()
        return code
    except click.UsageError as error:
        return _fail(usage_error(error, command, localinfer_command), error, ready_line)
    except click.ClickException as error:
        return _fail(with_notes(error, error.format_message()), error, ready_line)
    except LocalinferError as error:
        text = library_error(error, in_options(str(error), command), command, localinfer_command)
        return _fail(text, error, ready_line)
    except KeyboardInterrupt:
        interruption.take()
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return EXIT_BROKEN_PIPE
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        from localinfer.kernels.address_space import describe, is_shortage

        if is_shortage(error):
            way_out = describe() or "; use a smaller model or --context-length"
            return _fail(f"memory ran out ({str(error) or type(error).__name__}){way_out}", MemoryError(), ready_line)
        if not isinstance(error, OSError):
            raise
        _close_stdout()
        return _fail(f"the system refused: {error}", error, ready_line)
