"""The commands of a chat, and how replies are printed."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TextIO

from localinfer.cli.chat.conversation import Conversation
from localinfer.terminal import ModelOutput, check_text, describe_stats, dim, neutralise_controls


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
