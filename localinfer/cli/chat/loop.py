"""`localinfer chat`: a conversation on a terminal, or one message per line from a pipe."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from localinfer.cli.chat.commands import Chat, Exit
from localinfer.cli.chat.completion import CommandCompleter
from localinfer.cli.chat.continuing import Saving, show_continued
from localinfer.cli.chat.conversation import Conversation
from localinfer.cli.chat.keystrokes import keystrokes_held
from localinfer.errors import LocalinferError
from localinfer.folders import user_folder

if TYPE_CHECKING:
    from localinfer.llm import LLM


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
    saving: Saving | None = None,
    **sampling: Any,
) -> None:
    """Chat until the input ends: with line editing on a terminal, one message per line from a pipe.

    describe_error: formats an error for the terminal. saving: the conversation to go on with, which a terminal
    saves after every reply, and a pipe never; None: nothing is kept, typed lines neither.
    Raises: LocalinferError for a message that cannot be answered, from a pipe only; a terminal shows it and continues.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    saved = None if saving is None else saving.saved
    kept = saving if is_terminal else None
    conversation = Conversation(
        llm, system=system, max_tokens=max_tokens, saved=saved, save=None if kept is None else kept.save, **sampling
    )
    store = None if kept is None else kept.store
    chat = Chat(conversation, sys.stdout, sys.stderr, shows_stats=stats, store=store)
    try:
        if is_terminal:
            if saved is not None and saved.turns:
                show_continued(saved, sys.stdout, sys.stderr)
            history = InMemoryHistory() if saving is None else open_history()
            with keystrokes_held(sys.stdin, sys.stdout) as mark_pastes:
                _run_terminal(chat, describe_error, mark_pastes, history)
        else:
            for line in sys.stdin:
                chat.handle(line.rstrip("\r\n"))
    except Exit:
        return


def _run_terminal(
    chat: Chat, describe_error: Callable[[LocalinferError], str], mark_pastes: Callable[[], None], history: History
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
        history=history,
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
