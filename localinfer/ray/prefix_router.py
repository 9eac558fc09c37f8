"""A router of Serve that sends a prompt to the replica which has computed most of its beginning."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from localinfer.ray.prefix_table import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Serve's queues and limits, and the order of a `PrefixTable`. The ingress gives each request its prefixes."""

    def initialize_state(self, **options: Any) -> None:
        """Called by Serve once; options: of `PrefixTable`."""
        self._table = PrefixTable(**options)
        self._running: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, one by one, the best first: one that is full refuses."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        running = {replica_id: self._num_running(replica_id) for replica_id in replicas}
        return [[replicas[one]] for one in self._table.ranked(_prefixes(pending_request), running)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note what a replica is about to compute."""
        self._running[replica_id] += 1
        self._table.note(replica_id, _prefixes(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that it has one request less."""
        self._running[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget what replicas have computed that are gone."""
        super().update_replicas(replicas)
        present = [replica.replica_id for replica in replicas]
        self._table.keep_only(present)
        for replica_id in [one for one in self._running if one not in present]:
            del self._running[replica_id]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget what it has computed."""
        super().on_replica_actor_died(replica_id)
        self._table.forget(replica_id)

    def _num_running(self, replica_id: ReplicaID) -> int:
        # Serve's own figure counts what other ingresses sent, as far as it is known here.
        return max(self._running[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)


def _prefixes(request: PendingRequest | None) -> tuple[int, ...]:
    return () if request is None else tuple(request.kwargs.get("prefix", ()))
