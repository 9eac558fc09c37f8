"""Types that many packages use."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
FloatArray = NDArray[np.float32]

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, the units done and the total, 0 if unknown."""

Told = Callable[[int, int], None]
"""The same without a stage; what it raises ends the work."""
