"""What a replica serves, and the registry with its one model."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localinfer.apps.server.transport.settings import Quota, ServerSettings
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.apps.server.operation.metrics import Metrics
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.apps.server.router.models import ModelRegistry
    from localinfer.llm import LLM

_NOT_FOR_REPLICAS = ("progress", "cancel")


@dataclass(frozen=True)
class ReplicaOptions:
    """Model and settings of a replica."""

    model: str | None
    """As of `app`."""
    name: str | None
    """As of `app`."""
    settings: ServerSettings
    """Settings of the server."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """Options of `localinfer.load`."""
    hands_over: bool = False
    """Whether prompts go from one replica to another, so that the model has to keep them on disk."""


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
    """The registry of a replica, whose model is loaded at once. Raises: RequestError for what is no model."""
    import localinfer
    from localinfer.apps.server.router.model_folder import measure_need, model_source
    from localinfer.apps.server.router.models import ModelRegistry
    from localinfer.loading.options import model_path
    from localinfer.storage.hub.find import find_model

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
