"""Routers of Serve that tell which replicas there are, one of which sends a request where the ingress says."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

REPLICA = "replica"
"""The argument of a request that names its replica."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that it names, and one that names none where the fewest requests are.

    The ingress chooses by what replicas have computed (`placement`); this knows who is there.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called by Serve once."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that is named, if it is there, or else all, one by one."""
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
        """Note who is there."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Note who is gone, before Serve has seen it."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        # Serve copies this class by value, with what is global here.
        from localinfer.apps.fleet.ingress_accounts import present_replicas

        names = {one.unique_id: one.to_full_id_str() for one in self.curr_replicas}
        present_replicas.note(self._deployment_id.name, names)
