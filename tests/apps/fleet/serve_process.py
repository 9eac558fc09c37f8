"""An application of Ray Serve in processes of its own, and what tests do to it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from tests.support.limits import seconds, wait_until

_ROOT = Path(__file__).resolve().parents[3]
_END_SECONDS = 60.0
_START_SECONDS = 60.0


def has_ray() -> bool:
    # This folder is a package of that name, too, which has no `serve`.
    try:
        return find_spec("ray.serve") is not None
    except ImportError:
        return False


class ServeProcess:
    """The replicas of one model, and the address of their ingress."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process = process

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=seconds(60), trust_env=False, verify=False)

    def replicas(self, deployment: str = "engine") -> dict[int, list[str]]:
        """By the number of its process, the ids of what each replica generates."""
        return {int(number): replies for number, replies in self._ask({"do": "running", "deployment": deployment})}

    def wait_for(self, condition: Callable[[dict[int, list[str]]], object], deployment: str = "engine") -> None:
        """Wait until something holds of what `replicas` gives."""
        holds = wait_until(lambda: condition(self.replicas(deployment)), _START_SECONDS, every=0.2)
        assert holds, self.replicas(deployment)

    def wait_for_replicas(self, count: int, deployment: str = "engine") -> None:
        self.wait_for(lambda now: len(now) == count, deployment)

    def deploy(self, **options: Any) -> None:
        """Deploy the application again, with other options."""
        self._ask({"do": "deploy", "options": options})

    def kill(self, replica: int) -> None:
        os.kill(replica, signal.SIGKILL)

    def _ask(self, asked: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return read_answer(self._process)


def read_answer(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the driver has ended with {process.wait()}"
    return json.loads(line)


@contextmanager
def serving_replicas(num_cpus: int = 2, **options: Any) -> Iterator[ServeProcess]:
    """An application for as long as the context lasts; options: of `localinfer.ray.app`."""
    # Paths of sockets are short.
    folder = tempfile.mkdtemp(prefix="ray")
    given = json.dumps({"folder": folder, "num_cpus": num_cpus, **options})
    log = Path(folder) / "driver.log"
    try:
        with log.open("w") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.apps.fleet.serve_driver", given],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )
        with process:
            try:
                answer = read_answer(process)
            except BaseException as error:
                # What it has started ends with it.
                process.terminate()
                if isinstance(error, AssertionError):
                    raise AssertionError(log.read_text()[-4000:]) from None
                raise
            try:
                yield ServeProcess(process, answer["port"])
            finally:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(_END_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
