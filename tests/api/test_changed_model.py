"""A model's file that is cut off or written while the model is loaded: right words or a typed error, and nothing kept
of it that is not its own."""

import shutil
import sys
from pathlib import Path

import pytest

from localinfer.models import demo
from tests.kernels.subprocesses import run_in_copy

MODEL = Path(demo.__file__).parent / "demo-q4_k_m.gguf"
OTHER = Path(demo.__file__).parent / "demo-f16.gguf"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows does not let a mapped file change")

CHANGES = {
    "cut to nothing": "os.truncate(path, 0)",
    "cut in the middle": "os.truncate(path, os.path.getsize(path) // 2)",
    "zeros": "size = os.path.getsize(path); os.truncate(path, 0); os.truncate(path, size)",
    "another model": "data = open(other, 'rb').read(); open(path, 'r+b').write(data)",
    "begun anew": "open(path, 'wb').write(open(other, 'rb').read(5000))",
    "one byte": "file = open(path, 'r+b'); file.seek(-100, 2); file.write(b'?'); file.close()",
    "replaced": "shutil.copy(other, path + '.new'); os.replace(path + '.new', path)",
}

SETUP = """
import logging, os, shutil, sys
import localinfer
from localinfer.errors import CorruptFileError, SessionFileError
from localinfer.models.load import weights
model, other, place = {model!r}, {other!r}, {place!r}
path, folder = place + "/model.gguf", place + "/cache"
CHANGES = {changes!r}
FIRST, SECOND = "Once upon a time", "Zebras, quickly! And 7 violins?"
CASES = [(name, whole) for name in CHANGES for whole in (True, False)]
said = []

class Keeping(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger().addHandler(Keeping(logging.WARNING))

def change(name):
    exec(CHANGES[name], dict(os=os, shutil=shutil, path=path, other=other))

def load(whole):
    if os.path.exists(folder):
        shutil.rmtree(folder)
    shutil.copyfile(model, path)
    os.utime(path, ns=(10**18, 10**18))
    # Not whole: as of a table too large to be read at once.
    sizes = dict(whole_bytes=4 << 20, block_bytes=1) if whole else dict(whole_bytes=0, block_bytes=1)
    weights.RowsOnDemand.__init__.__kwdefaults__.update(sizes)
    said.clear()
    return localinfer.load(path, threads=1, disk_cache=True, disk_cache_folder=folder)

def words(llm, prompt):
    return list(llm.complete(prompt, temperature=0, max_tokens=12, ignore_eos=True).token_ids)

def files():
    return sorted(name for _, _, names in os.walk(folder) for name in names if name.endswith((".page", ".chat")))

with load(True) as llm:
    right = words(llm, FIRST), words(llm, SECOND)
    assert right[0] and right[1]
"""


def child(tmp_path: Path, code: str) -> str:
    """Run code over copies of the model, in a process that must end by itself; what it printed."""
    values = {"model": str(MODEL), "other": str(OTHER), "place": str(tmp_path), "changes": CHANGES}
    return run_in_copy(SETUP.format(**values) + code)[0]


def test_change_between_prompts_is_an_error_or_right_words_and_keeps_nothing(tmp_path: Path) -> None:
    code = """
for name, whole in CASES:
    llm = load(whole)
    assert words(llm, FIRST) == right[0]
    llm._disk.flush()
    before = files()
    assert before
    change(name)
    assert words(llm, FIRST) == right[0]
    refused = 0
    for _ in range(2):
        try:
            assert words(llm, SECOND) == right[1], name
        except CorruptFileError as error:
            assert "load the model again" in str(error), error
            refused += 1
    # What lies under another name is what it was.
    assert refused == (0 if whole or name == "replaced" else 2), (name, refused)
    try:
        llm.save_session(folder + "/session")
        raise AssertionError("a session was saved")
    except SessionFileError as error:
        assert "has changed since it was loaded" in str(error), error
    llm.close()
    assert files() == before, f"something was kept after the change: {name}"
    assert len([line for line in said if "has changed since it was loaded" in line]) == 1, said
    print(name)
"""
    assert child(tmp_path, code).splitlines() == [name for name in CHANGES for _ in range(2)]


def test_change_while_a_stream_runs_is_an_error_or_right_words(tmp_path: Path) -> None:
    code = """
for name, whole in CASES:
    token_ids, ended = [], "to its end"
    with load(whole) as llm:
        try:
            for event in llm.stream(SECOND, temperature=0, max_tokens=12, ignore_eos=True):
                token_ids.append(event.token_id)
                if len(token_ids) == 2:
                    change(name)
        except CorruptFileError:
            ended = "with an error"
    assert token_ids == right[1][:len(token_ids)] and len(token_ids) >= 2, name
    assert (ended == "to its end") == (len(token_ids) == 12)
    assert not (whole and ended == "with an error"), name
    print(name)
"""
    assert child(tmp_path, code).splitlines() == [name for name in CHANGES for _ in range(2)]


def test_change_before_the_first_prompt_keeps_nothing_under_any_name(tmp_path: Path) -> None:
    code = """
for name in CHANGES:
    with load(False) as llm:
        # Whether its hash was computed before the change or not.
        change(name)
        try:
            assert words(llm, FIRST) == right[0]
        except CorruptFileError:
            pass
    assert not files(), name
    print(name)
"""
    assert child(tmp_path, code).splitlines() == list(CHANGES)


def test_change_while_the_model_is_loaded_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(MODEL, path)
    code = f"""
import os
import localinfer
from localinfer.errors import CorruptFileError
path = {str(path)!r}
done = []
def progress(stage, count, total):
    if stage.startswith("loading weights") and not done:
        done.append(os.utime(path, ns=(10**18, 10**18)))
try:
    localinfer.load(path, threads=1, progress=progress)
except CorruptFileError as error:
    print(error)
"""
    (line,) = run_in_copy(code)[0].splitlines()
    assert "written while it was open" in line or "was changed while it was being loaded" in line


def test_change_while_a_model_is_quantized_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    code = """
from localinfer.apps.quantize import quantize
for name in CHANGES:
    if name == "replaced":
        continue
    shutil.copyfile(other, path)
    os.utime(path, ns=(10**18, 10**18))
    done = []
    def progress(stage, count, total):
        if stage.startswith("blk.") and not done:
            done.append(change(name))
    try:
        quantize(path, place + "/small.gguf", type="q8_0", method="rtn", threads=1, progress=progress)
        raise AssertionError("a model of two versions was written")
    except CorruptFileError as error:
        assert "load the model again" in str(error), error
    assert done and "small.gguf" not in os.listdir(place) and not [n for n in os.listdir(place) if n.endswith(".tmp")]
    print(name)
"""
    assert child(tmp_path, code).splitlines() == [name for name in CHANGES if name != "replaced"]


def test_model_that_nobody_changed_keeps_and_finds_what_it_said(tmp_path: Path) -> None:
    code = """
with load(False) as llm:
    assert words(llm, FIRST) == right[0]
    os.rename(path, path + ".moved")
assert files() and not said
os.rename(path + ".moved", path)
with localinfer.load(path, threads=1, disk_cache=True, disk_cache_folder=folder) as llm:
    print(llm.complete(FIRST, temperature=0, max_tokens=12, ignore_eos=True).stats.cached_tokens > 0)
"""
    assert child(tmp_path, code) == "True"


def test_metadata_read_while_the_file_is_cut_off_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(MODEL, path)
    code = f"""
import os, threading
from localinfer.errors import CorruptFileError
from localinfer.quant.gguf.reader import read_gguf
path = {str(path)!r}
content = open(path, "rb").read()
file = read_gguf(path)
keys = list(file.metadata)
right = {{key: file.metadata.value_bytes(key) for key in keys}}
ended = threading.Event()
def read():
    while not ended.is_set():
        for key in keys:
            try:
                assert file.metadata.value_bytes(key) == right[key]
            except CorruptFileError:
                pass
readers = [threading.Thread(target=read) for _ in range(2)]
for reader in readers:
    reader.start()
for _ in range(50):
    os.truncate(path, 64)
    with open(path, "r+b") as other:
        other.write(content)
ended.set()
for reader in readers:
    reader.join()
print("done")
"""
    assert run_in_copy(code)[0] == "done"
