"""The prefix cache as the engine uses it: a new sequence starts with all that is cached of its prompt, and is cached.

It combines the page pool, the prefix tree and, if there is one, a tier below (disk), and explains misses.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from localinfer.engine.cache.block_hashes import NO_SALT, CacheObserver, common_length, tell_cleared
from localinfer.engine.cache.block_pool import STATES_OF_SEQUENCE, PageNumbers, PagePool, default_kv_memory
from localinfer.engine.cache.prefix_tree import CachedPath, Match, PrefixTree
from localinfer.engine.cache.sequence import KVEviction, SequenceCache
from localinfer.engine.cache.sequence_state import DEFAULT_POLICY, Settle, SnapshotPolicy
from localinfer.engine.cache.stats import CacheCounters, CacheMiss, SnapshotStats
from localinfer.engine.media import PlacedMedia
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import StatefulProgram
from localinfer.types import Record, TokenIds

if TYPE_CHECKING:
    from localinfer.models.load.loader import Model

_SHOWN_TOKENS = 8
"""Token ids kept on each side of the first one that differs."""


class CacheHints(Record, kw_only=True):
    """Hints for caching a generation's ids."""

    system_tokens: int = 0
    """Number of ids at the start of the prompt that other prompts share; once another has, they are evicted after
    ordinary ones."""
    branch_tokens: tuple[int, ...] = ()
    """Lengths of beginnings that a later prompt is likely to share, such as all before the reply."""
    is_pinned: bool = False
    """Evict all of them last."""
    history: TokenIds | None = None
    """int32, ids of the chat so far; where the prompt parts from them, its chat template is the cause."""
    salt: bytes = NO_SALT
    """Only texts of the same salt share anything."""
    row_type: int = 0
    """Token type of all rows, which the salt tells from others: 1 where an adapter changes the text."""
    is_handed_over: bool = False
    """Another process continues at the end of the prompt."""


class Admission(NamedTuple):
    """A sequence that holds what was cached of its prompt, how many tokens that is, and why not more, if known."""

    sequence: SequenceCache
    cached_tokens: int
    miss: CacheMiss | None


class CacheTier(Protocol):
    """A slower memory under the tree, such as the disk; called under the step lock."""

    def restore(self, token_ids: TokenIds, cached_tokens: int, salt: bytes) -> str | None:
        """Put more of a prompt into the tree than the `cached_tokens` it holds, if there is more of the same salt.

        Returns why what is stored cannot be used, in words, or None.
        """

    def on_evict(self, path: CachedPath, kept_tokens: int) -> None:
        """Called when only `kept_tokens` of a path will stay in memory; its pages are valid during the call."""

    def on_idle(self, token_ids: TokenIds, salt: bytes) -> None:
        """Called when a sequence has ended whose ids, all of them computed, are in the tree now."""


class PrefixCache:
    """Pages, tree and tier of one model. One thread at a time, under the step lock.

    `last_retired` is the text that ended last, as token ids, whether or not it is still cached, and
    `last_retired_salt` its salt, `last_retired_type` its rows' type. batch_tokens: the most that one batch adds to a
    sequence. window: bounds what each sequence holds; what is computed after it has dropped pages is an approximation,
    and never enters the tree. settle: of the program, for a model with recurrent layers.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_bytes: int | None,
        context_length: int,
        batch_tokens: int = 1,
        window: KVEviction | None = None,
        policy: SnapshotPolicy = DEFAULT_POLICY,
        settle: Settle | None = None,
    ) -> None:
        self.pool = PagePool(layout, max_bytes=max_bytes)
        self.tree = PrefixTree(self.pool, policy)
        self.counters = CacheCounters()
        self.last_retired: TokenIds | None = None
        self.last_retired_salt, self.last_retired_type = NO_SALT, 0
        self._context_length = context_length
        self._batch_tokens = batch_tokens
        self.window = window
        self._policy = policy
        self._settle = settle
        self._tier: CacheTier | None = None

    @classmethod
    def for_model(cls, model: "Model", kv_memory: int | None, window: KVEviction | None = None) -> "PrefixCache":
        """The cache of a loaded model; kv_memory: bytes, None for the default."""
        context_length, batch_tokens = model.config.context_length, model.program.max_batch_rows
        if kv_memory is None:
            kv_memory = default_kv_memory(model.kv_layout, context_length, batch_tokens)
        return cls(
            model.kv_layout,
            max_bytes=kv_memory,
            context_length=context_length,
            batch_tokens=batch_tokens,
            window=window,
            settle=model.program.settle if isinstance(model.program, StatefulProgram) else None,
        )

    def set_tier(self, tier: CacheTier) -> None:
        """Put a slower memory under the tree."""
        self._tier = tier
        self.tree.on_evict = tier.on_evict

    def observe(self, observer: CacheObserver) -> None:
        """Tell of pages that enter and leave the tree from now on, to one observer."""
        self.tree.observer = observer

    def close(self) -> None:
        """Release all memory, and let go of the tier, which refers to what owns this cache."""
        observer, self.tree.observer = self.tree.observer, None
        if observer is not None:
            tell_cleared(observer, self.tree.roots, self.pool.page_tokens)
            observer.close()
        self.pool.close()
        self._tier = self.tree.on_evict = self.pool.reclaim = self.pool.make_grid_room = self._settle = None

    @property
    def near_tokens(self) -> int:
        """Positions too few for a snapshot, or for reading one from the disk."""
        return self._policy.near_tokens

    def check_fits(self, length: int) -> None:
        """Raise OutOfMemoryError, with both numbers, if `length` positions are more than may ever be allocated."""
        held = length if self.window is None else min(length, self.window.max_tokens)
        wanted, allowed = self.pool.peak_bytes(held, self._batch_tokens), self.pool.max_bytes
        if allowed is not None and wanted > allowed:
            raise OutOfMemoryError(
                f"{length} tokens take {wanted:,} bytes of key-value cache, which may use {allowed:,}; shorten the "
                "prompt, or allow more with kv_memory or memory_limit"
            )

    def has_room(
        self,
        token_ids: TokenIds,
        salt: bytes = NO_SALT,
        *,
        media: PlacedMedia | None = None,
        without: Collection[SequenceCache] = (),
    ) -> bool:
        """True if one more sequence of these ids fits, beside all others that are open and a page more for each."""
        pool = self.pool
        if pool.max_bytes is None:
            return True
        pool.close_abandoned()
        held = [sequence for sequence in pool.sequences if sequence not in without]
        pages, windowed, states, logs = _distinct(sequence.pages for sequence in held), 0, 0, 0
        if pool.sliding.tokens:
            windowed = _distinct(sequence.pages[sequence.windowed] for sequence in held).size
        if pool.has_states:
            # Each alternates between two, whether or not it holds both now; snapshots are evicted for them.
            states = max(STATES_OF_SEQUENCE * len(held), len({s for one in held for s in one.state_slots}))
            logs = len({slot for sequence in held for slot in sequence.log_slots})
        match = self.match(token_ids, salt, media)
        shared = np.isin(match.pages[: match.usable // pool.page_tokens], pages).sum()
        length = token_ids.size + 1 if self.window is None else min(token_ids.size + 1, self.window.max_tokens)
        wanted = pool.peak_bytes(length, self._batch_tokens) - int(shared) * pool.page_bytes
        more = pool.num_bytes(len(held), len(held))
        return pool.num_bytes(pages.size, windowed, states, logs) + wanted + more <= pool.max_bytes

    def used_fraction(self, held: Sequence[SequenceCache]) -> float:
        """Share of the pages that there is memory for that these sequences hold; 0 without a limit.

        Any thread may ask, during a step too.
        """
        pool = self.pool
        if not pool.max_bytes:
            return 0.0
        num_bytes = pool.num_bytes(_distinct(sequence.pages for sequence in held).size, 0)
        return min(1.0, num_bytes / pool.max_bytes)

    def open(self) -> SequenceCache:
        """Return an empty sequence."""
        return SequenceCache(self.pool, max_length=self._context_length, window=self.window, policy=self._policy)

    def match(self, token_ids: TokenIds, salt: bytes = NO_SALT, media: PlacedMedia | None = None) -> Match:
        """Match a prompt but its last token, up to where it may be continued; media: its pictures and sounds.

        A run of rows that see each other is found as a whole or not at all, and nothing from the first short run on
        whose ids stand for another one's.
        """
        match = self.tree.match(self._reusable(token_ids, media), salt)
        if media is None:
            return match
        if (whole := media.reusable(match.length)) < match.length:
            match = self.tree.match(token_ids[:whole], salt)
        while (whole := media.reusable(match.usable)) < match.usable:
            match = self.tree.within(match, whole)
        return match

    def find(self, token_ids: TokenIds, salt: bytes, media: PlacedMedia | None = None) -> int:
        """Number of cached ids of a prompt but its last, after reading from the disk what is stored of it."""
        prefix, found = self._reusable(token_ids, media), self.match(token_ids, salt, media).usable
        if self._tier is None or found >= prefix.size:
            return found
        self._tier.restore(prefix, found, salt)
        return self.match(token_ids, salt, media).usable

    def admit(
        self, token_ids: TokenIds, hints: CacheHints, *, is_prompt: bool = True, media: PlacedMedia | None = None
    ) -> Admission:
        """Return a sequence for a prompt, with all of it that is cached but its last token, whose logits are wanted.

        is_prompt: it counts as one; a sequence that continues a generation does not. media: its pictures and sounds.
        """
        prefix = self._reusable(token_ids, media)
        match = self.match(token_ids, hints.salt, media)
        refusal = None
        if self._tier is not None and match.usable < prefix.size:
            refusal = self._tier.restore(prefix, match.usable, hints.salt)
            match = self.match(token_ids, hints.salt, media)
        sequence = self.open()
        sequence.media, sequence.row_type = media, hints.row_type
        # Others are likely to continue from where texts part, and where a prompt, or its shared prefix, ends.
        system = min(hints.system_tokens, token_ids.size)
        sequence.pin_window(match.length, token_ids.size, system)
        # The last token is always computed. A system prefix ends between pages in the tree.
        page_tokens = self.pool.page_tokens
        places = (prefix.size, self._policy.before_end(prefix.size, page_tokens), system - system % page_tokens)
        needed = prefix.size if hints.is_handed_over else None
        sequence.want_snapshots(*places, *hints.branch_tokens, parting=match.length, needed=needed)
        # A text that shares little more than the system prefix is another conversation. Only then, or where all of it
        # is one, that prefix is kept for others: most programs' side questions have one of their own.
        goes_on = match.length > system + page_tokens
        sequence.has_shared_prefix = system >= token_ids.size or system - page_tokens < match.length and not goes_on
        # Snapshots are weighed by what they save.
        sequence.num_turns = match.num_turns if goes_on and not self.pool.has_states else 0
        self._take(sequence, match, prefix, hints.salt)
        if not is_prompt:
            return Admission(sequence, sequence.length, None)
        is_whole = match.usable == token_ids.size - 1
        miss = None if is_whole else self._explain(token_ids, match, hints, refusal, media)
        counters = self.counters
        counters.prompts += 1
        counters.prompt_tokens += token_ids.size
        counters.cached_tokens += sequence.length
        counters.hits += sequence.length > 0
        if miss is not None:
            counters.misses[miss.cause] += 1
        return Admission(sequence, sequence.length, miss)

    def extend(self, sequence: SequenceCache, token_ids: TokenIds, salt: bytes = NO_SALT) -> int:
        """Adopt what others have computed of a prompt since; return how many positions that saves."""
        prefix = self._reusable(token_ids, sequence.media)
        match = self.match(token_ids, salt, sequence.media)
        before = sequence.length
        if match.length > max(before, match.usable):
            # Requests that wait can continue from what this one computes there.
            sequence.pin_window(match.length)
            sequence.want_snapshots(parting=match.length)
        if match.usable <= before:
            return 0
        self._take(sequence, match, prefix, salt)
        saved = max(0, sequence.length - before)
        self.counters.cached_tokens += saved
        return saved

    def publish(self, sequence: SequenceCache, token_ids: TokenIds, hints: CacheHints) -> None:
        """Cache the full pages of a sequence in use; `token_ids` are at least those of its positions.

        Of a page that is not full, a copy up to the last snapshot of recurrent states, if there is one in it.
        """
        if not sequence.is_exact:
            return
        length = _findable(sequence)
        whole = length - length % self.pool.page_tokens
        snapshots = [position for position in sequence.snapshots if position <= length] if self.pool.has_states else []
        last = max(snapshots, default=0)
        if last <= whole:
            self._insert(sequence, token_ids[:whole], hints)
            return
        pool, tail = self.pool, sequence.pages[whole // self.pool.page_tokens]
        try:
            copy = pool.acquire(1)
        except OutOfMemoryError:
            self._insert(sequence, token_ids[:whole], hints)
            return
        try:
            pool.copy(int(tail), int(copy[0]))
            self._insert(sequence, token_ids[:last], hints, tail=copy)
        finally:
            pool.release(copy)

    def retire(self, sequence: SequenceCache, token_ids: TokenIds, hints: CacheHints) -> None:
        """Make all of a sequence findable, unless it is an approximation, and close it."""
        known = token_ids[: sequence.length]
        try:
            if sequence.is_exact and known.size:
                sequence.snapshot_end(self._settle)
            if not sequence.is_exact:
                known = known[: self.tree.match(known, hints.salt).length]
            elif known.size:
                self._insert(sequence, known[: _findable(sequence)], hints)
            if known.size:
                self.last_retired, self.last_retired_salt = known, hints.salt
                self.last_retired_type = hints.row_type
        finally:
            sequence.close()
        if known.size and self._tier is not None:
            self._tier.on_idle(known, hints.salt)

    @property
    def snapshot_stats(self) -> SnapshotStats | None:
        """Figures of snapshots; None for a model without recurrent layers."""
        pool, tree, counters = self.pool, self.tree, self.counters
        if not pool.has_states:
            return None
        held, grid = tree.num_snapshots, len(pool.grid)
        state_bytes = pool.states.slot_bytes
        taken, hits = tree.taken_snapshots, counters.snapshot_hits
        return SnapshotStats(held, held * state_bytes, grid, grid * state_bytes, taken, tree.evicted_snapshots, hits)

    def clear(self) -> None:
        """Evict everything that no running sequence uses."""
        self.pool.close_abandoned()
        self.tree.clear()
        if self.tree.observer is not None and next(self.tree.roots.nodes(), None) is None:
            self.tree.observer.cleared()

    def forget(self, token_ids: TokenIds, salt: bytes = NO_SALT) -> int:
        """Evict what of a text no other text and no running sequence uses; return how many ids that was."""
        return self.tree.forget(token_ids, salt)

    def _reusable(self, token_ids: TokenIds, media: PlacedMedia | None = None) -> TokenIds:
        """Ids of a prompt that a sequence may adopt: all but its last token, and no more than its window holds."""
        prefix = token_ids[:-1] if media is None else token_ids[: media.reusable(token_ids.size - 1)]
        return prefix if self.window is None else prefix[: self.window.num_pages * self.pool.page_tokens]

    def _insert(
        self, sequence: SequenceCache, token_ids: TokenIds, hints: CacheHints, tail: PageNumbers | None = None
    ) -> None:
        """Put the beginning of what a sequence holds into the tree. tail: in place of its last page."""
        sequence.free_out_of_window()
        num_pages = self.pool.num_pages_for(token_ids.size)
        pages, windowed = sequence.pages[:num_pages], sequence.windowed[:num_pages]
        if tail is not None:
            pages = np.concatenate((pages[:-1], tail))
        snapshots = sequence.snapshots if self.pool.has_states else {}
        snapshots = {position: slot for position, slot in snapshots.items() if position <= token_ids.size}
        self.tree.insert(
            token_ids,
            pages,
            windowed,
            snapshots=snapshots,
            system_tokens=hints.system_tokens if sequence.has_shared_prefix else 0,
            is_pinned=hints.is_pinned,
            num_turns=sequence.num_turns,
            salt=hints.salt,
        )
        if snapshots:
            sequence.forget_snapshots(list(snapshots))

    def _take(self, sequence: SequenceCache, match: Match, token_ids: TokenIds, salt: bytes) -> None:
        """Make a sequence share a match's full pages and copy a last one that is not full.

        token_ids: those that were matched, of this salt.
        """
        if not match.usable:
            return
        self.tree.touch(match.node, match.usable, match.offset)
        num_pages = self.pool.num_pages_for(match.usable)
        sequence.adopt(match.pages[:num_pages], match.usable, match.windowed[:num_pages], match.state)
        self.counters.snapshot_hits += self.pool.has_states
        begun = match.usable % self.pool.page_tokens
        if begun:
            try:
                sequence.reserve(match.usable + 1)
            except OutOfMemoryError:
                # Without this page it may be evicted, so that the sequence needs no more than it would alone.
                if self.pool.has_states:
                    self._take_before(sequence, token_ids[: match.usable - begun], salt)
                    return
                without = sequence.windowed[: num_pages - 1]
                sequence.truncate(self.pool.sliding.usable_length(without, match.usable - begun))

    def _take_before(self, sequence: SequenceCache, token_ids: TokenIds, salt: bytes) -> None:
        """Make a sequence share what of these ids it can continue from within whole pages."""
        sequence.truncate(0)
        # Snapshots may have been dropped while memory was looked for, and their slots taken by others.
        match = self.tree.match(token_ids, salt)
        for position in sorted(match.snapshots, reverse=True):
            pages = match.pages[: position // self.pool.page_tokens]
            windowed = match.windowed[: pages.size]
            is_whole = position % self.pool.page_tokens == 0
            if is_whole and self.pool.sliding.usable_length(windowed, position) == position:
                sequence.adopt(pages, position, windowed, match.snapshots[position])
                return

    def _explain(
        self,
        token_ids: TokenIds,
        match: Match,
        hints: CacheHints,
        refusal: str | None,
        media: PlacedMedia | None = None,
    ) -> CacheMiss | None:
        position = match.usable
        if refusal is not None:
            return CacheMiss("foreign", position, detail=refusal)
        if self.tree.evicted_length(token_ids, hints.salt) > match.length:
            return CacheMiss("evicted", position)
        if position < match.length and not self.pool.has_states:
            return CacheMiss("windowed", position, until=match.length)
        if match.length - position >= self._policy.near_tokens:
            return CacheMiss("snapshot", position, until=match.length)
        if media is not None and media.cached_length is not None and position == media.cached_length:
            return CacheMiss("media", position, detail=f"{media.name_at(position)} has too few rows to be told apart")
        if match.length == token_ids.size - 1:
            return None
        position = match.length
        if self.tree.is_empty(hints.salt):
            return CacheMiss("empty", 0)
        cached = self.tree.continuation(match, _SHOWN_TOKENS)
        if not cached.size:
            return None
        changed = _changed_media(cached, token_ids[position:], position, media)
        if changed:
            return CacheMiss("media", position, detail=changed)
        is_rewritten = hints.history is not None and position == common_length(hints.history, token_ids)
        return CacheMiss(
            "template" if is_rewritten else "different",
            position,
            tuple(token_ids[max(0, position - _SHOWN_TOKENS) : position].tolist()),
            tuple(cached.tolist()),
            tuple(token_ids[position : position + _SHOWN_TOKENS].tolist()),
        )


def _findable(sequence: SequenceCache) -> int:
    """Positions of a sequence that other texts may be found to share."""
    media = sequence.media
    most = sequence.length if media is None or media.cached_length is None else media.cached_length
    return min(sequence.length, most)


def _changed_media(cached: TokenIds, wanted: TokenIds, position: int, media: PlacedMedia | None) -> str:
    """Words on the picture or sound at which a text parts from the cached one; empty where words differ."""
    name = "" if media is None or not wanted.size else media.name_at(position)
    if name and cached[0] < 0:
        return f"{name} has changed"
    if name:
        return f"{name} is new there"
    return "a picture or sound was left out" if cached[0] < 0 else ""


def _distinct(runs: Iterable[PageNumbers]) -> PageNumbers:
    """Pages that occur in any of these."""
    return np.unique(np.concatenate((np.zeros(0, np.int64), *runs)))
