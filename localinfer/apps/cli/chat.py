"""The `localinfer chat` command; `chat -p`, and text that is piped into it, are one message and one answer."""

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.help import GroupedCommand
from localinfer.apps.cli.messages import in_options
from localinfer.apps.cli.options import (
    COUNT,
    LoadOptions,
    constraint_options,
    flag,
    load_options,
    load_with,
    option,
    sampling_options,
    takes_config,
)
from localinfer.apps.cli.sessions import complete_name
from localinfer.errors import ContextLengthError, RequestError
from localinfer.generation.chat.media_parts import read_media_part
from localinfer.generation.chat.messages import Content, checked_content
from localinfer.generation.compaction import COMPACT_AT
from localinfer.generation.options import Constraint
from localinfer.system.extras import require
from localinfer.terminal import ModelOutput, Progress, check_text, describe_stats, neutralise_controls

if TYPE_CHECKING:
    from localinfer.apps.mcp.client import MCPServers
    from localinfer.apps.terminal.conversation import Conversation
    from localinfer.generation.stream import Stats, TextStream
    from localinfer.llm import LLM
    from localinfer.storage.conversations import SavedConversation


EXIT_CUT = 3
"""Exit code where the reply was cut: it was printed, and is not whole."""

_MOST_BYTES = 16 << 20
"""Of one part of a message: more than the longest contexts hold, and what is counted in seconds."""
_LOOK_SECONDS = 0.2
_THOUGHTS_AT_ONCE = 16
"""Tokens of reasoning between two looks at the progress line."""
_GIVE_ONE = "pass -p TEXT, or pipe it into standard input"


@click.command("chat", cls=GroupedCommand)
@option("-p --prompt", "TEXT", "Send one message, print only the answer and exit; '-' reads standard input.")
@option("--file files", "FILE", "Add a text file to that message; may be repeated.", multiple=True)
@option("--image images", "FILE", "Add a picture to that message, before its text; may be repeated.", multiple=True)
@option("--audio audios", "FILE", "Add a sound to that message, before its text; may be repeated.", multiple=True)
@flag("--show-reasoning", "Print the model's reasoning before that answer to stderr.")
@flag("--lines", "Read a conversation from a pipe, one message per line.")
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
@option("--mcp", "FILE", "Let the model call tools of the MCP servers in this file, when you confirm.")
@option("--mcp-allow", "NAME", "Call this tool, or any of this server, unasked; may be repeated.", multiple=True)
@flag("--no-history", "Keep nothing on disk: no conversation, no typed lines, no prompt cache.")
def chat_command(
    options: LoadOptions,
    prompt: str | None,
    files: tuple[str, ...],
    images: tuple[str, ...],
    audios: tuple[str, ...],
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
    mcp: str | None,
    mcp_allow: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Chat with a model.

    On a terminal: Enter sends, Alt-Enter starts a new line, Ctrl-C stops a reply, Ctrl-D exits, /help lists commands.

    With -p TEXT, or text in a pipe: all of it is one message, and only the answer is printed, as in `git diff |
    localinfer chat -p "Review this"`. Exit code 3: the answer was cut, as stderr says. With --lines each line of a pipe
    is a message of one conversation instead. With --continue or --session NAME, that message continues a saved
    conversation, and is saved in it with its answer.

    --mcp FILE starts the servers of a file {"mcpServers": {NAME: {"command": ..., "args": [...]} or {"url": ...}}}
    for the chat (needs `pip install 'localinfer[mcp]'`). With -p nobody is asked, and calls need --mcp-allow.

    Conversations on a terminal are saved after every reply; 'localinfer sessions' lists, exports and deletes them.
    """
    if system is not None:
        check_text(system, "--system")
    if constraint is not None:
        sampling["constraint"] = constraint
    media = [*(("image", file) for file in images), *(("audio", file) for file in audios)]
    if is_one_shot(prompt, (*files, *images, *audios), show_reasoning=show_reasoning, lines=lines):
        saving = None
        if continues or session is not None:
            from localinfer.apps.terminal.continuing import begin_saving

            saving = begin_saving(options, continues=continues, session=session, system=system, no_history=no_history)
        elif no_history:
            options["disk_cache"] = False
        message = read_message(prompt, files, media)
        with started_servers(mcp, mcp_allow) as servers, load_with(options) as llm:
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
                servers=servers,
                allowed_calls=mcp_allow,
                **sampling,
            )
        return
    from localinfer.apps.terminal.continuing import begin_saving
    from localinfer.apps.terminal.loop import run_chat

    saving = begin_saving(options, continues=continues, session=session, system=system, no_history=no_history)
    with started_servers(mcp, mcp_allow) as servers, load_with(options) as llm:
        if servers is not None:
            servers.wait()
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
            servers=servers,
            allowed_calls=mcp_allow,
            pin_cache=True,
            **sampling,
        )


@contextmanager
def started_servers(config: str | None, allowed: Sequence[str]) -> "Iterator[MCPServers | None]":
    """The MCP servers of a file, which start while the model is loaded, and end with it. Raises: RequestError."""
    if config is None:
        if allowed:
            raise RequestError("--mcp-allow is for tools of MCP servers; add --mcp FILE")
        yield None
        return
    require("mcp", "--mcp")
    from localinfer.apps.mcp.client import MCPServers, read_config

    with MCPServers(read_config(config)) as servers:
        yield servers


@dataclass(frozen=True)
class OneMessage:
    """The parts of one message, each a name for people and the text that the model gets."""

    parts: tuple[tuple[str, str], ...]
    media: tuple[dict[str, str], ...] = ()
    """Pictures and sounds before the text, as plain data."""

    @property
    def content(self) -> Content:
        """The whole message."""
        text = "\n\n".join(text for _, text in self.parts)
        return [*self.media, text] if self.media else text


def is_one_shot(prompt: str | None, files: tuple[str, ...], *, show_reasoning: bool, lines: bool) -> bool:
    """True for one message, False for a chat. Raises: RequestError for options that exclude each other."""
    is_asked = prompt is not None or bool(files)
    if lines and is_asked:
        raise RequestError(
            "--lines reads a conversation from a pipe, -p, --file, --image and --audio make one message; leave one out"
        )
    if lines and _is_terminal_input():
        raise RequestError("--lines reads messages from a pipe, and nothing is piped; leave it out to chat here")
    is_piped = not lines and not _is_terminal_input()
    if prompt is None and not is_piped and (files or show_reasoning):
        name = "--file" if files else "--show-reasoning"
        raise RequestError(f"{name} is for one message; add -p TEXT")
    return is_asked or is_piped


def read_message(prompt: str | None, files: tuple[str, ...], media: Sequence[tuple[str, str]] = ()) -> OneMessage:
    """Make the message of -p, of files and of piped standard input, in this order; '-' or no prompt is that input.

    media: pictures and sounds, each as its type and path.

    Raises: RequestError if it would be empty, or a part is not text.
    """
    is_input = prompt is None or prompt == "-"
    first = _standard_input() if is_input else check_text(prompt or "", "the prompt")
    parts = [("standard input" if is_input else "the prompt", first)]
    parts += [(file, _labelled(file, _file_text(file))) for file in files]
    if not is_input and not _is_terminal_input():
        parts.append(("standard input", _standard_input()))
    if is_input and not first.strip():
        raise RequestError(f"standard input is empty, so there is no message; {_GIVE_ONE}")
    shown = [read_media_part({"type": kind, kind: Path(file)}, f"--{kind}") for kind, file in media]
    message = OneMessage(
        tuple((name, text) for name, text in parts if text.strip()),
        tuple(source.as_part() for source in shown if source is not None),
    )
    if not message.parts:
        raise RequestError(f"the message is empty; {_GIVE_ONE}")
    return message


def answer_once(
    llm: "LLM",
    message: OneMessage,
    *,
    system: str | None,
    max_tokens: int | None,
    show_reasoning: bool,
    stats: bool,
    saved: "SavedConversation | None" = None,
    save: "Callable[[SavedConversation], None] | None" = None,
    seed: int | None = None,
    servers: "MCPServers | None" = None,
    allowed_calls: Sequence[str] = (),
    **options: Any,
) -> None:
    """Print the answer to a message on stdout as it is generated, with a newline at its end, and nothing else.

    saved, save: a conversation that it continues, and the function that saves it; without one, nothing is kept.
    servers, allowed_calls: MCP servers, and what the model may call of them; other calls are refused.
    Raises: click's Exit with EXIT_CUT if the answer was cut, told on stderr; ContextLengthError with the tokens of each
        part if the message does not fit the context; RequestError if the conversation waits for the result of a call.
    """
    from localinfer.apps.terminal.conversation import Conversation

    conversation = Conversation(llm, system=system, max_tokens=max_tokens, seed=seed, saved=saved, save=save, **options)
    if waiting := conversation.open_calls:
        raise RequestError(
            f"the conversation waits for the result of a call of {waiting[0].name}, and not for a message; resume it "
            "by `localinfer chat --continue`"
        )
    conversation.on_messages_dropped = _tell_dropped
    conversation.on_compaction = _tell_compaction
    conversation.compact_at = None if saved is None else COMPACT_AT
    calls = None
    if servers is not None:
        from localinfer.apps.terminal.mcp_calls import MCPCalls

        servers.wait()
        calls = MCPCalls(servers, allowed_calls, lambda text: click.echo(neutralise_controls(text), err=True))
        calls.offer(conversation)
    try:
        _print_answer(conversation, conversation.reply(message.content), shows_reasoning=show_reasoning)
        while calls is not None and calls.answer(conversation):
            _print_answer(conversation, conversation.regenerate(), shows_reasoning=show_reasoning)
    except ContextLengthError:
        raise _too_long(conversation, message) from None
    last_stats = conversation.last_stats
    assert last_stats is not None, "there was a stream"
    if stats:
        click.echo(describe_stats(last_stats), err=True)
    _report(llm, last_stats, conversation.finish_reason, max_tokens)


def _tell_dropped(num_messages: int) -> None:
    click.echo(f"the context is full: the {num_messages} oldest messages are left out", err=True)


def _tell_compaction(before: int, after: int | None) -> None:
    if after is not None:
        click.echo(
            f"the conversation was summed up, as it filled the context: {before} tokens became {after}", err=True
        )


def _print_answer(conversation: "Conversation", reply: Generator[str], *, shows_reasoning: bool) -> None:
    """Print a reply as it comes."""
    output = ModelOutput(sys.stdout, is_terminal=sys.stdout.isatty())
    thoughts = ModelOutput(sys.stderr, is_terminal=sys.stderr.isatty())
    num_thoughts = 0
    with Progress() as progress, ExitStack() as reading:

        def begin(stream: "TextStream") -> None:
            reading.callback(_show_reading(stream, progress))

        def think(reasoning: str) -> None:
            nonlocal num_thoughts
            reading.close()
            num_thoughts += 1
            if shows_reasoning:
                progress.close()
                thoughts.write(reasoning)
            elif num_thoughts % _THOUGHTS_AT_ONCE == 0:
                progress(f"reasoning, {num_thoughts:,} tokens (--show-reasoning shows them)", 0, 0)

        conversation.on_stream, conversation.on_reasoning = begin, think
        try:
            with closing(reply) as deltas:
                for delta in deltas:
                    reading.close()
                    if delta:
                        progress.close()
                        thoughts.end_line()
                        output.write(delta)
        finally:
            reading.close()
            progress.close()
            thoughts.end_line()
            output.end_line()


def _show_reading(stream: "TextStream", progress: Progress) -> Callable[[], None]:
    """Show on a terminal how much of a prompt has been computed, until the function that is returned is called."""
    ended = threading.Event()

    def watch() -> None:
        total = stream.stats.prompt_tokens
        while not ended.wait(_LOOK_SECONDS):
            progress("reading the message, tokens", min(stream.computed_tokens, total), total)

    thread = threading.Thread(target=watch, daemon=True)
    if sys.stderr.isatty():
        thread.start()

    def end() -> None:
        ended.set()
        if thread.is_alive():
            thread.join()

    return end


def _report(llm: "LLM", stats: "Stats", finish_reason: str | None, max_tokens: int | None) -> None:
    if stats.dropped_tokens:
        click.echo(
            f"the context was full: {stats.dropped_tokens:,} tokens before its recent half were left out", err=True
        )
    if finish_reason != "length":
        return
    is_limited = max_tokens is not None and stats.completion_tokens >= max_tokens
    if is_limited:
        why = f"at -n {max_tokens:,}; a larger -n gives more"
    else:
        why = f"at the end of the context of {llm.context_length:,} tokens; --context-length N makes room for more"
    click.echo(f"the reply was cut after {stats.completion_tokens:,} tokens, {why}", err=True)
    raise click.exceptions.Exit(EXIT_CUT)


def _too_long(conversation: "Conversation", message: OneMessage) -> ContextLengthError:
    # The older messages of a conversation were left out before.
    messages: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}] if conversation.system else []
    messages.append({"role": "user", "content": checked_content(message.content)})
    llm = conversation.llm
    num_tokens = llm.count_chat_tokens(messages)
    shares = [f"{name} {len(llm.tokenizer.encode(text, add_special=False)):,}" for name, text in message.parts]
    of_these = f" ({', '.join(shares)})" if len(shares) > 1 else ""
    return ContextLengthError(
        f"the message takes {num_tokens:,} tokens{of_these}, but the context holds {llm.context_length:,}; shorten it, "
        "or pass a larger --context-length, or --context-shift to keep its end",
        num_tokens=num_tokens,
        context_length=llm.context_length,
    )


def _is_terminal_input() -> bool:
    """True if standard input is a terminal, or closed."""
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


def _standard_input() -> str:
    """All of standard input, without one newline at its end."""
    if sys.stdin is None or sys.stdin.closed:
        raise RequestError(f"standard input is closed, so there is no message; {_GIVE_ONE}")
    if sys.stdin.isatty():
        click.echo("type the message; Ctrl-D at the start of a line ends it", err=True)
        text = sys.stdin.read(_MOST_BYTES + 1)
    else:
        with Progress() as progress:
            progress("waiting for the end of standard input", 0, 0)
            text = sys.stdin.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise RequestError(
            f"standard input is longer than {_MOST_BYTES:,} bytes, more than a context holds; shorten it"
        )
    if "\0" in text:
        raise RequestError("standard input holds a NUL character, so it is not text; pipe text, such as `git diff`")
    return check_text(text.removesuffix("\n").removesuffix("\r"), "standard input")


def _file_text(file: str) -> str:
    """The text of a file, without a newline at its end. Raises: RequestError naming it."""
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except IsADirectoryError:
        raise RequestError(f"--file: {file} is a folder; name the files in it, each with its own --file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"--file: {file} cannot be read: {reason}; check the path") from None
    if len(content) > _MOST_BYTES:
        raise RequestError(f"--file: {file} is longer than {_MOST_BYTES:,} bytes, more than a context holds; cut it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"--file: {file} is not UTF-8 text ({error.reason} at byte {error.start}); convert it, or leave it out"
        ) from None
    if "\0" in text:
        raise RequestError(f"--file: {file} is not text (a NUL byte at {content.index(0)}); leave it out")
    return text.replace("\r\n", "\n").removesuffix("\n")


def _labelled(file: str, text: str) -> str:
    """A file as a part of a message: its name, then its text between fences that it does not hold itself."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"File {neutralise_controls(Path(file).name)}:\n{fence}\n{text}\n{fence}"
