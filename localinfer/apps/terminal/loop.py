"""`localinfer chat`: prompts with keys, completion and history, or one message per line from a pipe."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.lexers import SimpleLexer
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from localinfer.apps.terminal.command import Command
from localinfer.apps.terminal.commands import Chat, Exit
from localinfer.apps.terminal.continuing import SavedChat, show_continued
from localinfer.apps.terminal.conversation import Conversation
from localinfer.apps.terminal.conversation_commands import edit_in_editor
from localinfer.apps.terminal.keyboard import MOMENT_SECONDS, PROMPT, Interrupts, Keystrokes, TypedAhead, sent
from localinfer.apps.terminal.live_terminal import LiveTerminal
from localinfer.apps.terminal.model_commands import LoadModel
from localinfer.apps.terminal.reply_output import ReplyOutput
from localinfer.apps.terminal.status_line import StatusLine
from localinfer.errors import LocalinferError, RequestError
from localinfer.generation.compaction import COMPACT_AT
from localinfer.system.folders import user_folder
from localinfer.terminal import dim, has_colour, neutralise_controls

if TYPE_CHECKING:
    from localinfer.apps.mcp.client import MCPServers
    from localinfer.llm import LLM


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
            for candidate in self._commands[name].candidates(rest):
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


EXIT_TERMINATED = 143
_STYLES = {"bottom-toolbar": "noreverse dim", "typed": "bold"}
_ECHOED_LINES = 12
"""Of a message that was typed ahead, where it is sent; the rest is counted."""


def run_chat(
    llm: "LLM",
    *,
    system: str | None,
    max_tokens: int | None,
    stats: bool = False,
    model_name: str | None = None,
    load_model: LoadModel | None = None,
    describe_error: Callable[[LocalinferError], str] = str,
    saving: SavedChat | None = None,
    servers: "MCPServers | None" = None,
    allowed_calls: Iterable[str] = (),
    **sampling: Any,
) -> None:
    """Chat until the input ends: with line editing on a terminal, one message per line from a pipe.

    model_name, load_model: the model's name, and what loads another. describe_error: formats an error for the terminal.
    saving: the conversation to continue, which a terminal saves after every reply, and a pipe never; None: nothing is
    kept, typed lines neither. servers, allowed_calls: as `Chat` has them.
    Raises: LocalinferError for a message that cannot be answered, from a pipe only; a terminal shows it and continues.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    saved = None if saving is None else saving.saved
    kept = saving if is_terminal else None
    conversation = Conversation(
        llm, system=system, max_tokens=max_tokens, saved=saved, save=None if kept is None else kept.save, **sampling
    )
    conversation.compact_at = COMPACT_AT
    options: dict[str, Any] = {"shows_stats": stats, "model_name": model_name, "load_model": load_model}
    options |= {"servers": servers, "allowed_calls": allowed_calls}
    if not is_terminal:
        _run_lines(Chat(conversation, sys.stdout, sys.stderr, **options))
        return
    if saved is not None and saved.turns:
        show_continued(saved, sys.stdout, sys.stderr)
        sys.stdout.write("\n")
    with Keystrokes(sys.stdin, sys.stdout) as keystrokes, _ended_by_termination():
        TerminalChat(conversation, keystrokes, kept, **options).run(describe_error)


def _run_lines(chat: Chat) -> None:
    try:
        chat.offer_tools()
        for line in sys.stdin:
            chat.handle(line.rstrip("\r\n"))
        chat.end_input()
    except Exit:
        return
    finally:
        chat.close()


def _label(model: str | None) -> str:
    """The name of a model in the status line."""
    return "demo" if model is None else Path(model).name.removesuffix(".gguf") or model


class TerminalChat:
    """A chat on a terminal: prompts, and between them replies while which further messages may be typed.

    On a dumb terminal, and where keys cannot be read while a reply comes, as on Windows (not tested there), they wait
    for the next prompt, and nothing is drawn but the text.
    """

    def __init__(
        self,
        conversation: Conversation,
        keystrokes: Keystrokes,
        saving: SavedChat | None,
        *,
        model_name: str | None,
        load_model: LoadModel | None,
        shows_stats: bool,
        servers: "MCPServers | None",
        allowed_calls: Iterable[str],
    ) -> None:
        self._history: History = InMemoryHistory() if saving is None else open_history()
        self._keystrokes = keystrokes
        self._conversation = conversation
        self._status = status = StatusLine(_label(model_name), conversation.llm.context_length)
        conversation.on_stream = status.begin
        self._interrupts = Interrupts()
        self._typed = TypedAhead(self._unfold)
        self._has_styles = has_colour(sys.stdout)
        self._is_live = keystrokes.is_held and os.environ.get("TERM") != "dumb"
        output: Any = sys.stdout
        notices: Any = sys.stderr
        live = None
        if self._is_live:
            output = live = LiveTerminal(
                sys.stdout, keystrokes, self._typed, status, self._interrupts, has_styles=self._has_styles
            )
            if sys.stderr.isatty():
                notices = live
        self._output = output
        self._replies = ReplyOutput(output, notices, live=live, status=status)
        store = None if saving is None else saving.store
        self._chat = Chat(
            conversation,
            output,
            notices,
            shows_stats=shows_stats,
            store=store,
            load_model=load_model,
            model_name=model_name,
            edit_text=self._edit,
            reply_output=self._replies,
            servers=servers,
            allowed_calls=allowed_calls,
            confirm=self._confirm,
        )
        self._chat.on_model_change = self._show_model

    def run(self, describe_error: Callable[[LocalinferError], str]) -> None:
        """Take messages and commands until one, or the keyboard, ends the chat."""
        session = self._prompt_session()
        model = f"{self._status.model_name}: {self._conversation.context_length:,} tokens of context"
        self._chat.notice(f"{model}. /help lists commands, Ctrl-D exits")
        self._chat.offer_tools()
        if self._is_live:
            self._output.write("\n")
            self._typed.begin(self._keystrokes.typed_before())
        try:
            while not self._interrupts.leaves:
                try:
                    text = self._next_message(session)
                    if text is None:
                        return
                    self._chat.handle(text)
                    if self._is_live and text.strip():
                        self._output.write("\n")
                except LocalinferError as error:
                    self._chat.notice(f"error: {describe_error(error)}")
                    if self._is_live:
                        self._output.write("\n")
                except KeyboardInterrupt as interrupt:
                    # Between a reply and a prompt.
                    self._interrupts.answer(interrupt)
        except Exit:
            return
        except KeyboardInterrupt as interrupt:
            # While the one before it was answered: the second within a moment.
            self._interrupts.answer(interrupt)
        finally:
            self._chat.close()

    def _edit(self, text: str) -> str | None:
        """Have the user's editor change a text, on the terminal as it was found; None if it was left unsaved."""
        self._keystrokes.release()
        try:
            return edit_in_editor(text)
        finally:
            self._keystrokes.hold()

    def _confirm(self, question: str) -> str | None:
        """Ask the user something between two replies; None where the question was left."""
        session: PromptSession[str] = PromptSession(question, reserve_space_for_menu=0)
        try:
            answer = session.prompt()
        except (EOFError, KeyboardInterrupt):
            return None
        self._keystrokes.mark_pastes()
        if self._is_live:
            self._typed.press_all(get_typeahead(session.input))
        return answer

    def _show_model(self, model: str | None, _context_length: int) -> None:
        """Name the model that answers from now on in the status line."""
        self._status.model_name = _label(model)

    def _next_message(self, session: PromptSession[str]) -> str | None:
        """The next message that was typed ahead, or one asked for; None at the end of the input."""
        typed = self._typed
        message = typed.take_message()
        if message is not None:
            self._echo(message)
            session.history.append_string(message)
            return message
        if typed.leaves:
            return None
        self._status.rest(self._conversation.context_used, self._conversation.context_length)
        try:
            text = session.prompt(default=typed.take_text(), pre_run=lambda: self._show_hint(session))
        except EOFError:
            return None
        self._keystrokes.mark_pastes()
        if self._is_live:
            # Keys that came with the last Enter belong before those that are typed from now on.
            keys = get_typeahead(session.input)
            typed.press_all(keys)
            if any(key_press.key == Keys.ControlC for key_press in keys):
                self._interrupts.press()
                self._chat.notice("stopped: the message was not sent")
                return ""
        return text

    def _echo(self, message: str) -> None:
        """Show a message that was typed ahead as the prompt would have."""
        lines = neutralise_controls(message).split("\n")
        first, *others = lines[:_ECHOED_LINES]
        self._output.write("\n".join([sent(first, has_styles=self._has_styles), *others]) + "\n")
        self._output.flush()
        if len(lines) > _ECHOED_LINES:
            self._chat.notice(f"({len(lines) - _ECHOED_LINES:,} more lines)")

    def _prompt_session(self) -> PromptSession[str]:
        return PromptSession(
            FormattedText([("bold ansicyan" if self._has_styles else "", PROMPT)]),
            multiline=True,
            prompt_continuation="",
            key_bindings=key_bindings(
                self._interrupts, self._chat.notice, self._show_last_reasoning, self._keystrokes.suspend, self._edit
            ),
            completer=CommandCompleter(self._chat.commands.values()),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            bottom_toolbar=self._toolbar if self._is_live else None,
            lexer=SimpleLexer("class:typed"),
            style=Style.from_dict(_STYLES if self._has_styles else {"bottom-toolbar": "noreverse"}),
            history=self._history,
        )

    def _toolbar(self) -> str:
        """The bottom line of the terminal while a prompt waits."""
        if self._interrupts.was_just_pressed:
            return LEAVING_HINT
        return self._status.text(get_app().output.get_size().columns)

    def _show_hint(self, session: PromptSession[str]) -> None:
        """Show the hint of a Ctrl-C that stopped a reply for as long as it is true."""
        if self._interrupts.was_just_pressed:
            draw_again(session.app)

    def _unfold(self) -> None:
        self._replies.shows_reasoning = not self._replies.shows_reasoning

    def _show_last_reasoning(self) -> None:
        """Print the reasoning of the last reply that had any."""
        reasoning = self._replies.last_reasoning.strip("\n")
        if reasoning:
            self._output.write(f"{dim(neutralise_controls(reasoning), self._output)}\n\n")
            self._output.flush()
        else:
            self._chat.notice("there is no reasoning yet")


@contextmanager
def _ended_by_termination() -> Iterator[None]:
    """Leave the block when the process is told to terminate, so that the terminal is restored."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(EXIT_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
