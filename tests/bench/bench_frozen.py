"""Freeze an application in one folder and in one file, and measure its first start and a warm one.

Run in an environment with what `pip wheel .` builds (an editable install has no digests of sources) and PyInstaller:

    python tests/bench/bench_frozen.py [--folder WHERE] [--form onedir|onefile]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

APP = Path(__file__).with_name("frozen_chat.py")


def freeze(folder: Path, form: str) -> Path:
    """The executable that PyInstaller makes of the application without further options."""
    words = [sys.executable, "-m", "PyInstaller", f"--{form}", "--noconfirm", "--log-level", "WARN", str(APP)]
    began = time.monotonic()
    subprocess.run(words, cwd=folder, check=True)
    print(f"{form}: frozen in {time.monotonic() - began:.0f} s")
    found = folder / "dist" / APP.stem
    return found / APP.stem if form == "onedir" else found


def num_bytes(executable: Path, form: str) -> int:
    """What is shipped."""
    if form == "onefile":
        return executable.stat().st_size
    return sum(path.stat().st_size for path in executable.parent.rglob("*") if path.is_file() and not path.is_symlink())


def start(executable: Path, cache: Path) -> dict[str, Any]:
    """One run, with caches in this folder and nothing of this environment."""
    settings = {"LOCALINFER_CACHE": str(cache), "PATH": os.environ.get("PATH", ""), "HOME": str(cache)}
    words = [str(executable), str(time.time())]
    done = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout) | {"errors": done.stderr}
    return found


def main() -> None:
    """Measure both forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the application is built; default: a temporary folder")
    parser.add_argument("--form", choices=["onedir", "onefile"], help="one form only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for form in [options.form] if options.form else ["onedir", "onefile"]:
            folder = (options.folder or Path(temporary)).absolute() / form
            folder.mkdir(parents=True, exist_ok=True)
            executable = freeze(folder, form)
            print(f"{form}: {num_bytes(executable, form) / 1e6:.0f} MB")
            with tempfile.TemporaryDirectory() as cache:
                for name in ("first start", "second start", "third start"):
                    found = start(executable, Path(cache))
                    print(f"{form}, {name}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
