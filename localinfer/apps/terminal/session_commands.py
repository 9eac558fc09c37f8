"""Commands for saved conversations: save under a name, load, list."""

from collections.abc import Iterable
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

from localinfer.apps.terminal.command import Command
from localinfer.errors import LocalinferError, RequestError, SessionFileError

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat
    from localinfer.storage.conversations import ConversationStore, ConversationSummary

_MOST_LISTED = 20
_NOT_KEPT = "conversations are not kept here: they were switched off (--no-history), or you have no state folder"


class SessionCommands:
    """/save, /load and /sessions."""

    def __init__(self, chat: "Chat", store: "ConversationStore | None") -> None:
        self._chat = chat
        self._store = store
        self._reported = ""

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command("/save", "name this conversation, which is saved after every reply", self._save, "NAME"),
            Command("/load", "go on with a saved conversation", self._load, "NAME", self._complete_name),
            Command("/sessions", "list the saved conversations", self._list),
        )

    def report_failure(self, error: SessionFileError) -> None:
        """Say once why turns are not saved: each of them would have the same reason."""
        if str(error) != self._reported:
            self._reported = str(error)
            self._chat.notice(f"not saved: {error}; /save tries again")

    def _save(self, name: str) -> None:
        conversation = self._chat.conversation
        if self._store is None or conversation.saved is None:
            self._chat.notice(_NOT_KEPT)
            return
        if not conversation.turns:
            self._chat.notice("there is nothing to save yet")
            return
        try:
            conversation.keep()
            if name:
                self._store.rename(self._store.id_of(conversation.saved), name)
                conversation.saved = replace(conversation.saved, name=name)
            shown = self._store.load(self._store.id_of(conversation.saved)).name
        except (RequestError, SessionFileError) as error:
            self._chat.notice(str(error))
            return
        self._chat.notice(f"saved as {shown}; localinfer chat --session {quote(shown)} goes on with it")

    def _load(self, name: str) -> None:
        if self._store is None:
            self._chat.notice(_NOT_KEPT)
            return
        if not name:
            self._chat.notice("name the conversation: /load NAME; /sessions lists them")
            return
        conversation = self._chat.conversation
        model = None if conversation.saved is None else conversation.saved.model
        try:
            saved = self._store.load(name)
        except (RequestError, SessionFileError) as error:
            self._chat.notice(str(error))
            return
        conversation.restore(saved)
        count = f"{len(saved.turns):,} message{'' if len(saved.turns) == 1 else 's'}"
        self._chat.notice(f"{saved.name or saved.id}: {count}")
        self._chat.show_exchange(saved.turns)
        if model is not None and saved.model != model:
            self._chat.notice(f"it was held with {saved.model}; /model {saved.model} switches to that")
        if conversation.can_resume:
            self._chat.notice("its last reply was cut; /continue goes on with it")

    def _list(self, _: str) -> None:
        summaries = self._summaries()
        if self._store is None:
            self._chat.notice(_NOT_KEPT)
        elif not summaries:
            self._chat.notice("no conversation is saved yet")
        saved = self._chat.conversation.saved
        for summary in summaries[:_MOST_LISTED]:
            mark = "*" if saved is not None and summary.id == saved.id else " "
            when = summary.changed.astimezone().strftime("%Y-%m-%d %H:%M")
            self._chat.notice(f"{mark} {when}  {summary.name}  ({summary.num_messages} messages, {summary.model})")
        if len(summaries) > _MOST_LISTED:
            more = len(summaries) - _MOST_LISTED
            self._chat.notice(f"and {more} older ones, which localinfer sessions lists")

    def _complete_name(self, typed: str) -> Iterable[str]:
        names = (summary.name for summary in self._summaries())
        return [name for name in names if name.casefold().startswith(typed.casefold()) and name.isprintable()]

    def _summaries(self) -> "list[ConversationSummary]":
        try:
            return [] if self._store is None else self._store.list()
        except LocalinferError as error:
            self._chat.notice(str(error))
            return []
