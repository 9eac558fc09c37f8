"""What the person who runs a server wants to see of it, and may change while it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localinfer.apps.server.operation.request_log import RequestLog
from localinfer.apps.server.operation.request_record import Observer
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings


@dataclass(frozen=True)
class Configuration:
    """What may change while a server runs. sources: the models, None to leave them as they are."""

    settings: ServerSettings
    sources: Sequence[ModelSource] | None = None


@dataclass(frozen=True)
class Observability:
    """How a server is watched, and how its configuration is read again.

    observers: told of every request at its end. request_log: gets all of them whole. read_configuration: is given the
    present settings, in a thread, and may raise; None: nothing can be read again.
    """

    observers: tuple[Observer, ...] = ()
    request_log: RequestLog | None = None
    read_configuration: Callable[[ServerSettings], Configuration] | None = None


NO_OBSERVABILITY = Observability()
