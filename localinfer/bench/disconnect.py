"""How soon the server stops working for a client that disconnects while its prompt or its reply is computed."""

import asyncio
import re
import time
from contextlib import closing
from typing import Any

from localinfer.bench.figures import Failure, Record, summarize
from localinfer.bench.load import Prompts, chat_body
from localinfer.bench.load_client import CHAT_PATH, LoadClient, chat
from localinfer.errors import BackendUnavailableError

DISCONNECTS = 9
_ATTEMPTS = 4 * DISCONNECTS
_RUNNING = re.compile(rb"^localinfer_running_generations (\S+)$", re.MULTILINE)
_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0
_LONG_PROMPT, _SHORT_REPLY = 1024, 64
_SHORT_PROMPT, _LONG_REPLY = 64, 1024
"""Tokens of a prompt or a reply that is aborted, where the context has room for them."""
_CHECKED_TOKENS = 16
_CHECKED_SHARE = 3
"""One in so many of the aborted requests is sent again: whole prompts take their time."""


class DisconnectingClients:
    """Clients that disconnect from a server on which nothing else runs.

    room: tokens that a message and its reply may have. bodies: some of the aborted requests, to be sent again.
    """

    def __init__(self, port: int, prompts: Prompts, room: int) -> None:
        self._port = port
        self._prompts = prompts
        self._long_prompt = max(1, min(_LONG_PROMPT, room - _SHORT_REPLY))
        self._short_prompt = max(1, min(_SHORT_PROMPT, room // 2))
        self._long_reply = min(_LONG_REPLY, room - self._short_prompt)
        self.bodies: list[dict[str, Any]] = []

    async def in_prompt(self) -> Record:
        """Disconnect while the prompt is computed: seconds until no text is generated any more.

        Raises: BackendUnavailableError if the server goes on, or prompts are too short to disconnect in.
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
                # The first event names the role; the second would be the reply's first token.
                await asyncio.wait_for(client.receive_events(2), share * whole.time_to_first_token_seconds)
            except TimeoutError:
                samples.append(await self._disconnect(client, body, len(samples)))
                # In the middle, and at a different place each time.
                share = 0.25 + 0.5 * (len(samples) % DISCONNECTS) / DISCONNECTS
            else:
                # Other work of the machine made it late, or the prompt fast.
                share *= 0.5
                await self._seconds_to_idle(client)
            if len(samples) == DISCONNECTS:
                return _record(samples)
        raise BackendUnavailableError(
            f"prompts of {self._long_prompt} tokens are over before a client can disconnect; measure a larger model"
        )

    async def in_reply(self) -> Record:
        """Disconnect after some tokens of the reply. Raises: BackendUnavailableError if the server goes on."""
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
                        f"the server still works {_PATIENCE_SECONDS:.0f} s after its client left; please report this"
                    )
                await asyncio.sleep(_POLL_SECONDS)


def _record(samples: list[float]) -> Record:
    return {**summarize(samples), "max": max(samples)}
