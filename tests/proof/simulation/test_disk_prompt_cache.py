"""The prompt cache of an engine on a simulated disk: killed or cut off at any operation, it never changes an answer."""

import sys
from random import Random

import pytest

if sys.platform == "win32":
    pytest.skip("it simulates a POSIX file system", allow_module_level=True)

from localinfer.llm import LLM
from localinfer.storage.prompt_cache import DiskCache, DiskOptions
from tests.engine.fakes import fake_model
from tests.proof.simulation.clock import Clock
from tests.proof.simulation.disk import Disk, Killed
from tests.storage.test_prompt_cache import PROMPT, FakeIdentity, answer, cold
from tests.support.inside import engine_of


def start(disk: Disk) -> tuple[LLM, DiskCache]:
    llm = LLM(fake_model())  # type: ignore[arg-type]
    options = DiskOptions(disk.root / "conversations", 1 << 20)
    return llm, DiskCache(engine_of(llm), FakeIdentity(), options, in_background=False)  # type: ignore[arg-type]


def write(disk: Disk, cache: DiskCache) -> int:
    """Write all that is due, step by step; return the steps."""
    disk.clock.advance(1.0)
    steps = 0
    while cache.write_next():
        steps += 1
    return steps


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_an_end_at_any_operation_leaves_what_restores_the_same_answer(is_power_cut: bool):
    disk = Disk(Random(1), Clock())
    prompt = [*PROMPT, *range(30)]
    expected = cold(prompt).token_ids
    cached = []
    with disk.installed():
        empty = disk.snapshot()
        for after in [*range(0, 90, 6), 10**6]:
            disk.restore(empty)
            llm, cache = start(disk)
            assert answer(llm, prompt).token_ids == expected
            disk.kill_after(after)
            try:
                write(disk, cache)
            except Killed:
                llm.close()
            disk.sync_names()
            disk.restart(power_cut=is_power_cut)
            again, cache = start(disk)
            found = answer(again, prompt)
            cached.append(found.stats.cached_tokens)
            assert found.token_ids == expected
            write(disk, cache)
            assert not disk.open_files and not disk.forgotten
            again.close()
            llm.close()
    # A power cut takes any of the pages, none of which is synced.
    assert cached[0] == 0 and (is_power_cut or cached == sorted(cached)) and len(set(cached)) > 2 - is_power_cut


def test_writing_takes_steps_of_a_few_pages_and_the_rest_is_written_at_once():
    disk = Disk(Random(1), Clock())
    with disk.installed():
        llm, cache = start(disk)
        for first in (1, 2):
            answer(llm, [first, *PROMPT, *range(30)])
        assert not cache.write_next()
        disk.clock.advance(1.0)
        assert cache.write_next()
        some = len(disk.files)
        cache.close()
        assert 0 < some < len(disk.files)
        llm.close()
