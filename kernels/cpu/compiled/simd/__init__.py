"""The basis of all kernels: vector code, memory access, and the loops of the thread pool."""
