"""The constant tables of the layouts whose codes are places in a grid of vectors (IQ1, IQ2, IQ3).

They are part of the file format, and taken from the `gguf` package when first needed.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from localinfer.system.extras import require


@cache
def grid_vectors(name: str) -> NDArray[np.int8]:
    """Return int8[entries, 4 or 8], the vectors that codes of a type select, by the type's name in the format."""
    require("gguf", f"the table of {name}")
    import gguf.quants  # imports for a quarter of a second, and few models need it

    table = getattr(gguf.quants, name)
    table.init_grid()
    vectors: NDArray[np.int8] = table.grid[0, 0].astype(np.int8)
    vectors.flags.writeable = False
    return vectors
