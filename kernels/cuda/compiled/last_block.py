"""Blocks that write parts of a result: the last one to have written, whichever it is, continues with all of it.

Any block may be the last, so its result must depend only on the data written. No block waits: blocks that are not
last end. Source: `__threadfence` and its example in the CUDA C++ programming guide; PTX ISA 7.8, section 8.
"""

from numba import cuda, int64, uint32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import inline


@inline
def is_last_block(counter, count):
    """True for the last of `count` blocks to call it; their writes before are then visible to all threads.

    counter: address of a uint32 that is 0 before, and 0 again after the last block. All threads of a block call it.
    """
    arrived = cuda.shared.array(1, uint32)
    ptx.syncthreads()
    if ptx.thread() == 0:
        before = int64(0)
        if count > 1:
            before = ptx.add_ordered(counter, 1)
            if before == count - 1:
                ptx.store_u32(counter, 0)
        else:
            before = int64(count - 1)
        arrived[0] = before
    ptx.syncthreads()
    return arrived[0] == count - 1
