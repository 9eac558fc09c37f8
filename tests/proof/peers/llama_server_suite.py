"""Run llama.cpp's own server tests against `localinfer serve`; README.md says where they come from.

python -m tests.proof.peers.llama_server_suite TESTS [--models FOLDER] [options of pytest]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.proof.peers.suite_models import MODELS_VARIABLE, SuiteModels

ROOT = Path(__file__).parents[3]


def main() -> int:
    """Run the suite; return pytest's exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", type=Path, help="the folder tools/server/tests of llama.cpp")
    parser.add_argument("--models", type=Path, help="a folder with stories260K.gguf, which some cases need")
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        SuiteModels(folder).write(given.models)
        starter = folder / "llama-server"
        starter.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.proof.peers.llama_server "$@"\n')
        starter.chmod(0o700)
        environment = {
            **os.environ,
            MODELS_VARIABLE: str(folder),
            "LLAMA_SERVER_BIN_PATH": str(starter),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "pytest", "-p", "tests.proof.peers.suite_plugin", "-m", "not slow", *options]
        return subprocess.run(command, cwd=given.tests, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
