"""Commands that change what was said: make again, edit, undo, fork, continue."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from localinfer.apps.terminal.command import Command
from localinfer.errors import RequestError, SessionFileError
from localinfer.terminal import check_text

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat

EditText = Callable[[str], str | None]
"""Lets the user edit a text; None where it was left as it is."""
_MOST_SHOWN = 60


def edit_in_editor(text: str) -> str | None:
    """Open the editor that VISUAL or EDITOR names, or the system's; None if nothing was saved. Raises: RequestError."""
    try:
        edited = click.edit(text, extension=".md")
    except click.ClickException as error:
        raise RequestError(f"{error.format_message()}; set EDITOR to the command of an editor") from None
    return None if edited is None or edited.rstrip("\n") == text.rstrip("\n") else edited.rstrip("\n")


class EditingCommands:
    """/regen, /edit, /undo, /fork and /continue. All of them compute from the change on only."""

    def __init__(self, chat: "Chat", edit_text: EditText) -> None:
        self._chat = chat
        self._edit_text = edit_text

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command("/regen", "regenerate the last reply", self._regenerate),
            Command("/edit", "edit your last message, or the N-th, and answer from there", self._edit, "[N]"),
            Command("/undo", "remove your last message and its reply", self._undo),
            Command("/fork", "go on in a copy of the conversation, under a name", self._fork, "NAME"),
            Command("/continue", "go on with a reply that was cut or stopped", self._continue),
        )

    def _regenerate(self, _: str) -> None:
        if self._chat.conversation.can_regenerate:
            self._chat.print_reply(self._chat.conversation.regenerate())
        else:
            self._chat.notice("there is no reply to make again")

    def _edit(self, argument: str) -> None:
        number, _, text = argument.partition(" ")
        if argument and (not number.isdecimal() or not int(number)):
            self._chat.notice(f"{number} is no number of a message; /edit 1 edits your first, /edit the last")
            return
        index = int(number) - 1 if number else -1
        try:
            former = self._chat.conversation.user_message(index)
            edited = text.strip() or self._edit_text(former)
        except RequestError as error:
            self._chat.notice(str(error))
            return
        if edited is None or not edited.strip():
            self._chat.notice("the message was left as it is")
            return
        if not text.strip():
            self._chat.notice(f"> {_shortened(edited)}")
        self._chat.print_reply(self._chat.conversation.edit(index, check_text(edited, "the message")))

    def _undo(self, _: str) -> None:
        removed = self._chat.conversation.undo()
        if not removed:
            self._chat.notice("there is nothing to undo")
            return
        self._chat.notice(
            f'removed "{_shortened(removed[0]["content"])}" and what followed it ({len(removed)} messages)'
        )

    def _fork(self, name: str) -> None:
        conversation, store = self._chat.conversation, self._chat.store
        former = conversation.saved
        if store is None or former is None:
            self._chat.notice("conversations are not kept here, so there is no place for a copy; see --no-history")
        elif not name:
            self._chat.notice("give the copy a name: /fork NAME")
        elif not conversation.turns:
            self._chat.notice("there is nothing to copy yet")
        else:
            try:
                conversation.keep()
                conversation.fork()
            except SessionFileError as error:
                self._chat.notice(str(error))
                return
            copy = conversation.saved
            assert copy is not None, "there was a saved one"
            try:
                store.rename(copy.id, name)
            except (RequestError, SessionFileError) as error:
                conversation.saved = former
                self._chat.notice(str(error))
                with suppress(SessionFileError):
                    store.delete(copy.id)
                return
            conversation.saved = replace(copy, name=name)
            self._chat.notice(f"this is {name} from here on; the former conversation stays as it is")

    def _continue(self, _: str) -> None:
        conversation = self._chat.conversation
        if not conversation.turns:
            self._chat.notice("there is no reply to go on with yet")
        elif conversation.open_calls:
            self._chat.notice(f"the model waits for the result of {conversation.open_calls[0].name}; type it")
        elif not conversation.can_resume:
            self._chat.notice("the last reply is whole; /regen makes it again")
        elif conversation.sampling.get("constraint") is not None and conversation.turns[-1]["role"] == "assistant":
            self._chat.notice(
                "the format holds for whole replies; /regen makes this one again (/set max_tokens N allows more), and "
                "after /set format off it can be gone on with"
            )
        else:
            self._chat.print_reply(conversation.resume())
            if not conversation.is_reply_kept and conversation.context_used >= conversation.context_length:
                self._chat.notice(
                    "there is no room for more: your message and its reply fill the context by themselves"
                )


def _shortened(text: str) -> str:
    """The beginning of a text, on one line."""
    words = " ".join(text.split())
    return words if len(words) <= _MOST_SHOWN else f"{words[: _MOST_SHOWN - 3]}..."
