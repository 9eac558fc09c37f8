"""Replicas behind Ray Serve, stopped and killed under conversations of two tokens: `python -m tests.proof.soak fleet`.

Each conversation is one of a few scripts, whose replies a lone server has given before. A third token asks as often as
it can and must be let through exactly as often as its limit says; each of the first two reads whatever the other might
have left, and asks for the other's texts to see whether they come sooner.
"""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import psutil

from localinfer.apps.bench.processes import ServerProcess
from localinfer.apps.server.transport.http import PING
from localinfer.loading.options import model_path
from tests.apps.fleet.serve_process import ServeProcess, serving_replicas
from tests.proof.soak.fleet_scripts import LIMIT, OPERATOR, TOKEN_FILE, USERS, Script, guess_of, make_scripts

MOST_SILENT = 5.0
MOST_EVENT_MS = 0.3
_FAULT_SECONDS = 10.0
_STOPPED_SECONDS = 6.0
"""After which some that were stopped go on; the others are left to be replaced."""
_LOOK_SECONDS = 10.0
_ASK_SECONDS = 0.5
_OWN_TOKENS = 16
_INGRESS, _PROXY, _ENGINE = "ServeReplica:test:ingress", "ProxyActor", "ServeReplica:test:engine"
_READY = re.compile(r'^localinfer_replica_answered\{replica="\w+"\} 1$', re.MULTILINE)
_ROUTES = ("/metrics", "/requests", "/slots", "/props", "/v1/models", "/api/ps", "/health", "/v1/responses/x")
Say = Callable[[str], None]


@dataclass
class Tally:
    """What clients saw.

    gaps: the longest silence of each stream, in seconds; text_gaps: the longest time without text, where comments are
    silence too; firsts: until its first byte. pings: comments that came in place of text. faults: what was done to
    replicas; num_spared: how often nothing, as there was none beside. admitted: when requests of the limited token were
    answered. guesses: seconds for a text of the other token, and for an unknown one. looks: answers that were searched.
    """

    replies: int = 0
    events: int = 0
    pings: int = 0
    gaps: list[float] = field(default_factory=list)
    text_gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_spared: int = 0
    admitted: list[float] = field(default_factory=list)
    refused: int = 0
    guesses: list[tuple[float, float]] = field(default_factory=list)
    looks: int = 0
    findings: list[str] = field(default_factory=list)


class Fleet:
    """One run. seed: of what is asked, and of which replica is stopped or killed when."""

    def __init__(self, seed: int, conversations: int, replicas: int, ingresses: int, say: Say) -> None:
        self._numbers = random.Random(seed)
        self._scripts = make_scripts(seed, conversations)
        self._options: dict[str, Any] = {
            "replicas": replicas,
            "cpus": 0.2,
            "threads": 1,
            "kv_memory": 64 << 20,
            "speculation": None,
            "ingress_replicas": ingresses,
            "settings": {
                "token": OPERATOR,
                "token_file": TOKEN_FILE,
                "isolates_cache": True,
            },
        }
        self._say = say
        self.tally = Tally()
        self._wanted: dict[tuple[str, int], str] = {}
        self._until = 0.0

    def run(self, seconds: float) -> bool:
        """Ask for so long; return whether all that was promised held."""
        model = str(model_path(None))
        with ServerProcess(model, device="cpu", threads=None, max_generations=len(self._scripts)) as server:
            self._wanted = asyncio.run(self._lone_replies(f"http://127.0.0.1:{server.port}"))
        self._say(f"{len(self._wanted)} replies of a lone server")
        replicas = int(self._options["replicas"])
        with serving_replicas(replicas + 2, **self._options) as cluster:
            cluster.wait_for_replicas(replicas)
            busy = _busy_seconds()
            began = time.monotonic()
            self._until = began + seconds
            asyncio.run(self._ask_all(cluster))
            elapsed = time.monotonic() - began
            now = _busy_seconds()
        spent = {name: now[name] - busy.get(name, 0.0) for name in now}
        return self._report(elapsed, spent)

    async def _lone_replies(self, url: str) -> dict[tuple[str, int], str]:
        """The reply of each turn, all scripts side by side."""
        found: dict[tuple[str, int], str] = {}

        async def hold(script: Script) -> None:
            replies: list[str] = []
            async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
                for turn in range(script.turns):
                    answer = await client.post("/v1/chat/completions", json=script.body(turn, replies))
                    answer.raise_for_status()
                    replies.append(answer.json()["choices"][0]["message"]["content"])
                    found[script.name, turn] = replies[-1]

        async with asyncio.TaskGroup() as group:
            for script in self._scripts:
                group.create_task(hold(script))
        return found

    async def _ask_all(self, cluster: ServeProcess) -> None:
        async with asyncio.TaskGroup() as group:
            talking = [group.create_task(self._converse(cluster, script)) for script in self._scripts]
            beside = [
                group.create_task(self._ask_limited(cluster)),
                group.create_task(self._look(cluster)),
                group.create_task(self._disturb(cluster)),
            ]
            await asyncio.wait(talking)
            for task in beside:
                task.cancel()

    async def _converse(self, cluster: ServeProcess, script: Script) -> None:
        numbers = random.Random(script.name)
        async with _client(cluster, script.user) as client:
            while time.monotonic() < self._until:
                replies: list[str] = []
                for turn in range(script.turns):
                    await asyncio.sleep(numbers.expovariate(1.0))
                    if time.monotonic() >= self._until:
                        return
                    body = {**script.body(turn, replies), "stream": True}
                    text = await self._streamed(client, body, f"{script.name}, turn {turn}")
                    if text != self._wanted[script.name, turn]:
                        self._find(f"{script.name}, turn {turn}: another text than a lone server's: {text[:200]!r}")
                        break
                    replies.append(text)

    async def _streamed(self, client: httpx.AsyncClient, body: Mapping[str, Any], name: str) -> str:
        """The text of a streamed reply; its silences are noted."""
        began = last = last_text = time.monotonic()
        received, gap, text_gap = b"", 0.0, 0.0
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for piece in response.aiter_raw():
                    now = time.monotonic()
                    if received:
                        gap = max(gap, now - last)
                    else:
                        self.tally.firsts.append(now - began)
                        last_text = now
                    if b"data: " in piece:
                        text_gap, last_text = max(text_gap, now - last_text), now
                    received, last = received + piece, now
            if response.status_code != 200:
                self._find(f"{name}: status {response.status_code}: {received[:300]!r}")
        except httpx.HTTPError as error:
            waited = time.monotonic() - last
            self._find(f"{name}: {type(error).__name__} after {len(received)} bytes, and nothing for {waited:.1f} s")
        self.tally.gaps.append(gap)
        self.tally.text_gaps.append(text_gap)
        self.tally.pings += received.count(PING)
        self.tally.replies += 1
        self.tally.events += received.count(b"\n\n")
        if gap > MOST_SILENT:
            self._find(f"{name}: silent for {gap:.1f} s")
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))

    async def _ask_limited(self, cluster: ServeProcess) -> None:
        """Ask more often than is allowed, one request after the other."""
        async with _client(cluster, "carl") as client:
            while time.monotonic() < self._until:
                body = {"prompt": f"{self._numbers.random()}", "max_tokens": 1}
                try:
                    answer = await client.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self._find(f"the limited token: {type(error).__name__}")
                    continue
                if answer.status_code == 200:
                    self.tally.admitted.append(time.monotonic())
                elif answer.status_code == 429 and "retry-after" in answer.headers:
                    self.tally.refused += 1
                else:
                    self._find(f"the limited token: status {answer.status_code}: {answer.text[:200]}")
                await asyncio.sleep(_ASK_SECONDS)

    async def _look(self, cluster: ServeProcess) -> None:
        """Search for traces of the other token, and guess its texts."""
        number = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for user, other in (USERS, USERS[::-1]):
                async with _client(cluster, user) as client:
                    for route in _ROUTES:
                        answer = await _tried(client.get(route))
                        if answer is None:
                            continue
                        shown = answer.text + str(answer.headers)
                        traces = [word for word in (f"secret-{other}", f"name {other}", "replica=") if word in shown]
                        if traces:
                            self._find(f"{user} reads {traces} at {route}")
                        self.tally.looks += 1
                    known = [script for script in self._scripts if script.user == other]
                    if number >= len(known):
                        # A text that was guessed once is one's own the next time.
                        continue
                    seconds = []
                    for is_right in (True, False):
                        body = guess_of(known[number], is_right=is_right)
                        began = time.monotonic()
                        answer = await _tried(client.post("/v1/chat/completions", json=body))
                        if answer is not None and answer.status_code == 200:
                            seconds.append(time.monotonic() - began)
                            usage = answer.json()["usage"]
                            # One's own texts begin with the same few words.
                            if usage["prompt_tokens_details"]["cached_tokens"] > _OWN_TOKENS:
                                self._find(f"{user} finds a text of {other} in the cache: {usage}")
                    if len(seconds) == 2:
                        self.tally.guesses.append((seconds[0], seconds[1]))
                number += 1

    async def _disturb(self, cluster: ServeProcess) -> None:
        """Stop a replica or kill it, over and over, as long as another one answers."""
        number = 0
        async with httpx.AsyncClient(base_url=cluster.url, timeout=10.0, trust_env=False) as client:
            while time.monotonic() + _FAULT_SECONDS < self._until:
                await asyncio.sleep(_FAULT_SECONDS)
                answer = await _tried(client.get("/metrics", headers={"authorization": f"Bearer {OPERATOR}"}))
                ready = 0 if answer is None else len(_READY.findall(answer.text))
                pids = [pid for pid in _processes(_ENGINE) if not _is_stopped(pid)]
                if ready < 2 or not pids:
                    self.tally.num_spared += 1
                    continue
                pid = self._numbers.choice(pids)
                kind = ("stop", "kill", "pause")[number % 3]
                number += 1
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                self.tally.faults.append(kind)
                self._say(f"{self._until - time.monotonic():5.0f} s left: {kind} {pid}; {ready} were ready")
                if kind == "pause":
                    asyncio.get_running_loop().call_later(_STOPPED_SECONDS, _go_on, pid)

    def _find(self, finding: str) -> None:
        self.tally.findings.append(finding)
        self._say(f"FOUND: {finding}")

    def _report(self, seconds: float, spent: Mapping[str, float]) -> bool:
        """Say what was found; return whether it is as promised."""
        tally, say = self.tally, self._say
        gaps, text_gaps, firsts = sorted(tally.gaps), sorted(tally.text_gaps), sorted(tally.firsts)
        say(
            f"{len(tally.faults)} replicas were stopped, paused or killed in {seconds:.0f} s; {tally.num_spared} times "
            "fewer than two were ready"
        )
        say(f"{tally.replies} replies of {tally.events} events, {tally.events / seconds:.0f} a second")
        for what, found in (("silence of a stream", gaps), ("time without text in a stream", text_gaps)):
            say(f"longest {what} {found[-1]:.2f} s; of 99 % at most {found[len(found) * 99 // 100]:.2f} s")
        say(f"{tally.pings} comments in place of text")
        say(f"first bytes after {median(firsts):.2f} s, {firsts[len(firsts) * 99 // 100]:.2f} s, {firsts[-1]:.2f} s")
        for name, used in spent.items():
            say(f"{name}: {1e3 * used / max(1, tally.events):.3f} ms of processor time an event")
        self._check_limit(seconds)
        sooner = sum(right < wrong for right, wrong in tally.guesses)
        if tally.guesses:
            rights, wrongs = zip(*tally.guesses, strict=True)
            say(
                f"{len(tally.guesses)} guesses of the other's text: {sooner} sooner than an unknown text; medians "
                f"{1e3 * median(rights):.0f} and {1e3 * median(wrongs):.0f} ms; {tally.looks} answers searched"
            )
        if 1e3 * spent[_INGRESS] / max(1, tally.events) > MOST_EVENT_MS:
            self._find(f"the ingress takes more than {MOST_EVENT_MS} ms an event")
        say(f"{len(tally.findings)} findings")
        return not tally.findings

    def _check_limit(self, seconds: float) -> None:
        """Compare the requests of the limited token with a bucket that is full at first and refills all the time."""
        admitted = self.tally.admitted
        most = LIMIT + LIMIT * (admitted[-1] - admitted[0]) / 60 if admitted else 0.0
        self._say(f"limited token: {len(admitted)} let through of {LIMIT} a minute, {self.tally.refused} refused")
        # It asks again only so often, and what was let through may have taken a while to be answered.
        if not most - 2 <= len(admitted) <= most + 1:
            self._find(f"{len(admitted)} requests were let through where {most:.1f} are allowed")


def _client(cluster: ServeProcess, user: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer sk-{user}"}
    return httpx.AsyncClient(base_url=cluster.url, headers=headers, timeout=120.0, trust_env=False)


async def _tried(asking: Any) -> httpx.Response | None:
    try:
        answer: httpx.Response = await asking
    except httpx.HTTPError:
        return None
    return answer


def _processes(name: str) -> list[int]:
    found = psutil.process_iter(["pid", "cmdline"])
    return [one.info["pid"] for one in found if any(name in part for part in one.info["cmdline"] or ())]


def _busy_seconds() -> dict[str, float]:
    """Processor time of the ingresses, the proxy and the accounts."""
    found: dict[str, float] = {}
    for name in (_INGRESS, _PROXY, "ServeReplica:test:accounts"):
        times = [psutil.Process(pid).cpu_times() for pid in _processes(name)]
        if times:
            found[name] = sum(one.user + one.system for one in times)
    return found


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return True


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
