"""Prefixes are found to the token, pages are kept once, and what goes first when memory ends is what should."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.prefix_tree import CachedPath, PrefixTree, Priority
from localinfer.engine.cache.sequence import SequenceCache
from tests.engine.fakes import FakeLayout

PAGE_TOKENS = 4


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def text(name: str) -> NDArray[np.int32]:
    return np.array([ord(character) for character in name], np.int32)


class Shelf:
    """A tree and a pool, and texts that go in and come out."""

    def __init__(self, max_pages: int | None = None) -> None:
        layout = FakeLayout(page_tokens=PAGE_TOKENS, page_bytes=64)
        self.pool = PagePool(layout, max_bytes=None if max_pages is None else 64 * max_pages)
        self.tree = PrefixTree(self.pool)

    def put(self, name: str, *, system_tokens: int = 0, is_pinned: bool = False) -> None:
        """Compute a text on top of what is cached of it, as the engine does, and put it in."""
        match = self.tree.match(text(name))
        sequence = SequenceCache(self.pool, max_length=1000)
        sequence.adopt(match.pages, match.length)
        sequence.reserve(len(name))
        sequence.commit(len(name))
        self.tree.insert(text(name), sequence.pages, system_tokens=system_tokens, is_pinned=is_pinned)
        sequence.close()

    def found(self, name: str) -> int:
        return self.tree.match(text(name)).length

    def texts(self) -> set[str]:
        return {"".join(map(chr, path.token_ids)) for path in self.tree.paths()}

    @property
    def num_used(self) -> int:
        return self.pool.num_pages - self.pool.num_free_pages


def test_match_is_exact_to_the_token():
    shelf = Shelf()
    shelf.put("the cat sat on the mat")
    for length in range(23):
        assert shelf.found("the cat sat on the mat"[:length] + "#") == length
    assert shelf.found("the cat sat on the mat and slept") == 22
    assert shelf.found("") == shelf.found("a cat") == 0


def test_texts_that_part_share_every_whole_page_before():
    shelf = Shelf()
    shelf.put("abcdefghij1111")
    shelf.put("abcdefghij2222")
    shelf.put("abcdefgX")
    assert shelf.texts() == {"abcdefghij1111", "abcdefghij2222", "abcdefgX"}
    first, second = (shelf.tree.match(text(name)).pages for name in ("abcdefghij1111", "abcdefghij2222"))
    assert first[:2].tolist() == second[:2].tolist() and not set(first[2:]) & set(second[2:])
    assert shelf.num_used == shelf.tree.num_pages == 1 + 1 + 1 + 2 + 2


def test_longer_text_takes_the_place_of_a_shorter_one():
    shelf = Shelf()
    for end in range(1, 23):
        shelf.put("the cat sat on the mat"[:end])
        assert shelf.texts() == {"the cat sat on the mat"[:end]}
    assert shelf.num_used == 6
    shelf.put("the cat")
    assert shelf.texts() == {"the cat sat on the mat"} and shelf.num_used == 6


def test_system_prefix_is_a_node_of_its_own_in_whole_pages():
    shelf = Shelf()
    shelf.put("system.. hello", system_tokens=7)
    shelf.put("system.. other", system_tokens=7)
    nodes = shelf.tree.root.children
    assert [bytes(node.token_ids.tolist()).decode() for node in nodes] == ["syst"]
    assert nodes[0].priority is Priority.SYSTEM
    assert {node.priority for node in nodes[0].children} == {Priority.ORDINARY}


def test_system_prefix_can_be_marked_afterwards():
    shelf = Shelf()
    shelf.put("system..hello")
    shelf.put("system..", system_tokens=8)
    shelf.put("system..hello again", system_tokens=8)
    assert [path.priority for path in shelf.tree.paths()] == [Priority.ORDINARY]
    assert shelf.tree.root.children[0].priority is Priority.SYSTEM
    assert shelf.texts() == {"system..hello again"} and shelf.num_used == 5


def test_least_recently_used_text_goes_first_from_its_end():
    shelf = Shelf(max_pages=8)
    shelf.put("aaaa1111xxxx")
    shelf.put("bbbb2222yyyy")
    shelf.put("aaaa1111xxxx")
    shelf.pool.acquire(3)
    assert shelf.texts() == {"aaaa1111xxxx", "bbbb2222"}
    assert shelf.found("bbbb2222yyyy") == 8
    shelf.pool.acquire(2)
    assert shelf.texts() == {"aaaa1111xxxx"}
    assert (shelf.tree.evicted_tokens, shelf.tree.evicted_bytes) == (12, 3 * 64)


def test_shared_prefix_outlives_its_branches():
    shelf = Shelf(max_pages=4)
    for text in ("same1111", "same2222", "same3333"):
        shelf.put(text)
    shelf.pool.acquire(3)
    assert shelf.texts() == {"same"}


def test_system_prefixes_go_after_ordinary_texts_and_pinned_ones_last():
    shelf = Shelf(max_pages=6)
    shelf.put("pinned!!", is_pinned=True)
    shelf.put("system..", system_tokens=8)
    shelf.put("ordinary")
    shelf.pool.acquire(2)
    assert shelf.texts() == {"pinned!!", "system.."}
    shelf.pool.acquire(2)
    assert shelf.texts() == {"pinned!!"}
    shelf.pool.acquire(2)
    assert shelf.texts() == set()


def test_pages_in_use_are_never_evicted():
    shelf = Shelf(max_pages=4)
    shelf.put("aaaabbbbcccc")
    match = shelf.tree.match(text("aaaabbbb"))
    shelf.pool.retain(match.pages)
    assert shelf.tree.evict(3) == 1
    assert shelf.texts() == {"aaaabbbb"} and shelf.tree.evict(1) == 0
    shelf.pool.release(match.pages)
    assert shelf.tree.evict(2) == 2 and shelf.tree.is_empty()


def test_listener_sees_the_whole_path_before_its_pages_are_freed():
    shelf = Shelf()
    shelf.put("aaaabbbbccccd")
    seen: list[tuple[CachedPath, int, int]] = []
    shelf.tree.on_evict = lambda path, kept: seen.append((path, kept, shelf.pool.num_free_pages))
    shelf.tree.evict(2)
    ((path, kept, num_free),) = seen
    assert path.token_ids.tolist() == text("aaaabbbbccccd").tolist() and path.pages.size == 4
    assert (kept, num_free) == (8, 0)


def test_evicted_texts_are_remembered_as_such():
    shelf = Shelf()
    shelf.put("aaaabbbbcccc")
    shelf.tree.evict(1)
    assert shelf.tree.evicted_length(text("aaaabbbbccXX")) == 10
    shelf.tree.evict(2)
    assert shelf.tree.evicted_length(text("aaaabbbbcccc")) == 12
    assert shelf.tree.evicted_length(text("bbbb")) == 0


def test_clear_forgets_everything_but_pages_in_use():
    shelf = Shelf()
    shelf.put("aaaabbbbcccc")
    shelf.put("aaaadddd")
    page = shelf.tree.match(text("aaaadddd")).pages[1:]
    shelf.pool.retain(page)
    shelf.tree.clear()
    assert shelf.texts() == {"aaaadddd"} and shelf.num_used == 2


def test_continuation_is_the_most_recent_one():
    shelf = Shelf()
    shelf.put("same1111")
    shelf.put("same2222")
    match = shelf.tree.match(text("same3"))
    assert bytes(shelf.tree.continuation(match, 3).tolist()) == b"222"
    assert bytes(shelf.tree.continuation(shelf.tree.match(text("same11#")), 9).tolist()) == b"11"
    assert shelf.tree.continuation(shelf.tree.match(text("same1111")), 9).size == 0


@pytest.mark.parametrize("alphabet", [2, 3, 200])
def test_random_texts_are_found_as_a_plain_list_of_them_would(alphabet: int):
    chooser = np.random.default_rng(alphabet)
    shelf = Shelf()
    known: list[NDArray[np.int32]] = []
    for _ in range(300):
        base = known[chooser.integers(len(known))] if known and chooser.random() < 0.7 else ids()
        sample = np.concatenate((base[: chooser.integers(base.size + 1)], chooser.integers(97, 97 + alphabet, 9)))
        sample = sample.astype(np.int32)
        name = "".join(map(chr, sample))
        expected = max((_common(sample, other) for other in known), default=0)
        assert shelf.found(name) == expected
        shelf.put(name, system_tokens=int(chooser.integers(9)) if chooser.random() < 0.3 else 0)
        known.append(sample)
        assert shelf.num_used == shelf.tree.num_pages
    assert all(shelf.found("".join(map(chr, sample))) == sample.size for sample in known)


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    size = min(a.size, b.size)
    return next((index for index in range(size) if a[index] != b[index]), size)
