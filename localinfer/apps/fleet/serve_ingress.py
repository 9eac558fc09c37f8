"""The ingress as Ray Serve runs it: replicas behind handles, Ray's errors that mean one is gone, and the router."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import ASGIApp, Receive, Scope, Send

from localinfer.apps.fleet.accounts import IngressAccounts, IngressOptions, call_apart, present_replicas
from localinfer.apps.fleet.ingress import Ingress
from localinfer.apps.fleet.relay import ReplicaLostError
from localinfer.apps.fleet.replica import AnswerPart, RelayedRequest
from localinfer.apps.fleet.replica_answers import Answers, answers_within
from localinfer.apps.server.replies.relay import Resumption

ENGINE = "engine"
"""The name of the deployment whose replicas hold the model."""
_GONE = (RayActorError, WorkerCrashedError)


class ServeIngress:
    """The deployment that Serve calls with each request. engine: a handle of the replicas.

    prefill: a handle of those that compute prompts for them, None for none. accounts: a handle of what several
    ingresses share, None for the only one, which has them itself.
    """

    def __init__(
        self,
        engine: DeploymentHandle,
        options: IngressOptions,
        prefill: DeploymentHandle | None = None,
        accounts: DeploymentHandle | None = None,
    ) -> None:
        told = IngressAccounts(options, accounts, present_replicas, ENGINE)
        self._ingress = Ingress(ServeReplicas(engine, prefill), options.settings, told)

    def __serve_build_asgi_app__(self) -> ASGIApp:  # noqa: PLW3201 - Serve's name
        # A function: uvicorn takes a method for an app of the former interface.
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await self._ingress(scope, receive, send)

        return serve


class ServeReplicas:
    """`Replicas` behind handles of Serve."""

    def __init__(self, engine: DeploymentHandle, prefill: DeploymentHandle | None) -> None:
        self._engine, self._prefill = engine, prefill

    async def answer(
        self, request: RelayedRequest, resumption: Resumption | None, replica: str
    ) -> AsyncGenerator[list[AnswerPart]]:
        """See `Replicas`."""
        answer = self._engine.options(stream=True).answer
        response: Any = call_apart(answer.remote, request, resumption, replica=replica)
        has_ended = False
        try:
            async for parts in response:
                yield parts
            has_ended = True
        except _GONE as error:
            has_ended = True
            raise ReplicaLostError(str(error)) from error
        finally:
            if not has_ended:
                response.cancel()

    async def of_all(
        self, method: str, request: RelayedRequest, seconds: float, is_enough: Callable[[Any], bool]
    ) -> Answers[Any]:
        """See `Replicas`."""
        return await _of_all(self._engine, method, request, seconds, is_enough)

    async def prefill_metrics(self, request: RelayedRequest, seconds: float) -> Answers[Any]:
        """See `Replicas`."""
        return Answers() if self._prefill is None else await _of_all(self._prefill, "metrics", request, seconds)

    async def ask(self, replica: str) -> None:
        """See `Replicas`."""
        if replica not in present_replicas.of(ENGINE):
            raise ReplicaLostError("Serve names it no longer")
        await call_apart(self._engine.is_alive.remote, replica=replica)

    async def end(self, replica: str) -> None:
        """See `Replicas`."""
        actor = present_replicas.of(ENGINE).get(replica)
        if actor is not None:
            await asyncio.to_thread(lambda: ray.kill(ray.get_actor(actor, namespace="serve")))


async def _of_all(
    replicas: DeploymentHandle,
    method: str,
    request: RelayedRequest,
    seconds: float,
    is_enough: Callable[[Any], bool] = lambda answer: False,
) -> Answers[Any]:
    """The results that present replicas return in time; see `answers_within`."""
    called = replicas.broadcast(method, request)
    began = time.monotonic()
    try:
        # Serve's own `results_async` returns nothing of the others where one says nothing.
        results = await asyncio.wait_for(called._fetch_replica_results_async(), seconds)
    except (DeploymentUnavailableError, TimeoutError):
        return Answers()
    left = max(0.0, began + seconds - time.monotonic())
    return await answers_within((result.get_async() for result in results), left, is_enough)


REPLICA = "replica"
"""The argument of a request that names its replica."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that it names, and one that names none where the fewest requests are.

    The ingress chooses by the prompts that replicas computed (`placement`); this reports which replicas exist.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called by Serve once."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named replica, if it exists, or else all in order of load."""
        named = "" if pending_request is None else pending_request.kwargs.get(REPLICA, "")
        found = [replica for replica in candidate_replicas if named and replica.replica_id.unique_id == named]
        if found:
            return [found]
        lengths = self.replica_queue_len_cache
        return [
            [replica]
            for replica in sorted(candidate_replicas, key=lambda replica: lengths.get(replica.replica_id) or 0)
        ]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note the replicas that exist."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Note a replica that is gone, before Serve has seen it."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        # Serve copies this class by value, with its module's globals: the import finds the process's own.
        from localinfer.apps.fleet.accounts import present_replicas

        names = {one.unique_id: one.to_full_id_str() for one in self.curr_replicas}
        present_replicas.note(self._deployment_id.name, names)
