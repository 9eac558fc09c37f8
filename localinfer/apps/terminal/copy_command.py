"""The command that copies the last reply, or the code in it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from localinfer.apps.terminal.command import Command, beginning_with
from localinfer.apps.terminal.markdown import code_blocks
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat

CopyText = Callable[[str, Callable[[str], bool]], str]
"""As `clipboard.copy_to_clipboard`."""

_PARTS = ("code", "reply")


class CopyCommand:
    """/copy."""

    def __init__(self, chat: "Chat", copy_text: CopyText) -> None:
        self._chat = chat
        self._copy_text = copy_text

    def commands(self) -> tuple[Command, ...]:
        """The command."""
        return (
            Command(
                "/copy",
                "copy the last code block of the last reply; without one, all of it",
                self._copy,
                "[code|reply]",
                lambda typed: beginning_with(typed, _PARTS),
            ),
        )

    def _copy(self, part: str) -> None:
        if part not in ("", *_PARTS):
            self._chat.notice(
                f"/copy is given {part}; it takes nothing, code for the last code block, or reply for all"
            )
            return
        replies = [turn["content"] for turn in self._chat.conversation.turns if turn["role"] == "assistant"]
        if not replies:
            self._chat.notice("there is no reply yet")
            return
        blocks = [] if part == "reply" else code_blocks(replies[-1])
        if part == "code" and not blocks:
            self._chat.notice("the last reply has no code block; /copy reply copies all of it")
            return
        what, text = ("the last code block", blocks[-1]) if blocks else ("the whole last reply", replies[-1])
        try:
            by = self._copy_text(text, self._chat.send_to_terminal)
        except RequestError as error:
            self._chat.notice(str(error))
            return
        self._chat.notice(f"copied {what}, {_length(text)}, by {by}")


def _length(text: str) -> str:
    num_lines = len(text.splitlines())
    lines = f"{num_lines:,} lines of " if num_lines > 1 else ""
    return f"{lines}{len(text):,} character{'' if len(text) == 1 else 's'}"
