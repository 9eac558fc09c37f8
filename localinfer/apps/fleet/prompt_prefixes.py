"""Prefixes of prompts: a number for each beginning, and an index from these to the replicas that computed them.

What is looked up grows with the blocks of a prompt alone, however many replicas there are: a prefix names the few that
were sent it last, and one bound holds for the prefixes of all of them together.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
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
    """What a router is to know of a request.

    body: as it came; of what is no JSON object, or has no prompt, there are no prefixes. salt: whose it is, where
    clients are kept apart: then beginnings of one are those of no other.
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
