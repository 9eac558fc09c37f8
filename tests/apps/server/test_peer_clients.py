"""Other people's clients in processes of their own, as `tests/proof/peers/run_clients.sh` runs them.

Those are run that it has installed in `build/clients`, and those that this interpreter has anyway; the clients that
other files here test in this process are left to them.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_servers import ServedModel, serving

from localinfer.apps.server.transport.settings import ServerSettings
from tests.support.limits import seconds

REPOSITORY = Path(__file__).resolve().parents[3]
PEERS = REPOSITORY / "tests" / "proof" / "peers"
SCRIPT = (PEERS / "run_clients.sh").read_text(encoding="utf-8")
CLIENTS = [line.split() for line in SCRIPT.partition("<<'CLIENTS'\n")[2].partition("CLIENTS")[0].splitlines()]
ELSEWHERE = {"openai", "anthropic", "langchain", "llama-index", "litellm", "ollama"}


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    """A server with the usual limits."""
    with serving(ServerSettings(port=0)) as running:
        yield running


def has(packages: list[str]) -> bool:
    try:
        return all(importlib.metadata.version(name.partition("[")[0]) for name in packages)
    except importlib.metadata.PackageNotFoundError:
        return False


def command(name: str, language: str, file: str, packages: list[str]) -> tuple[list[str], Path]:
    """How a client is run, and the folder of its programs."""
    place = REPOSITORY / "build" / "clients" / name
    is_installed = (place / "installed").exists()
    path = PEERS / "clients" / file
    if language == "js":
        if not is_installed or shutil.which("node") is None:
            pytest.skip(f"{name} is not in {place}, or there is no node; run tests/proof/peers/run_clients.sh")
        # Node looks for packages beside the file.
        return ["node", shutil.copy(path, place)], place
    programs = place / "bin" if is_installed else Path(sys.executable).parent
    if not is_installed and (name in ELSEWHERE or not has(packages)):
        pytest.skip(f"{name} is not in {place}; run tests/proof/peers/run_clients.sh")
    interpreter = programs / "python" if is_installed else Path(sys.executable)
    return ["sh" if path.suffix == ".sh" else str(interpreter), str(path)], programs


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts, and folders of programs as on Unix")
@pytest.mark.parametrize(
    ("name", "language", "file", "packages"), [(*line[:3], line[3:]) for line in CLIENTS], ids=[c[0] for c in CLIENTS]
)
def test_client_works_unmodified(served: ServedModel, tmp_path, name, language, file, packages):
    words, programs = command(name, language, file, packages)
    environment = {**os.environ, "URL": served.url, "BIN": str(programs), "HOME": str(tmp_path)}
    done = subprocess.run(
        words,
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_every_client_stands_in_the_table_of_the_readme():
    readme = (REPOSITORY / "localinfer" / "apps" / "server" / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Clients")[2].partition("## ")[0]
    for name, _, file, package, *_ in CLIENTS:
        assert f"`{package}`" in table or f"`{package.partition('[')[0]}`" in table, name
        assert (PEERS / "clients" / file).is_file(), name
    assert {path.name for path in (PEERS / "clients").iterdir()} == {file for _, _, file, *_ in CLIENTS}
