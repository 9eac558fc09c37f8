"""The `localinfer` command. Heavy modules are imported inside the command that needs them, so `--help` is instant."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from localinfer.apps.cli.bench import bench_command
from localinfer.apps.cli.cache import cache_command
from localinfer.apps.cli.completion import VARIABLE, complete, completion_command
from localinfer.apps.cli.doctor import doctor_command
from localinfer.apps.cli.embed import embed_command, rerank_command
from localinfer.apps.cli.evaluate import compare_command, perplexity_command
from localinfer.apps.cli.grouped_help import ALL_HELP, GroupedCommand, first_sentence
from localinfer.apps.cli.mcp import mcp_command
from localinfer.apps.cli.messages import begin_crash_reports, in_options, one_line, send_messages_to_stderr, wrapped_for
from localinfer.apps.cli.models import list_command, pull_command, rm_command, show_command, warmup_command
from localinfer.apps.cli.next_command import library_error, unknown_command, usage_error, with_notes
from localinfer.apps.cli.one_shot import answer_once, is_one_shot, one_shot_options, read_message
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
from localinfer.apps.cli.quantize import quantize_command
from localinfer.apps.cli.serve import ServeProcess, serve_command
from localinfer.apps.cli.sessions import complete_name, sessions_command
from localinfer.apps.cli.standard_streams import ReadyLine, open_missing_streams, sidecar_streams
from localinfer.errors import LocalinferError, RequestError
from localinfer.generation.chat.constraints import Constraint
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
@click.pass_context
def localinfer_command(context: click.Context) -> None:
    """Run quantized language models locally.

    Without -m, commands use the model that your configuration file names, or else the small bundled demo model, which
    shows that everything works. `localinfer` alone says where that file is, and what to type first.
    """
    if context.invoked_subcommand is None:
        from localinfer.apps.cli.welcome import welcome
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


@localinfer_command.command("chat", cls=GroupedCommand)
@one_shot_options
@load_options
@takes_config()
@sampling_options
@constraint_options
@option("-n --max-tokens", "N", "Maximum tokens of a reply. Default: up to the end of the context.", type=COUNT)
@option("--system", "TEXT", "System prompt.")
@flag("--context-shift", "At the end of the context, continue with its recent half.")
@flag("--stats", "Report token counts, cache use and speed on stderr after every reply.")
@flag("--continue continues", "Continue the saved conversation that was changed last.")
@option("--session", "NAME", "Continue the saved conversation of this name, or begin it.", shell_complete=complete_name)
@flag("--no-history", "Keep nothing on disk: no conversation, no typed lines, no prompt cache.")
def chat_command(
    options: LoadOptions,
    prompt: str | None,
    files: tuple[str, ...],
    show_reasoning: bool,
    lines: bool,
    max_tokens: int | None,
    system: str | None,
    context_shift: bool,
    stats: bool,
    constraint: Constraint | None,
    continues: bool,
    session: str | None,
    no_history: bool,
    **sampling: Any,
) -> None:
    """Chat with a model.

    On a terminal: Enter sends, Alt-Enter starts a new line, Ctrl-C stops a reply, Ctrl-D exits, /help lists commands.

    With -p TEXT, or text in a pipe: all of it is one message, and only the answer is printed, as in `git diff |
    localinfer chat -p "Review this"`. Exit code 3: the answer was cut, as stderr says. With --lines each line of a pipe
    is a message of one conversation instead. With --continue or --session NAME, that message goes on with a saved
    conversation, and is saved in it with its answer.

    Conversations on a terminal are saved after every reply; 'localinfer sessions' lists, exports and deletes them.
    """
    if system is not None:
        check_text(system, "--system")
    if constraint is not None:
        sampling["constraint"] = constraint
    if is_one_shot(prompt, files, show_reasoning=show_reasoning, lines=lines):
        saving = None
        if continues or session is not None:
            from localinfer.apps.terminal.continuing import begin_saving

            saving = begin_saving(options, continues=continues, session=session, system=system, no_history=no_history)
        elif no_history:
            options["disk_cache"] = False
        message = read_message(prompt, files)
        with load_with(options) as llm:
            answer_once(
                llm,
                message,
                system=system,
                max_tokens=max_tokens,
                show_reasoning=show_reasoning,
                stats=stats,
                saved=None if saving is None else saving.saved,
                save=None if saving is None else saving.save,
                context_shift=context_shift,
                **sampling,
            )
        return
    from localinfer.apps.terminal.continuing import begin_saving
    from localinfer.apps.terminal.loop import run_chat

    saving = begin_saving(options, continues=continues, session=session, system=system, no_history=no_history)
    with load_with(options) as llm:
        run_chat(
            llm,
            system=system,
            max_tokens=max_tokens,
            stats=stats,
            model_name=options["model"],
            load_model=lambda name: load_with({**options, "model": name}),
            describe_error=lambda error: in_options(str(error), chat_command),
            saving=saving,
            context_shift=context_shift,
            pin_cache=True,
            **sampling,
        )


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
    from localinfer.storage.hub.find import find_model

    source = _input_text(text, "TEXT", missing="no text: pass TEXT, or pipe it into standard input")
    tokenizer = localinfer.load_tokenizer(None if model is None else find_model(model))
    token_ids = tokenizer.encode(source, add_special=not no_special, parse_special=parse_special)
    if ids:
        click.echo(" ".join(map(str, token_ids)))
        return
    for token_id in token_ids:
        click.echo(f"{token_id}\t{tokenizer.decode([token_id])!r}")


localinfer_command.add_command(show_command)
localinfer_command.add_command(bench_command)
localinfer_command.add_command(cache_command)
localinfer_command.add_command(completion_command)
localinfer_command.add_command(doctor_command)
localinfer_command.add_command(embed_command)
localinfer_command.add_command(rerank_command)
localinfer_command.add_command(mcp_command)
localinfer_command.add_command(pull_command)
localinfer_command.add_command(list_command)
localinfer_command.add_command(rm_command)
localinfer_command.add_command(quantize_command)
localinfer_command.add_command(compare_command)
localinfer_command.add_command(perplexity_command)
localinfer_command.add_command(serve_command)
localinfer_command.add_command(sessions_command)
localinfer_command.add_command(warmup_command)
for one in (embed_command, rerank_command, quantize_command, compare_command, perplexity_command):
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


def _is_completing() -> bool:
    """Answer a shell that asks what can follow, if one does."""
    return VARIABLE in os.environ and complete(localinfer_command)


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
            code = 0 if process.owns_process and _is_completing() else _invoke(words, process)
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
