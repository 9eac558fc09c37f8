"""What can be fuzzed: a target, its limits, and how it says that an input was refused."""

import importlib
import random
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from localinfer.errors import LocalinferError

FOLDER = Path(__file__).parent
MODEL_TARGETS = ("gguf", "http", "safetensors")
"""Targets that run models.

The suite runs a few inputs of them without guard mode, in which each needs kernels that no other test has compiled.
"""
LONGEST_MESSAGE = 2000
SHORTEST_MESSAGE = 12


@dataclass(frozen=True)
class Limits:
    """What one case may take.

    seconds: of the CPU; a case may wait six times as many. memory_factor, memory_constant: peak resident
    bytes beyond those before the case, as a multiple of its size and bytes. address_space: bytes that the worker may
    map beyond those it has when it is ready, so that a case which asks for all memory leaves the machine alone.
    """

    seconds: float = 10.0
    memory_factor: int = 4
    memory_constant: int = 64 << 20
    address_space: int = 8 << 30

    def memory(self, num_bytes: int) -> int:
        """Most bytes of memory for an input of num_bytes."""
        return self.memory_factor * num_bytes + self.memory_constant


@dataclass(frozen=True)
class Target:
    """Something that reads input from outside.

    corpus: sound inputs, made by our own writers; the same in every process. mutate: another input, from one of the
    corpus or of an earlier mutation; what it draws from the generator decides it. run: reads an input in a worker
    process, with an empty folder for files, and returns what came of it in a few words ("loaded", or `refused`); a
    detail may follow after a newline. What it raises is a finding. prepare: what a worker does once, before its first
    input: imports, kernels. simplify: smaller or simpler inputs than a finding, the boldest first. file_bytes: how many
    bytes of files an input stands for, if they are not its own length.
    """

    name: str
    corpus: Callable[[], Sequence[bytes]]
    mutate: Callable[[random.Random, bytes, Sequence[bytes]], bytes]
    run: Callable[[bytes, Path], str]
    limits: Limits = field(default_factory=Limits)
    prepare: Callable[[], None] | None = None
    simplify: Callable[[bytes], Iterable[bytes]] | None = None
    file_bytes: Callable[[bytes], int] = len


class Inputs(Sequence[bytes]):
    """Inputs that are made when they are first wanted: a file takes tens of milliseconds."""

    def __init__(self, makers: Iterable[Callable[[], bytes]]) -> None:
        self._makers = [cache(make) for make in makers]

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: Any) -> Any:
        return [make() for make in self._makers[index]] if isinstance(index, slice) else self._makers[index]()


class UnclearMessageError(Exception):
    """An input was refused in words that help nobody."""


def refused(error: LocalinferError) -> str:
    """The outcome of an input that was refused. Raises: UnclearMessageError if its message is not fit to be shown."""
    message = str(error)
    flaws = {
        "is too short": len(message) < SHORTEST_MESSAGE,
        "is too long": len(message) > LONGEST_MESSAGE,
        "has control characters": any(unicodedata.category(letter) in ("Cc", "Cf", "Cs") for letter in message),
    }
    for flaw, is_there in flaws.items():
        if is_there:
            raise UnclearMessageError(f"the message of {type(error).__name__} {flaw}: {message[:400]!a}") from error
    return f"refused: {type(error).__name__}\n{message}"


def find_target(name: str) -> Target:
    """The target of this name. Raises: LookupError naming those there are."""
    modules = _modules()
    if name not in modules:
        raise LookupError(f"there is no target {name!r}; there are {', '.join(target_names())}")
    target: Target = importlib.import_module(f"tests.proof.fuzz.{modules[name]}").TARGET
    return target


def target_names() -> list[str]:
    """Every target, by name, but the toy of the tests."""
    return sorted(name for name in _modules() if name != "toy")


def _modules() -> dict[str, str]:
    """The module of each target: NAME, or NAME_target where NAME is also a package, which tests here would not see."""
    stems = [path.stem for path in FOLDER.glob("*.py") if "\nTARGET = Target(" in path.read_text(encoding="utf-8")]
    return {stem.removesuffix("_target"): stem for stem in stems}
