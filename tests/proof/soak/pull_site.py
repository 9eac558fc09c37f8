"""A pull that is killed: what arrived is kept, and the next one brings the rest."""

import shutil
import subprocess
import sys
from random import Random
from typing import Any

from localinfer.storage.hub.installed import find_installed, find_model
from localinfer.storage.hub.pull import pull_model, read_reference
from tests.kernels.subprocesses import environment
from tests.proof.soak.site import Site, check_ended_well, require
from tests.storage.hub.pull_process import PULL
from tests.storage.hub.stand_in import StandInHub, places_in

_REPOSITORY = "org/Tiny-GGUF"
_NAME = f"{_REPOSITORY}:Q4_K_M"
_CONTENT = Random(1).randbytes(6_000_000)


class PullSite(Site):
    """`localinfer pull` from a stand-in of the hub."""

    name = "pull"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hub = StandInHub({_REPOSITORY: {"README.md": b"words", "Tiny-Q4_K_M.gguf": _CONTENT}}, pause_seconds=0.02)
        self._hub.__enter__()
        self._places = places_in(self.folder, self._hub.endpoint)

    def start(self, random: Random) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PULL, str(self.folder), self._hub.endpoint, _REPOSITORY]
        pipe = subprocess.PIPE
        shown = environment(HF_TOKEN="", HOME=str(self.folder / "home"))
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=shown, start_new_session=True)

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        output, errors = process.communicate()
        check_ended_well(process, errors)
        if output.splitlines()[-1:] == [_NAME]:
            self._check_whole()

    def _check_whole(self) -> None:
        require(find_model(_NAME, self._places).read_bytes() == _CONTENT, "other bytes were pulled")
        self.count("models compared")

    def check(self) -> None:
        problems = [model.problem for model in find_installed(self._places) if not model.is_unfinished]
        require(not any(problems), f"what was pulled cannot be used: {problems}")
        blobs = [path for path in (self.folder / "hub").rglob("*.incomplete")]
        if blobs and len(self._hub.downloads) % 2:
            # The next process goes on with it.
            self.count("pulls left for the next process")
            return
        asked = len(self._hub.downloads)
        pull_model(read_reference(_REPOSITORY), self._places)
        self._check_whole()
        self.count("pulls resumed", any(wanted is not None for _, wanted in self._hub.downloads[asked:]))
        require(not self.temporaries(), f"a pull that ended left {self.temporaries()}")
        for folder in self.folder.iterdir():
            shutil.rmtree(folder)

    def close(self) -> None:
        self._hub.__exit__()
