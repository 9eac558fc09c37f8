"""The disk tier of the prefix cache: sequences are written when they go idle, and restored when they continue.

Writing behind copies a few pages at a time between two steps of the engine, so that the writer holds no page and no
step waits for the disk. Its thread exists only while there is something to write.
"""

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from localinfer.engine.cache.block_hashes import NO_SALT, common_length
from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.cache.prefix_tree import CachedPath, Match
from localinfer.engine.engine import Engine
from localinfer.errors import ClosedError, LocalinferError, OutOfMemoryError
from localinfer.storage.budget import CHATS_FOLDER, DESCRIPTION, WEIGHTS_FOLDER, described_folders
from localinfer.storage.chats import AnsweredChat, ChatMemory, StoredChats
from localinfer.storage.fingerprint import (
    Fingerprint,
    ModelIdentity,
    describe_differences,
    describe_folder,
    read_description,
)
from localinfer.storage.media_files import MediaFiles
from localinfer.storage.page_store import (
    DiskCounters,
    DiskTier,
    FileKind,
    Found,
    PageSource,
    Saved,
    SnapshotTier,
    chosen_positions,
    finished,
)
from localinfer.storage.restore import Tiers, restore_prompt
from localinfer.system import disk
from localinfer.system.files import num_io_threads
from localinfer.system.folders import expand_home, make_private, user_folder
from localinfer.types import TokenIds

_MOST_DELAYS = 4
"""Most idle times that a sequence waits while others go idle after it."""

Steps: TypeAlias = Generator[None, None, None]


class IdleSequence(NamedTuple):
    """A text that is not computed any more, and the salt that keeps it apart."""

    token_ids: TokenIds
    salt: bytes = NO_SALT


class Saving(Protocol):
    """The steps in which some sequences are written: few pages each, or, not behind, all that is there."""

    def __call__(self, pending: Sequence[IdleSequence], *, is_behind: bool) -> Steps: ...


class WriteBehind:
    """The queue of sequences to be written. Thread-safe.

    saving: its steps are taken under a lock, so that they never overlap. idle_seconds: idle time after a sequence's
    last token before it is written. has_thread: False leaves it to the callers of `write_next`.
    """

    def __init__(self, saving: Saving, idle_seconds: float, *, has_thread: bool) -> None:
        self._saving = saving
        self.idle_seconds = idle_seconds
        self._has_thread = has_thread
        self._wake = threading.Condition()
        self._pending: list[IdleSequence] = []
        self._due = self._latest = 0.0
        self._is_closing = False
        self._writer: threading.Thread | None = None
        # Lock order: before the engine's lock, which copying pages acquires.
        self._writing = threading.Lock()
        self._steps: Steps | None = None

    def add(self, sequence: IdleSequence) -> None:
        """Write a sequence once it has been idle for a moment, instead of its beginnings that wait."""
        with self._wake:
            if self._is_closing:
                return
            kept = [one for one in self._pending if not _begins(sequence, one)]
            now = time.monotonic()
            if not self._pending:
                self._latest = now + _MOST_DELAYS * self.idle_seconds
            self._pending = [*kept, sequence]
            # Sequences that go idle all the time, as those before each context shift, must not put it off for ever.
            self._due = min(now + self.idle_seconds, self._latest)
            if self._writer is None and self._has_thread:
                self._writer = threading.Thread(target=self._write, name="localinfer-write-behind", daemon=True)
                self._writer.start()

    def write_next(self) -> bool:
        """Write the next few due pages; False if none is."""
        with self._writing:
            if self._steps is None:
                with self._wake:
                    if not self._pending or time.monotonic() < self._due:
                        return False
                    pending, self._pending = self._pending, []
                self._steps = self._saving(pending, is_behind=True)
            self._step()
            return True

    def write_now(self, sequence: IdleSequence) -> None:
        """Finish what was begun, then write this sequence, in steps too; return when it is written."""
        with self._writing:
            while self._steps is not None:
                self._step()
            with self._wake:
                self._pending = [one for one in self._pending if not _begins(sequence, one)]
            finished(self._saving([sequence], is_behind=True))

    def write_all(self) -> None:
        """Finish what was begun, then write everything pending."""
        with self._writing:
            while self._steps is not None:
                self._step()
            with self._wake:
                pending, self._pending = self._pending, []
            finished(self._saving(pending, is_behind=False))

    def stop(self) -> None:
        """Take nothing more, and end the thread after its step; what is pending is left to `write_all`."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread, which was stopped; False if it has not ended in this time."""
        with self._wake:
            writer = self._writer
        if writer is not None:
            writer.join(seconds)
        return writer is None or not writer.is_alive()

    def _step(self) -> None:
        """Take a step; the steps are over at their end, and after an exception."""
        assert self._steps is not None, "there is something to do"
        steps, self._steps = self._steps, None
        with contextlib.suppress(StopIteration):
            next(steps)
            self._steps = steps

    def _write(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._is_closing and (rest := self._due - time.monotonic()) > 0:
                        self._wake.wait(rest)
                while not self._is_closing and self.write_next():
                    pass
                with self._wake:
                    if self._is_closing or not self._pending:
                        self._writer = None
                        return
        finally:
            with self._wake:
                if self._writer is threading.current_thread():
                    self._writer = None


def _begins(sequence: IdleSequence, beginning: IdleSequence) -> bool:
    """Return True if a text is the beginning of another of the same salt."""
    size = beginning.token_ids.size
    return sequence.salt == beginning.salt and common_length(beginning.token_ids, sequence.token_ids) == size


logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 4 << 30
_IDLE_SECONDS = 0.5
"""Idle time after a sequence's last token before it is written."""
_CLOSE_SECONDS = 5.0
"""Time limit for writing what is pending when closing."""
_PAGES_IN_PLACE = 64
"""Pages written between two checks of the time limit when closing."""
_MAX_OTHERS = 64
"""Other fingerprints searched for a prompt, to explain a miss."""


def conversations_folder(parent: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the prompt cache: inside `parent`, or inside this user's cache folder; None if there is none."""
    cache = user_folder("cache") if parent is None else expand_home(parent).absolute()
    return None if cache is None else cache / "conversations"


@dataclass(frozen=True)
class DiskOptions:
    """The folder of the prompt cache, and its byte budget."""

    folder: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def weights_memory(self) -> Path:
        """The folder of cached hashes of model files."""
        return self.folder / WEIGHTS_FOLDER


class DiskCache:
    """A `CacheTier` over a folder, for one engine. `close` and the end of the process write what is pending.

    history: its chats are stored too. The folder is created if it is missing, and refused, with a warning, if others
    could write it. embedding_width: of a model that sees or hears, of whose media is kept too what was computed.
    idle_seconds: idle time after a sequence's last token before it is written. in_background: False has no thread: what
    is due is written when `write_next` is called.
    """

    def __init__(
        self,
        engine: Engine,
        identity: ModelIdentity,
        options: DiskOptions,
        history: ChatMemory | None = None,
        *,
        embedding_width: int = 0,
        idle_seconds: float = _IDLE_SECONDS,
        in_background: bool = True,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._history = history
        self._answered: deque[AnsweredChat] = deque(maxlen=128)
        self._folder = options.folder
        self._max_bytes = options.max_bytes
        self._tiers: Tiers | None = None
        self._others: list[tuple[Mapping[str, str], DiskTier]] = []
        self._chats_failure: str | None = None
        self._is_outdated = False
        self._process = os.getpid()
        self._deadline = float("inf")
        self._is_closing = False
        self._closing = threading.Lock()
        self._behind = WriteBehind(self._saving, idle_seconds, has_thread=in_background)
        self._cache: PrefixCache | None = None
        self.media: MediaFiles | None = None
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        problem = make_private(options.folder)
        if problem is not None:
            logger.warning("prompts are not cached on disk: %s", problem)
            self._is_closing = True
            return
        self._opener = threading.Thread(target=self._open_if_known, name="localinfer-fingerprint", daemon=True)
        if in_background:
            self._opener.start()
        else:
            self._open_if_known()
        atexit.register(self._at_exit)
        with engine.exclusive_cache() as cache:
            self._cache = cache
            cache.set_tier(self)
        if embedding_width:
            self.media = MediaFiles(options.folder, embedding_width, engine.embeddings, options.max_bytes)
            engine.embeddings.tier = self.media
        if history is not None:
            history.on_answer = self._answered.append

    @property
    def counters(self) -> DiskCounters:
        """Pages and bytes read, written and rejected so far."""
        return DiskCounters() if self._tiers is None else self._tiers.pages.counters

    @property
    def snapshot_counters(self) -> DiskCounters:
        """The same of snapshots of recurrent states."""
        states = None if self._tiers is None else self._tiers.states
        return DiskCounters() if states is None else states.counters

    def wait_until_open(self) -> None:
        """Wait until stored chats have been read, milliseconds after loading."""
        if not self._is_closing:
            self._wait_for_opener()

    def restore(self, token_ids: TokenIds, cached_tokens: int, salt: bytes = NO_SALT) -> str | None:
        """Read pages that continue a prompt's cached prefix into the tree; see `CacheTier`."""
        self._wait_for_opener()
        if self._tiers is None:
            return None
        tiers = self._tiers.of_salt(salt)
        found = tiers.pages.find(token_ids, cached_tokens // tiers.pages.form.page_tokens)
        if found.num_tokens <= cached_tokens:
            return self._explain(token_ids, cached_tokens, found, salt)
        assert self._cache is not None, "a tier was set"
        try:
            return restore_prompt(self._cache, tiers, token_ids, found)
        except OutOfMemoryError:
            return "it is on disk, and memory has no room for it beside the running sequences"

    def on_evict(self, path: CachedPath, kept_tokens: int) -> None:
        """Do nothing: an evicted sequence was written when it went idle."""

    def on_idle(self, token_ids: TokenIds, salt: bytes = NO_SALT) -> None:
        """Write a sequence once it has been idle for a moment."""
        self._behind.add(IdleSequence(token_ids, salt))

    def write_next(self) -> bool:
        """Write the next few due pages, without waiting for the thread that does; False if none is."""
        return self._behind.write_next()

    def write_now(self, token_ids: TokenIds, salt: bytes = NO_SALT) -> None:
        """Write what is cached of a text, a few pages at a time between two steps of the engine; return at its end."""
        if not self._is_closing:
            self._behind.write_now(IdleSequence(token_ids, salt))

    @property
    def folder(self) -> Path:
        """The folder of the files of all fingerprints."""
        return self._folder

    @property
    def last_failure(self) -> str | None:
        """Reason why the last save ended early, None if it did not."""
        return self.counters.last_failure or self.snapshot_counters.last_failure

    def tiers(self, salt: bytes = NO_SALT) -> Tiers | None:
        """The files of a salt; None where nothing is kept. The first call may have to read the weights, to hash them.

        Raises: OSError, ClosedError.
        """
        if self._is_closing:
            return None
        self._wait_for_opener()
        if self._tiers is None:
            self._open(self._identity.compute(threads=num_io_threads(), should_stop=self._must_stop))
        return None if self._tiers is None or self._has_model_changed() else self._tiers.of_salt(salt)

    def flush(self) -> None:
        """Write everything pending now, with all threads and no step of the engine meanwhile."""
        self._behind.write_all()

    def close(self, *, seconds: float = _CLOSE_SECONDS) -> None:
        """Write what is pending, for at most about `seconds`; may be called again. Does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        with self._closing:
            if self._is_closing:
                return
            self._is_closing = True
        self._deadline = time.monotonic() + seconds
        self._behind.stop()
        atexit.unregister(self._at_exit)
        self._wait_for_opener(seconds)
        # A thread that is blocked by the disk is abandoned: it holds no memory of the engine.
        if self._behind.join(seconds) and not self._opener.is_alive():
            self.flush()

    def _wait_for_opener(self, seconds: float | None = None) -> None:
        if self._opener.ident is not None:
            self._opener.join(seconds)

    def _saving(self, pending: Sequence[IdleSequence], *, is_behind: bool) -> Steps:
        """Write embeddings, sequences and chats: in steps, between which the engine may run, or with all threads
        meanwhile."""
        threads = 1 if is_behind else num_io_threads()
        if pending:
            self._wait_for_opener()
        if self._has_model_changed():
            return
        if self.media is not None:
            yield from self.media.saving(threads=threads, should_stop=self._must_stop)
        for token_ids, salt in pending:
            try:
                fingerprint = self._identity.compute(threads=threads, should_stop=self._must_stop)
                tiers = self._tiers or self._open(fingerprint)
                if fingerprint is None or tiers is None:
                    continue
                tiers = tiers.of_salt(salt)
                if is_behind:
                    saved = yield from self._saving_copies(tiers, token_ids)
                else:
                    saved = self._save_in_place(tiers, token_ids, threads)
                if saved.num_written:
                    pages = tiers.pages
                    describe_folder(pages.folder / DESCRIPTION, self._identity.name, fingerprint, pages.form)
            except (OSError, LocalinferError) as error:
                logger.warning("a prompt was not cached on disk: %s", error)
        self._save_chats()

    def _has_model_changed(self) -> bool:
        """Return True if the model's file was changed, so that nothing may be written; warns once."""
        if self._identity.has_changed and not self._is_outdated:
            self._is_outdated = True
            logger.warning(
                "%s has changed since it was loaded, so prompts are no longer cached on disk; load it again",
                self._identity.name,
            )
        return self._is_outdated

    def _save_chats(self) -> None:
        """Write the token ids of replies, which cannot be computed from their texts."""
        if self._tiers is None or not disk.is_folder(self._tiers.pages.folder):
            return
        chats = []
        while self._answered:
            chats.append(self._answered.popleft())
        try:
            StoredChats(self._tiers.pages.folder / CHATS_FOLDER).save(chats)
            self._chats_failure = None
        except OSError as error:
            level = logging.INFO if str(error) == self._chats_failure else logging.WARNING
            logger.log(level, "a reply's token ids were not cached on disk: %s", error)
            self._chats_failure = str(error)

    def _saving_copies(self, tiers: Tiers, token_ids: TokenIds) -> Generator[None, None, Saved]:
        """Copy a few pages at a time between two steps of the engine."""
        saved = yield from tiers.pages.saving(token_ids, self._copies(tiers.pages, token_ids, is_windowed=False))
        if tiers.windows is not None:
            with self._engine.exclusive_cache() as cache:
                places = np.flatnonzero(cache.tree.match(token_ids, tiers.pages.salt).windowed).tolist()
            copies = self._copies(tiers.windows, token_ids, is_windowed=True)
            yield from tiers.windows.saving(token_ids, copies, places=places)
        if tiers.states is not None:
            yield from self._saving_snapshots(tiers.states, token_ids)
        return saved

    def _saving_snapshots(self, tier: SnapshotTier, token_ids: TokenIds) -> Steps:
        """Copy one snapshot after the other between two steps of the engine."""
        buffer = np.empty(tier.form.page_bytes, np.uint8).data

        def read(position: int) -> memoryview | None:
            if self._must_stop():
                return None
            try:
                with self._engine.exclusive_cache() as cache:
                    slot = cache.tree.match(token_ids, tier.salt).snapshots.get(position)
                    if slot is None:
                        return None
                    buffer[:] = cache.pool.state_view(slot).data
            except ClosedError:
                return None
            return buffer

        with self._engine.exclusive_cache() as cache:
            positions = chosen_positions(cache.tree.match(token_ids, tier.salt).snapshots, cache.pool.grid)
        yield from tier.saving_snapshots(token_ids, positions, read)

    def _copies(self, tier: DiskTier, token_ids: TokenIds, *, is_windowed: bool) -> PageSource:
        """Pages of one sequence, or their sliding-window blocks, copied alternately to two sets of buffers."""
        sets: list[list[memoryview]] = [[], []]

        def read(indices: Sequence[int]) -> Sequence[memoryview] | None:
            if self._must_stop():
                return None
            sets.reverse()
            sets[0] += [np.empty(tier.form.page_bytes, np.uint8).data for _ in range(len(indices) - len(sets[0]))]
            buffers = sets[0][: len(indices)]
            try:
                with self._engine.exclusive_cache() as cache:
                    match = cache.tree.match(token_ids, tier.salt)
                    pages = self._pages(cache.pool, match, token_ids, indices, is_windowed)
                    for page, buffer in zip(pages or (), buffers, strict=False):
                        buffer[:] = page
            except ClosedError:
                return None
            return None if pages is None else buffers

        return read

    def _save_in_place(self, tiers: Tiers, token_ids: TokenIds, threads: int) -> Saved:
        """Write pages without copying them; no step of the engine runs meanwhile."""
        with self._engine.exclusive_cache() as cache:
            pool, match = cache.pool, cache.tree.match(token_ids, tiers.pages.salt)

            def save(tier: DiskTier, places: Sequence[int] | None, is_windowed: bool) -> Saved:
                def read(indices: Sequence[int]) -> Sequence[memoryview] | None:
                    return self._pages(pool, match, token_ids, indices, is_windowed)

                return tier.save(token_ids, read, places=places, threads=threads, pages_at_once=_PAGES_IN_PLACE)

            saved = save(tiers.pages, None, False)
            if tiers.windows is not None:
                save(tiers.windows, np.flatnonzero(match.windowed).tolist(), True)
            if tiers.states is not None:

                def states(position: int) -> memoryview | None:
                    return None if self._must_stop() else pool.state_view(match.snapshots[position]).data

                positions = chosen_positions(match.snapshots, pool.grid)
                tiers.states.save_snapshots(token_ids, positions, states)
            return saved

    def _pages(
        self, pool: PagePool, match: Match, token_ids: TokenIds, indices: Sequence[int], is_windowed: bool
    ) -> list[memoryview] | None:
        """The bytes of some pages, or of their sliding-window blocks; None if they are not cached, or time is up."""
        reaches = match.length >= min(token_ids.size, (indices[-1] + 1) * pool.page_tokens)
        if self._must_stop() or not reaches or (is_windowed and not match.windowed[list(indices)].all()):
            return None
        view = pool.windowed_view if is_windowed else pool.view
        return [view(page).data for page in match.pages[list(indices)].tolist()]

    def _must_stop(self) -> bool:
        return time.monotonic() > self._deadline

    def _open_if_known(self) -> None:
        try:
            self._open(self._identity.known())
        except (OSError, LocalinferError) as error:
            logger.info("the disk cache is not used: %s", error)

    def _open(self, fingerprint: Fingerprint | None) -> Tiers | None:
        if fingerprint is None:
            return None
        pool = self._engine.pool
        self._others = [other for other in self._find_others() if other[0] != dict(fingerprint.parts)]
        pages = self._tier_of(fingerprint, pool.page_tokens, pool.page_bytes)
        windows = states = None
        if pool.sliding.tokens:
            windows = self._tier_of(fingerprint, pool.page_tokens, pool.windowed_bytes, FileKind.WINDOW)
        if pool.has_states:
            states = SnapshotTier(
                self._folder,
                fingerprint.key,
                page_tokens=pool.page_tokens,
                state_bytes=pool.states.slot_bytes,
                max_bytes=self._max_bytes,
                contents=self._engine.embeddings.short_runs.contents,
            )
        self._tiers = tiers = Tiers(pages, windows, states)
        if self._history is not None:
            self._history.recall(StoredChats(pages.folder / CHATS_FOLDER).load(self._history.vocab_size))
        return tiers

    def _tier_of(
        self, fingerprint: Fingerprint, page_tokens: int, page_bytes: int, kind: FileKind = FileKind.PAGE
    ) -> DiskTier:
        return DiskTier(
            self._folder,
            fingerprint.key,
            page_tokens=page_tokens,
            page_bytes=page_bytes,
            max_bytes=self._max_bytes,
            threads=num_io_threads(),
            kind=kind,
            contents=self._engine.embeddings.short_runs.contents,
        )

    def _find_others(self) -> Iterator[tuple[Mapping[str, str], DiskTier]]:
        """Other fingerprints of the folder, from their unverified descriptions, for explanations only."""
        for path in described_folders(self._folder)[:_MAX_OTHERS]:
            try:
                fields = read_description(path)
            except (OSError, ValueError) as error:
                logger.info("%s is not used: %s", path, error)
                continue
            parts = fields["parts"]
            yield parts, self._tier_of(Fingerprint(parts), fields["page_tokens"], fields["page_bytes"])

    def _explain(self, token_ids: TokenIds, cached_tokens: int, found: Found, salt: bytes) -> str | None:
        if found.problem is not None:
            return f"a file on disk {found.problem.value}, and was deleted"
        for parts, tier in () if cached_tokens else self._others:
            if tier.of_salt(salt).has_beginning(token_ids[: tier.form.page_tokens]):
                ours = self._identity.known()
                return describe_differences(parts, {} if ours is None else ours.parts)
        return None


def _close_at_exit(reference: "weakref.ref[DiskCache]") -> None:
    cache = reference()
    if cache is not None:
        cache.close()
