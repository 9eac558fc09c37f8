"""A server with the demo model under hostile connections: its memory, and how soon it says that it is well."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.kernels.subprocesses import REPOSITORY, environment
from tests.proof.soak.process_figures import figures
from tests.proof.soak.site import ViolationError, require
from tests.support.limits import seconds

_MOST_GROWTH = 400 << 20
_MOST_SECONDS = 0.25
_PROBE_SECONDS, _SAMPLE_SECONDS = 0.1, 0.25
_KV_MEMORY = "32MB"
"""Of the prompt cache, so that what it grows by is not taken for what bodies take."""
_BUSY = "while True: pass"
_TWIN = """
import asyncio
async def answer(reader, writer):
    while await reader.readline():
        writer.write(b'.')
async def run():
    server = await asyncio.start_server(answer, '127.0.0.1', 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(run())
"""
"""A program that does nothing but answer: what the machine itself costs is what it takes."""


class Probe(NamedTuple):
    """One question whether the server is well: when, its seconds by TCP and by the Unix socket, and the twin's."""

    at: float
    tcp: float
    unix: float
    twin: float


class Hostile:
    """A run of so many hostile connections. say: is given lines of progress. busy: programs that take a core each.

    most_bytes: of the largest bodies. judges_time: whether seconds decide too.
    """

    def __init__(
        self,
        seed: int,
        num_connections: int,
        say: Callable[[str], None] = print,
        *,
        busy: int = 0,
        most_bytes: int = 30 << 20,
        judges_time: bool = True,
    ) -> None:
        self._seed, self._num_connections, self._say = seed, num_connections, say
        self._busy, self._most_bytes, self._judges_time = busy, most_bytes, judges_time
        self.probes: list[Probe] = []
        self.growth: list[int] = []

    def run(self, length: float) -> bool:
        """Attack for so many seconds; return whether both bounds held."""
        with tempfile.TemporaryDirectory(prefix="soak-hostile-") as folder:
            os.chmod(folder, 0o700)
            errors = Path(folder) / "errors.log"
            processes: list[subprocess.Popen[str]] = []
            try:
                with errors.open("w") as log:
                    processes.append(server := _started(Path(folder) / "s.sock", log))
                    asyncio.run(self._run(server, Path(folder) / "s.sock", length, processes))
                server.terminate()
                require(server.wait(seconds(30)) == 0, f"the server ended with {server.returncode}")
                require("Traceback" not in errors.read_text(), f"a fault: {errors.read_text()[-3000:]}")
            except ViolationError as error:
                self._say(f"FOUND with --seed {self._seed}: {error}")
                return False
            finally:
                for process in processes:
                    process.kill()
                    process.communicate()
        return True

    async def _run(
        self, server: subprocess.Popen[str], path: Path, length: float, processes: list[subprocess.Popen[str]]
    ) -> None:
        port = _port(await _line(server))
        words = (str(port), str(self._seed), str(self._num_connections), str(length), str(self._most_bytes))
        processes.append(attackers := _python("-m", "tests.proof.soak.attackers", *words))
        processes.append(twin := _python("-c", _TWIN))
        processes.extend(_python("-c", _BUSY) for _ in range(self._busy))
        twin_port = int(await _line(twin))
        require(await _line(attackers) == "ready\n", "the attackers did not start")
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=seconds(60), trust_env=False
        ) as client:
            await _warm_up(client)
            # What freed memory the first requests left is not what hostile ones take.
            base = figures(server.pid).rss
            assert attackers.stdin is not None and attackers.stdout is not None, "pipes"
            attackers.stdin.write("\n")
            attackers.stdin.flush()
            until = time.monotonic() + length
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._probe(port, path, twin_port, until))
                tasks.create_task(self._sample(server.pid, base, until))
            self._say(f"attackers: {json.loads(await _line(attackers))}")
            self._report(base)
            answer = await client.post("/v1/chat/completions", json=_CHAT)
            require(answer.status_code == 200, f"afterwards a chat is answered by {answer.status_code}: {answer.text}")

    async def _probe(self, port: int, path: Path, twin_port: int, until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", twin_port)
        while time.monotonic() < until:
            at = time.monotonic()
            tcp = await _health(lambda: asyncio.open_connection("127.0.0.1", port))
            unix = await _health(lambda: asyncio.open_unix_connection(str(path)))
            asked = time.monotonic()
            writer.write(b"\n")
            await reader.readexactly(1)
            self.probes.append(Probe(at, tcp, unix, time.monotonic() - asked))
            await asyncio.sleep(_PROBE_SECONDS)
        writer.close()

    async def _sample(self, process: int, base: int, until: float) -> None:
        told = time.monotonic()
        while (now := time.monotonic()) < until:
            self.growth.append(figures(process).rss - base)
            if now - told > 30:
                told = now
                slowest = max(max(one.tcp, one.unix) for one in self.probes[-300:])
                self._say(
                    f"{until - now:.0f} s left: {self.growth[-1] >> 20:+} MiB, at most {max(self.growth) >> 20:+}, "
                    f"/health within {1e3 * slowest:.0f} ms, load {os.getloadavg()[0]:.1f}"
                )
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _report(self, base: int) -> None:
        """Say what was found. Raises: ViolationError for a bound that did not hold."""
        for name in ("tcp", "unix", "twin"):
            times = sorted(1e3 * getattr(one, name) for one in self.probes)
            median, late = times[len(times) // 2], times[int(0.99 * len(times))]
            self._say(
                f"{name}: {len(times)} times, median {median:.1f} ms, p99 {late:.0f} ms, worst {times[-1]:.0f} ms"
            )
        grown = max(self.growth)
        self._say(
            f"memory: {base >> 20} MiB at the start, at most {grown >> 20:+} MiB, at the end {self.growth[-1] >> 20:+}"
        )
        require(grown <= _MOST_GROWTH, f"memory grew by {grown >> 20} MiB; wanted at most {_MOST_GROWTH >> 20}")
        # The twin's own time around a probe is what the machine would have cost any program.
        excess = [
            max(one.tcp, one.unix) - max(near.twin for near in self.probes[max(0, index - 3) : index + 4])
            for index, one in enumerate(self.probes)
        ]
        self._say(f"/health took at most {1e3 * max(excess):.0f} ms more than a program that does nothing else")
        num_late = sum(one > _MOST_SECONDS for one in excess)
        if self._judges_time:
            require(
                not num_late, f"{num_late} of {len(excess)} times /health took {_MOST_SECONDS} s longer than the twin"
            )


_CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16}


async def _warm_up(client: httpx.AsyncClient) -> None:
    """Have each part of the server used once."""
    for path, body in (
        ("/v1/chat/completions", _CHAT),
        ("/v1/chat/completions", {**_CHAT, "regex": "[a-z ]+"}),
        ("/tokenize", {"content": "Once upon a time. " * 60_000}),
    ):
        answer = await client.post(path, json=body)
        require(answer.status_code == 200, f"{path} is answered by {answer.status_code}: {answer.text[:500]}")


async def _health(connect: Callable[[], object]) -> float:
    """Seconds until /health was answered, on a connection of its own. Raises: ViolationError."""
    began = time.monotonic()
    reader, writer = await connect()  # type: ignore[misc]
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
    except ConnectionError as error:
        status = repr(error).encode()
    finally:
        writer.close()
    require(b" 200 " in status, f"/health is answered by {status!r}")
    return time.monotonic() - began


def _started(path: Path, log: object) -> subprocess.Popen[str]:
    words = ["serve", "--port", "0", "--socket", str(path), "--no-config", "--no-disk-cache", "--no-store"]
    return _python("-m", "localinfer", *words, "--kv-memory", _KV_MEMORY, errors=log)


def _python(*words: str, errors: object = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words], cwd=REPOSITORY, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
    )  # type: ignore[call-overload, no-any-return]  # fmt: skip


async def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "a pipe"
    return await asyncio.to_thread(process.stdout.readline)


def _port(line: str) -> int:
    require("http://127.0.0.1:" in line, f"the server did not start: {line!r}")
    return int(line.split("http://127.0.0.1:")[1].split()[0].strip(","))
