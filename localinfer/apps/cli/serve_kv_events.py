"""The options of `localinfer serve` for routers that listen to KV cache events."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from localinfer.apps.cli.options import COUNT, LoadOptions, flag, option, options_group_of
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.storage.kv_events.publisher import KVEventPublisher


@dataclass(frozen=True)
class KVEventsOptions:
    """What the options below were given."""

    kv_events: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    buffer_steps: int | None = None
    encoding: Literal["map", "array"] | None = None
    connects: bool = False
    allows_remote: bool = False

    @contextmanager
    def publishing(self) -> "Iterator[KVEventPublisher | None]":
        """What publishes the events of a server's model while the context lasts, None where none are asked for.

        Raises: RequestError, MissingPackageError.
        """
        further = {name: value for name, value in vars(self).items() if name != "kv_events" and value}
        if self.kv_events is None:
            if further:
                name = next(parameter.opts[0] for parameter in _parameters() if parameter.name in further)
                raise RequestError(f"{name} needs an address for the events; add --kv-events, or leave it out")
            yield None
            return
        from localinfer.storage.kv_events.config import config_of
        from localinfer.storage.kv_events.publisher import KVEventPublisher

        with KVEventPublisher(config_of(self.kv_events, **further)) as publisher:
            yield publisher

    def check_sources(self, sources: "list[ModelSource]") -> "list[ModelSource]":
        """The models of a server whose events can be told of. Raises: RequestError where there are several."""
        if self.kv_events is not None and len(sources) > 1:
            raise RequestError(
                f"KV events tell of one model, and there are {len(sources)} to serve; name one with -m, and run a "
                "server for each"
            )
        return sources


def _parameters() -> list[click.Parameter]:
    return click.get_current_context().command.params


def with_events(options: LoadOptions, publisher: "KVEventPublisher | None") -> LoadOptions:
    """Options of `localinfer.load` with what publishes events of the model."""
    return options if publisher is None else {**options, "kv_events": publisher}


kv_events_options = options_group_of(
    KVEventsOptions,
    "events",
    option(
        "--kv-events",
        "ADDRESS",
        "Publish KV cache events for routers, as vLLM does, at this address of ZMQ, such as tcp://127.0.0.1:5557. "
        "They hold the tokens of all texts, without a token to read them.",
    ),
    option(
        "--kv-events-replay-endpoint replay_endpoint",
        "ADDRESS",
        "Address where routers can have past batches of events sent again.",
    ),
    option("--kv-events-topic topic", "TEXT", "Topic of the events; llm-d reads kv@POD@MODEL."),
    option(
        "--kv-events-buffer-steps buffer_steps",
        "N",
        "Batches of events that are kept to be sent again. Default: 10,000.",
        type=COUNT,
    ),
    option(
        "--kv-events-encoding encoding",
        "KIND",
        "map: events as of vLLM 0.24 and later (default); array: as of those before.",
        type=click.Choice(["map", "array"]),
    ),
    flag("--kv-events-connect connects", "Connect --kv-events to a router that listens there, instead of listening."),
    flag("--kv-events-allow-remote allows_remote", "Listen for routers also where other machines can connect."),
)
