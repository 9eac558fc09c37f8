"""Planted bugs: a module of the product is imported with some of its text replaced, which the simulator must notice."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType


@dataclass(frozen=True)
class Planted:
    """A bug: in a module, by its dotted name, the one place with the text `old` has `new` instead.

    what: the bug in words. model: of the simulation in which it is looked for; "all" for any, and "disk" for the
    simulation of what several processes keep on disk.
    """

    name: str
    module: str
    old: str
    new: str
    what: str = ""
    model: str = "all"


def plant(name: str) -> Planted:
    """Apply a bug of `planted.py`, before its module is imported. Raises: SystemExit for one that cannot be."""
    planted: Iterable[Planted] = importlib.import_module("tests.proof.simulation.planted").PLANTED
    known = {bug.name: bug for bug in planted}
    if name not in known:
        raise SystemExit(f"there is no planted bug {name!r}; there are {', '.join(sorted(known))}")
    bug = known[name]
    if bug.module in sys.modules:
        raise SystemExit(f"{bug.module} is imported already, so that nothing can be planted in it")
    sys.meta_path.insert(0, _Finder(bug))
    return bug


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, whose loader changes its text."""

    def __init__(self, bug: Planted) -> None:
        self._bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._bug.module:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = _Loader(spec.loader.name, spec.loader.path, self._bug)
                return spec
        raise SystemExit(f"{fullname} has no source in which a bug could be planted")


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the changed text, and never the kept bytecode."""

    def __init__(self, name: str, path: str, bug: Planted) -> None:
        super().__init__(name, path)
        self._bug = bug

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        if source.count(self._bug.old) != 1:
            raise SystemExit(
                f"the bug {self._bug.name!r} cannot be planted: its text is {source.count(self._bug.old)} times in "
                f"{self.path}; change `old` to what is there once"
            )
        return compile(source.replace(self._bug.old, self._bug.new), self.path, "exec", dont_inherit=True)
