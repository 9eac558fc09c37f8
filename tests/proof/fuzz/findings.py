"""Findings as files: small inputs that a target once handled wrongly, which tests run ever after."""

import hashlib
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

from tests.proof.fuzz.target import FOLDER

FOUND = FOLDER / "found"
_LARGEST_PLAIN = 4096
_PACKED = ".xz"


@dataclass(frozen=True)
class Finding:
    """An input, and what came of it: kind ("SIGSEGV", "hang", "memory", "TypeError"), place, text for people."""

    kind: str
    place: str
    text: str
    data: bytes

    @property
    def key(self) -> tuple[str, str]:
        """Findings of one key are taken for one mistake."""
        return self.kind, self.place


def save(finding: Finding, folder: Path) -> Path:
    """Write the input into a folder, under a name that says what it showed; compressed if it is long."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = re.sub(r"[^A-Za-z0-9]+", "-", finding.kind)
    name = f"{kind}-{hashlib.sha256(finding.data).hexdigest()[:10]}.case"
    if len(finding.data) <= _LARGEST_PLAIN:
        path, content = folder / name, finding.data
    else:
        path, content = folder / (name + _PACKED), lzma.compress(finding.data, preset=9)
    path.write_bytes(content)
    return path


def read(path: Path) -> bytes:
    """The input in a file."""
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == _PACKED else content


def found_cases(name: str) -> list[Path]:
    """The files of a target, in the order of their names."""
    return sorted(path for path in (FOUND / name).glob("*") if path.is_file())
