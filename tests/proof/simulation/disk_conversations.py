"""Saved conversations of several processes, and what must be there of them."""

import base64
import hashlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

from localinfer.errors import RequestError, SessionFileError
from localinfer.storage.conversation_media import is_reference
from localinfer.storage.conversations import ConversationStore, SavedConversation
from tests.proof.simulation.disk import Disk
from tests.proof.simulation.disk_part import Member, Part, Setting, demand

_NAMES = ("one", "two", "Two", "three")
_MOST_TURNS = 6
_PICTURES = [bytes([number]) * 300 for number in range(3)]


@dataclass(eq=False)
class _Chat:
    """A conversation as one process goes on with it. saved: its turns when it was last reported as saved."""

    conversation: SavedConversation
    saved: tuple[str, ...] = ()


@dataclass(eq=False)
class _Open:
    store: ConversationStore
    chats: list[_Chat] = field(default_factory=list)


class Conversations(Part):
    """The folder of conversations."""

    name = "conversations"

    def __init__(self, disk: Disk, setting: Setting) -> None:
        super().__init__(disk, setting)
        self.operations = {
            "go_on": (8, self._go_on),
            "load": (4, self._load),
            "list": (2, self._list),
            "rename": (2, self._rename),
            "delete": (1, self._delete),
        }
        self.unchecked = frozenset(self.operations)
        self.alone = frozenset({"delete"})
        self._num_turns = 0
        self._attempted: set[tuple[str, ...]] = set()
        # Turns that were reported as saved, and whose conversation nobody tried to delete since.
        self._required: set[tuple[str, ...]] = set()
        self._deleted: set[str] = set()
        # A name that could not be read once may have been given again.
        self._are_names_known = True

    def open(self, member: Member) -> None:
        member.objects[self.name] = _Open(ConversationStore(self.folder))

    def has_failed(self, operation: str) -> None:
        self._are_names_known = False

    def check(self) -> None:
        found = self._stored()
        for id, turns in found.items():
            demand(turns in self._attempted, f"{id} has turns of no save: {turns}")
            demand(id not in self._deleted, f"{id} was deleted, and is there again")
        for required in self._required:
            demand(
                any(turns[: len(required)] == required for turns in found.values()),
                f"turns that were reported as saved are lost: {required}",
            )

    def check_rests(self, member: Member) -> None:
        member.objects[self.name] = _Open(ConversationStore(self.folder))
        self._go_on(member, Random(1))
        rests = [path for path in self.disk.files if path.startswith(f"{self.folder}/") and path.endswith(".tmp")]
        demand(not rests, f"rests of unfinished writes stay: {rests}")

    def _stored(self) -> dict[str, tuple[str, ...]]:
        """Every conversation on the disk, each of which must be whole."""
        found, names = {}, set()
        for path, content in self.disk.files.items():
            if path.startswith(f"{self.folder}/") and path.endswith(".json"):
                try:
                    conversation = SavedConversation.from_json(content, is_stored=True)
                except SessionFileError as error:
                    demand(False, f"{path} is damaged: {error}")
                    continue
                found[conversation.id] = _texts(conversation)
                for turn in found[conversation.id]:
                    for digest in turn.split()[1:] if turn.startswith("pictures ") else ():
                        picture = self.disk.files.get(f"{self.folder}/media/{conversation.id}-{digest}", b"")
                        demand(hashlib.sha256(picture).hexdigest() == digest, f"{path} has lost a picture")
                is_taken = conversation.name.casefold() in names
                demand(not is_taken or not self._are_names_known, f"two are named {conversation.name}")
                names.add(conversation.name.casefold())
        return found

    def _go_on(self, member: Member, random: Random) -> None:
        mine: _Open = member.objects[self.name]
        if not mine.chats or random.random() < 0.2:
            name = random.choice(_NAMES) if random.random() < 0.5 else ""
            mine.chats = [*mine.chats[-3:], _Chat(SavedConversation.begin("model", name=name))]
        chat = random.choice(mine.chats)
        if len(chat.conversation.turns) >= _MOST_TURNS:
            return
        self._num_turns += 1
        content: Any = f"turn {self._num_turns} {'x' * random.choice((0, 0, 200))}"
        if random.random() < 0.3:
            shown = random.sample(_PICTURES, random.choice((1, 2)))
            content = [{"type": "image", "data": base64.b64encode(data).decode()} for data in shown]
        former, whole = list(chat.conversation.turns), _texts(chat.conversation)
        if random.random() < 0.1:
            # An edit leaves the last turns, and maybe the last that shows a picture, out.
            former = former[: random.randrange(len(former) + 1)]
            left = {whole[:size] for size in range(len(former) + 1, len(whole) + 1)}
            self._required -= left
        turn = {"role": "user", "content": content}
        chat.conversation = chat.conversation.with_turns([*former, turn], system=None)
        turns = _texts(chat.conversation)
        self._attempted.add(turns)
        self._deleted.discard(chat.conversation.id)
        self._deleted.discard(mine.store._moved.get(chat.conversation.id, ""))
        try:
            mine.store.save(chat.conversation)
        except SessionFileError:
            return
        # A folder above that may not be read cannot be synced.
        if not self.disk.faults.permission_lost:
            self._require(turns)

    def _require(self, turns: tuple[str, ...]) -> None:
        """Turns are saved; their beginnings are with them."""
        self._required = {one for one in self._required if turns[: len(one)] != one} | {turns}

    def _load(self, member: Member, random: Random) -> None:
        mine: _Open = member.objects[self.name]
        wanted = self._some(random)
        if wanted is None:
            return
        try:
            conversation = mine.store.latest() if random.random() < 0.3 else mine.store.load(wanted)
        except (RequestError, SessionFileError):
            return
        if conversation is None:
            return
        demand(_texts(conversation) in self._attempted, "a conversation is loaded that nobody saved so")
        # A program goes on with a conversation in one place.
        ids = {chat: mine.store._moved.get(chat.conversation.id, chat.conversation.id) for chat in mine.chats}
        others = [chat for chat, id in ids.items() if id != conversation.id and chat.conversation.id != conversation.id]
        mine.chats = [*others[-3:], _Chat(conversation)]

    def _list(self, member: Member, random: Random) -> None:
        try:
            member.objects[self.name].store.list()
        except SessionFileError:
            return

    def _rename(self, member: Member, random: Random) -> None:
        wanted = self._some(random)
        if wanted is None:
            return
        self._deleted.discard(wanted)
        try:
            member.objects[self.name].store.rename(wanted, random.choice(_NAMES))
        except (RequestError, SessionFileError):
            return

    def _delete(self, member: Member, random: Random) -> None:
        stored = self._stored()
        if len(stored) < 4:
            return
        wanted = random.choice(sorted(stored))
        turns = stored[wanted]
        self._required = {one for one in self._required if turns[: len(one)] != one}
        try:
            member.objects[self.name].store.delete(wanted)
        except (RequestError, SessionFileError):
            return
        self._deleted.add(wanted)

    def _some(self, random: Random) -> str | None:
        stored = sorted(self._stored())
        return random.choice(stored) if stored else None


def _texts(conversation: SavedConversation) -> tuple[str, ...]:
    """A text for each turn: of one with pictures, their digests."""
    return tuple(one if isinstance(one := turn["content"], str) else _digests(one) for turn in conversation.turns)


def _digests(parts: list[dict[str, Any]]) -> str:
    found = [one["sha256"] if is_reference(one) else _digest(one) for one in parts]
    return " ".join(("pictures", *found))


def _digest(part: dict[str, Any]) -> str:
    return hashlib.sha256(base64.b64decode(part["data"])).hexdigest() if "data" in part else "missing"
