"""How long a test waits for something that has to come: by what the machine shows, not by a clock alone.

Such a limit only ends a test that would hang. It may be generous, and on a machine that does other work at the same
time it must be.
"""

import hashlib
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

_WORK = bytes(1 << 20)
_WORK_SECONDS = 0.0006
"""What hashing the bytes takes on one idle core of 2023, with the CPU's instructions for it."""
_ROUNDS = 12
_GENEROSITY = 4.0
_BELIEVED_SECONDS = 2.0


def seconds(nominal: float) -> float:
    """So many seconds of an idle machine, in seconds of this one as it is now, and some more."""
    return nominal * _GENEROSITY * _MACHINE.slowness()


def wait_until(condition: Callable[[], object], limit: float = 15.0, every: float = 0.002) -> bool:
    """Ask until the answer is yes or `limit` seconds, on an idle machine, are over; return whether it is."""
    deadline = time.monotonic() + seconds(limit)
    while not (is_met := bool(condition())) and time.monotonic() < deadline:
        time.sleep(every)
    return is_met


class _Machine:
    """How many times longer than on an idle machine a piece of work takes, at least 1; measured every two seconds."""

    def __init__(self) -> None:
        self._slowness = 1.0
        self._measured_at = float("-inf")

    def slowness(self) -> float:
        began = time.perf_counter()
        if began - self._measured_at > _BELIEVED_SECONDS:
            for _ in range(_ROUNDS):
                hashlib.sha256(_WORK).digest()
            self._measured_at = time.perf_counter()
            self._slowness = max(1.0, (self._measured_at - began) / (_ROUNDS * _WORK_SECONDS))
        return self._slowness


_MACHINE = _Machine()


def set_clock(patch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[[], float]) -> None:
    """Give one module functions of `time` of its own: `time`'s are also those of servers in other threads."""
    patch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))
