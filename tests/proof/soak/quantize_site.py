"""Quantizing that is killed: its output is whole or not there, and what was calibrated is used by the next run."""

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from tests.kernels.subprocesses import environment
from tests.proof.soak.site import Site, check_ended_well, require

_SOURCE = Path(__file__).resolve().parents[3] / "models" / "demo" / "demo-f16.gguf"
_METHODS = ("rtn", "gptq")


class QuantizeSite(Site):
    """`localinfer quantize` of the demo model, by two methods, to one name."""

    name = "quantize"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._target = self.folder / "target.gguf"
        self._method = ""
        self._is_finished = False
        self._wanted: dict[str, bytes] = {}

    def start(self, random: Random) -> subprocess.Popen[str]:
        if not self._wanted:
            self._wanted = {method: self._quantized_alone(method) for method in _METHODS}
        self._method = random.choice(_METHODS)
        return self._begin(self._method, self._target)

    def _begin(self, method: str, target: Path) -> subprocess.Popen[str]:
        words = ["quantize", str(_SOURCE), str(target), "--type", "q4_0", "--method", method, "--threads", "1"]
        words += ["--chunks", "0", "--calibration-tokens", "512", "--device", "cpu", "--no-config"]
        command = [sys.executable, "-m", "localinfer", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True)

    def _quantized_alone(self, method: str) -> bytes:
        target = self.folder / "alone.gguf"
        with self._begin(method, target) as process:
            _, errors = process.communicate()
        check_ended_well(process, errors)
        content = target.read_bytes()
        target.unlink()
        return content

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        _, errors = process.communicate()
        check_ended_well(process, errors)
        if process.returncode == 0:
            self._is_finished = True
            require(self._target.read_bytes() == self._wanted[self._method], f"{self._method} wrote other bytes")
            self.count("outputs compared after unfinished runs")

    def check(self) -> None:
        if not self._target.exists():
            require(not self._is_finished, f"{self._target} is gone")
            return
        require(self._target.read_bytes() in self._wanted.values(), f"{self._target} is not whole")
        self.count("outputs whole after kills")

    def finish(self) -> None:
        for method in _METHODS:
            with self._begin(method, self._target) as process:
                self._method = method
                self.drive(process, Random(0))
        left = [path.name for path in self.folder.iterdir() if path != self._target]
        require(not left, f"left behind beside the output: {left}")
