"""Pages, sliding-window blocks, snapshots, chats and descriptions of the prompt cache, and what they must be."""

import contextlib
import hashlib
from functools import lru_cache
from random import Random

import numpy as np

from localinfer.storage import budget, chats
from localinfer.storage.chats import AnsweredChat, EncodedChat, StoredChats
from localinfer.storage.fingerprint import Fingerprint, describe_folder, read_description
from localinfer.storage.page_store import DiskTier, FileKind, PageFormat, SnapshotTier
from localinfer.system.folders import make_private
from localinfer.types import TokenIds
from tests.proof.simulation.disk import Disk, Faults
from tests.proof.simulation.disk_part import Member, Part, Setting, demand

PAGE_TOKENS = 4
_BYTES = {FileKind.PAGE: 96, FileKind.WINDOW: 32, FileKind.STATE: 200}
_MODELS = [Fingerprint({"weights": name}) for name in ("first", "second")]
_VOCABULARY = 3


@lru_cache(1 << 16)
def contents(kind: FileKind, model: int, prefix: bytes) -> bytes:
    """What a model would compute for a prefix."""
    return hashlib.shake_128(f"{kind.name} {model} ".encode() + prefix).digest(_BYTES[kind])


def expected(kind: FileKind, model: int, prefix: TokenIds) -> memoryview:
    return memoryview(contents(kind, model, prefix.astype("<i4").tobytes()))


class PromptCache(Part):
    """The files of two models in one folder."""

    name = "conversations-cache"

    def __init__(self, disk: Disk, setting: Setting) -> None:
        super().__init__(disk, setting)
        self.operations = {
            "save": (8, self._save),
            "restore": (8, self._restore),
            "save_snapshots": (4, self._save_snapshots),
            "read_snapshots": (4, self._read_snapshots),
            "save_chats": (3, self._save_chats),
            "load_chats": (3, self._load_chats),
            "describe": (1, self._describe),
            "clear": (1, self._clear),
        }
        self.alone = frozenset({"clear"})
        self._histories: list[TokenIds] = []
        # What was saved, and no fault, clearing or budget may have taken since.
        self._saved: set[tuple[int, bytes]] = set()
        self._suspect: set[str] = set()
        self._chats: dict[bytes, int] = {}
        self._num_chats = 0

    def open(self, member: Member) -> None:
        problem = make_private(self.folder)
        demand(problem is None or "cannot be used" in problem, f"the cache's folder is refused: {problem}")
        sizes = {"page_tokens": PAGE_TOKENS, "max_bytes": self.setting.max_bytes}
        tiers: dict[object, DiskTier] = {}
        for number, model in enumerate(_MODELS):
            for kind in (FileKind.PAGE, FileKind.WINDOW):
                tiers[number, kind] = DiskTier(self.folder, model.key, page_bytes=_BYTES[kind], kind=kind, **sizes)
            state_bytes = _BYTES[FileKind.STATE]
            tiers[number, FileKind.STATE] = SnapshotTier(self.folder, model.key, state_bytes=state_bytes, **sizes)
        member.objects[self.name] = tiers

    def has_lost_power(self) -> None:
        self._saved.clear()
        # They have their lengths, so that a save takes them for whole: they are found out when they are read.
        self._suspect.update(self.disk.files)

    def has_failed(self, operation: str) -> None:
        self._saved.clear()
        if operation == "flip":
            self._suspect.update(self.disk.files)

    def check(self) -> None:
        stored = list(budget.stored_files(self.folder))
        total = sum(file.num_bytes for file in stored if not file.path.endswith(".tmp"))
        most = self.setting.max_bytes * (1 + self.setting.num_members / 16) + max(_BYTES.values()) + 1000
        demand(total <= most, f"{total} bytes are cached, where the budget is {self.setting.max_bytes}")

    def check_rests(self, member: Member) -> None:
        for number in range(len(_MODELS)):
            tier = member.objects[self.name][number, FileKind.PAGE]
            history = np.array([number, number], np.int32)
            # The budget is enforced by the first save of a process.
            demand(tier.save(history, self._source(FileKind.PAGE, number, history)).failure is None, "it is not saved")
        rests = [path for path in self.disk.files if path.startswith(str(self.folder)) and path.endswith(".tmp")]
        demand(not rests, f"rests of unfinished writes stay: {rests}")

    def _history(self, random: Random) -> TokenIds:
        """A history that often continues another."""
        size = random.randint(1, 6)
        more = np.array([random.randrange(_VOCABULARY) for _ in range(size)], np.int32)
        if self._histories and random.random() < 0.8:
            former = random.choice(self._histories)
            more = np.concatenate((former[: random.randint(0, former.size)], more))[:24]
            if random.random() < 0.4:
                return former
        self._histories = [*self._histories[-15:], more]
        return more

    def _source(self, kind: FileKind, number: int, history: TokenIds):  # type: ignore[no-untyped-def]
        ends = [min(history.size, start + PAGE_TOKENS) for start in range(0, history.size, PAGE_TOKENS)]
        return lambda indices: [expected(kind, number, history[: ends[index]]) for index in indices]

    def _save(self, member: Member, random: Random) -> None:
        number, history = random.randrange(2), self._history(random)
        tiers = member.objects[self.name]
        saved = tiers[number, FileKind.PAGE].save(history, self._source(FileKind.PAGE, number, history))
        tier = tiers[number, FileKind.PAGE]
        paths = {str(tier._path(record)) for record in tier._records(history)}
        if saved.failure is None and self.setting.is_roomy and not paths & self._suspect:
            self._saved.add((number, history.tobytes()))
        places = [place for place in range(-(-history.size // PAGE_TOKENS)) if random.random() < 0.5]
        tiers[number, FileKind.WINDOW].save(
            history, self._source(FileKind.WINDOW, number, history), places=places, pages_at_once=random.randint(1, 3)
        )

    def _restore(self, member: Member, random: Random) -> None:
        number, history = random.randrange(2), self._history(random)
        is_known = (number, history.tobytes()) in self._saved and self.disk.faults == Faults()
        tiers = member.objects[self.name]
        tier = tiers[number, FileKind.PAGE]
        found = tier.find(history)
        pages = [memoryview(bytearray(_BYTES[FileKind.PAGE])) for _ in found.pages]
        restored = tier.restore(found, pages)
        self._compare(FileKind.PAGE, number, history, found.pages, pages, restored.num_tokens)
        if is_known and (number, history.tobytes()) in self._saved:
            demand(restored.num_tokens == history.size, f"of {history.size} tokens {restored.num_tokens} are found")
        tier.mark_used(found)
        blocks = tiers[number, FileKind.WINDOW]
        for start, block in enumerate(blocks.of_same_pages(found)):
            if block is not None:
                some = type(found)(0, 0, (block,))
                view = memoryview(bytearray(_BYTES[FileKind.WINDOW]))
                if blocks.restore(some, [view]).num_tokens:
                    prefix = np.concatenate((history[: start * PAGE_TOKENS], block.record.token_ids))
                    demand(view == expected(FileKind.WINDOW, number, prefix), "a sliding-window block has wrong bytes")

    def _compare(self, kind: FileKind, number: int, history: TokenIds, found, pages, num_tokens: int) -> None:  # type: ignore[no-untyped-def]
        for index, (page, view) in enumerate(zip(found, pages, strict=True)):
            start = index * PAGE_TOKENS
            if start >= num_tokens:
                return
            prefix = np.concatenate((history[:start], page.record.token_ids))
            shared = history[start : start + page.num_tokens]
            demand(np.array_equal(page.record.token_ids[: shared.size], shared), "a page of another text is found")
            demand(view == expected(kind, number, prefix), "a page has wrong bytes")

    def _save_snapshots(self, member: Member, random: Random) -> None:
        number, history = random.randrange(2), self._history(random)
        positions = [position for position in range(1, history.size + 1) if random.random() < 0.3]
        member.objects[self.name][number, FileKind.STATE].save_snapshots(
            history, positions, lambda position: expected(FileKind.STATE, number, history[:position])
        )

    def _read_snapshots(self, member: Member, random: Random) -> None:
        number, history = random.randrange(2), self._history(random)
        tier = member.objects[self.name][number, FileKind.STATE]
        for found in tier.find_snapshots(history, after=random.randint(0, 4)):
            view = memoryview(bytearray(_BYTES[FileKind.STATE]))
            if tier.read_snapshot(found, view):
                prefix = history[: found.position]
                demand(view == expected(FileKind.STATE, number, prefix), "a snapshot has wrong bytes")

    def _chats_of(self, number: int) -> StoredChats:
        return StoredChats(self.folder / _MODELS[number].key.hex()[:32] / budget.CHATS_FOLDER)

    def _save_chats(self, member: Member, random: Random) -> None:
        number, some = random.randrange(2), []
        for _ in range(random.randint(0, 2)):
            self._num_chats += 1
            ids = np.array([random.randrange(_VOCABULARY) for _ in range(random.randint(1, 9))], np.int32)
            text = f"{number} {self._num_chats}"
            ends = [len(text)] * ids.size
            some.append(AnsweredChat(EncodedChat(text, ((0, 1),), ids, 0, None, ("a",)), text, ids, ends))
            self._chats[chats._to_json(some[-1])] = number
        try:
            self._chats_of(number).save(some)
        except OSError as error:
            demand(self.disk.faults != Faults(), f"chats are not saved: {error!r}")

    def _load_chats(self, member: Member, random: Random) -> None:
        number = random.randrange(2)
        for chat in self._chats_of(number).load(_VOCABULARY):
            demand(self._chats.get(chats._to_json(chat)) == number, "a chat is loaded that nobody saved so")

    def _describe(self, member: Member, random: Random) -> None:
        number = random.randrange(2)
        path = self.folder / _MODELS[number].key.hex()[:32] / budget.DESCRIPTION
        describe_folder(path, f"model {number}", _MODELS[number], PageFormat(PAGE_TOKENS, 96))
        with contextlib.suppress(OSError, ValueError):
            found = read_description(path)
            demand(set(found["parts"]) <= {"weights"} or self.disk.faults.bit_flip, "a description is another's")

    def _clear(self, member: Member, random: Random) -> None:
        self._saved.clear()
        if random.random() < 0.3:
            budget.clear(self.folder)
        self._saved.clear()
