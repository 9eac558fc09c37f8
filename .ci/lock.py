"""Write `pylock.toml`: the packages of a default install, each by version, address and hash (PEP 751).

`python .ci/lock.py`, with uv installed: resolves pyproject.toml for all platforms at once. Of the wheels those are kept
that the README's platforms take; on others a package is built from its source archive.
"""

import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "pylock.toml"
TAKEN = re.compile(
    r"-(?:cp31[1-5]-cp31[1-5]|cp3\d{0,2}-abi3|(?:py2\.)?py3-none)-"
    r"(?:any|(?:manylinux|musllinux)\S*_(?:x86_64|aarch64)|macosx_\S+|win_amd64|win_arm64)\.whl"
)
HEAD = "# Packages of a default install: written by .ci/lock.py, installed by `uv pip install -r pylock.toml`.\n"


def main() -> None:
    command = ["pip", "compile", "--universal", "--python-version", "3.11", "--format", "pylock.toml"]
    command += ["--generate-hashes", "--no-header", "--upgrade", "--quiet", "pyproject.toml"]
    found = subprocess.run(
        [sys.executable, "-m", "uv", *command], cwd=LOCK.parent, check=True, capture_output=True, text=True
    ).stdout
    lines = [line for line in found.splitlines() if ".whl" not in line or not is_one_wheel(line) or TAKEN.search(line)]
    LOCK.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def is_one_wheel(line: str) -> bool:
    """True for a line of a list of wheels; a list of one is written on the line of its key."""
    return line.startswith("    {")


if __name__ == "__main__":
    main()
