"""`localinfer chat`: a conversation on a terminal, or one message per line from a pipe."""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from localinfer.cli.conversation import Conversation
from localinfer.cli.keystrokes import keystrokes_held
from localinfer.errors import LocalinferError
from localinfer.folders import user_folder
from localinfer.terminal import ModelOutput, check_text, describe_stats, dim, neutralise_controls

if TYPE_CHECKING:
    from localinfer.llm import LLM


@dataclass(frozen=True)
class Command:
    """A command that starts with '/': its name, its help, and a function of the rest of the line."""

    name: str
    help: str
    run: Callable[[str], None]


class Exit(Exception):
    """The user asked to end the chat."""


class Chat:
    """Turns input lines into replies and commands, from a terminal or a pipe.

    Replies go to `output`, everything else to `notices`. shows_stats: print the statistics of every reply after it.
    """

    def __init__(
        self, conversation: Conversation, output: TextIO, notices: TextIO, *, shows_stats: bool = False
    ) -> None:
        self._shows_stats = shows_stats
        self._conversation = conversation
        self._output = output
        self._notices = notices
        self._is_reasoning = False
        conversation.on_reasoning = self._show_reasoning
        conversation.on_messages_dropped = self._report_dropped
        commands = (
            Command("/help", "list the commands and keys", self._help),
            Command("/clear", "clear the conversation", self._clear),
            Command("/system", "show or set the system prompt: /system TEXT, /system off", self._system),
            Command("/regen", "regenerate the last reply", self._regenerate),
            Command("/stats", "statistics of the last reply", self._stats),
            Command("/exit", "exit", self._exit),
        )
        self.commands = {command.name: command for command in commands}

    def handle(self, text: str) -> None:
        """Run a command, or send a message and print the reply as it is generated.

        A line that starts with '/' never reaches the model; a space before it makes it a message.
        Raises: Exit from /exit; LocalinferError if the message cannot be answered; it is then not in the conversation.
        """
        if not text.strip():
            return
        if text.startswith("/"):
            name, _, rest = text.partition(" ")
            command = self.commands.get(name.strip())
            if command is None:
                self.notice(
                    f"unknown command {name.strip()}; /help lists them, and a space before '/' sends it as text"
                )
            else:
                command.run(rest.strip())
        else:
            self._print_reply(self._conversation.reply(check_text(text, "the message")))

    def notice(self, text: str) -> None:
        """Print a line that is not model text."""
        self._notices.write(f"{dim(neutralise_controls(text), self._notices)}\n")
        self._notices.flush()

    def _print_reply(self, reply: Generator[str]) -> None:
        output = ModelOutput(self._output, is_terminal=self._output.isatty())
        has_text = False
        try:
            with closing(reply):
                for delta in reply:
                    if delta:
                        self._end_reasoning()
                    has_text = has_text or bool(delta)
                    output.write(delta)
        except KeyboardInterrupt:
            self._end_reasoning()
            output.end_line()
            kept = "the partial reply stays in the conversation" if has_text else "the conversation is unchanged"
            self.notice(f"stopped: {kept}")
        finally:
            self._end_reasoning()
            output.end_line()
        self._report()

    def _show_reasoning(self, text: str) -> None:
        """Show reasoning, dimmed, on a terminal; a pipe gets the answer only."""
        if self._notices.isatty():
            self._is_reasoning = True
            self._notices.write(dim(neutralise_controls(text), self._notices))
            self._notices.flush()

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            self._notices.write("\n\n")
            self._notices.flush()

    def _report_dropped(self, num_messages: int) -> None:
        self.notice(f"the context is full: the {num_messages} oldest messages are left out from now on")

    def _report(self) -> None:
        stats = self._conversation.last_stats
        if stats is None:
            return
        if self._shows_stats:
            self.notice(describe_stats(stats))
        elif stats.dropped_tokens:
            self.notice(f"the context is full: {stats.dropped_tokens} tokens before its recent half were left out")
        if self._conversation.context_is_full:
            self.notice(
                "the reply was cut at the end of the context; the next message leaves out the oldest ones, /clear "
                "removes all, and --context-length N makes room for more"
            )

    def _help(self, _: str) -> None:
        for command in self.commands.values():
            self.notice(f"{command.name:<8}  {command.help}")
        self.notice("Enter sends, Alt-Enter or Ctrl-J starts a new line, Ctrl-C stops a reply, Ctrl-D exits")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self.notice("conversation cleared")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "off" else check_text(text, "the system prompt")
        self.notice(f"system prompt: {self._conversation.system or 'none'}")

    def _regenerate(self, _: str) -> None:
        if self._conversation.can_regenerate:
            self._print_reply(self._conversation.regenerate())
        else:
            self.notice("there is no reply to make again yet")

    def _stats(self, _: str) -> None:
        stats = self._conversation.last_stats
        self.notice("there is no reply yet" if stats is None else describe_stats(stats))

    def _exit(self, _: str) -> None:
        raise Exit


class CommandCompleter(Completer):
    """Completes the names of commands; nothing inside a message."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands = list(commands)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield the commands that start with the text before the cursor."""
        typed = document.text_before_cursor
        if typed.startswith("/"):
            for command in self._commands:
                if command.name.startswith(typed):
                    yield Completion(command.name, start_position=-len(typed), display_meta=command.help)


class PrivateHistory(FileHistory):
    """Typed lines in a file readable by its owner only; a full disk never ends a chat."""

    def store_string(self, string: str) -> None:
        """Append one entry, with undecodable bytes replaced."""
        try:
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))
        except OSError:
            return


def open_history() -> History:
    """The history file in the user's state folder, or one in memory where that folder cannot be written."""
    folder = user_folder("state")
    if folder is None:
        return InMemoryHistory()
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.close(descriptor)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return PrivateHistory(str(path))


def key_bindings() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J start a new line. A pasted text of several lines is one message."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def run_chat(
    llm: "LLM",
    *,
    system: str | None,
    max_tokens: int | None,
    stats: bool = False,
    describe_error: Callable[[LocalinferError], str] = str,
    **sampling: Any,
) -> None:
    """Chat until the input ends: with line editing on a terminal, one message per line from a pipe.

    describe_error: formats an error for the terminal.
    Raises: LocalinferError for a message that cannot be answered, from a pipe only; a terminal shows it and continues.
    """
    conversation = Conversation(llm, system=system, max_tokens=max_tokens, **sampling)
    chat = Chat(conversation, sys.stdout, sys.stderr, shows_stats=stats)
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with keystrokes_held(sys.stdin, sys.stdout) as mark_pastes:
                _run_terminal(chat, describe_error, mark_pastes)
        else:
            for line in sys.stdin:
                chat.handle(line.rstrip("\r\n"))
    except Exit:
        return


def _run_terminal(
    chat: Chat, describe_error: Callable[[LocalinferError], str], mark_pastes: Callable[[], None]
) -> None:
    session: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]),
        multiline=True,
        prompt_continuation="",
        key_bindings=key_bindings(),
        completer=CommandCompleter(chat.commands.values()),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        history=open_history(),
    )
    chat.notice("/help lists commands, Ctrl-D exits")
    while True:
        try:
            text = session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        mark_pastes()
        try:
            chat.handle(text)
        except LocalinferError as error:
            chat.notice(f"error: {describe_error(error)}")
        except KeyboardInterrupt:
            continue
