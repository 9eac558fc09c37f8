"""Memory that a closed model has freed goes back to the system, though what is in use lies between; few heaps."""

import ctypes
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import localinfer
from localinfer import Regex
from localinfer.generation.questions import YesNo
from tests.models.talking_models import build_talking_model
from tests.support.inside import engine_of

CODE = """
import ctypes, sys
import localinfer
from localinfer.system.free_memory import return_free_memory

def resident():
    text = open("/proc/self/smaps_rollup").read()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))

llm = localinfer.load(threads=1)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
held, kept = [], []
for _ in range(1000):
    held.append(library.malloc(64 << 10))
    ctypes.memset(held[-1], 1, 64 << 10)
    kept.append(library.malloc(64 << 10))
for block in held:
    library.free(ctypes.c_void_p(block))
before = resident()
if sys.argv[1] == "closed":
    llm.close()
else:
    return_free_memory()
print(before - resident())
"""

THREADS_CODE = """
import ctypes, os, sys, tempfile, threading
from localinfer.system.free_memory import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
library = ctypes.CDLL(None)
library.malloc.restype = library.fopen.restype = ctypes.c_void_p
together = threading.Barrier(12)

def allocate():
    together.wait()
    library.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
name = os.path.join(tempfile.mkdtemp(), "heaps.xml")
file = ctypes.c_void_p(library.fopen(name.encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
print(open(name).read().count("<heap nr="))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators return memory by themselves")
@pytest.mark.parametrize("how", ["asked", "closed"])
def test_freed_memory_goes_back_to_the_system(how: str):
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library is not glibc")
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators have no such heaps")
def test_threads_of_a_server_share_two_heaps():
    if not hasattr(ctypes.CDLL(None), "malloc_info"):
        pytest.skip("the C library is not glibc")
    limited, unlimited = (
        int(subprocess.run([sys.executable, "-c", THREADS_CODE, how], capture_output=True, text=True).stdout)
        for how in ("limited", "unlimited")
    )
    assert limited <= 2 < unlimited


@pytest.mark.parametrize("name", [None, "gemma3-gqa", "lfm2-hybrid"])
def test_closed_model_is_gone_with_its_last_reference(name: str | None, tmp_path: Path):
    """A garbage collection of all objects is rare, and knows nothing of the memory that they stand for."""
    model = None if name is None else build_talking_model(tmp_path, name)
    gc.collect()
    gc.disable()
    try:
        with localinfer.load(model, threads=1, disk_cache_folder=str(tmp_path)) as llm:
            llm.complete("Once upon a time", max_tokens=20)
            llm.complete("Once", max_tokens=12, constraint=Regex("(red|blue) [a-z]{2,9}"))
            llm.chat([{"role": "user", "content": "Hello"}], max_tokens=5)
            llm.embed("Hello")
            llm.decide("Hello", {"greets": YesNo(instructions="Is it a greeting?")})
            engine = engine_of(llm)
            held = [engine, engine.scheduler, engine.pool, engine.program, llm.tokenizer, llm.tokenizer._encoder]
            references = [weakref.ref(one) for one in held]
            del engine, held
        del llm
        left = [type(one).__name__ for one in (reference() for reference in references) if one is not None]
    finally:
        gc.enable()
    assert left == []
