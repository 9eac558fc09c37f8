"""Snapshots of recurrent states on disk, beside the pages of the same fingerprint.

The file of a snapshot is like that of a page that ends where the snapshot was taken, with the states in place of keys
and values, so it is found by the token ids of a prompt, verified when read, and evicted by last use like a page.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np

from localinfer.storage.budget import mark_used
from localinfer.storage.page_file import PageRecord, Rejection, check_file, read_page, read_record
from localinfer.storage.store import DiskTier, FileKind, Saved, finished
from localinfer.system import disk
from localinfer.types import TokenIds

_MOST_OTHERS = 4

SnapshotSource = Callable[[int], memoryview | None]
"""Returns the states at a position, a buffer of `state_bytes` that is unchanged until the next call; None if they are
no longer cached, which ends the save."""


class FoundSnapshot(NamedTuple):
    """A file that, if valid, has the states after `position` tokens of a sequence."""

    position: int
    path: Path
    record: PageRecord


class SnapshotTier(DiskTier):
    """The snapshots of one fingerprint in a cache folder; see `DiskTier`."""

    def __init__(self, folder: Path, fingerprint: bytes, *, page_tokens: int, state_bytes: int, max_bytes: int) -> None:
        super().__init__(
            folder,
            fingerprint,
            page_tokens=page_tokens,
            page_bytes=state_bytes,
            max_bytes=max_bytes,
            kind=FileKind.STATE,
        )

    def find_snapshots(self, token_ids: TokenIds, *, after: int) -> Iterator[FoundSnapshot]:
        """Files that claim to be of a prefix of these ids longer than `after`, the longest first."""
        by_parent = self._names_by_parent()
        size, records = self.form.page_tokens, list(self._records(token_ids))
        for index in range(len(records) - 1, after // size - 1, -1):
            wanted, found = records[index], []
            for name in by_parent.get(wanted.parent.hex()[:32], ()):
                path = self._path(wanted).parent / name
                record = read_record(path, self.form)
                if isinstance(record, Rejection):
                    self._reject(path, record)
                elif record.parent == wanted.parent and _is_prefix(record.token_ids, wanted.token_ids):
                    found.append(FoundSnapshot(index * size + record.token_ids.size, path, record))
            yield from (one for one in sorted(found, key=lambda one: -one.position) if one.position > after)

    def read_snapshot(self, found: FoundSnapshot, states: memoryview) -> bool:
        """Read a file into memory and verify it; if it is rejected, the buffer's contents are undefined."""
        problem = read_page(found.path, self.form, found.record, states)
        if problem is None:
            self.counters.pages_read += 1
            mark_used([found.path])
        else:
            self._reject(found.path, problem)
        return problem is None

    def save_snapshots(self, token_ids: TokenIds, positions: Sequence[int], read: SnapshotSource) -> Saved:
        """Write the missing ones of some snapshots of a sequence, and enforce the budget; see `DiskTier.save`."""
        return finished(self.saving_snapshots(token_ids, positions, read))

    def saving_snapshots(
        self, token_ids: TokenIds, positions: Sequence[int], read: SnapshotSource
    ) -> Generator[None, None, Saved]:
        """The steps of `save_snapshots`, one for each snapshot that is written."""
        with self._saving:
            if self._is_too_small:
                return Saved(0, 0, "the disk budget is smaller than one snapshot")
            records = list(self._records(token_ids))
            size = self.form.page_tokens
            paths: dict[int, Path] = {}
            num_written, reason = 0, None
            for position in sorted(positions, reverse=True):
                index, within = divmod(position - 1, size)
                record = PageRecord(records[index].parent, records[index].token_ids[: within + 1])
                path = self._path(record)
                if check_file(path, self.form.file_bytes) is not None:
                    states = read(position)
                    reason = None if states is None else self._write(path, record, states)
                    if states is None or reason is not None:
                        break
                    num_written += 1
                    yield
                paths[position] = path
            return self._finish_save(list(paths.values()), num_written, len(paths) - num_written, reason)

    def _names_by_parent(self) -> dict[str, list[str]]:
        """Names of all files of this tier, by the beginning of the key before them."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for shard in "0123456789abcdef":
            try:
                found = disk.entries(self.folder / shard)
            except OSError:
                continue
            for entry in found:
                if entry.name.endswith(self._suffix):
                    names[entry.name.partition("-")[0]].append(entry.name)
        return names


def chosen_positions(snapshots: Mapping[int, int], grid: Set[int]) -> tuple[int, ...]:
    """Of the snapshots of a text, slots by position, those worth a file.

    Those on the grid, which are few; of the others the first, which more texts share, and the last. Those of former
    turns were written at their time, and stay as long as the budget lets them.
    """
    others = [position for position in sorted(snapshots) if snapshots[position] not in grid]
    chosen = {position for position, slot in snapshots.items() if slot in grid}
    return tuple(sorted({*others[:1], *others[-_MOST_OTHERS:], *chosen}))


def _is_prefix(some: TokenIds, of: TokenIds) -> bool:
    return some.size <= of.size and np.array_equal(some, of[: some.size])
