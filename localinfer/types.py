"""Types that many packages use."""

import sys
from collections.abc import Callable
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
FloatArray = NDArray[np.float32]

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, the units done and the total, 0 if unknown."""

Told = Callable[[int, int], None]
"""The same without a stage; what it raises ends the work."""


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can be; an integer of JSON or of Python may be larger, a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
