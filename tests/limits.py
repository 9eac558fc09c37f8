"""How long a test waits for something that has to come: by what the machine shows, not by a clock alone.

Such a limit only ends a test that would hang. It may be generous, and on a machine that does other work at the same
time it must be.
"""

import hashlib
import time

_WORK = bytes(1 << 20)
_WORK_SECONDS = 0.0006
"""What hashing the bytes takes on one idle core of 2023, with the CPU's instructions for it."""
_ROUNDS = 12
_GENEROSITY = 4.0


def seconds(nominal: float) -> float:
    """So many seconds of an idle machine, in seconds of this one as it is now, and some more."""
    return nominal * _GENEROSITY * slowness()


def slowness() -> float:
    """How many times longer than on an idle machine a piece of work takes now, at least 1."""
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        hashlib.sha256(_WORK).digest()
    return max(1.0, (time.perf_counter() - began) / (_ROUNDS * _WORK_SECONDS))
