"""What the weights of a model take once they are packed for the CPU."""

from localinfer.models.load.weights import CpuWeights


def packed_bytes(weights: CpuWeights) -> int:
    """Bytes of everything that was packed, once where matrices share memory, and of vectors with kernels' copies."""
    packed, others = {}, 0
    for (kind, *_), value in weights._loaded.items():
        if kind == "linear":
            begin = value.packed.data.ctypes.data
            packed[begin] = max(packed.get(begin, 0), value.packed.data.nbytes)
        else:
            others += value.packed.data.size if kind == "embedding" else 2 * value.nbytes
    return sum(packed.values()) + others
