"""Guard mode: stray and misaligned accesses of kernels end the process, those of freed slots too; bits stay."""

import signal
import sys

import pytest

from tests.kernels.subprocesses import run, start
from tests.support.limits import seconds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="deaths are told by signals")

_FOLD = """
import numpy as np
from localinfer.kernels.cpu.memory import address, aligned, empty
from localinfer.kernels.cpu.weights import _FOLD, _FIRST_LANES
lanes = _FIRST_LANES.copy()
words = {array}
words[:] = 1
_FOLD(address(lanes), address(words), words.size)
print("inside", flush=True)
_FOLD(address(lanes), address(words) + {offset}, words.size + {more})
print("survived")
"""

_MISALIGNED = """
import numpy as np
from localinfer.kernels.cpu.memory import aligned
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.weights import pack
from localinfer.kernels.layouts import Layout

class Arena:
    def __init__(self, offset):
        self.offset = offset

    def take(self, num_bytes):
        return aligned(num_bytes + self.offset)[self.offset:]

for offset, word in ((16, "inside"), (8, "survived")):
    pack(ThreadPool(1), Layout.Q8_0, np.zeros(16 * 34, np.uint8), 1, 16, 32, arena=Arena(offset))
    print(word, flush=True)
"""

_SLOT = """
from localinfer.engine.cache.block_pool import SlabAllocator
from localinfer.engine.cache.block_pool import host_bytes
slots = SlabAllocator(4096 + 64)
slots.grow(3, None)
first, second = slots.take(2).tolist()
one = host_bytes(int(slots.addresses[first]), slots.slot_bytes)
one[:] = 7
{then}
print("survived", int(one[0]))
"""

_DEMO = """
import localinfer
from localinfer.models.load import loader
texts = ("text_merging", "token_history")
loader.SHARED_KERNELS = [one for one in loader.SHARED_KERNELS if not one.name.startswith(texts)]
with localinfer.load(threads=2, context_length=512, speculation=None) as model:
    for settings in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 3}):
        print(model.complete([0, 600, 618, 262, 501], max_tokens=24, **settings).token_ids)
"""
"""Without kernels of texts and drafts, which nothing here asks for; the prompt is "Once upon a time"."""


def _death(code: str, guard: str, *, before: str = "") -> int:
    """The signal that ends a process, which prints no more than what comes before."""
    process = start(code, LOCALINFER_GUARD=guard)
    output, errors = process.communicate(timeout=seconds(50))
    assert process.returncode != 0, f"it survived: {output} {errors}"
    assert output.strip() == before, errors
    return -process.returncode


@pytest.mark.parametrize(
    ("guard", "array", "offset", "more"),
    [
        ("1", "empty(100, np.uint64)", 0, 1),
        ("1", "aligned(800).view(np.uint64)", 0, 32),
        ("before", "empty(100, np.uint64)", -8, 0),
        ("before", "aligned(800).view(np.uint64)", -8, 0),
    ],
)
def test_a_kernel_that_reads_outside_an_array_dies(guard: str, array: str, offset: int, more: int) -> None:
    code = _FOLD.format(array=array, offset=offset, more=more)
    assert _death(code, guard, before="inside") == signal.SIGSEGV


def test_a_kernel_that_stores_at_an_address_it_promised_to_be_aligned_dies_where_it_is_not() -> None:
    """Also where this processor's instruction for it would not mind."""
    assert _death(_MISALIGNED, "1", before="inside") == signal.SIGSEGV


def test_a_write_to_what_may_only_be_read_is_found_when_the_array_goes() -> None:
    code = "import ctypes\nfrom localinfer.kernels.cpu.memory import aligned\n"
    code += "a = aligned(64)\n{}\ndel a\nprint('survived')"
    assert run(code.format("a[:] = 1"), LOCALINFER_GUARD="1")[0] == "survived"
    assert _death(code.format("ctypes.memset(a.ctypes.data + 64, 1, 1)"), "1") == signal.SIGABRT


def test_a_free_slot_of_the_cache_cannot_be_read_until_it_is_taken_again() -> None:
    again = "slots.give_back([first])\nassert slots.take(1).tolist() == [first]"
    assert run(_SLOT.format(then=again), LOCALINFER_GUARD="1")[0] == "survived 7"
    assert _death(_SLOT.format(then="slots.give_back([first])"), "1") == signal.SIGSEGV
    assert _death(_SLOT.format(then="host_bytes(one.ctypes.data + slots.slot_bytes, 1)[0]"), "1") == signal.SIGSEGV


def test_a_model_says_the_same_in_guard_mode() -> None:
    plain = run(_DEMO)[0]
    assert plain.count("[") == 2
    assert run(_DEMO, LOCALINFER_GUARD="1")[0] == plain
    assert run(_DEMO, LOCALINFER_GUARD="before")[0] == plain


def test_slots_of_a_cache_leave_maps_for_other_arrays() -> None:
    """A cache takes whatever it may: a server in guard mode would refuse everything once it had answered enough."""
    code = """
from localinfer.kernels.cpu import guard
from localinfer.kernels.cpu.memory import empty
from localinfer.engine.cache.block_pool import SlabAllocator
guard.max_maps = lambda: 2 * guard._MAPS_FOR_OTHERS
slots = SlabAllocator(64)
while slots.num_slots < 4000:
    slots.grow(50, None)
kept = [empty(1, float) for _ in range(500)]
print(len(slots._guarded), len(kept))
"""
    assert run(code, LOCALINFER_GUARD="1")[0] == "1300 500"


def test_another_value_is_refused_and_a_limit_of_maps_is_said() -> None:
    code = """
from localinfer.kernels.cpu import guard
from localinfer.kernels.cpu.memory import empty
from localinfer.engine.cache.block_pool import SlabAllocator
from localinfer.errors import BackendUnavailableError
guard.max_maps = lambda: guard._MAPS_FOR_OTHERS + 30
kept = []
try:
    while True:
        kept.append(empty(1, float))
except BackendUnavailableError as error:
    print(len(kept), error)
slots = SlabAllocator(64)
slots.grow(20, None)
print(slots.num_slots)
"""
    output, errors = run(code, LOCALINFER_GUARD="1")
    assert "maps that this process may have; take a smaller model" in output and output.endswith("\n20")
    assert "guard mode" in errors, "pages of the cache lie together from then on, which is logged"
    process = start("import localinfer.kernels.cpu.guard", LOCALINFER_GUARD="yes")
    assert "LOCALINFER_GUARD is 'yes'; set it to 1" in process.communicate(timeout=seconds(50))[1]
