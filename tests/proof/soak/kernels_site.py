"""Compiling of kernels into an empty cache that is killed: what was compiled is whole, and used by the next process."""

import subprocess
import sys
from random import Random
from typing import Any

from localinfer.kernels.jit.object_cache import stored
from tests.kernels.subprocesses import environment, run
from tests.proof.soak.moments import Life
from tests.proof.soak.site import Site, check_ended_well, require

_PROMPT = "Once upon a time"
_ANSWER = f"""
import localinfer
with localinfer.load(threads=1, may_measure=False) as llm:
    print(list(llm.complete({_PROMPT!r}, max_tokens=12, temperature=0.0).token_ids))
"""
_LIFE_SECONDS = 6.0


class KernelsSite(Site):
    """`localinfer warmup` with a cache folder that is empty at first; a life is the first seconds of it."""

    name = "kernels"
    most_temporaries = 8
    first_life = Life(_LIFE_SECONDS, 40)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_objects = 0

    def start(self, random: Random) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "localinfer", "warmup", "--device", "cpu", "--no-config"]
        shown = environment(LOCALINFER_CACHE=str(self.folder))
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=shown, start_new_session=True)

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        _, errors = process.communicate()
        check_ended_well(process, errors)

    def check(self) -> None:
        objects = list(self.folder.rglob("*.o"))
        damaged = [path.name for path in objects if stored(path) is None]
        require(not damaged, f"compiled kernels are damaged: {damaged}")
        require(
            len(objects) >= self._num_objects, f"{self._num_objects} kernels were compiled, {len(objects)} are left"
        )
        self._num_objects = len(objects)
        self.counts["kernels compiled in killed processes"] = len(objects)

    def finish(self) -> None:
        """A process that uses what killed ones have compiled, and compiles the rest."""
        if self._num_objects:
            answer, _ = run(_ANSWER, LOCALINFER_CACHE=str(self.folder))
            cold = self.cold.complete(_PROMPT, max_tokens=12, temperature=0.0)
            require(answer == str(list(cold.ids)), f"with these kernels the answer is {answer}, not {cold.ids}")
