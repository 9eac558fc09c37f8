"""How soon the server stops working for a client that leaves, in the midst of its prompt or of its reply."""

import asyncio
import re
import statistics
import time
from typing import Any

from localinfer.bench.load import Prompts, chat_body
from localinfer.bench.load_client import CHAT_PATH, LoadClient, chat
from localinfer.bench.load_figures import Failure, Record
from localinfer.errors import BackendUnavailableError

LEAVINGS = 9
_ATTEMPTS = 4 * LEAVINGS
_RUNNING = re.compile(rb"^localinfer_running_generations (\S+)$", re.MULTILINE)
_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0
_LONG_PROMPT, _SHORT_REPLY = 1024, 64
_SHORT_PROMPT, _LONG_REPLY = 64, 1024
"""Tokens to leave in the midst of, where the context has room for them."""
_CHECKED_TOKENS = 16
_CHECKED_SHARE = 3
"""One in so many of what was left is asked for again: whole prompts take their time."""


class LeavingClients:
    """Clients that leave a server on which nothing else runs.

    room: tokens that a message and its reply may have. bodies: requests for some of what was left, to be asked again.
    """

    def __init__(self, port: int, prompts: Prompts, room: int) -> None:
        self._port = port
        self._prompts = prompts
        self._long_prompt = max(1, min(_LONG_PROMPT, room - _SHORT_REPLY))
        self._short_prompt = max(1, min(_SHORT_PROMPT, room // 2))
        self._long_reply = min(_LONG_REPLY, room - self._short_prompt)
        self.bodies: list[dict[str, Any]] = []

    async def in_prompt(self) -> Record:
        """Leave while the prompt is computed: seconds until no text is generated any more.

        Raises: BackendUnavailableError if the server goes on, or prompts are over before anybody can leave.
        """
        client = await LoadClient.connect(self._port)
        whole = await chat(client, chat_body(self._prompts.take(self._long_prompt), 1, None))
        client.close()
        if isinstance(whole, Failure):
            raise BackendUnavailableError(f"a prompt of {self._long_prompt} tokens failed: {whole.reason}")
        samples: list[float] = []
        share = 0.5
        for _ in range(_ATTEMPTS):
            body = chat_body(self._prompts.take(self._long_prompt), _SHORT_REPLY, None)
            client = await LoadClient.connect(self._port)
            client.send("POST", CHAT_PATH, body)
            try:
                # The first event says who speaks; the second would be the reply's first token.
                await asyncio.wait_for(client.receive_events(2), share * whole.time_to_first_token_seconds)
            except TimeoutError:
                self._remember(body, len(samples))
                samples.append(await self._leave(client))
                # In the midst, and not always at the same place of it.
                share = 0.25 + 0.5 * (len(samples) % LEAVINGS) / LEAVINGS
            else:
                # Other work of the machine made it late, or the prompt fast.
                share *= 0.5
                await self._leave(client)
            if len(samples) == LEAVINGS:
                return _record(samples)
        raise BackendUnavailableError(
            f"prompts of {self._long_prompt} tokens are over before a client can leave; measure a larger model"
        )

    async def in_reply(self) -> Record:
        """Leave after some tokens of the reply. Raises: BackendUnavailableError if the server goes on."""
        samples = []
        for repetition in range(LEAVINGS):
            body = chat_body(self._prompts.take(self._short_prompt), self._long_reply, repetition)
            client = await LoadClient.connect(self._port)
            client.send("POST", CHAT_PATH, body)
            await client.receive_events(3 + repetition)
            self._remember(body, repetition)
            samples.append(await self._leave(client))
        return _record(samples)

    def _remember(self, body: dict[str, Any], number: int) -> None:
        if number % _CHECKED_SHARE == 0:
            self.bodies.append({**body, "max_tokens": _CHECKED_TOKENS})

    async def _leave(self, client: LoadClient) -> float:
        """Close the connection; return the seconds until the server's gauge says that nothing is generated."""
        watcher = await LoadClient.connect(self._port)
        try:
            await watcher.request("GET", "/health")
            left = time.perf_counter()
            client.close()
            while True:
                answer = await watcher.request("GET", "/metrics")
                found = _RUNNING.search(answer.body)
                if found is not None and float(found[1]) == 0:
                    return answer.ended - left
                if answer.ended - left > _PATIENCE_SECONDS:
                    raise BackendUnavailableError(
                        f"the server still works {_PATIENCE_SECONDS:.0f} s after its client left; please report this"
                    )
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            watcher.close()


def _record(samples: list[float]) -> Record:
    return {"median": statistics.median(samples), "max": max(samples), "values": samples}
