"""How soon the server stops computing after a client disconnects during prefill or decoding."""

import asyncio
import re
import time
from contextlib import closing
from typing import Any

from localinfer.apps.bench.figures import Failure, Record, summarize
from localinfer.apps.bench.load import Prompts, chat_body
from localinfer.apps.bench.load_client import CHAT_PATH, LoadClient, chat
from localinfer.errors import BackendUnavailableError

DISCONNECTS = 9
_ATTEMPTS = 4 * DISCONNECTS
_RUNNING = re.compile(rb"^localinfer_running_generations (\S+)$", re.MULTILINE)
_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0
_LONG_PROMPT, _SHORT_REPLY = 1024, 64
_SHORT_PROMPT, _LONG_REPLY = 64, 1024
"""Tokens of an aborted prompt or reply, if the context has room."""
_CHECKED_TOKENS = 16
_CHECKED_SHARE = 3
"""One in so many aborted requests is repeated: whole prompts take long."""


class DisconnectingClients:
    """Clients that disconnect from an otherwise idle server.

    room: tokens of a message and its reply together. bodies: some of the aborted requests, to be repeated.
    """

    def __init__(self, port: int, prompts: Prompts, room: int) -> None:
        self._port = port
        self._prompts = prompts
        self._long_prompt = max(1, min(_LONG_PROMPT, room - _SHORT_REPLY))
        self._short_prompt = max(1, min(_SHORT_PROMPT, room // 2))
        self._long_reply = min(_LONG_REPLY, room - self._short_prompt)
        self.bodies: list[dict[str, Any]] = []

    async def in_prompt(self) -> Record:
        """Disconnect during prefill: seconds until nothing is generated any more.

        Raises: BackendUnavailableError if the server continues, or prompts are too short to disconnect in time.
        """
        with closing(LoadClient(self._port)) as client:
            whole = await chat(client, chat_body(self._prompts.take(self._long_prompt), 1, None))
        if isinstance(whole, Failure):
            raise BackendUnavailableError(f"a prompt of {self._long_prompt} tokens failed: {whole.reason}")
        samples: list[float] = []
        share = 0.5
        for _ in range(_ATTEMPTS):
            body = chat_body(self._prompts.take(self._long_prompt), _SHORT_REPLY, None)
            client = LoadClient(self._port)
            await client.send("POST", CHAT_PATH, body)
            try:
                # The first event holds the role, the second the reply's first token.
                await asyncio.wait_for(client.receive_events(2), share * whole.time_to_first_token_seconds)
            except TimeoutError:
                samples.append(await self._disconnect(client, body, len(samples)))
                # In the middle, at a different time in each repetition.
                share = 0.25 + 0.5 * (len(samples) % DISCONNECTS) / DISCONNECTS
            else:
                # The disconnect was late, or the prompt fast.
                share *= 0.5
                await self._seconds_to_idle(client)
            if len(samples) == DISCONNECTS:
                return _record(samples)
        raise BackendUnavailableError(
            f"prompts of {self._long_prompt} tokens are computed before a client can disconnect; measure a larger model"
        )

    async def in_reply(self) -> Record:
        """Disconnect after some tokens of the reply. Raises: BackendUnavailableError if the server continues."""
        samples = []
        for repetition in range(DISCONNECTS):
            body = chat_body(self._prompts.take(self._short_prompt), self._long_reply, repetition)
            client = LoadClient(self._port)
            await client.send("POST", CHAT_PATH, body)
            await client.receive_events(3 + repetition)
            samples.append(await self._disconnect(client, body, repetition))
        return _record(samples)

    async def _disconnect(self, client: LoadClient, body: dict[str, Any], number: int) -> float:
        if number % _CHECKED_SHARE == 0:
            self.bodies.append({**body, "max_tokens": _CHECKED_TOKENS})
        return await self._seconds_to_idle(client)

    async def _seconds_to_idle(self, client: LoadClient) -> float:
        """Close the connection; return the seconds until the server's gauge of running generations is 0."""
        with closing(LoadClient(self._port)) as watcher:
            await watcher.request("GET", "/health")
            began = time.perf_counter()
            client.close()
            while True:
                answer = await watcher.request("GET", "/metrics")
                found = _RUNNING.search(answer.body)
                if found is not None and float(found[1]) == 0:
                    return answer.ended - began
                if answer.ended - began > _PATIENCE_SECONDS:
                    raise BackendUnavailableError(
                        f"the server still computes {_PATIENCE_SECONDS:.0f} s after a disconnect; please report this"
                    )
                await asyncio.sleep(_POLL_SECONDS)


def _record(samples: list[float]) -> Record:
    return {**summarize(samples), "max": max(samples)}
