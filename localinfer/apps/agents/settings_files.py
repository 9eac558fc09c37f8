"""Write settings of an agent into its own files, and take them out again.

What a file held before stands in a record in localinfer's state folder: the bytes of the whole file, and of each value
that was set its former text. A file that nobody changed since gets its bytes back; of one that was changed only our
values are taken out, where they are still ours.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localinfer.apps.agents.settings_text import KeyPath, SettingsFormat, SettingsText, settings_text
from localinfer.errors import RequestError
from localinfer.system.files import OutputFile

_VERSION = 1
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class FileSettings:
    """Values for one file of an agent."""

    path: Path
    """The file, which need not exist."""
    form: SettingsFormat
    """Its notation."""
    values: tuple[tuple[KeyPath, Any], ...]
    """Keys, from the outermost on, and the value of each."""


@dataclass(frozen=True)
class _Edit:
    """One value that was set."""

    path: KeyPath
    """Its keys."""
    written: str
    """The text that was written."""
    former: str | None
    """The text that stood there before, None if there was none."""
    kept: int
    """Keys of the path that were there before."""


@dataclass(frozen=True)
class _Written:
    """A file that was written."""

    path: Path
    """The file."""
    form: SettingsFormat
    """Its notation."""
    former: bytes | None
    """All of it before, None if there was no file."""
    digest: str
    """SHA-256 of what was written."""
    edits: tuple[_Edit, ...]
    """The values that were set."""
    folders: tuple[Path, ...]
    """Folders that were made for it, the innermost first."""


class SettingsFiles:
    """The files of one agent. record: where it is noted what they held before."""

    def __init__(self, record: Path) -> None:
        self._record = record

    @property
    def is_written(self) -> bool:
        """True if settings were written and not taken out since."""
        return self._record.exists()

    def write(self, wanted: Sequence[FileSettings]) -> list[str]:
        """Write values into files, in place of those of an earlier time; return a line for each value.

        Raises: RequestError for files that cannot be read, changed or written; then none is changed.
        """
        earlier = {one.path: one for one in self._load()}
        planned = []
        for one in wanted:
            before = earlier.get(one.path)
            current = _read(one.path)
            former = current if before is None else _without(before, current)[0]
            planned.append((one, former, *_edited(one, former)))
        records = [before for path, before in earlier.items() if path not in {one.path for one in wanted}]
        for one, former, data, edits in planned:
            folders = tuple(folder for folder in one.path.parents if not folder.exists())
            if one.path in earlier:
                folders = earlier[one.path].folders
            records.append(_Written(one.path, one.form, former, _digest(data), tuple(edits), folders))
        # The record first: with it what a power cut leaves can be taken out.
        self._save(records)
        lines = []
        for one, _, data, edits in planned:
            one.path.parent.mkdir(parents=True, exist_ok=True)
            if data != _read(one.path):
                _write(one.path, data)
            for edit in edits:
                was = "" if edit.former is None else f" (was {_short(edit.former)})"
                lines.append(f"{one.path}: {'.'.join(edit.path)} = {_short(edit.written)}{was}")
        return lines

    def restore(self) -> list[str]:
        """Take out everything that `write` wrote; return a line for each file. Raises: RequestError."""
        lines, left = [], []
        for one in self._load():
            try:
                lines.append(_restore(one))
            except RequestError as error:
                left.append(one)
                lines.append(str(error))
        if left:
            self._save(left)
            raise RequestError("; ".join(lines))
        with suppress(FileNotFoundError):
            self._record.unlink()
        return lines

    def _load(self) -> list[_Written]:
        try:
            data = json.loads(self._record.read_bytes())
            assert data["version"] == _VERSION
            return [
                _Written(
                    Path(one["path"]),
                    one["form"],
                    None if one["former"] is None else base64.b64decode(one["former"]),
                    one["digest"],
                    tuple(_Edit(tuple(edit["path"]), **edit["value"]) for edit in one["edits"]),
                    tuple(map(Path, one["folders"])),
                )
                for one in data["files"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise RequestError(
                f"{self._record}, which notes what was changed, cannot be read ({type(error).__name__}); "
                "compare the agent's settings yourself and delete it"
            ) from None

    def _save(self, records: Sequence[_Written]) -> None:
        files = [
            {
                "path": str(one.path),
                "form": one.form,
                "former": None if one.former is None else base64.b64encode(one.former).decode(),
                "digest": one.digest,
                "edits": [
                    {
                        "path": list(edit.path),
                        "value": {"written": edit.written, "former": edit.former, "kept": edit.kept},
                    }
                    for edit in one.edits
                ],
                "folders": list(map(str, one.folders)),
            }
            for one in records
        ]
        self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(self._record, json.dumps({"version": _VERSION, "files": files}, indent=1).encode())


def _edited(wanted: FileSettings, former: bytes | None) -> tuple[bytes, list[_Edit]]:
    text = _text(wanted.path, wanted.form, former or b"")
    edits = []
    for path, value in wanted.values:
        written = text.written(value)
        edits.append(_Edit(path, written, text.find(path), text.depth(path)))
        text.put(path, written)
    return text.text.encode(), edits


def _without(record: _Written, current: bytes | None) -> tuple[bytes | None, str]:
    """Bytes of a file without our values, and a description of what is done to it."""
    if current is None:
        return None, "is no longer there"
    if _digest(current) == record.digest:
        if record.former is None:
            return None, "deleted: it was made by this command"
        return record.former, "restored to the bytes before"
    text = _text(record.path, record.form, current)
    kept = []
    for edit in reversed(record.edits):
        found = text.find(edit.path)
        if found is None:
            continue
        if not text.is_same(found, edit.written):
            kept.append(".".join(edit.path))
        elif edit.former is None:
            text.drop(edit.path, edit.kept)
        else:
            text.put(edit.path, edit.former)
    changed = f"; {', '.join(kept)}, which you changed, stays" if kept else ""
    return text.text.encode(), f"was edited since, so only our values were taken out{changed}"


def _restore(record: _Written) -> str:
    current = _read(record.path)
    wanted, said = _without(record, current)
    if wanted is None:
        with suppress(FileNotFoundError):
            record.path.unlink()
        for folder in record.folders:
            with suppress(OSError):
                folder.rmdir()
    elif wanted != current:
        _write(record.path, wanted)
    return f"{record.path}: {said}"


def _text(path: Path, form: SettingsFormat, data: bytes) -> SettingsText:
    try:
        return settings_text(data.decode(), form, str(path))
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not UTF-8; mend it, or write the settings that --print shows by hand") from None


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); see its access rights") from None
    if len(data) > _MOST_BYTES:
        raise RequestError(f"{path} has more than {_MOST_BYTES >> 20} MiB, and is no file of settings; see what it is")
    return data


def _write(path: Path, data: bytes) -> None:
    with OutputFile(path, is_private=True) as file:
        file.write(data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."
