"""The most memory that this process held since a moment: by the kernel's mark where it can be set back."""

import contextlib
import os
import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """Resident bytes beyond those at `start`. Without a mark that can be set back, only new maxima are seen."""

    def __init__(self) -> None:
        self._before = 0
        self._is_reset = os.access(_CLEAR, os.W_OK)

    def start(self) -> None:
        """Count from what is held now."""
        if self._is_reset:
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
            self._before = _kibibytes("VmRSS") << 10
        else:
            self._before = max(psutil.Process().memory_info().rss, _maximum())

    def growth(self) -> int:
        """Bytes by which the peak since `start` is above what was held then."""
        peak = _kibibytes("VmHWM") << 10 if self._is_reset else _maximum()
        return max(0, peak - self._before)


def limit_address_space(num_bytes: int) -> None:
    """Let this process map so many bytes more than it has, where systems know such a limit."""
    with contextlib.suppress(ImportError):
        import resource

        if sys.platform != "darwin":
            most = psutil.Process().memory_info().vms + num_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _maximum() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _kibibytes(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0
