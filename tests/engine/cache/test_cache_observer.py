"""What an observer of a prefix tree is told: whole pages once, with hashes of all before them, and the end of each."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.cache.block_hashes import NO_SALT, chained_hashes, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.errors import RequestError
from tests.engine.cache.test_prefix_tree import PAGE_TOKENS, Shelf, text
from tests.engine.fakes import FakeLayout
from tests.proof.simulation.faults import LineInterrupt


class Told:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.blocks: set[int] = set()

    def stored(
        self, block_hashes: Sequence[int], parent_hash: int | None, token_ids: NDArray[np.int32], salt: bytes
    ) -> None:
        words = "".join(map(chr, token_ids))
        self.events.append(("stored", words, tuple(block_hashes), parent_hash, salt))
        self.blocks |= set(block_hashes)

    def removed(self, block_hashes: Sequence[int]) -> None:
        self.events.append(("removed", tuple(block_hashes)))
        self.blocks -= set(block_hashes)

    def cleared(self) -> None:
        self.events.append(("cleared",))

    def close(self) -> None:
        self.events.append(("close",))


def hashes(name: str) -> tuple[int, ...]:
    return tuple(chained_hashes(text(name), PAGE_TOKENS))


def observed(max_pages: int | None = None) -> tuple[Shelf, Told]:
    shelf, told = Shelf(max_pages), Told()
    shelf.tree.observer = told
    return shelf, told


def there(shelf: Shelf) -> set[int]:
    return {block for name in shelf.texts() for block in hashes(name)}


def test_observer_is_told_of_whole_pages_once_and_what_comes_before_them() -> None:
    shelf, told = observed()
    shelf.put("abc")
    assert not told.events
    shelf.put("abcdefghij")
    shelf.put("abcdefghijklXY")
    shelf.put("abcdefgh1234")
    shelf.put("abcdefghijkl", is_pinned=True)
    all_of_it = hashes("abcdefghijkl")
    assert told.events == [
        ("stored", "abcdefgh", all_of_it[:2], None, NO_SALT),
        ("stored", "ijkl", all_of_it[2:], all_of_it[1], NO_SALT),
        ("stored", "1234", hashes("abcdefgh1234")[2:], all_of_it[1], NO_SALT),
    ]


def test_observer_is_told_of_evicted_pages_from_their_end() -> None:
    shelf, told = observed(max_pages=4)
    shelf.put("abcdefghijklmnop")
    told.events.clear()
    shelf.put("12345678")
    assert told.events[0] == ("removed", hashes("abcdefghijklmnop")[:1:-1])
    assert told.blocks == there(shelf)


def test_observer_is_told_of_what_a_forgotten_text_had_alone() -> None:
    shelf, told = observed()
    shelf.put("abcdefghijkl")
    shelf.put("abcdefgh1234")
    told.events.clear()
    shelf.tree.forget(text("abcdefgh1234"))
    assert told.events == [("removed", hashes("abcdefgh1234")[2:])]


def test_a_cache_that_is_emptied_or_closed_tells_of_each_block_and_that_nothing_is_left() -> None:
    cache, told = PrefixCache(FakeLayout(page_tokens=PAGE_TOKENS), max_bytes=None, context_length=99), Told()
    cache.observe(told)

    def put(name: str) -> None:
        sequence = cache.admit(text(name), CacheHints()).sequence
        sequence.reserve(len(name))
        sequence.commit(len(name) - sequence.length)
        cache.retire(sequence, text(name), CacheHints())

    put("abcdefgh")
    cache.clear()
    assert told.events[-2:] == [("removed", hashes("abcdefgh")[::-1]), ("cleared",)]
    put("abcdefgh")
    held = cache.admit(text("abcdefgh#"), CacheHints()).sequence
    put("ABCDEFGH")
    cache.clear()
    # What a running text uses stays, so the cache is not empty.
    assert told.events[-1] == ("removed", hashes("ABCDEFGH")[::-1])
    held.close()
    cache.close()
    cache.close()
    assert told.events[-3:] == [("removed", hashes("abcdefgh")[::-1]), ("cleared",), ("close",)]


def test_after_ctrl_c_at_any_line_too_little_is_known_and_the_next_text_mends_it() -> None:
    num_fired = 0
    for line in range(1, 400):
        shelf, told = observed(max_pages=5)
        shelf.put("abcdefghijklmnop")
        # One page of the first text stays, one is split off, others are evicted.
        with suppress(KeyboardInterrupt), LineInterrupt(line) as interrupt:
            shelf.put("abcd567890123456")
        num_fired += interrupt.has_fired
        assert told.blocks <= there(shelf), line
        if not interrupt.has_fired:
            assert told.blocks == there(shelf)
            break
        shelf.put("abcdefghijkl")
        shelf.put("abcd56789012")
        assert told.blocks == there(shelf), line
    assert num_fired > 100


def test_hashes_depend_on_all_before_them_and_on_the_salt() -> None:
    ids = list(range(100, 196))
    known = localinfer.block_hashes(ids)
    assert len(known) == len(set(known)) == 3 and all(0 <= block < 1 << 64 for block in known)
    assert localinfer.block_hashes(ids[:-1]) == localinfer.block_hashes(np.array(ids[:65])) == known[:2]
    assert not set(localinfer.block_hashes([*ids[:5], 0, *ids[6:]])) & set(known)
    assert not set(localinfer.block_hashes(ids[32:])) & set(known)
    salted = localinfer.block_hashes(ids, cache_salt="team")
    assert not set(salted) & set(known)
    assert salted == chained_hashes(np.array(ids, np.int32), 32, salt_of("team"))
    assert known[1:] == chained_hashes(np.array(ids[32:], np.int32), 32, parent=known[0])
    # What a router in another language has to find.
    assert known[0] == 10424169530405852405


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([[1, 2]], "no list"),
        ([0.5], "no list"),
        ([-(1 << 40)], "from -1099511627776"),
        ([1 << 40], "from -2147483648 to"),
        ("text", "no list"),
    ],
)
def test_what_are_no_token_ids_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        localinfer.block_hashes(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="block_size is 0"):
        localinfer.block_hashes([1], block_size=0)
