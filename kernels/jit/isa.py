"""The instruction set of kernels: the best of the CPU, or the one of `LOCALINFER_ISA`.

Every path computes the same bits: integer sums are exact, and float steps are the same fused operations. LLVM aborts
the process on an instruction that the CPU lacks, so a forced path that the CPU cannot run is refused.
"""

import os
from collections.abc import Collection
from enum import Enum

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.jit.host import amx_refusal, host_features


class ISA(Enum):
    """A family of vector instructions, best first."""

    AMX = "amx"
    AVX512_VNNI = "avx512vnni"
    AVX_VNNI = "avxvnni"
    AVX2 = "avx2"
    NEON_I8MM = "i8mm"
    NEON_DOTPROD = "neon"
    GENERIC = "generic"


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512_VNNI = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}

# LLVM's names of the required features; any one of the sets is enough.
_NEEDED_FEATURES: dict[ISA, list[frozenset[str]]] = {
    ISA.AMX: [_AVX512_VNNI | {"amx-tile", "amx-int8"}],
    ISA.AVX512_VNNI: [_AVX512_VNNI],
    ISA.AVX_VNNI: [_AVX2 | {"avxvnni"}, _AVX2 | {"avx512vnni", "avx512vl"}],
    ISA.AVX2: [_AVX2],
    ISA.NEON_I8MM: [frozenset({"neon", "dotprod", "i8mm"})],
    ISA.NEON_DOTPROD: [frozenset({"neon", "dotprod"})],
    ISA.GENERIC: [frozenset()],
}


NEON = frozenset({ISA.NEON_I8MM, ISA.NEON_DOTPROD})
"""Paths of arm64's vectors of 128 bits."""


AVX512 = frozenset({ISA.AMX, ISA.AVX512_VNNI})
"""Paths of AVX-512's vectors of 512 bits and products of bytes: AMX is this one, with products of many rows besides."""


UNTRIED = frozenset({ISA.AMX})
"""Paths that were emulated and have run on no such CPU yet: taken only where LOCALINFER_ISA names them."""


def runs_on(path: ISA, features: Collection[str]) -> bool:
    """True if a target with these features can run a path."""
    return any(needed <= set(features) for needed in _NEEDED_FEATURES[path])


def available() -> list[ISA]:
    """The paths that this CPU can run and that are taken by themselves, best first."""
    features = _features()
    return [path for path in ISA if runs_on(path, features) and path not in UNTRIED]


def amx_refusal_here() -> str | None:
    """The reason why this process does not use AMX, which the CPU has; None if it does, or if the CPU has none."""
    if not runs_on(ISA.AMX, _features()) or SELECTED is ISA.AMX:
        return None
    return amx_refusal() or "its kernels have run on no such CPU yet (LOCALINFER_ISA=amx takes them)"


def _features() -> list[str]:
    return [name for name, is_there in host_features().items() if is_there]


def pairs_rows() -> bool:
    """True if products are of small matrices: of pairs of rows, of weights and of activations, stored side by side."""
    return SELECTED is ISA.NEON_I8MM


def shares_bytes() -> bool:
    """True if a byte of a tile has codes of two rows of weights (`SHARED_LAYOUTS`): wherever rows are in pairs, too."""
    return SELECTED in NEON


def select(wanted: str | None) -> ISA:
    """Return the forced path, or the best. Raises: BackendUnavailableError if the CPU cannot run it."""
    choices = available()
    if not wanted:
        return choices[0]
    refusal = None
    if wanted == ISA.AMX.value and runs_on(ISA.AMX, _features()):
        refusal = amx_refusal()
        choices = choices if refusal else [ISA.AMX, *choices]
    for path in choices:
        if path.value == wanted:
            return path
    raise BackendUnavailableError(
        f"LOCALINFER_ISA is {wanted!r}, but this CPU runs {', '.join(path.value for path in choices)}"
        f"{f' ({refusal})' if refusal else ''}; "
        "unset it, or set it to one of these"
    )


SELECTED = select(os.environ.get("LOCALINFER_ISA"))
