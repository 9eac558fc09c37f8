"""A replica: the server's app over one loaded model, without sockets, in a process of its own."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from localinfer.apps.fleet.answer_parts import AnswerPart, RelayedRequest, answer_parts
from localinfer.apps.fleet.prefill_deployment import PrefillDeployment
from localinfer.apps.fleet.replica_models import ReplicaOptions, model_registry
from localinfer.apps.server.replies.reply import Resumption


class EngineReplica:
    """Loads a model when it is made, and answers requests as `localinfer serve` does. Lives on one event loop.

    prefill: a handle of the deployment that computes long prompts, None where this replica does. num_prefill: of its
    replicas; so many may fail before a prompt is computed here.
    Raises: LocalinferError for a model that cannot be loaded, which ends the deployment.
    """

    # Serve awaits it: a model is loaded on the loop that answers.
    async def __init__(  # type: ignore[misc]
        self, options: ReplicaOptions, prefill: Any = None, num_prefill: int = 0
    ) -> None:
        from localinfer.apps.server.app import make_app
        from localinfer.apps.server.replies.service import Service

        loop = asyncio.get_running_loop()
        self._service = Service(
            options.settings,
            lambda metrics: model_registry(options, metrics),
            preloads=True,
            prefill_servers=[PrefillDeployment(prefill, loop) for _ in range(num_prefill)],
        )
        self._app = make_app(self._service)
        self._closing = AsyncExitStack()
        await self._closing.enter_async_context(self._app.router.lifespan_context(self._app))
        await self._service.get_ready()

    async def __del__(self) -> None:
        # Serve awaits it when the replica's last request has ended.
        await self._closing.aclose()

    async def answer(
        self, request: RelayedRequest, resumption: Resumption | None = None, replica: str = ""
    ) -> AsyncGenerator[list[AnswerPart]]:
        """Answer a request, or go on with a reply to it. replica: the name of this one, for the router."""
        async with aclosing(answer_parts(self._app, request, resumption)) as answering:
            async for parts in answering:
                yield parts

    async def prefill(self, request: RelayedRequest) -> AsyncGenerator[list[AnswerPart]]:
        """Compute a prompt for another replica. That it was taken on is said at once, by no parts."""
        yield []
        async with aclosing(answer_parts(self._app, request, None)) as answering:
            async for parts in answering:
                yield parts

    async def whole_answer(self, request: RelayedRequest) -> list[AnswerPart]:
        """The same at once, for what all replicas are asked."""
        return [part async for parts in answer_parts(self._app, request, None) for part in parts]

    async def metrics(self, request: RelayedRequest) -> tuple[str, list[AnswerPart]]:
        """The name of this replica, and its answer to a request for its metrics."""
        from ray import serve

        return serve.get_replica_context().replica_tag, await self.whole_answer(request)

    async def check_health(self) -> None:
        """Serve's question whether this replica can answer: it can, as it does."""

    async def is_alive(self, replica: str = "") -> bool:
        """The ingress's question. replica: as of `answer`."""
        return True

    async def running(self) -> tuple[int, list[str]]:
        """The number of this process, and the ids of the replies that it generates now."""
        return os.getpid(), [reply.id for reply in self._service.replies()]
