"""Pictures and sounds of saved conversations: files beside the records, each once for a conversation, by its digest.

A record is written anew with every turn; so its pictures are in it as digests only, and are written when they come.
Their files go with the record, or with the last turn that shows them.
"""

import base64
import binascii
import contextlib
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from localinfer.storage.records import RecordStore
from localinfer.system import disk

FOLDER = "media"
"""Name of their folder in that of the conversations."""

_FILE = re.compile(r"(?P<id>\d{8}-\d{6}-[0-9a-f]{6})-(?P<digest>[0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 256 << 20

Turns = Sequence[Mapping[str, Any]]


def is_reference(part: Mapping[str, Any]) -> bool:
    """True for a part that has the digest of a picture or sound in place of its bytes."""
    return "data" not in part and isinstance(part.get("sha256"), str) and bool(_DIGEST.fullmatch(part["sha256"]))


def references(turns: Turns) -> set[str]:
    """The digests in turns."""
    return {part["sha256"] for turn in turns for part in _parts(turn) if is_reference(part)}


def packed(turns: Turns) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Turns with digests in place of the bytes of pictures and sounds, and those bytes by their digests."""
    files: dict[str, bytes] = {}

    def pack(part: Mapping[str, Any]) -> Mapping[str, Any]:
        text = part.get("data")
        if not isinstance(text, str):
            return part
        with contextlib.suppress(binascii.Error, ValueError):
            data = base64.b64decode(text, validate=True)
            # Only what comes back as it was.
            if base64.b64encode(data).decode("ascii") == text:
                digest = hashlib.sha256(data).hexdigest()
                files[digest] = data
                return {**{name: value for name, value in part.items() if name != "data"}, "sha256": digest}
        return part

    return [_with_parts(turn, pack) for turn in turns], files


class ConversationMedia:
    """The pictures and sounds of the conversations in one folder. Callers hold its lock where they change anything."""

    def __init__(self, folder: Path) -> None:
        self._records = RecordStore(folder / FOLDER, most_bytes=_MOST_BYTES, is_durable=True)

    def write(self, id: str, files: Mapping[str, bytes]) -> None:
        """Write those of a conversation that are not there. Raises: OSError."""
        there = {name: size for _, name, size in self._files()}
        for digest, data in files.items():
            name = f"{id}-{digest}"
            if there.get(name) != len(data):
                self._records.write(name, data)

    def keep(self, id: str, digests: Iterable[str]) -> None:
        """Delete those of a conversation that it shows no more."""
        kept = {f"{id}-{digest}" for digest in digests}
        for owner, name, _ in self._files():
            if owner == id and name not in kept:
                self._records.discard(name)

    def keep_of(self, ids: Iterable[str]) -> None:
        """Delete those of conversations that are no more, and what killed writers left. Raises: OSError."""
        kept = set(ids)
        for owner, name, _ in self._files():
            if owner not in kept:
                self._records.discard(name)
        with contextlib.suppress(FileNotFoundError):
            self._records.delete_unfinished(is_locked=True)

    def num_bytes(self) -> Mapping[str, int]:
        """Bytes of all files by conversation."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for owner, _, size in self._files():
            sizes[owner] += size
        return sizes

    def unpacked(self, id: str, turns: Turns) -> tuple[list[dict[str, Any]], list[str]]:
        """Turns of a conversation with the bytes of its pictures and sounds; also which of them are gone or damaged, in
        whose place is a text. Raises: OSError for a file that is there and cannot be read."""
        problems: list[str] = []

        def unpack(part: Mapping[str, Any]) -> Mapping[str, Any]:
            if not is_reference(part):
                return part
            named = " ".join(filter(None, (part["type"], part.get("name"))))
            try:
                data = self._records.read(f"{id}-{part['sha256']}")
            except FileNotFoundError:
                problems.append(f"its {named} is gone")
                return {"type": "text", "text": f"[{named}]"}
            if hashlib.sha256(data).hexdigest() != part["sha256"]:
                problems.append(f"its {named} is damaged")
                return {"type": "text", "text": f"[{named}]"}
            whole = {name: value for name, value in part.items() if name != "sha256"}
            return {**whole, "data": base64.b64encode(data).decode("ascii")}

        return [_with_parts(turn, unpack) for turn in turns], problems

    def _files(self) -> list[tuple[str, str, int]]:
        """The conversation, name and size of each file."""
        try:
            found = disk.entries(self._records.folder)
        except OSError:
            return []
        files = []
        for entry in found:
            match = _FILE.fullmatch(entry.name)
            if match is not None:
                with contextlib.suppress(OSError):
                    files.append((match["id"], entry.name, entry.stat(follow_symlinks=False).st_size))
        return files


def _parts(turn: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = turn.get("content")
    return content if isinstance(content, list) else ()


def _with_parts(turn: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """A turn whose parts are changed."""
    content = turn.get("content")
    return {**turn, "content": [dict(change(part)) for part in content]} if isinstance(content, list) else dict(turn)
