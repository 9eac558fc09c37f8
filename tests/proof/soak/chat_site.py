"""Chats on a terminal that are killed, with their saved conversations and typed lines."""

import re
import subprocess
from random import Random
from typing import Any

from localinfer.storage.conversations import ConversationStore, SavedConversation
from tests.apps.cli.chat_command import CACHED, READY, ChatCommand, ChatEndedError
from tests.proof.soak.cold_answers import MOST_TURNS, QUESTIONS
from tests.proof.soak.site import Site, few_warnings, require

_CHATS = ("dog", "cat", "bird")
_WARNING = re.compile(r"(?im)^\W*warning\b.*$")


class ChatSite(Site):
    """`localinfer chat --session NAME`, which saves each turn before it says what the reply took."""

    name = "chat"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._store_folder = self.folder / "state" / "localinfer" / "conversations"
        self._finished: dict[str, list[dict[str, Any]]] = {}
        self._typed: set[str] = set()
        self._chat: ChatCommand | None = None
        self._session = ""

    def start(self, random: Random) -> subprocess.Popen[str]:
        self._release()
        self._session = random.choice(_CHATS)
        if len(self._finished.get(self._session, ())) >= 2 * MOST_TURNS:
            ConversationStore(self._store_folder).delete(self._session)
            del self._finished[self._session]
        words = ["--session", self._session, "--temperature", "0", "--disk-cache-size", "3MB", "--no-config"]
        self._chat = ChatCommand(self.folder, *words)
        return self._chat.process

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        chat = self._chat
        assert chat is not None, "it was started"
        try:
            chat.wait_for(READY)
            place = 0
            for _ in range(random.randrange(1, 4)):
                question = random.choice(QUESTIONS)
                chat.type(f"{question}\r")
                place = chat.wait_for(CACHED, place).end()
                self._note(question)
            chat.type("\x04")
            chat.wait_for("this never comes", place)
        except (ChatEndedError, OSError):
            process.wait()
        told = _WARNING.findall(chat.screen)
        require(len(told) <= 1, f"the chat warns more than once: {told}")

    def _note(self, question: str) -> None:
        """A turn whose end was shown must be saved; what precedes it was proven before."""
        kept = self._load()
        assert kept is not None, "a turn was finished"
        require(kept.turns[-2]["content"] == question, f"the last turn of {self._session} is {kept.turns[-2]}")
        require(len(kept.turns) == len(self._finished.get(self._session, ())) + 2, f"{self._session}: {kept.turns}")
        self._finished[self._session] = kept.turns
        self._typed.add(question)

    def _load(self) -> SavedConversation | None:
        return ConversationStore(self._store_folder).find(self._session)

    def check(self) -> None:
        self._release()
        store = ConversationStore(self._store_folder)
        with few_warnings("reading conversations"):
            names = [summary.name for summary in store.list()]
            require(len(set(names)) == len(names), f"conversations of one name: {names}")
            kept = store.find(self._session)
        finished = self._finished.get(self._session, [])
        turns = [] if kept is None else kept.turns
        require(turns[: len(finished)] == finished, f"{self._session} had {finished} and has {turns}")
        # The turn during which it was killed may have been saved before that was shown.
        require(len(turns) <= len(finished) + 2, f"{self._session} has turns that nobody asked for: {turns}")
        if kept is not None:
            self._compare(turns)
            with few_warnings("saving a conversation"):
                # Takes the lock, and deletes what killed writers left.
                store.save(kept)
            self._finished[self._session] = turns
        path = self._store_folder.parent / "chat-history"
        lines = path.read_text().splitlines() if path.exists() else []
        require(all(line in ("",) or line[:1] in "#+" for line in lines), f"typed lines are damaged: {lines[-9:]}")
        typed = [line[1:] for line in lines if line.startswith("+")]
        # One that repeats the line before it is kept once.
        require(self._typed <= set(typed), f"typed lines are gone: {self._typed - set(typed)}")

    def _compare(self, turns: list[dict[str, Any]]) -> None:
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
        for end in range(1, len(messages), 2):
            if turns[end].get("finish_reason") == "cancelled":
                continue
            cold = self.cold.chat(messages[:end], max_tokens=40, temperature=0.0)
            self.count("replies compared")
            require(messages[end]["content"] == cold.text, f"{messages[: end + 1]} is not the cold {cold.text!r}")

    def close(self) -> None:
        self._release()

    def _release(self) -> None:
        if self._chat is not None:
            self._chat.close()
            self._chat = None
