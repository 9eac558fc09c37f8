"""Sources that numba-cuda compiles to PTX; a start with everything in the cache imports none of them."""
