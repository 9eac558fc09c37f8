"""The disk under the prefix tree: conversations are written when they go idle, and come back when they go on.

Writing happens behind everything else, by a thread that lives only while there is something to write. It copies a few
pages at a time between two steps of the engine, so that it holds no page and no step waits for the disk.
"""

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localinfer.cache.prefix_cache import PrefixCache
from localinfer.cache.prefix_tree import CachedPath, Match, TokenIds
from localinfer.chat.history import AnsweredChat, ChatHistory
from localinfer.engine.engine import Engine
from localinfer.errors import ClosedError, LocalinferError, OutOfMemoryError
from localinfer.kernels.user_folders import expand_home
from localinfer.persistence.budget import CHATS_FOLDER, DESCRIPTION, WEIGHTS_FOLDER
from localinfer.persistence.chats import StoredChats
from localinfer.persistence.description import Description, describe_differences, describe_folder, read_description
from localinfer.persistence.fingerprint import Fingerprint, ModelIdentity
from localinfer.persistence.restore import part_view, restore_pages
from localinfer.persistence.store import DiskCounters, DiskTier, Found, Saved, common_length
from localinfer.private_folder import make_private, user_cache_folder
from localinfer.worker_threads import num_io_threads

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 4 << 30
_IDLE_SECONDS = 0.5
"""Rest after a conversation's last token before it is written."""
_CLOSE_SECONDS = 5.0
"""How long closing may take to write what is left."""
_PAGES_IN_PLACE = 64
"""Pages that closing writes before it looks at the time."""
_MAX_OTHERS = 64
"""Other fingerprints that are asked for a prompt, to say what they differ in."""


def conversations_folder(parent: str | os.PathLike[str] | None) -> Path | None:
    """Where conversations are kept: a folder of their own inside `parent`, or inside this user's cache folder.

    None if this user has none.
    """
    cache = user_cache_folder() if parent is None else expand_home(parent).absolute()
    return None if cache is None else cache / "conversations"


@dataclass(frozen=True)
class DiskOptions:
    """Where conversations are kept between runs, and how many bytes all of them may take there."""

    folder: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def weights_memory(self) -> Path:
        """Where hashes of model files are remembered."""
        return self.folder / WEIGHTS_FOLDER


@dataclass(frozen=True)
class _Other:
    """What another model, setting or version keeps in the same folder."""

    parts: Mapping[str, str]
    tier: DiskTier


class DiskCache:
    """A `CacheTier` over a folder, for one engine. `close` writes what is left; so does the end of the process.

    history: remembers chats over restarts too. The folder is made if it is not there, and refused, with a warning, if
    others could write it.
    """

    def __init__(
        self,
        engine: Engine,
        identity: ModelIdentity,
        options: DiskOptions,
        history: ChatHistory | None = None,
        *,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._history = history
        self._answered: deque[AnsweredChat] = deque(maxlen=128)
        self._folder = options.folder
        self._max_bytes = options.max_bytes
        self._idle_seconds = idle_seconds
        self._tier: DiskTier | None = None
        self._parts_tier: DiskTier | None = None
        self._others: list[_Other] = []
        self._chats_told: str | None = None
        self._is_described = False
        self._is_outdated = False
        self._process = os.getpid()
        self._wake = threading.Condition()
        self._pending: list[TokenIds] = []
        self._due = 0.0
        self._deadline = float("inf")
        self._is_closing = False
        self._writer: threading.Thread | None = None
        # Taken before the engine's lock, which who copies pages waits for.
        self._writing = threading.Lock()
        self._cache: PrefixCache | None = None
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        problem = make_private(options.folder)
        if problem is not None:
            logger.warning("conversations are not kept on disk: %s", problem)
            self._is_closing = True
            return
        self._opener = threading.Thread(target=self._open_if_known, name="localinfer-fingerprint", daemon=True)
        self._opener.start()
        atexit.register(self._at_exit)
        with engine.exclusive_cache() as cache:
            self._cache = cache
            cache.set_tier(self)
        if history is not None:
            history.on_answer = self._answered.append

    @property
    def counters(self) -> DiskCounters:
        """What was read, written and refused so far."""
        return DiskCounters() if self._tier is None else self._tier.counters

    def wait_until_open(self) -> None:
        """Wait until what is remembered of former chats has been read: milliseconds after loading."""
        if not self._is_closing:
            self._opener.join()

    def restore(self, token_ids: TokenIds, cached_tokens: int) -> str | None:
        """Read pages that continue what memory holds of a prompt into the tree; as `CacheTier` says."""
        self._opener.join()
        tier = self._tier
        if tier is None:
            return None
        found = tier.find(token_ids, cached_tokens // tier.form.page_tokens)
        if found.num_tokens <= cached_tokens:
            return self._explain(tier, token_ids, cached_tokens, found)
        assert self._cache is not None, "a tier was set"
        try:
            return restore_pages(self._cache, tier, self._parts_tier, token_ids, found)
        except OutOfMemoryError:
            return "it is on disk, and memory has no room for it beside the conversations that are running"

    def on_evict(self, path: CachedPath, kept_tokens: int) -> None:
        """Nothing: what is evicted was written when it went idle."""

    def on_idle(self, token_ids: TokenIds) -> None:
        """Have a conversation written after a moment's rest, unless it goes on."""
        with self._wake:
            if self._is_closing:
                return
            kept = [ids for ids in self._pending if common_length(ids, token_ids) < ids.size]
            self._pending = [*kept, token_ids]
            self._due = time.monotonic() + self._idle_seconds
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_behind, name="localinfer-write-behind", daemon=True)
                self._writer.start()

    def flush(self) -> None:
        """Write everything that waits, now, with all threads and no step of the engine meanwhile."""
        self._save_pending(self._save_in_place, num_io_threads())

    def close(self, *, seconds: float = _CLOSE_SECONDS) -> None:
        """Write what is left, for at most about `seconds`; may be called again. A forked child forgets."""
        if os.getpid() != self._process:
            return
        with self._wake:
            if self._is_closing:
                return
            self._is_closing = True
            self._deadline = time.monotonic() + seconds
            self._wake.notify()
            writer = self._writer
        atexit.unregister(self._at_exit)
        self._opener.join(seconds)
        if writer is not None:
            writer.join(seconds)
        # A writer whose page the disk does not take is left behind: it holds no memory of the engine.
        if writer is None or not writer.is_alive():
            self.flush()

    def _write_behind(self) -> None:
        while True:
            with self._wake:
                while not self._is_closing and (rest := self._due - time.monotonic()) > 0:
                    self._wake.wait(rest)
                if self._is_closing or not self._pending:
                    self._writer = None
                    return
            self._save_pending(self._save_behind, 1)

    def _save_pending(self, save: Callable[[DiskTier, TokenIds, int], Saved], threads: int) -> None:
        with self._writing:
            with self._wake:
                pending, self._pending = self._pending, []
            if pending:
                self._opener.join()
            if self._has_model_changed():
                return
            for token_ids in pending:
                try:
                    tier = self._tier or self._open(
                        self._identity.compute(threads=threads, should_stop=self._must_stop)
                    )
                    if tier is not None and save(tier, token_ids, threads).num_written:
                        self._describe(tier)
                except (OSError, LocalinferError) as error:
                    logger.warning("a conversation was not kept on disk: %s", error)
            self._save_chats()

    def _has_model_changed(self) -> bool:
        """Whether nothing may be kept any more, since only who loads the old file would find it; told once."""
        if self._identity.has_changed and not self._is_outdated:
            self._is_outdated = True
            logger.warning(
                "%s has changed since it was loaded, so conversations are not kept on disk any more; load it again",
                self._identity.name,
            )
        return self._is_outdated

    def _save_chats(self) -> None:
        """Write the replies' ids too, which cannot be had again from their texts."""
        if self._tier is None or not self._tier.folder.is_dir():
            return
        chats = []
        while self._answered:
            chats.append(self._answered.popleft())
        try:
            StoredChats(self._tier.folder / CHATS_FOLDER).save(chats)
            self._chats_told = None
        except OSError as error:
            level = logging.INFO if str(error) == self._chats_told else logging.WARNING
            logger.log(level, "a reply's tokens were not kept on disk: %s", error)
            self._chats_told = str(error)

    def _save_behind(self, tier: DiskTier, token_ids: TokenIds, threads: int) -> Saved:
        saved = tier.save(token_ids, _Copies(self, tier, token_ids, is_windowed=False), threads=threads)
        if self._parts_tier is not None:
            with self._engine.exclusive_cache() as cache:
                places = np.flatnonzero(cache.tree.match(token_ids).windowed).tolist()
            copies = _Copies(self, self._parts_tier, token_ids, is_windowed=True)
            self._parts_tier.save(token_ids, copies, places=places, threads=threads)
        return saved

    def _save_in_place(self, tier: DiskTier, token_ids: TokenIds, threads: int) -> Saved:
        with self._engine.exclusive_cache() as cache:
            pool, match = cache.pool, cache.tree.match(token_ids)

            def save(tier: DiskTier, places: Sequence[int] | None, is_windowed: bool) -> Saved:
                def read(indices: Sequence[int]) -> Sequence[memoryview] | None:
                    if self._must_stop() or not _holds(match, token_ids, indices, pool.page_tokens, is_windowed):
                        return None
                    return [part_view(pool, page, is_windowed) for page in match.pages[list(indices)].tolist()]

                return tier.save(token_ids, read, places=places, threads=threads, pages_at_once=_PAGES_IN_PLACE)

            saved = save(tier, None, False)
            if self._parts_tier is not None:
                save(self._parts_tier, np.flatnonzero(match.windowed).tolist(), True)
            return saved

    def _must_stop(self) -> bool:
        return time.monotonic() > self._deadline

    def copy_pages(
        self, token_ids: TokenIds, indices: Sequence[int], buffers: Sequence[memoryview], is_windowed: bool
    ) -> bool:
        """Copy some pages of a conversation from the tree, or their windowed parts, between two steps; False if they
        are not there any more."""
        if self._must_stop():
            return False
        try:
            with self._engine.exclusive_cache() as cache:
                match = cache.tree.match(token_ids)
                if not _holds(match, token_ids, indices, cache.pool.page_tokens, is_windowed):
                    return False
                for index, buffer in zip(indices, buffers, strict=True):
                    buffer[:] = part_view(cache.pool, int(match.pages[index]), is_windowed)
        except ClosedError:
            return False
        return True

    def _open_if_known(self) -> None:
        try:
            self._open(self._identity.known())
        except (OSError, LocalinferError) as error:
            logger.info("what is on disk is not looked at: %s", error)

    def _open(self, fingerprint: Fingerprint | None) -> DiskTier | None:
        if fingerprint is None:
            return None
        pool = self._engine.pool
        self._others = [other for other in self._find_others() if dict(other.parts) != dict(fingerprint.parts)]
        tier = self._tier_of(fingerprint, pool.page_tokens, pool.page_bytes)
        if pool.sliding.tokens:
            self._parts_tier = self._tier_of(fingerprint, pool.page_tokens, pool.windowed_bytes, is_windowed=True)
        self._tier = tier
        if self._history is not None:
            self._history.recall(StoredChats(tier.folder / CHATS_FOLDER).load(self._history.vocab_size))
        return tier

    def _describe(self, tier: DiskTier) -> None:
        """Say in the folder of a fingerprint what it is of, unless it says so already."""
        fingerprint = self._identity.known()
        if fingerprint is None or self._is_described:
            return
        self._is_described = True
        path, form = tier.folder / DESCRIPTION, tier.form
        wanted = Description(
            model=self._identity.name,
            parts=dict(fingerprint.parts),
            page_tokens=form.page_tokens,
            page_bytes=form.page_bytes,
        )
        describe_folder(path, wanted)

    def _tier_of(
        self, fingerprint: Fingerprint, page_tokens: int, page_bytes: int, *, is_windowed: bool = False
    ) -> DiskTier:
        return DiskTier(
            self._folder,
            fingerprint.key,
            page_tokens=page_tokens,
            page_bytes=page_bytes,
            max_bytes=self._max_bytes,
            threads=num_io_threads(),
            is_windowed=is_windowed,
        )

    def _find_others(self) -> list[_Other]:
        """Fingerprints of the folder, by what their descriptions say, which is proven by nothing and only ever told."""
        others = []
        for path in sorted(self._folder.glob(f"*/{DESCRIPTION}"))[:_MAX_OTHERS]:
            try:
                fields = read_description(path)
            except (OSError, ValueError) as error:
                logger.info("%s is not used: %s", path, error)
                continue
            parts = fields["parts"]
            tier = self._tier_of(Fingerprint(parts), fields["page_tokens"], fields["page_bytes"])
            others.append(_Other(parts, tier))
        return others

    def _explain(self, tier: DiskTier, token_ids: TokenIds, cached_tokens: int, found: Found) -> str | None:
        if found.problem is not None:
            return f"a file on disk {found.problem.value}, and was deleted"
        if cached_tokens:
            return None
        for other in self._others:
            if other.tier.has_beginning(token_ids[: other.tier.form.page_tokens]):
                parts = self._identity.known()
                ours: Mapping[str, str] = {} if parts is None else parts.parts
                return describe_differences(other.parts, ours)
        return None


def _holds(match: Match, token_ids: TokenIds, indices: Sequence[int], page_tokens: int, is_windowed: bool) -> bool:
    """Whether a match reaches to the end of the last of some pages, or of the text, and has their windowed parts."""
    reaches = match.length >= min(token_ids.size, (indices[-1] + 1) * page_tokens)
    return reaches and (not is_windowed or bool(match.windowed[list(indices)].all()))


class _Copies:
    """A `PageSource` of one conversation: copies in two sets of buffers, in turns."""

    def __init__(self, cache: DiskCache, tier: DiskTier, token_ids: TokenIds, *, is_windowed: bool) -> None:
        self._cache, self._token_ids, self._page_bytes = cache, token_ids, tier.form.page_bytes
        self._is_windowed = is_windowed
        self._sets: list[list[memoryview]] = [[], []]

    def __call__(self, indices: Sequence[int]) -> Sequence[memoryview] | None:
        self._sets.reverse()
        buffers = self._sets[0]
        buffers += [np.empty(self._page_bytes, np.uint8).data for _ in range(len(indices) - len(buffers))]
        used = buffers[: len(indices)]
        return used if self._cache.copy_pages(self._token_ids, indices, used, self._is_windowed) else None


def _close_at_exit(reference: "weakref.ref[DiskCache]") -> None:
    cache = reference()
    if cache is not None:
        cache.close()
