"""Which replicas have computed how much of a prompt, as far as one router knows: an index from beginnings to replicas.

What is looked up grows with the blocks of a prompt alone, however many replicas there are: a beginning names the few
that were sent it last, and one bound holds for the beginnings of all of them together.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

_MOST_PREFIXES = 1_000_000
"""Beginnings of prompts that are remembered: some 170 MB, and the caches of 200 replicas with 65,536 tokens each."""
_MOST_HOLDERS = 4
"""Replicas that are remembered of one beginning: a system prompt that all have needs no further ones to be found."""
_ENOUGH = 4
"""Candidates after which shorter matches are not looked at."""


class PrefixTable:
    """Prefixes of the prompts that were sent to replicas; the least recently sent are forgotten first.

    most: prefixes, of all replicas together.
    """

    def __init__(self, most: int = _MOST_PREFIXES) -> None:
        self._most = most
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        self.num_looked_up = 0
        """Entries that were read, by which tests count what a choice costs."""

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, replica: str, prefixes: Sequence[int]) -> None:
        """A prompt was sent to a replica."""
        holders = self._holders
        known: tuple[str, ...] | None = None
        now: tuple[str, ...] = ()
        left_out: list[str] = []
        num_new = is_new = 0
        # The shortest prefix is used last: what begins alike is forgotten from its ends.
        for prefix in reversed(prefixes):
            before = holders.get(prefix, ())
            if before is not known:
                # Neighbours mostly have the same holders, and then the same object.
                known, now = before, self._with(before, replica)
                is_new = replica not in before
                left_out = [name for name in before if name not in now]
            if now is not before:
                holders[prefix] = now
                num_new += is_new
                if left_out:
                    self._dropped(left_out)
            holders.move_to_end(prefix)
        self._sizes[replica] += num_new
        while len(holders) > self._most:
            self._dropped(holders.popitem(last=False)[1])

    def forget(self, replica: str) -> None:
        """A replica is gone. Its name is of no other; what is known of it is passed over, and dropped in time."""
        self._sizes.pop(replica, None)

    def size(self, replica: str) -> int:
        """How many prefixes a replica is known to have."""
        return self._sizes[replica]

    def matches(self, prefixes: Sequence[int]) -> dict[str, int]:
        """Replicas with the longest beginnings of a prompt, and how many blocks each has; a few of those that have any.

        Of equal ones those come first that were sent it last.
        """
        depth = 0
        holders = self._holders
        for prefix in prefixes:
            if prefix not in holders:
                break
            depth += 1
        self.num_looked_up += min(depth + 1, len(prefixes))
        found: dict[str, int] = {}
        former: tuple[str, ...] = ()
        for index in range(depth - 1, -1, -1):
            names = holders[prefixes[index]]
            self.num_looked_up += 1
            if names is former or names == former:
                continue
            former = names
            for name in reversed(names):
                if name not in found and name in self._sizes:
                    found[name] = index + 1
            if len(found) >= _ENOUGH:
                break
        return found

    def _with(self, names: tuple[str, ...], replica: str) -> tuple[str, ...]:
        """Holders, the latest last, without those that are gone or too many; the same object where nothing changes."""
        if names and names[-1] == replica:
            return names
        others = [name for name in names if name != replica and name in self._sizes]
        return (*others[1 - _MOST_HOLDERS :], replica)

    def _dropped(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._sizes:
                self._sizes[name] -= 1
