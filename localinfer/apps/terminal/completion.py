"""Completion at the prompt: names of commands, and what may follow them."""

from collections.abc import Iterable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from localinfer.apps.terminal.command import Command


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
