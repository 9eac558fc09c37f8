"""Figures of the prefix cache: what it has found, and what it holds of snapshots."""

from collections import Counter
from dataclasses import dataclass, field

from localinfer.engine.cache.miss import CacheMissCause


@dataclass
class CacheCounters:
    """What the cache has done since the model was loaded.

    prompts: that were looked up; hits: those of which at least one token was found. prompt_tokens, cached_tokens:
    their tokens, and those found. misses: prompts that were not found as far as they might have been, by cause.
    snapshot_hits: sequences that went on from a snapshot of recurrent states.
    """

    prompts: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    misses: Counter[CacheMissCause] = field(default_factory=Counter)
    snapshot_hits: int = 0


@dataclass(frozen=True)
class SnapshotStats:
    """Snapshots of recurrent states in memory: how many, those on the grid, and bytes of both; and how many were taken,
    evicted, and gone on from since the model was loaded."""

    held: int
    num_bytes: int
    grid: int
    grid_bytes: int
    taken: int
    evicted: int
    hits: int
