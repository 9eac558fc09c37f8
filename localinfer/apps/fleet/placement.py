"""Which replica gets a request: where most of its prompt was computed, less what has to be waited for there."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from localinfer.apps.fleet.prompt_prefixes import PrefixTable

_LEAST_SHARE = 0.1
"""Of a prompt, what has to be found somewhere for the place to matter."""
_QUEUED_BLOCKS = 8
"""Blocks of a prompt that are as good as one running text less: what is computed again is not waited for."""
_ALL = 16
"""Up to so many replicas are compared one by one."""
_RANDOM = 2
"""Of more, so many are drawn beside those that have the prompt's beginning (Mitzenmacher, 2001)."""
_TRIES = 8
"""Draws for one with a place, before all are gone through."""


class Placement:
    """The replicas that are there, the texts that each has now, and the choice among them.

    places: texts that a replica computes at one time; of texts as urgent as each other it is given no more, and more
    urgent ones beyond that, as its engine lets them take the place of others. most: of all of these, None for any.
    seed: of what is drawn.
    """

    def __init__(
        self, places: int, *, most: int | None = None, seed: int = 1, table: PrefixTable | None = None
    ) -> None:
        self.places = places
        self._most = math.inf if most is None else most
        self.table = PrefixTable() if table is None else table
        self._numbers = random.Random(f"placement {seed}")
        self._names: list[str] = []
        self._suspects: set[str] = set()
        self._texts: dict[str, Counter[int]] = {}
        self.num_compared = 0
        """Replicas that were compared, by which tests count what a choice costs."""

    @property
    def num_replicas(self) -> int:
        """How many are there, suspects too."""
        return len(self._names)

    def set_replicas(self, names: Iterable[str]) -> None:
        """These are there now, and no others."""
        present = set(names)
        for gone in [one for one in self._names if one not in present]:
            self.table.forget(gone)
            self._suspects.discard(gone)
        self._names = [one for one in self._names if one in present]
        self._names += sorted(present - set(self._names))
        for name in [one for one, texts in self._texts.items() if one not in present and not texts.total()]:
            del self._texts[name]

    def suspect(self, name: str, is_suspect: bool) -> None:
        """A replica says nothing, and is given nothing while another can be; or it has answered again."""
        if is_suspect and name in self._names:
            self._suspects.add(name)
        else:
            self._suspects.discard(name)

    def running(self, name: str) -> int:
        """Texts that a replica has now."""
        return self._texts[name].total() if name in self._texts else 0

    def has_place(self, name: str, priority: int, count: int = 1) -> bool:
        """Whether a text would be computed at once, as those as urgent as it leave a place."""
        texts = self._texts.get(name)
        if not texts:
            return True
        before = sum(number for urgency, number in texts.items() if urgency <= priority)
        return before < self.places and texts.total() + count <= self._most

    def choose(
        self,
        prefixes: Sequence[int],
        priority: int = 0,
        count: int = 1,
        *,
        without: str = "",
        waits: bool = True,
    ) -> str | None:
        """The best replica for a prompt with so many texts; None where all that are there are full, or none is.

        priority: of its texts, lower is more urgent. without: one that is gone. waits: False for one with no place,
        too, where there is none. The best has the longest match, less what its texts cost; of those without the one
        that holds least, so that prompts which begin otherwise are spread.
        """
        matches = {name: match for name, match in self.table.matches(prefixes).items() if self._is_well(name, without)}
        if max(matches.values(), default=0) < max(1.0, _LEAST_SHARE * len(prefixes)):
            matches = {}
        names = self._candidates(matches, without)
        free = [name for name in names if self.has_place(name, priority, count)]
        if not free and len(self._names) > _ALL:
            free = self._drawn_free(priority, count, without)
        if not free and waits:
            return None
        return min(free or names, key=lambda name: self._cost(name, matches), default=None)

    def crowded(self, is_crowded: Callable[[str], bool], count: int) -> str | None:
        """Of replicas of which something holds, and that may be sent so many texts more, the one with the fewest.

        Of many some are looked at.
        """
        names = self._names if len(self._names) <= _ALL else self._numbers.sample(self._names, _TRIES)
        self.num_compared += len(names)
        allowed = [name for name in names if self._is_well(name, "") and self.running(name) + count <= self._most]
        return min(filter(is_crowded, allowed), key=self.running, default=None)

    def begin(self, name: str, prefixes: Sequence[int], count: int, priority: int) -> None:
        """A replica is sent a prompt with so many texts."""
        self._texts.setdefault(name, Counter())[priority] += count
        self.table.note(name, prefixes)

    def change(self, name: str, count: int, priority: int) -> None:
        """A replica has so many texts more, or fewer."""
        texts = self._texts.get(name)
        if texts is not None:
            texts[priority] += count
            if not texts[priority]:
                del texts[priority]

    def _candidates(self, matches: dict[str, int], without: str) -> list[str]:
        if len(self._names) <= _ALL:
            names = self._names
        else:
            names = list({**matches, **dict.fromkeys(self._numbers.sample(self._names, _RANDOM))})
        well = [name for name in names if self._is_well(name, without)]
        self.num_compared += len(names)
        # Rather one of which nothing was heard than none.
        return well or [name for name in names if name != without]

    def _drawn_free(self, priority: int, count: int, without: str) -> list[str]:
        for _ in range(_TRIES):
            name = self._numbers.choice(self._names)
            self.num_compared += 1
            if self._is_well(name, without) and self.has_place(name, priority, count):
                return [name]
        self.num_compared += len(self._names)
        return [name for name in self._names if self._is_well(name, without) and self.has_place(name, priority, count)]

    def _is_well(self, name: str, without: str) -> bool:
        return name != without and name not in self._suspects

    def _cost(self, name: str, matches: dict[str, int]) -> tuple[float, int]:
        running, size = self.running(name), self.table.size(name)
        if not matches:
            return _QUEUED_BLOCKS * running + size, running
        return _QUEUED_BLOCKS * running - matches.get(name, 0), size
