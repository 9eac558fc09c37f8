"""Naming what `localinfer` exports imports next to nothing; a load imports in its own thread, and looks at `cancel`."""

import inspect
import json

import pytest

import localinfer
from localinfer.loading import imports
from tests.kernels.subprocesses import run

HEAVY = ("numpy", "llvmlite", "numba", "tokenizers", "jinja2", "msgspec", "llguidance", "localinfer.kernels.cpu")
MOST_MODULES = 180
"""That all names import together, with those of the standard library."""
MOST_LOADED = 144
"""Modules of localinfer that a load with default options imports, packages included."""

NAMING = """
import json, sys
import localinfer
found, before = {}, set(sys.modules)
for name in localinfer.__all__:
    getattr(localinfer, name)
    found[name] = sorted(set(sys.modules) - before)
    before = set(sys.modules)
print(json.dumps(found))
"""
CANCELLED = """
import json, sys, threading
import localinfer
from localinfer.loading.imports import MODULES

class Watcher:
    '''Sets an event when a module is looked for.'''
    def __init__(self, name):
        self.name, self.event = name, threading.Event()
    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            self.event.set()

found = {}
for name in (None, MODULES[0], "localinfer.kernels.ops", MODULES[-1]):
    watcher = Watcher(name)
    if name is None:
        watcher.event.set()
    sys.meta_path.insert(0, watcher)
    try:
        localinfer.load(cancel=watcher.event)
    except localinfer.errors.LoadCancelledError as error:
        found[str(name)] = [str(error), [one for one in MODULES if one in sys.modules]]
    sys.meta_path.remove(watcher)
print(json.dumps(found))
"""
IMPORTED = """
import json, sys
import localinfer
told = []
def progress(stage, done, total):
    told.append((stage, done, total, [name for name in sys.modules if name.startswith("localinfer")]))
with localinfer.load(progress=progress, threads=1):
    progress("loaded", 0, 0)
told.append(["others", 0, 0, [name for name in sys.modules if not name.startswith("localinfer")]])
print(json.dumps(told))
"""


def test_naming_an_export_imports_nothing_heavy() -> None:
    found = json.loads(run(NAMING)[0])
    assert sorted(found) == sorted(localinfer.__all__)
    heavy = {name: [one for one in new if one.startswith(HEAVY)] for name, new in found.items()}
    assert {name: new for name, new in heavy.items() if new} == {}
    assert sum(map(len, found.values())) < MOST_MODULES


def test_a_load_is_cancelled_between_two_imports() -> None:
    found = json.loads(run(CANCELLED)[0])
    before, first, within, last = (
        found[str(name)] for name in (None, imports.MODULES[0], "localinfer.kernels.ops", imports.MODULES[-1])
    )
    assert before[1] == [] and "cancelled while importing" in before[0]
    assert first[1] == [imports.MODULES[0]]
    assert within[1] == list(imports.MODULES[:2])
    assert last[1] == list(imports.MODULES) and "reading the header" in last[0]


def test_each_part_of_the_imports_is_small_and_few_are_left_for_later() -> None:
    """What depends on the options, or on the model's family, is imported where the load uses it."""
    *told, (*_, others) = json.loads(run(IMPORTED)[0])
    assert not {"asyncio", "ssl", "numba"} & set(others)
    parts = [words for words in told if words[0] == imports.STAGE]
    assert [(done, total) for _, done, total, _ in parts] == [
        (number, len(imports.MODULES)) for number in range(len(imports.MODULES))
    ]
    sizes = [len(words[3]) for words in [*parts, told[len(parts)]]]
    assert max(after - before for before, after in zip(sizes, sizes[1:], strict=False)) < 40
    later = set(told[-1][3]) - set(told[len(parts)][3])
    assert len(later) < 10, later
    assert len(told[-1][3]) <= MOST_LOADED


@pytest.mark.parametrize("name", ["load", "availability", "warm_up", "load_tokenizer"])
def test_light_functions_keep_their_signatures(name: str) -> None:
    function = getattr(localinfer, name)
    parameters = inspect.signature(function).parameters
    assert inspect.isfunction(function) and "model" in parameters and function.__doc__
    assert all(one.annotation is not inspect.Parameter.empty for one in parameters.values())
    assert isinstance(localinfer.LLM, type) and isinstance(localinfer.Session, type)
