"""What was measured on this machine once, kept for a month beside the kernels it was measured with."""

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from localinfer.files import read_bounded, write_all, write_atomically
from localinfer.kernels.jit.object_cache import CACHE_FOLDER

_REMEMBERED_SECONDS = 30 * 24 * 3600
_MAX_BYTES = 1 << 16


def recall(kind: str, key: str) -> dict[str, Any] | None:
    """What `remember` was given under this kind and key, or None: nothing, too old, or not what was written."""
    path = _path(kind, key)
    if path is None:
        return None
    try:
        record = json.loads(read_bounded(path, _MAX_BYTES))
        return record if 0 <= time.time() - float(record["measured_at"]) < _REMEMBERED_SECONDS else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def remember(kind: str, key: str, **values: Any) -> None:
    """Keep values that JSON can hold; a disk that is full only costs measuring again."""
    path = _path(kind, key)
    if path is None:
        return
    record = json.dumps({**values, "measured_at": time.time()}).encode()
    with contextlib.suppress(OSError):
        write_atomically(path, lambda file: write_all(file, record))


def _path(kind: str, key: str) -> Path | None:
    if CACHE_FOLDER is None:
        return None
    return CACHE_FOLDER / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
