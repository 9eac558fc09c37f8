"""Which instruction set kernels are compiled for: the best the CPU has, or the one `LOCALINFER_ISA` forces.

Every path computes the same bits (DESIGN idea B): integer sums are exact and float steps are the same fused operations.
An instruction the CPU lacks aborts the process inside LLVM, so a forced path that the CPU cannot run is refused here.
"""

import os
from enum import Enum

from llvmlite import binding as llvm

from localinfer.errors import BackendUnavailableError


class ISA(Enum):
    """A family of vector instructions, best first."""

    AVX512_VNNI = "avx512vnni"
    AVX_VNNI = "avxvnni"
    AVX2 = "avx2"
    NEON_DOTPROD = "neon"
    GENERIC = "generic"


REQUIRED_FEATURES: dict[ISA, tuple[str, ...]] = {
    ISA.AVX512_VNNI: ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"),
    ISA.AVX_VNNI: ("avx2", "fma", "f16c"),
    ISA.AVX2: ("avx2", "fma", "f16c"),
    ISA.NEON_DOTPROD: ("neon", "dotprod"),
    ISA.GENERIC: (),
}


def available() -> list[ISA]:
    """Paths this CPU can run, best first."""
    features = llvm.get_host_cpu_features()
    paths = [path for path in ISA if all(features.get(name) for name in REQUIRED_FEATURES[path])]
    if not (features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl"))):
        paths = [path for path in paths if path is not ISA.AVX_VNNI]
    return paths


def select(wanted: str | None) -> ISA:
    """Return the forced path, or the best; raise BackendUnavailableError for one this CPU lacks."""
    choices = available()
    if not wanted:
        return choices[0]
    for path in choices:
        if path.value == wanted:
            return path
    raise BackendUnavailableError(
        f"LOCALINFER_ISA is {wanted!r}, but this CPU runs {', '.join(path.value for path in choices)}; "
        "unset it, or set it to one of these"
    )


SELECTED = select(os.environ.get("LOCALINFER_ISA"))
