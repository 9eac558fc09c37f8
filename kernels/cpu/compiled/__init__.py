"""The kernels' source, compiled by Numba. Only `localinfer.kernels.jit` imports these modules, and only for a kernel
not yet cached."""
