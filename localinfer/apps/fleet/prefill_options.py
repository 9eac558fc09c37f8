"""Who computes long prompts in an application, and what the two kinds of replicas have alike."""

from dataclasses import dataclass, replace
from typing import Any

from localinfer.apps.fleet.replica_models import ReplicaOptions
from localinfer.apps.server.transport.settings import (
    DEFAULT_DEADLINE_SECONDS,
    DEFAULT_THRESHOLD,
    KVTransferOptions,
    ServerSettings,
)
from localinfer.arguments import check_number
from localinfer.errors import RequestError
from localinfer.storage.response_store import ResponseStoreOptions


@dataclass(frozen=True)
class PrefillOptions:
    """Options of `app`, without the word prefill; checked when they are made. None: as if it were not given.

    Raises: RequestError.
    """

    replicas: int = 0
    cpus: float | None = None
    threshold: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        check_number("prefill_replicas", self.replicas, 0)
        for name, value, least, kind in (
            ("prefill_cpus", self.cpus, 0, float),
            ("prefill_threshold", self.threshold, 1, int),
            ("prefill_deadline", self.deadline, 0.1, float),
        ):
            if value is not None and not self.replicas:
                raise RequestError(
                    f"{name} is of use with prefill_replicas only; give 1 of these or more, or leave it out"
                )
            check_number(name, value, least, kind=kind, none="for the default")

    def asking(self, options: ReplicaOptions) -> ReplicaOptions:
        """What the replicas serve that generate text. Raises: RequestError for a model that hands no prompts over."""
        if not self.replicas:
            return options
        load = {"disk_cache": True, **options.load}
        if not load["disk_cache"]:
            raise RequestError(
                "prefill_replicas hand prompts over in the folder of the prompt cache; leave out disk_cache=False"
            )
        if load.get("kv_window") is not None:
            raise RequestError(
                "kv_window keeps no whole prompt, so none can be handed over; leave out prefill_replicas"
            )
        if options.settings.handover != KVTransferOptions():
            raise RequestError(
                "settings.handover and prefill_replicas both say who computes prompts; leave one of them out"
            )
        handover = KVTransferOptions(
            threshold=DEFAULT_THRESHOLD if self.threshold is None else self.threshold,
            deadline_seconds=DEFAULT_DEADLINE_SECONDS if self.deadline is None else self.deadline,
        )
        settings = replace(options.settings, handover=handover)
        return replace(options, settings=settings, load=load, hands_over=True)

    def asked(self, asking: ReplicaOptions) -> ReplicaOptions:
        """What the replicas serve that compute prompts. asking: those who ask; they check clients and limits."""
        settings = ServerSettings(
            max_generations=asking.settings.max_generations,
            max_body_bytes=max(asking.settings.max_body_bytes, ServerSettings.max_body_bytes),
            kept_responses=ResponseStoreOptions(max_bytes=0),
            serves_page=False,
            handover=KVTransferOptions(role="prefill"),
        )
        return replace(asking, settings=settings)


def with_threads(options: ReplicaOptions, cpus: float) -> ReplicaOptions:
    """The model computes with so many threads, one at least, unless `threads` was given."""
    load: dict[str, Any] = {"threads": max(1, int(cpus)), **options.load}
    return replace(options, load=load)
