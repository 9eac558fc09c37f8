"""A chat over a scripted model for tests of its commands: what it printed, what was copied, and a store in memory."""

import io
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from localinfer.apps.terminal.commands import Chat
from localinfer.apps.terminal.conversation import Conversation
from localinfer.errors import RequestError, SessionFileError
from tests.apps.cli.conftest import FakeLLM


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Saved:
    """A saved conversation, as `SavedConversation` has it."""

    id: str
    name: str
    model: str
    system: str | None
    turns: list[dict[str, Any]]
    changed: datetime = field(default_factory=lambda: datetime.now(UTC))

    @classmethod
    def begin(cls, model: str, *, name: str = "", system: str | None = None) -> Self:
        return cls(f"id{next(_numbers)}", name, model, system, [])

    def with_turns(self, turns: list[dict[str, Any]], *, system: str | None) -> Self:
        return replace(self, turns=[dict(turn) for turn in turns], system=system)

    @property
    def num_messages(self) -> int:
        return len(self.turns)


_numbers = iter(range(1 << 20))


class Store:
    """Conversations in memory; names are unique."""

    def __init__(self) -> None:
        self.saved: dict[str, Saved] = {}
        self.fails = False

    def save(self, conversation: Saved) -> None:
        if self.fails:
            raise SessionFileError("the disk is full")
        self.saved[conversation.id] = conversation

    def load(self, name: str) -> Saved:
        for one in self.saved.values():
            if name in (one.id, one.name):
                return one
        raise RequestError(f"there is no saved conversation {name!r}")

    def id_of(self, conversation: Saved) -> str:
        return conversation.id

    def list(self) -> list[Saved]:
        return list(reversed(self.saved.values()))

    def rename(self, id: str, name: str) -> None:
        if any(one.name == name and one.id != id for one in self.saved.values()):
            raise RequestError(f"another conversation is named {name!r}")
        self.saved[id] = replace(self.saved[id], name=name)

    def delete(self, id: str) -> None:
        del self.saved[id]


class TypedLines:
    """A chat whose lines a test types. chat, notices: set by what inherits it."""

    chat: Chat
    notices: io.StringIO

    def type(self, *lines: str) -> str:
        """Handle lines; return the notices of them."""
        self.notices.seek(0)
        self.notices.truncate()
        for line in lines:
            self.chat.handle(line)
        return self.notices.getvalue()


class Session(TypedLines):
    """A chat over a scripted model, with what it printed, what was copied, and a store."""

    def __init__(self, llm: FakeLLM, **options: Any) -> None:
        self.llm, self.store = llm, Store()
        self.output, self.notices = io.StringIO(), io.StringIO()
        self.copied: list[str] = []
        self.loaded: dict[str | None, Any] = {}
        self.edited: str | None = "edited"
        self.conversation = Conversation(
            llm, system=None, max_tokens=None, seed=3, saved=Saved.begin("tiny"), save=self.store.save
        )
        self.chat = Chat(
            self.conversation,
            self.output,
            self.notices,
            store=self.store,
            load_model=self.load,
            model_name="tiny",
            edit_text=lambda _: self.edited,
            copy_text=lambda text, _: self.copied.append(text) or "test",
            **options,
        )

    def load(self, name: str | None) -> Any:
        found = self.loaded.get(name, RequestError(f"there is no model {name!r}"))
        if isinstance(found, list):
            found = found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found
