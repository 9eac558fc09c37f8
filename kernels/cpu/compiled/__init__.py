"""The kernels' source, compiled by Numba. Only `localinfer.kernels.jit.numba` imports these modules, and only for a
kernel not yet cached."""
