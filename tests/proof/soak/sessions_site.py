"""Saved conversations that are renamed, deleted and exported by commands that are killed."""

import json
import subprocess
import sys
from random import Random
from typing import Any

from localinfer.storage.conversations import ConversationStore, SavedConversation
from tests.kernels.subprocesses import environment
from tests.proof.soak.site import Site, check_ended_well, few_warnings, require

_NAMES = ("one", "two", "three", "four", "five", "six")
_NUM_KEPT = 3


class SessionsSite(Site):
    """`localinfer sessions rename|delete|export`."""

    name = "sessions"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: dict[str, list[dict[str, Any]]] = {}
        self._exported = self.folder / "exported.json"
        self._wanted: list[str] = []
        self._before: dict[str, list[dict[str, Any]]] = {}
        self._after: dict[str, list[dict[str, Any]]] = {}

    @property
    def _store(self) -> ConversationStore:
        """The store as another process opens it."""
        return ConversationStore(self.folder / "state" / "localinfer" / "conversations")

    def start(self, random: Random) -> subprocess.Popen[str]:
        while len(self._kept) < _NUM_KEPT:
            name = random.choice([one for one in _NAMES if one not in self._kept])
            turns = [{"role": "user", "content": "long " * random.randrange(1, 30000)}]
            self._store.save(SavedConversation.begin("demo", name=name).with_turns(turns, system=None))
            self._kept[name] = turns
        name = random.choice(sorted(self._kept))
        self._before = self._after = dict(self._kept)
        match random.choice(("rename", "delete", "export")):
            case "rename":
                other = random.choice([one for one in _NAMES if one not in self._kept])
                self._wanted = ["rename", name, other]
                self._after = {other if one == name else one: turns for one, turns in self._kept.items()}
            case "delete":
                self._wanted = ["delete", name]
                self._after = {one: turns for one, turns in self._kept.items() if one != name}
            case _:
                self._wanted = ["export", name, "--output", str(self._exported)]
        command = [sys.executable, "-m", "localinfer", "sessions", *self._wanted]
        shown = environment(XDG_STATE_HOME=str(self.folder / "state"))
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=shown, start_new_session=True)

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        output, errors = process.communicate()
        check_ended_well(process, errors)
        if process.returncode == 0 or output:
            # What is told has been done.
            self._before = self._after

    def check(self) -> None:
        with few_warnings("reading conversations"):
            store = self._store
            found = {summary.name: store.load(summary.id).turns for summary in store.list()}
        require(found in (self._before, self._after), f"{self._wanted} left {sorted(found)} of {sorted(self._before)}")
        self._kept = found
        self.count("states compared")
        if self._exported.exists():
            turns = json.loads(self._exported.read_bytes())
            require(turns, "an exported conversation is empty")
