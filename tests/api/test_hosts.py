"""A model in another program: what is left of it there, forks, other users of Numba, and unusual surroundings."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.subprocesses import REPOSITORY, environment, run_in_copy
from tests.support.limits import seconds
from tests.support.warm_python import run_copy

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a process holds is read from /proc")

MANY_LOADS = """
import os, tempfile, threading
import localinfer
from localinfer.errors import ClosedError

def held():
    with open("/proc/self/maps") as maps:
        names = sorted({line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) > 5})
    files = sorted(os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if number != "3")
    return [name for name in names if "/" in name and ".so" not in name], len(files), sorted(
        thread.name for thread in threading.enumerate())

def rss():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def cancelled(llm):
    stream = llm.stream("Once", max_tokens=300, ignore_eos=True)
    next(stream)
    stream.cancel()
    list(stream)

def left_open(llm):
    streams.append(llm.stream("Once", max_tokens=300, ignore_eos=True))
    next(streams[-1])

def failing_callback(llm):
    try:
        for event in llm.stream("Once", max_tokens=300, ignore_eos=True):
            raise ValueError
    except ValueError:
        pass

def closed_while_generating(llm):
    def read():
        try:
            for event in llm.stream("Once", max_tokens=900, ignore_eos=True):
                begun.set()
        except ClosedError:
            ended.append(True)
    begun = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    llm.close()
    reader.join()

def failing_load(llm):
    def progress(stage, done, total):
        if stage.startswith("loading weights"):
            raise ValueError
    try:
        localinfer.load(device="cpu", progress=progress)
    except ValueError:
        failed.append(True)

def background(llm):
    llm.set_priority("background")
    llm.embed("Once")

uses = [cancelled, left_open, failing_callback, closed_while_generating, failing_load, background]
streams, ended, failed = [], [], []
folder = tempfile.mkdtemp(dir=os.environ["TEMPORARY"])
sizes = []
for number in range(13):
    llm = localinfer.load(device="cpu", threads=2, disk_cache=True, disk_cache_folder=folder)
    llm.chat([{"role": "user", "content": "Hi"}], max_tokens=4)
    uses[number % len(uses)](llm)
    llm.close()
    if number == 0:
        first = held()
    sizes.append(rss())
assert held() == first, (held(), first)
assert len(ended) == len(failed) == 2, (ended, failed)
assert first[2] == ["MainThread"], first
print((max(sizes) - sizes[0]) // 10**6)
"""


@LINUX
def test_loads_leave_nothing_behind_whatever_became_of_their_streams(tmp_path: Path) -> None:
    output, errors = run_in_copy(MANY_LOADS, TEMPORARY=str(tmp_path))
    assert errors == ""
    assert int(output) < 50


CLOSED_AND_HELD = """
import os
import numpy as np
import localinfer
from localinfer.errors import ClosedError

def rss():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

llms = []
for _ in range(6):
    llms.append(localinfer.load(device="cpu", threads=1, speculation=None))
    llms[-1].complete("Once", max_tokens=2)
    llms[-1].close()
    if len(llms) == 1:
        first = rss()
print((rss() - first) // 10**6)
try:
    llms[0].logits([1])
except ClosedError:
    print("closed")
"""


@LINUX
def test_closed_models_take_no_memory_though_the_program_keeps_them() -> None:
    size, closed = run_in_copy(CLOSED_AND_HELD)[0].split()
    # Weights of the demo model are 14 MB, its vocabulary a few.
    assert int(size) < 5 * 7 and closed == "closed"


FORKS = """
import os, sys, tempfile, threading, time, warnings
warnings.simplefilter("ignore")
import localinfer
from localinfer.errors import ClosedError

folder = tempfile.mkdtemp(dir=os.environ["TEMPORARY"])
llm = localinfer.load(device="cpu", threads=2, disk_cache=True, disk_cache_folder=folder)
chat, file = [{"role": "user", "content": "Hi"}], os.path.join(folder, "session")
uses = {
    "complete": lambda: llm.complete("a"), "stream": lambda: llm.stream("a"), "chat": lambda: llm.chat(chat),
    "stream_chat": lambda: llm.stream_chat(chat), "complete_many": lambda: llm.complete_many("a", n=2),
    "chat_many": lambda: llm.chat_many(chat, n=2), "render_chat": lambda: llm.render_chat(chat),
    "beam_search": lambda: llm.beam_search("a", num_beams=2, max_tokens=2),
    "count_chat_tokens": lambda: llm.count_chat_tokens(chat), "score": lambda: llm.score([1, 2]),
    "embed": lambda: llm.embed("a"), "embed_many": lambda: llm.embed_many(["a"]),
    "embedding_ids": lambda: llm.embedding_ids(["a"]), "rerank": lambda: llm.rerank("a", ["b"]),
    "logits": lambda: llm.logits([1]), "clear_cache": lambda: llm.clear_cache(),
    "save_session": lambda: llm.save_session(file), "load_session": lambda: llm.load_session(file),
    "set_threads": lambda: llm.set_threads(1), "set_priority": lambda: llm.set_priority("background"),
    "next": lambda: next(stream),
}
llm.complete("Once", max_tokens=2)
llm.save_session(file)
stream = llm.stream("The dog", max_tokens=40, ignore_eos=True, temperature=0)
texts, began = [], [next(stream)]

def generate():
    for _ in range(5):
        texts.append(llm.complete("Once upon a time", max_tokens=120, ignore_eos=True, seed=1).token_ids)

thread = threading.Thread(target=generate)
thread.start()
codes = []
for number in range(4):
    time.sleep(0.01 * number)
    child = os.fork()
    if child == 0:
        for name, use in uses.items():
            try:
                use()
            except ClosedError:
                continue
            print(name, "was not refused", flush=True)
        llm.close()
        stream.close()
        if number == 3:
            with localinfer.load(device="cpu", threads=2, speculation=None) as own:
                assert own.complete("Once", max_tokens=2).text
        sys.exit(7)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
ids = [event.token_id for event in began + list(stream)]
assert ids == llm.complete("The dog", max_tokens=40, ignore_eos=True, temperature=0).token_ids
llm.close()
print(codes, len(texts), len(set(map(tuple, texts))))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_while_a_text_is_generated_is_refused_in_the_child_and_unnoticed_in_the_parent(tmp_path: Path) -> None:
    output, errors = run_in_copy(FORKS, TEMPORARY=str(tmp_path))
    assert (output, errors) == ("[7, 7, 7, 7] 5 1", "")


WORKQUEUE = """
import threading
import numba, numpy as np
import localinfer
from tests.kernels.numba_host import total

values, is_over = np.ones(100_000), threading.Event()
sums = {total(values)}
layer = numba.threading_layer()

def compute():
    while not is_over.is_set():
        sums.add(total(values))

llm = localinfer.load(device="cpu", threads=2)
options = {"max_tokens": 60, "ignore_eos": True, "seed": 3}
wanted = llm.complete("Once upon a time", **options).token_ids
host = threading.Thread(target=compute)
host.start()
found = []
readers = [threading.Thread(target=lambda: found.append(llm.complete("Once upon a time", **options).token_ids))
           for _ in range(4)]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
is_over.set()
host.join()
llm.close()
print(layer, numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS, found == [wanted] * 4, sums == {100_000.0})
"""


def test_a_host_whose_numba_runs_in_parallel_without_locks_computes_beside_a_model() -> None:
    assert run_in_copy(WORKQUEUE, NUMBA_THREADING_LAYER="workqueue")[0] == "workqueue True True True"


STREAMS = """
import json, os, sys
how, target, *words = sys.argv[1:]
for number in range(3):
    os.close(number)
if how == "both":
    sys.stdin = sys.stdout = sys.stderr = sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None
if words:
    from localinfer.apps.cli import main
    result = main(words)
else:
    import localinfer
    with localinfer.load(device="cpu", threads=1) as llm:
        result = llm.complete("Once", max_tokens=4, temperature=0).text
with open(target, "w") as file:
    json.dump(result, file)
"""
COMMANDS = {
    "closed": {"": " upon a time,", "--version": 0, "chat --lines -n 2 --threads 1 --no-disk-cache": 0},
    "both": {
        "": " upon a time,",
        "run -p Once -n 2 --threads 1 --no-disk-cache": 0,
        "run -m /nowhere/at/all -p x": 2,
    },
}


@pytest.mark.parametrize("how", COMMANDS)
def test_without_standard_streams_the_library_and_the_command_do_their_work(how: str, tmp_path: Path) -> None:
    for words, wanted in COMMANDS[how].items():
        target = tmp_path / "result"
        command = [sys.executable, "-c", STREAMS, how, str(target), *words.split()]
        done = run_copy(command, env=environment(), timeout=seconds(20))
        assert done.returncode == 0 and "Traceback" not in done.stderr, (words, done.stderr)
        assert json.loads(target.read_text("utf-8")) == wanted, words
        target.unlink()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages in a folder with an unusual name, which nobody may write."""
    folder = tmp_path_factory.mktemp("Programme für 本地 и других") / "app"
    for name in ("localinfer", "kernels", "models", "quant"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def without_overriding(words: list[str]) -> list[str]:
    """A command for which the modes of files count, though the user is root."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return words
    if shutil.which("setpriv") is None:
        pytest.skip("this user may write everywhere, and there is no setpriv to take that away")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--inh-caps=-all", *words]


UNUSUAL = """
import os, shutil, sys
import localinfer
from localinfer.errors import LocalinferError

place = os.environ["PLACE"]
for folder in (os.path.dirname(localinfer.__file__), os.environ["HOME"]):
    try:
        open(os.path.join(folder, "written"), "w").close()
        print("this folder can be written:", folder)
    except OSError:
        pass
assert "本地" in localinfer.__file__
with localinfer.load(os.path.join(place, "модель ñ.gguf"), device="cpu", threads=1, disk_cache=True,
                     disk_cache_folder=os.path.join(place, "Кэш 缓存")) as llm:
    first = llm.complete("Once upon a time there was a little dog who lived in a big house. " * 4, max_tokens=4)
    llm.save_session(os.path.join(place, "会话.session"))
with localinfer.load(os.path.join(place, "модель ñ.gguf"), device="cpu", threads=1, speculation=None) as llm:
    assert llm.load_session(os.path.join(place, "会话.session"))
try:
    localinfer.load(os.path.join(place, "нет.gguf"))
except LocalinferError as error:
    assert "нет.gguf" in str(error)
print(len(first.token_ids), len(os.listdir(os.path.join(place, "Кэш 缓存"))) > 0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the modes of files are those of POSIX")
def test_a_read_only_program_and_home_and_paths_in_other_scripts_work(installed: Path, tmp_path: Path) -> None:
    home = tmp_path / "дом"
    home.mkdir()
    home.chmod(0o555)
    shutil.copy(REPOSITORY / "models" / "demo" / "demo-f16.gguf", tmp_path / "модель ñ.gguf")
    kept = {name: value for name, value in environment().items() if not name.startswith("XDG_")}
    # Kernels that are compiled already: compiling is not what is tested here.
    cache = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())}
    changes = {"PYTHONPATH": str(installed), "HOME": str(home), "PLACE": str(tmp_path)} | cache
    done = subprocess.run(
        without_overriding([sys.executable, "-c", UNUSUAL]),
        cwd=tmp_path,
        env=kept | changes,
        capture_output=True,
        timeout=seconds(60),
        check=False,
    )
    assert (done.returncode, done.stdout.decode().strip()) == (0, "4 True"), done.stderr.decode()
