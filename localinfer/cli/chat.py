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
    """A line that starts with '/': its name, what /help says, and what it does with the rest of the line."""

    name: str
    help: str
    run: Callable[[str], None]


class Leave(Exception):
    """The user asked to end the chat."""


class Chat:
    """Turns lines into replies and commands, whatever keys or pipes they come from.

    Replies go to `output`, everything else to `notices`. shows_stats: the numbers of every reply follow it.
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
            Command("/clear", "forget the conversation", self._clear),
            Command("/system", "show the instructions, or set them: /system TEXT, /system off", self._system),
            Command("/regen", "answer the last message again", self._regenerate),
            Command("/stats", "numbers of the last reply", self._stats),
            Command("/exit", "leave", self._exit),
        )
        self.commands = {command.name: command for command in commands}

    def handle(self, text: str) -> None:
        """Run a command, or send a message and print the reply as it comes.

        A line that starts with '/' never reaches the model; a space before it makes it a message.
        Raises: Leave from /exit; LocalinferError if the message cannot be answered, which leaves no trace of it.
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
        """Tell the user something that the model did not say."""
        self._notices.write(f"{dim(neutralise_controls(text), self._notices)}\n")
        self._notices.flush()

    def _print_reply(self, reply: Generator[str]) -> None:
        output = ModelOutput(self._output, is_terminal=self._output.isatty())
        has_text = False
        try:
            with closing(reply):
                for piece in reply:
                    if piece:
                        self._end_reasoning()
                    has_text = has_text or bool(piece)
                    output.write(piece)
        except KeyboardInterrupt:
            self._end_reasoning()
            output.end_line()
            kept = "what was said stays in the conversation" if has_text else "nothing was said, so nothing changed"
            self.notice(f"stopped: {kept}")
        finally:
            self._end_reasoning()
            output.end_line()
        self._report()

    def _show_reasoning(self, text: str) -> None:
        """Show what the model reasons on a terminal, dimmed; a pipe gets the answer only."""
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
        self.notice(f"the context is full: the {num_messages} oldest messages are left out from here on")

    def _report(self) -> None:
        """Report what the last reply left out, and its numbers if they are wanted."""
        stats = self._conversation.last_stats
        if stats is None:
            return
        if self._shows_stats:
            self.notice(describe_stats(stats))
        elif stats.dropped_tokens:
            self.notice(f"the context is full: {stats.dropped_tokens} tokens before its recent half were left out")
        if self._conversation.context_is_full:
            self.notice(
                "the reply was cut where the context ends; the next message leaves out the oldest ones, /clear all of "
                "them, and --context-length N makes room for more"
            )

    def _help(self, _: str) -> None:
        for command in self.commands.values():
            self.notice(f"{command.name:<8}  {command.help}")
        self.notice("Enter sends, Alt-Enter or Ctrl-J starts a new line, Ctrl-C stops a reply, Ctrl-D leaves")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self.notice("the conversation is empty")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "off" else check_text(text, "the instructions")
        self.notice(f"instructions: {self._conversation.system or 'none'}")

    def _regenerate(self, _: str) -> None:
        if self._conversation.can_regenerate:
            self._print_reply(self._conversation.regenerate())
        else:
            self.notice("there is no reply to make again yet")

    def _stats(self, _: str) -> None:
        stats = self._conversation.last_stats
        self.notice("there is no reply yet" if stats is None else describe_stats(stats))

    def _exit(self, _: str) -> None:
        raise Leave


class CommandCompleter(Completer):
    """Completes the name of a command; never anything inside a message."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands = list(commands)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield the commands that start with what was typed."""
        typed = document.text_before_cursor
        if typed.startswith("/"):
            for command in self._commands:
                if command.name.startswith(typed):
                    yield Completion(command.name, start_position=-len(typed), display_meta=command.help)


class PrivateHistory(FileHistory):
    """Typed lines in a file that only its owner can read; a full disk never ends a chat."""

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
    """Enter sends; Alt-Enter and Ctrl-J start a new line. A pasted text is one message, however many lines it has."""
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
    """Talk until the input ends: with line editing on a terminal, one message per line from a pipe.

    describe_error: what a terminal shows of an error.
    Raises: LocalinferError for a message that cannot be answered, from a pipe only; a terminal shows it and goes on.
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
    except Leave:
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
    chat.notice("/help lists commands, Ctrl-D leaves")
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
