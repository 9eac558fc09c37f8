"""Record of other machines that commands reached: one file of lines, which `localinfer doctor --network` shows.

Python announces every connection before it is made (PEP 578), so what is noted was tried, whether or not it was
answered. Only processes of commands note it; a program that imports localinfer keeps its audit events to itself.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 256 * 1024
"""Of the file; a longer one is replaced by one line for each thing that was reached."""


@dataclass(frozen=True)
class Reached:
    """A name that was looked up, or an address that was connected to."""

    target: str
    """A host's name, or an address with its port."""
    module: str
    """The module that asked, such as `huggingface_hub.utils._http`."""
    command: str
    """The command of localinfer, such as `pull`."""
    first: float
    """Seconds since the epoch."""
    last: float
    times: int
    """In how many processes; in each the first time counts."""


def path() -> Path | None:
    """The file's path, or None for a user without a home folder."""
    from localinfer.system.folders import user_folder

    folder = user_folder("state")
    return None if folder is None else folder / "network.jsonl"


def begin(command: str) -> None:
    """Note what this process reaches from now on; a process calls it once, as an audit hook stays for its life."""
    noted: set[tuple[str, str]] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if not event.startswith("socket."):
            return
        # Most commands reach nothing: what tells addresses apart is not imported at their start.
        from localinfer.system import offline

        if offline.is_on():
            return
        if (target := offline.leads_to(event, arguments)) is None:
            return
        module = offline.asking_module(sys._getframe(1))
        if (target, module) not in noted:
            noted.add((target, module))
            now = time.time()
            _append(Reached(target, module, command, now, now, 1))

    sys.addaudithook(note)


def _append(reached: Reached) -> None:
    """Add a line; where nothing can be written, the connection is made all the same, and `doctor --network` says it."""
    file = path()
    if file is None:
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > MOST_BYTES:
            _write_merged(file)
        with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0) as opened:
            # One write, so that the lines of two processes do not mix.
            opened.write(json.dumps(asdict(reached)).encode() + b"\n")
    except OSError:
        pass


def _write_merged(file: Path) -> None:
    from localinfer.system.files import write_all, write_atomically

    text = "".join(json.dumps(asdict(one)) + "\n" for one in read(file))
    write_atomically(file, lambda opened: write_all(opened, text.encode()))


def read(file: Path) -> list[Reached]:
    """Read the record: each target, module and command once, by the time it was last reached, newest first.

    Lines that are not of this form are left out, such as one that a power cut ended. Raises: OSError.
    """
    merged: dict[tuple[str, str, str], Reached] = {}
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            one = Reached(**json.loads(line))
            key = (str(one.target), str(one.module), str(one.command))
            first, last, times = float(one.first), float(one.last), int(one.times)
        except (ValueError, TypeError):
            continue
        if (known := merged.get(key)) is not None:
            first, last, times = min(first, known.first), max(last, known.last), times + known.times
        merged[key] = Reached(*key, first, last, times)
    return sorted(merged.values(), key=lambda one: -one.last)
