"""The commands of a chat: their table, and what becomes of a line that was typed."""

import difflib
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TextIO

from localinfer.apps.terminal.attachments import AttachmentCommands
from localinfer.apps.terminal.command import Command, Exit, beginning_with
from localinfer.apps.terminal.conversation import Conversation
from localinfer.apps.terminal.conversation_commands import (
    ContextCommands,
    CopyCommand,
    CopyText,
    EditingCommands,
    EditText,
    SessionCommands,
    copy_to_clipboard,
    edit_in_editor,
)
from localinfer.apps.terminal.display_width import wrap_words
from localinfer.apps.terminal.mcp_calls import Confirm, MCPCalls
from localinfer.apps.terminal.model_commands import LoadModel, OptionCommands, SetCommand, ShowCommand
from localinfer.apps.terminal.reply_output import ReplyOutput, show_last_exchange
from localinfer.errors import RequestError, SessionFileError
from localinfer.system import interruption
from localinfer.terminal import check_text, dim, neutralise_controls

if TYPE_CHECKING:
    from localinfer.apps.mcp.client import MCPServers
    from localinfer.storage.conversations import ConversationStore

__all__ = ["Chat", "Command", "Exit"]

_KEYS = (
    ("Enter", "sends; Alt-Enter or Ctrl-J starts a new line"),
    ("Ctrl-C", "stops a reply, clears what is typed; a second one leaves"),
    ("Ctrl-D", "exits"),
    ("Ctrl-G", "opens what is typed in your editor"),
    ("Ctrl-O", "shows reasoning: the last, or while one comes; again folds it"),
    ("Tab", "completes commands and what may follow them, which /help NAME lists"),
    ("//", "begins a message with a slash"),
)


class Chat:
    """Turns input lines into replies and commands, from a terminal or a pipe.

    Replies go to `output`, everything else to `notices`. shows_stats: print the statistics of every reply after it.
    store: of saved conversations, for the commands; `conversation` saves itself. load_model, model_name: loads another
    model, and the name of the one that answers now. edit_text, copy_text: the user's editor and clipboard.
    reply_output: how replies are printed, if not as they come. servers, allowed_calls, confirm: MCP servers, whose
    tools the model may call: those allowed, by their names or their servers', and others where the user says so.
    `on_model_change` is called with the name of another model and the length of its context.
    """

    def __init__(
        self,
        conversation: Conversation,
        output: TextIO,
        notices: TextIO,
        *,
        shows_stats: bool = False,
        store: "ConversationStore | None" = None,
        load_model: LoadModel | None = None,
        model_name: str | None = None,
        edit_text: EditText = edit_in_editor,
        copy_text: CopyText = copy_to_clipboard,
        reply_output: ReplyOutput | None = None,
        servers: "MCPServers | None" = None,
        allowed_calls: Iterable[str] = (),
        confirm: Confirm | None = None,
    ) -> None:
        self.conversation = conversation
        self.store = store
        self._output = output
        self._notices = notices
        self.reply_output = ReplyOutput(output, notices) if reply_output is None else reply_output
        self.on_model_change: Callable[[str, int], None] | None = None
        self.attachments = AttachmentCommands(self)
        self._context = ContextCommands(self, shows_stats=shows_stats)
        self._options = OptionCommands(self, load_model, model_name)
        saving = SessionCommands(self, store)
        self._mcp = None if servers is None else MCPCalls(servers, allowed_calls, self.notice, confirm)
        conversation.on_reasoning = self.reply_output.write_reasoning
        conversation.on_messages_dropped = self._context.report_dropped
        conversation.on_compaction = self._context.report_compaction
        conversation.on_save_error = saving.report_failure
        commands = (
            Command("/help", "list the commands and keys", self._help, "[COMMAND]", self._complete_help),
            Command("/system", "show or set the system prompt", self._system, "[TEXT|off]", ("off",), may_raise=True),
            *EditingCommands(self, edit_text).commands(),
            *self.attachments.commands(),
            *SetCommand(self).commands(),
            *self._options.commands(),
            *ShowCommand(self).commands(),
            *self._context.commands(),
            *saving.commands(),
            *CopyCommand(self, copy_text).commands(),
            *(() if self._mcp is None else self._mcp.commands()),
            Command("/clear", "clear the conversation", lambda _: self.start_anew()),
            Command("/exit", "exit", self._exit),
        )
        self.commands = {command.name: command for command in commands}

    def handle(self, text: str) -> None:
        """Run a command, or send a message and print the reply as it is generated.

        A line that starts with '/' never reaches the model; '//' or a space before it makes it a message. One that is
        the path of a picture or sound, as terminals type a file that is dragged in, adds it to the next message.
        Raises: Exit from /exit; LocalinferError if the message cannot be answered; it is then not in the conversation.
        """
        if self.attachments.is_pasting:
            message = self.attachments.take(text)
            if message is not None:
                self.send(message)
        elif not text.strip() or (not text.startswith("//") and self.attachments.take_dropped(text)):
            return
        elif text.startswith("/") and not text.startswith("//"):
            self._run_command(text)
        else:
            self.send(text[1:] if text.startswith("//") else text)

    def end_input(self) -> None:
        """Send what was pasted without an end mark, as the input has ended. Raises: as `handle`."""
        message = self.attachments.end_paste()
        if message is not None:
            self.send(message)

    def close(self) -> None:
        """Close a model that was switched to; the first one is its loader's."""
        self._options.close()

    def send(self, text: str) -> None:
        """Send a message, with the files that wait for it, or the result of a call; print the reply."""
        text = check_text(text, "the message")
        if self.conversation.open_calls:
            if self.conversation.add_result(text):
                self.print_reply(self.conversation.regenerate())
            else:
                self._options.show_calls()
            return
        self.print_reply(self.conversation.reply(self.attachments.message(text)))
        if self.conversation.is_reply_kept:
            self.attachments.drop()

    def notice(self, text: str, *, hanging: int = 0, wraps: bool = True) -> None:
        """Print a line that is not model text. wraps: a terminal breaks it at spaces. hanging: as `wrap_words`."""
        text = neutralise_controls(text)
        if wraps and self._notices.isatty():
            text = wrap_words(text, self.reply_output.columns(), hanging=hanging)
        self._notices.write(f"{dim(text, self._notices)}\n")
        self._notices.flush()

    def send_to_terminal(self, sequence: str) -> bool:
        """Write a control sequence of ours; False where the output is no terminal."""
        if not self._output.isatty():
            return False
        self._output.write(sequence)
        self._output.flush()
        return True

    def print_reply(self, reply: Generator[str]) -> None:
        """Print a reply as it comes, and those behind the results of its calls; Ctrl-C stops it."""
        self._print(reply)
        while self._mcp is not None and self._mcp.answer(self.conversation):
            self._print(self.conversation.regenerate())
        self._options.show_calls()

    def offer_tools(self) -> None:
        """Tell the model of the tools of MCP servers."""
        if self._mcp is not None:
            self._mcp.offer(self.conversation)

    def _print(self, reply: Generator[str]) -> None:
        output = self.reply_output
        with output.printing():
            try:
                with closing(reply):
                    for delta in reply:
                        output.write(delta)
            except KeyboardInterrupt:
                interruption.take()
                output.end()
                kept = "the conversation is unchanged"
                if self.conversation.is_reply_kept:
                    kept = "the partial reply stays in the conversation, and /continue completes it"
                self.notice(f"stopped: {kept}")
        self._context.report_reply()

    def print_aside(self, text: Generator[str]) -> None:
        """Print what is no reply, as reasoning is printed; Ctrl-C stops it."""
        output = self.reply_output
        with output.printing():
            try:
                with closing(text):
                    for delta in text:
                        output.write_reasoning(delta)
            except KeyboardInterrupt:
                interruption.take()
                output.end()
                self.notice("stopped")

    def show_exchange(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Show the last exchange of a resumed conversation, to people: a pipe gets new replies alone."""
        if self._output.isatty():
            show_last_exchange(turns, self._output, self._notices)

    def start_anew(self) -> None:
        """Begin another conversation."""
        self.conversation.clear()
        self.attachments.drop()
        self.notice("conversation cleared")

    def _run_command(self, line: str) -> None:
        name, rest = (*re.split(r"\s+", line, maxsplit=1), "")[:2]
        command = self.commands.get(name)
        if command is not None:
            try:
                command.run(rest.strip())
            except (RequestError, SessionFileError) as error:
                if command.may_raise:
                    raise
                self.notice(str(error))
            return
        near = beginning_with(name, self.commands) or difflib.get_close_matches(name, self.commands, n=1)
        meant = f" (did you mean {' or '.join(near)}?)" if near and len(name) > 1 else ""
        self.notice(f"unknown command {name}{meant}; /help lists them, and a space or '/' before it sends it as text")

    def _help(self, name: str) -> None:
        wanted = self.commands.get(f"/{name.removeprefix('/')}") if name else None
        if wanted is not None:
            self.notice(f"{wanted.name} {wanted.arguments}".rstrip() + f": {wanted.help}")
            return
        if name:
            self.notice(f"there is no command /{name.removeprefix('/')}; /help lists them")
            return
        for command in self.commands.values():
            self.notice(f"{command.name:<9}  {command.help}", hanging=11)
        self.notice("")
        for keys, meaning in _KEYS:
            self.notice(f"{keys:<9}  {meaning}", hanging=11)

    def _complete_help(self, typed: str) -> list[str]:
        return beginning_with(typed, (name.removeprefix("/") for name in self.commands))

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "off" else check_text(text, "the system prompt")
        self.notice(f"system prompt: {self.conversation.system or 'none'}")

    def _exit(self, _: str) -> None:
        raise Exit
