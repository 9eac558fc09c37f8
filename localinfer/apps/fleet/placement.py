"""The replica of a request: the one that computed most of its prompt, less what has to be waited for there.

A prompt's beginnings are numbers, one for each block. A table names the few replicas that were sent a beginning last;
one bound holds for all of them together, so that a choice takes as long as its prompt has blocks, whatever the number
of replicas.
"""

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

_BLOCK_BYTES = 64
"""About fifteen tokens: a page of the cache holds 32."""
_MOST_BLOCKS = 4096
_HEADS = ("model", "cache_salt", "tools", "system", "instructions")
"""Members that stand before all messages in a prompt, or keep it apart from others."""
_COPIES = ("best_of", "n", "n_cmpl")
_MOST_TEXTS = 1_000_000
_BODIES = ("messages", "input", "prompt", "content", "query")


class PromptFacts(NamedTuple):
    """Facts of a request's body."""

    prefixes: tuple[int, ...] = ()
    """A number for each beginning of its prompt, by blocks; requests share as many as their texts begin alike."""
    num_texts: int = 1
    """Texts that it asks for."""
    priority: int | None = None
    """Its priority, None if it does not say."""


def prompt_facts(body: bytes, salt: str = "") -> PromptFacts:
    """The facts of a request that a router needs.

    body: unparsed; there are no prefixes if it is no JSON object or has no prompt. salt: of the client, where clients
    are isolated: then no two share a prefix.
    """
    try:
        members = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PromptFacts()
    if not isinstance(members, dict):
        return PromptFacts()
    options = members.get("options")
    priority = members.get("priority", options.get("priority") if isinstance(options, dict) else None)
    copies = next((one for name in _COPIES if isinstance(one := members.get(name), int) and one > 0), 1)
    prompt = members.get("prompt")
    # A list of ids is one prompt.
    has_several = isinstance(prompt, list) and bool(prompt) and not any(isinstance(one, int) for one in prompt)
    num_texts = min(copies * (len(prompt) if has_several and isinstance(prompt, list) else 1), _MOST_TEXTS)
    prefixes = _prefixes(_text(members), salt) if any(members.get(name) for name in _BODIES) else ()
    return PromptFacts(prefixes, num_texts, priority if isinstance(priority, int) else None)


def _prefixes(text: bytes, salt: str) -> tuple[int, ...]:
    prefixes = []
    chain = blake2b(salt.encode(), digest_size=8).digest() if salt else b""
    for end in range(_BLOCK_BYTES, min(len(text), _BLOCK_BYTES * _MOST_BLOCKS) + 1, _BLOCK_BYTES):
        chain = blake2b(chain + text[end - _BLOCK_BYTES : end], digest_size=8).digest()
        prefixes.append(int.from_bytes(chain, "little"))
    return tuple(prefixes)


def _text(members: dict[str, Any]) -> bytes:
    pieces = [msgspec.json.encode(members.get(name), order="deterministic") for name in _HEADS]
    for name in _BODIES:
        value = members.get(name)
        if isinstance(value, list):
            pieces += [msgspec.json.encode(one, order="deterministic") for one in value]
        elif isinstance(value, str):
            pieces.append(value.encode("utf-8", "surrogatepass"))
    return b"".join(pieces)


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
        """Note a prompt that was sent to a replica."""
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
        """Forget a replica. Names are not reused: its entries are passed over, and dropped in time."""
        self._sizes.pop(replica, None)

    def size(self, replica: str) -> int:
        """The number of prefixes that a replica is known to have."""
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


_LEAST_SHARE = 0.1
"""Share of a prompt that a replica must hold for the choice to matter."""
_QUEUED_BLOCKS = 8
"""Blocks of a prompt that are as good as one running text less: what is computed again is not waited for."""
_ALL = 16
"""Up to so many replicas are compared one by one."""
_RANDOM = 2
"""Of more, so many are drawn beside those that have the prompt's beginning (Mitzenmacher, 2001)."""
_TRIES = 8
"""Draws for one with a free slot, before all are tried."""


class Placement:
    """The replicas that are there, the texts that each has now, and the choice among them.

    places: texts that a replica computes at one time; of texts as urgent as each other it is given no more, and more
    urgent ones beyond that, as its engine lets them replace others. most: of all of these, None for any.
    seed: of the random draws.
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
        """Replicas, with suspects."""
        return len(self._names)

    def set_replicas(self, names: Iterable[str]) -> None:
        """Set the replicas."""
        present = set(names)
        for gone in [one for one in self._names if one not in present]:
            self.table.forget(gone)
            self._suspects.discard(gone)
        self._names = [one for one in self._names if one in present]
        self._names += sorted(present - set(self._names))
        for name in [one for one, texts in self._texts.items() if one not in present and not texts.total()]:
            del self._texts[name]

    def suspect(self, name: str, is_suspect: bool) -> None:
        """Pass over a silent replica while there is another one, or take it back when it has answered."""
        if is_suspect and name in self._names:
            self._suspects.add(name)
        else:
            self._suspects.discard(name)

    def running(self, name: str) -> int:
        """Texts that a replica has now."""
        return self._texts[name].total() if name in self._texts else 0

    def has_place(self, name: str, priority: int, count: int = 1) -> bool:
        """True if a text would be computed at once, as texts of its urgency leave a slot."""
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

        priority: of its texts, lower is more urgent. without: one that is gone. waits: False for a full one
        too, if all are full. The best has the longest match, less what its texts cost; of those without the one
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
        """Count a prompt with its texts at a replica."""
        self._texts.setdefault(name, Counter())[priority] += count
        self.table.note(name, prefixes)

    def change(self, name: str, count: int, priority: int) -> None:
        """Change the number of texts at a replica."""
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
        # A silent one is better than none.
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
