"""Options of replicas: the model and settings that they serve, and which of them compute prompts for others."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localinfer.apps.server.transport.settings import (
    DEFAULT_DEADLINE_SECONDS,
    DEFAULT_THRESHOLD,
    KVTransferOptions,
    Quota,
    ServerSettings,
)
from localinfer.arguments import check_number
from localinfer.errors import RequestError
from localinfer.storage.response_store import ResponseStoreOptions

if TYPE_CHECKING:
    from localinfer.apps.server.operation.observation import Metrics
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.apps.server.router.models import ModelRegistry
    from localinfer.llm import LLM


_NOT_FOR_REPLICAS = ("progress", "cancel")


@dataclass(frozen=True)
class ReplicaOptions:
    """Model and settings of a replica."""

    model: str | None
    """See `app`."""
    name: str | None
    """See `app`."""
    settings: ServerSettings
    """Settings of the server."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """Options of `localinfer.load`."""
    hands_over: bool = False
    """True if prompts are transferred between replicas, so that the model has to keep them on disk."""


def without_limits(settings: ServerSettings) -> ServerSettings:
    """The settings of a replica behind an ingress, which holds the limits of tokens for all replicas together."""
    return replace(
        settings,
        requests_per_minute=None,
        tokens_per_minute=None,
        running_per_token=None,
        queued_per_token=None,
        tokens=tuple(replace(one, quota=Quota(min_priority=one.quota.min_priority)) for one in settings.tokens),
    )


def checked_load(options: Mapping[str, Any]) -> None:
    """Check options of `localinfer.load` where no model is at hand. Raises: RequestError, with the way out."""
    from localinfer.loading.load_options import LoadOptions, options_of
    from localinfer.loading.options import check_options, check_speculation

    known = [name for name in options_of(LoadOptions) if name not in ("model", *_NOT_FOR_REPLICAS)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"give {near[0]}" if near else f"localinfer.load takes {', '.join(known)}"
            raise RequestError(f"{name} is no option of app, nor of localinfer.load; {hint}", field=name)
    given = LoadOptions(**options)
    # Files are those of the nodes.
    check_speculation(given.speculation, has_draft=given.draft is not None)
    check_options(replace(given, speculation=None, draft=None, disk_cache_folder=None))
    try:
        pickle.dumps(dict(options))
    except Exception as error:
        raise RequestError(
            f"options of load cannot be sent to replicas ({type(error).__name__}); give values, and no open objects"
        ) from None


def model_registry(options: ReplicaOptions, metrics: "Metrics") -> "ModelRegistry":
    """The registry of a replica, whose model is loaded at once. Raises: RequestError for a path that is no model."""
    import localinfer
    from localinfer.apps.server.router.model_folder import measure_need, model_source
    from localinfer.apps.server.router.models import ModelRegistry
    from localinfer.loading.options import model_path
    from localinfer.storage.hub.installed import find_model

    path = model_path(None) if options.model is None else Path(find_model(options.model))
    source = model_source(path)
    if source is None:
        raise RequestError(f"{path} is not a model; give a GGUF file, the first part of a split one, or a model folder")
    source = source if options.name is None else replace(source, id=options.name)

    def load(one: "ModelSource") -> "LLM":
        llm = localinfer.load(one.path, **options.load)
        if options.hands_over and "completion" in llm.capabilities:
            # Hashes the weights now, not beside the first reply.
            llm.handover_fingerprint()
        return llm

    return ModelRegistry(
        [source],
        load,
        lambda one: measure_need(one.path, str(options.load.get("kv_type", "f16"))),
        metrics,
        strict=options.settings.strict_model,
        context_length=options.load.get("context_length"),
        preload=[source.id],
    )


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
        """Options of the replicas that generate text. Raises: RequestError for a model that cannot transfer prompts."""
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
                "settings.handover and prefill_replicas both name what computes prompts; leave one of them out"
            )
        handover = KVTransferOptions(
            threshold=DEFAULT_THRESHOLD if self.threshold is None else self.threshold,
            deadline_seconds=DEFAULT_DEADLINE_SECONDS if self.deadline is None else self.deadline,
        )
        settings = replace(options.settings, handover=handover)
        return replace(options, settings=settings, load=load, hands_over=True)

    def asked(self, asking: ReplicaOptions) -> ReplicaOptions:
        """Options of the replicas that compute prompts. asking: of those that generate, which check limits."""
        settings = ServerSettings(
            max_generations=asking.settings.max_generations,
            max_body_bytes=max(asking.settings.max_body_bytes, ServerSettings.max_body_bytes),
            kept_responses=ResponseStoreOptions(max_bytes=0),
            serves_page=False,
            handover=KVTransferOptions(role="prefill"),
        )
        return replace(asking, settings=settings)


def with_threads(options: ReplicaOptions, cpus: float) -> ReplicaOptions:
    """The options with as many threads as processors, one at least, unless `threads` was given."""
    load: dict[str, Any] = {"threads": max(1, int(cpus)), **options.load}
    return replace(options, load=load)
