"""A target with mistakes planted in it, on which the framework itself is tested."""

import ctypes
import os
import random
import time
from pathlib import Path

import numpy as np

from localinfer.errors import CorruptFileError
from tests.proof.fuzz.mutation import mutate_bytes
from tests.proof.fuzz.target import Limits, Target, refused

MAGIC = b"toy"
_HELD = 96 << 20


def corpus() -> list[bytes]:
    """One sound input."""
    return [MAGIC + b"....."]


def run(data: bytes, folder: Path) -> str:
    """Read an input whose fourth byte decides what goes wrong."""
    try:
        if not data.startswith(MAGIC):
            raise CorruptFileError(f"the input starts with {data[:3]!r}; wanted {MAGIC!r}: write it again")
        return MISTAKES.get(data[3:4], lambda: "loaded")()
    except CorruptFileError as error:
        return refused(error)


def _segfault() -> str:
    ctypes.string_at(8)
    return "never"


def _abort() -> str:
    os.abort()


def _hang() -> str:
    while True:
        pass


def _wait() -> str:
    time.sleep(1000)
    return "never"


def _hoard() -> str:
    return f"loaded {np.ones(_HELD, np.uint8).size}"


def _raise() -> str:
    return str({}["missing"])


def _mumble() -> str:
    return refused(CorruptFileError("bad"))


def _escape() -> str:
    return refused(CorruptFileError("the name \x1b[2J is no name; wanted another"))


MISTAKES = {
    b"S": _segfault,
    b"A": _abort,
    b"H": _hang,
    b"W": _wait,
    b"M": _hoard,
    b"K": _raise,
    b"U": _mumble,
    b"E": _escape,
}


def mutate(generator: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A change of bytes, or one of the mistakes that cost no time."""
    if generator.random() < 0.05:
        return data[:3] + generator.choice((b"K", b"U", b"E")) + data[4:]
    return mutate_bytes(generator, data, others)


TARGET = Target("toy", corpus, mutate, run, Limits(seconds=1.0, memory_constant=32 << 20, address_space=1 << 30))
