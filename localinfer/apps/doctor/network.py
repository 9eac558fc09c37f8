"""Facts of `doctor --network`: the other machines that commands of localinfer reached, and since when."""

import importlib.metadata
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localinfer.errors import LocalinferError
from localinfer.system import network_log
from localinfer.terminal import neutralise_controls

Facts = dict[str, Any]


def network_facts() -> Facts:
    """`file`, `writable`, `installed` (seconds since the epoch or None), `reached`. Raises: LocalinferError."""
    file = network_log.path()
    try:
        reached = [] if file is None else network_log.read(file)
    except OSError as error:
        raise LocalinferError(f"{file} cannot be read ({error.strerror}); make it readable, or delete it") from None
    return {
        "file": None if file is None else str(file),
        "writable": file is not None and _is_writable(file.parent),
        "installed": _installed_at(),
        "reached": [asdict(one) for one in reached],
    }


def network_lines(facts: Facts) -> Iterator[str]:
    """Lines without line ends: what was reached, newest first, then what the record does not hold."""
    since = f"since {_day(facts['installed'])}, when it was installed" if facts["installed"] else "until now"
    if not facts["reached"]:
        yield f"Commands of localinfer reached no other machine {since}."
    else:
        yield f"Other machines that commands of localinfer reached {since}, newest first:"
        rows = [("reached", "last", "first", "times", "command", "asked by")]
        for one in facts["reached"]:
            texts = (one["target"], _day(one["last"]), _day(one["first"]), str(one["times"]), one["command"])
            rows.append((*texts, one["module"]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            yield neutralise_controls("  " + "  ".join(cells).rstrip())
    if not facts["writable"]:
        yield f"Nothing can be recorded: {facts['file'] or 'there is no home folder'} cannot be written."
    yield "Programs that import localinfer, and native code, are not in this record."


def _installed_at() -> float | None:
    """When this version was installed: the time of its metadata."""
    try:
        files = importlib.metadata.files("localinfer") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    records = [Path(str(one.locate())) for one in files if one.name == "RECORD"]
    return next((file.stat().st_mtime for file in records if file.exists()), None)


def _is_writable(folder: Path) -> bool:
    """Return whether a file can be made in a folder, or in that of its parents which exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
