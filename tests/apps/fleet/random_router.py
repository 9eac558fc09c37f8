"""A router that knows nothing, as prefix-aware routing is compared with it."""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RandomRouter(RequestRouter):
    """Any replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, in any order."""
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]
