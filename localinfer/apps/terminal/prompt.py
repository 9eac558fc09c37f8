"""The prompt of a chat: its keys, completion, and the history of typed lines."""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator

from prompt_toolkit.application import Application, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from localinfer.apps.terminal.command import Command
from localinfer.apps.terminal.keyboard import MOMENT_SECONDS, Interrupts
from localinfer.errors import RequestError
from localinfer.system.folders import user_folder

LEAVING_HINT = "Ctrl-C again, or Ctrl-D, leaves"


def key_bindings(
    interrupts: Interrupts,
    notice: Callable[[str], None],
    unfold: Callable[[], None],
    suspend: Callable[[], None],
    edit: Callable[[str], str | None],
) -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J start a new line; a pasted text of several lines is one message.

    Ctrl-C clears what was typed; where nothing was, it says that a second one leaves, by `notice` on a terminal that
    has no status line. Ctrl-O calls `unfold`, which may print, and Ctrl-Z `suspend`, which stops the process. Ctrl-G
    has `edit` change what is typed; it gives None, or raises RequestError, where that stays as it is.
    """
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif interrupts.press():
            event.app.exit(exception=EOFError)
        elif event.app.renderer.height_is_known:
            # It is in the status line for a moment.
            draw_again(event.app)
        else:
            run_in_terminal(lambda: notice(LEAVING_HINT))

    @bindings.add("c-o")
    def show_reasoning(_: KeyPressEvent) -> None:
        run_in_terminal(unfold)

    @bindings.add("c-g", filter=~is_searching)
    def edit_typed(event: KeyPressEvent) -> None:
        buffer = event.current_buffer

        def change() -> None:
            try:
                edited = edit(buffer.text)
            except RequestError as error:
                notice(str(error))
                return
            if edited is not None:
                buffer.document = Document(edited)

        run_in_terminal(change)

    @bindings.add("c-z")
    def stop(_: KeyPressEvent) -> None:
        run_in_terminal(suspend)

    return bindings


def draw_again(app: Application[str]) -> None:
    """Draw a running prompt anew when the moment after a Ctrl-C is over."""

    async def draw() -> None:
        await asyncio.sleep(MOMENT_SECONDS)
        app.invalidate()

    app.create_background_task(draw())


class CommandCompleter(Completer):
    """Completes commands and their arguments; nothing inside a message."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands = {command.name: command for command in commands}

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield what the text before the cursor may become."""
        typed = document.text_before_cursor
        if not typed.startswith("/") or "\n" in typed:
            return
        name, space, rest = typed.partition(" ")
        if not space:
            for command in self._commands.values():
                if command.name.startswith(typed):
                    yield Completion(command.name, start_position=-len(typed), display_meta=command.help)
        elif name in self._commands:
            for candidate in self._commands[name].complete(rest):
                yield Completion(candidate, start_position=-len(rest))


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
