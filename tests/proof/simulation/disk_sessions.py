"""Sessions that are saved under names of the user's, and what they must hold."""

import hashlib
from random import Random

import numpy as np

from localinfer.errors import SessionFileError
from localinfer.storage.page_store import PageFormat
from localinfer.storage.sessions import SessionContent, SessionReader, write_session
from localinfer.system import disk as calls
from tests.proof.simulation.disk import Disk, Faults
from tests.proof.simulation.disk_part import Member, Part, Setting, demand

_FORM = PageFormat(4, 40)


class Sessions(Part):
    """Two files, which are saved again and again."""

    name = "sessions"

    def __init__(self, disk: Disk, setting: Setting) -> None:
        super().__init__(disk, setting)
        self.operations = {"save": (4, self._save), "load": (4, self._load)}
        self._num_saved = 0
        # By file: what it may hold, None for nothing.
        self._may_be_damaged = False
        self._in_progress: set[int | None] = set()
        self._may_be: dict[str, set[int | None]] = {name: {None} for name in ("one", "two")}

    def open(self, member: Member) -> None:
        calls.make_folder(self.folder)
        calls.sync_folder(self.disk.root)

    def has_failed(self, operation: str) -> None:
        self._may_be_damaged |= operation == "flip"

    def check(self) -> None:
        for name, may_be in self._may_be.items():
            content = self.disk.files.get(f"{self.folder}/{name}")
            demand(content is not None or None in may_be, f"the session {name} is gone")

    def _save(self, member: Member, random: Random) -> None:
        name = random.choice(sorted(self._may_be))
        self._num_saved += 1
        number = self._num_saved
        before = self._may_be[name] - self._in_progress
        self._may_be[name].add(number)
        self._in_progress.add(number)
        try:
            write_session(self.folder / name, *_session(number))
        except SessionFileError:
            return
        finally:
            self._in_progress.discard(number)
        if self.disk.faults != Faults():
            return
        # One that another process saves meanwhile may take its place, and one before it not.
        self._may_be[name] -= before

    def _load(self, member: Member, random: Random) -> None:
        name = random.choice(sorted(self._may_be))
        may_be, newest = set(self._may_be[name]), self._num_saved
        try:
            with SessionReader(self.folder / name) as session:
                number = int(session.content.token_ids[0])
                content, pages = _session(number)
                views = [memoryview(bytearray(len(page))) for page in pages]
                demand(len(views) == session.content.num_buffers, "a session has another number of pages")
                session.read_pages(views)
                demand(views == pages and session.content.fingerprint == content.fingerprint, "a session is wrong")
        except SessionFileError as error:
            is_damaged = "does not exist" not in str(error)
            is_faulty = self.disk.faults != Faults()
            demand(
                is_faulty or self._may_be_damaged or None in may_be or not is_damaged,
                f"a saved session is refused: {error}",
            )
            demand(is_faulty or is_damaged or None in may_be, f"a saved session is lost: {error}")
            return
        is_expected = number in may_be | self._may_be[name] or number > newest
        demand(is_expected, f"session {number} is loaded, where {may_be} were saved")


def _session(number: int) -> tuple[SessionContent, list[memoryview]]:
    """A session that can be told by its number."""
    token_ids = np.array([number, *range(number % 23)], np.int32)
    windowed = min(number % 3, -(-token_ids.size // _FORM.page_tokens))
    content = SessionContent({"weights": "w"}, token_ids, _FORM, 16, windowed, 8, (1,))
    sizes = [_FORM.page_bytes] * content.num_pages + [16] * windowed + [8]
    data = hashlib.shake_128(str(number).encode()).digest(sum(sizes))
    starts = np.cumsum([0, *sizes])
    return content, [memoryview(data[start : start + size]) for start, size in zip(starts, sizes, strict=False)]
