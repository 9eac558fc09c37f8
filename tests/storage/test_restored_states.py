"""Memory that ends while a prompt's recurrent states are read from the disk."""

from types import SimpleNamespace

import numpy as np
import pytest

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.errors import OutOfMemoryError
from localinfer.storage.page_store import Found
from localinfer.storage.restore import Tiers, restore_prompt
from tests.engine.fake_recurrent import STATE_BYTES, recurrent_layout
from tests.engine.fakes import PAGE_BYTES, PAGE_TOKENS


def test_memory_for_a_state_is_not_taken_from_the_pages_it_continues():
    cache = PrefixCache(recurrent_layout(), max_bytes=2 * PAGE_BYTES + STATE_BYTES // 2, context_length=64)
    token_ids = np.arange(3 * PAGE_TOKENS, dtype=np.int32)
    cached = token_ids[: 2 * PAGE_TOKENS]
    pages = cache.pool.acquire(2)
    cache.tree.insert(cached, pages)
    cache.pool.release(pages)
    states = SimpleNamespace(find_snapshots=lambda *_, after: [SimpleNamespace(position=token_ids.size)])
    found = Found(2, token_ids.size, (SimpleNamespace(),))  # type: ignore[arg-type]
    with pytest.raises(OutOfMemoryError):
        restore_prompt(cache, Tiers(SimpleNamespace(salt=NO_SALT), None, states), token_ids, found)  # type: ignore[arg-type]
    assert cache.tree.match(token_ids).length == cached.size
    assert (cache.pool.counts[pages] == 1).all()
