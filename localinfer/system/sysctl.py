"""Values that macOS has by name. Untested: none of it is there elsewhere."""

import ctypes
import sys
from typing import Any

_MOST_BYTES = 256


def sysctl_number(name: str) -> int | None:
    """A number by its name; None if the system has none of this name."""
    found = sysctl_bytes(name)
    return None if found is None else int.from_bytes(found, sys.byteorder)


def sysctl_bytes(name: str) -> bytes | None:
    """The bytes of a value by its name; None if the system has none of this name."""
    try:
        ask: Any = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    buffer, size = ctypes.create_string_buffer(_MOST_BYTES), ctypes.c_size_t(_MOST_BYTES)
    if ask(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.raw[: size.value]
