"""Whether files of a model are still what the hub gave: their checksums are recorded where they were pulled.

The record of `localinfer pull` has them, and the hub's cache and Ollama's store name the files themselves so.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from localinfer.storage.hub.cache_folder import pointer_path
from localinfer.storage.hub.download import mismatch
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.records import PullRecord, PullRecords
from localinfer.storage.hub.variants import StoredFile
from localinfer.types import ProgressCallback

_NAMED_SO = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
_STAGE = "comparing checksums (MB)"


@dataclass(frozen=True)
class RecordedFile:
    """A file of which somebody recorded a checksum.

    path: where it lies. stored: its size and checksum. way_out: what to do if it has another one.
    """

    path: Path
    stored: StoredFile
    way_out: str


def recorded_files(paths: Iterable[Path], places: Places) -> list[RecordedFile]:
    """The files of the pulled model that some paths belong to, or those of the paths whose names are checksums."""
    real = {Path(os.path.realpath(path)) for path in paths}
    records = [] if places.records is None else PullRecords(places.records).all()
    for record in records:
        if isinstance(record, PullRecord) and record.is_whole:
            files = [
                RecordedFile(path, file.stored, f"delete {path} and run `localinfer pull {record.name}`")
                for file in record.files
                for path in [Path(os.path.realpath(pointer_path(record.cache, record.repository, file.stored)))]
            ]
            if real & {one.path for one in files}:
                return files
    found = []
    for path in sorted(real):
        named = _NAMED_SO.fullmatch(path.name)
        if named is not None and path.parent.name == "blobs":
            stored = StoredFile(path.name, path.stat().st_size, sha256=named[1])
            found.append(RecordedFile(path, stored, f"delete {path} and download the model again"))
    return found


def differing_files(files: Iterable[RecordedFile], progress: ProgressCallback | None = None) -> list[str]:
    """Read files and compare their checksums; a line for each that differs, with the way out.

    progress: told of MB done. Raises: OSError where one cannot be read.
    """
    files = list(files)
    total, before = sum(one.stored.size for one in files), 0
    found = []
    for one in files:
        problem = mismatch(one.path, one.stored, _reporter(progress, before, total))
        if problem:
            found.append(f"{one.stored.path} is not the file that was downloaded: {problem}; {one.way_out}")
        before += one.stored.size
    return found


def _reporter(progress: ProgressCallback | None, before: int, total: int) -> Callable[[int], None]:
    def read(count: int) -> None:
        if progress is not None:
            progress(_STAGE, before + count >> 20, total >> 20)

    return read
