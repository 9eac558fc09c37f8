"""What kernels of every kind are written with: vector code, memory at addresses, and the loops of the thread pool."""
