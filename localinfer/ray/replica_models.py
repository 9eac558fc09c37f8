"""What a replica serves, and the registry with its one model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localinfer.errors import RequestError
from localinfer.server.transport.settings import ServerSettings

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.server.operation.metrics import Metrics
    from localinfer.server.router.model_folder import ModelSource
    from localinfer.server.router.models import ModelRegistry


@dataclass(frozen=True)
class ReplicaOptions:
    """What a replica serves. model, name: as of `app`. settings: of the server. load: options of `localinfer.load`.

    hands_over: prompts go from one replica to another, so the model has to keep them on disk.
    """

    model: str | None
    name: str | None
    settings: ServerSettings
    load: Mapping[str, Any] = field(default_factory=dict)
    hands_over: bool = False


def model_registry(options: ReplicaOptions, metrics: "Metrics") -> "ModelRegistry":
    """The registry of a replica, whose model is loaded at once. Raises: RequestError for what is no model."""
    import localinfer
    from localinfer.hub.find import find_model
    from localinfer.loading.options import model_path
    from localinfer.server.router.memory_need import measure_need
    from localinfer.server.router.model_folder import model_source
    from localinfer.server.router.models import ModelRegistry

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
