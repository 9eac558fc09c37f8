"""Which replica has computed how much of a prompt, as far as one router knows."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

_MOST_PREFIXES = 200_000
_LEAST_SHARE = 0.1
"""Of a prompt, what has to be found somewhere for the place to matter."""
_QUEUED_BLOCKS = 8
"""Blocks of a prompt that are as good as one running request less: what is computed again is not waited for."""


class PrefixTable:
    """Prefixes of the prompts that were sent to each replica; the least recently sent are forgotten first."""

    def __init__(self, most: int = _MOST_PREFIXES) -> None:
        self._most = most
        self._prefixes: dict[Hashable, OrderedDict[int, None]] = {}

    def note(self, replica: Hashable, prefixes: Sequence[int]) -> None:
        """A prompt was sent to a replica."""
        known = self._prefixes.setdefault(replica, OrderedDict())
        # The shortest prefix is used last: what begins alike is forgotten from its ends.
        for prefix in reversed(prefixes):
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > self._most:
            known.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """A replica is gone."""
        self._prefixes.pop(replica, None)

    def keep_only(self, replicas: Sequence[Hashable]) -> None:
        """All others are gone."""
        for replica in [one for one in self._prefixes if one not in replicas]:
            self.forget(replica)

    def matched(self, replica: Hashable, prefixes: Sequence[int]) -> int:
        """How many blocks of a prompt a replica has computed."""
        known = self._prefixes.get(replica)
        if not known:
            return 0
        return next((index for index, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))

    def ranked(self, prefixes: Sequence[int], running: Mapping[Hashable, int]) -> list[Hashable]:
        """Replicas, the best for a prompt first. running: requests that each has now.

        The best has the longest match, less what its queue costs beyond the shortest one. Where next to nothing is
        found anywhere, it is the one that holds least, so that prompts which begin otherwise are spread.
        """
        matches = {replica: self.matched(replica, prefixes) for replica in running}
        if max(matches.values(), default=0) < max(1.0, _LEAST_SHARE * len(prefixes)):
            return sorted(running, key=lambda one: (running[one] * _QUEUED_BLOCKS + self._size(one), running[one]))
        return sorted(running, key=lambda one: (_QUEUED_BLOCKS * running[one] - matches[one], self._size(one)))

    def _size(self, replica: Hashable) -> int:
        return len(self._prefixes.get(replica, ()))
