"""Responses that several servers keep in one folder, and what must be there of them."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random
from typing import Any
from unittest import mock

from localinfer.storage import response_store
from localinfer.storage.response_store import ResponseStore, ResponseStoreOptions
from tests.proof.simulation.disk import Disk, Faults
from tests.proof.simulation.disk_part import Member, Part, Setting, demand

_NAMES = [
    f"{kind}_{number:024x}.{suffix}" for number in range(3) for kind, suffix in (("resp", "json"), ("conv", "json"))
]


class Queue:
    """In place of a thread pool: what is submitted runs when it is asked for."""

    def __init__(self, *_: object) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_closed = False

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._is_closed:
            raise RuntimeError("no more jobs are taken")
        self._jobs.append(lambda: work(*arguments))

    def run_next(self) -> bool:
        if not self._jobs:
            return False
        self._jobs.popleft()()
        return True

    def shutdown(self) -> None:
        self._is_closed = True
        while self.run_next():
            pass


def queued() -> AbstractContextManager[object]:
    """Have stores that are made meanwhile write when they are asked to."""
    return mock.patch.object(response_store, "ThreadPoolExecutor", Queue)


class Responses(Part):
    """The folder of responses."""

    name = "responses"

    def __init__(self, disk: Disk, setting: Setting) -> None:
        super().__init__(disk, setting)
        self.operations = {
            "put": (6, self._put),
            "get": (6, self._get),
            "delete": (1, self._delete),
            "write": (6, self._write),
            "close": (1, self._close),
            "sweep": (1, self._clear),
        }
        self._num_contents = 0
        self._ever: dict[str, set[bytes]] = {name: set() for name in _NAMES}
        # Of a server that is alone: what it was given last, and what of it was written.
        self._last: dict[str, bytes | None] = {}
        self._written: dict[str, bytes | None] = {}

    @property
    def _is_exact(self) -> bool:
        return self.setting.num_members == 1 and self.setting.is_roomy

    def open(self, member: Member) -> None:
        options = ResponseStoreOptions(self.folder, self.setting.max_bytes, 0.0 if self.setting.is_roomy else 7200.0)
        member.objects[self.name] = ResponseStore(options)

    def has_been_killed(self, member: Member) -> None:
        # What was pending may be written or not.
        self._last = {name: content for name, content in self._written.items() if self._last.get(name) == content}

    def has_lost_power(self) -> None:
        self._last, self._written = {}, {}

    def has_failed(self, operation: str) -> None:
        # Where the disk refuses, the memory of the process has it, and not its file.
        self._last, self._written = {}, {}

    def check(self) -> None:
        total = sum(len(data) for path, data in self.disk.files.items() if path.startswith(f"{self.folder}/resp_"))
        most = self.setting.max_bytes * (1 + self.setting.num_members / 16) + 400
        demand(total <= most, f"{total} bytes of responses are kept, where the budget is {self.setting.max_bytes}")

    def check_rests(self, member: Member) -> None:
        self.open(member)
        self._put(member, Random(1))
        self._store(member).close()
        rests = [path for path in self.disk.files if path.startswith(f"{self.folder}/") and path.endswith(".tmp")]
        demand(not rests, f"rests of unfinished writes stay: {rests}")

    def _store(self, member: Member) -> ResponseStore:
        store: ResponseStore = member.objects[self.name]
        return store

    def _queue(self, member: Member) -> Queue | None:
        queue: Any = self._store(member)._writer
        return queue

    def _put(self, member: Member, random: Random) -> None:
        name = random.choice(_NAMES)
        self._num_contents += 1
        content = f'{{"{name}": {self._num_contents}, "text": "{"x" * random.choice((0, 100, 300))}"}}'.encode()
        self._ever[name].add(content)
        self._store(member).put(name, content)
        self._last[name] = content

    def _get(self, member: Member, random: Random) -> None:
        name = random.choice(_NAMES)
        content = self._store(member).get(name)
        demand(content is None or content in self._ever[name], f"{name} has a content that nobody put: {content!r}")
        if self._is_exact and name in self._last and not self._has_faults():
            demand(content == self._last[name], f"{name} is {content!r}, and was {self._last[name]!r}")

    def _has_faults(self) -> bool:
        return self.disk.faults != Faults()

    def _delete(self, member: Member, random: Random) -> None:
        name = random.choice(_NAMES)
        self._store(member).delete(name)
        self._last[name] = None

    def _write(self, member: Member, random: Random) -> None:
        queue = self._queue(member)
        while queue is not None and queue.run_next() and random.random() < 0.7:
            pass
        self._note(member)

    def _note(self, member: Member) -> None:
        if self._queue(member) is None:
            # It was made while its folder was refused, and has everything in memory.
            return
        pending = self._store(member)._pending
        self._written |= {name: content for name, content in self._last.items() if name not in pending}

    def _close(self, member: Member, random: Random) -> None:
        self._store(member).close()
        self._note(member)
        self.open(member)

    def _clear(self, member: Member, random: Random) -> None:
        if random.random() < 0.2:
            self._last, self._written = {}, {}
            response_store.clear_responses(self.folder)
