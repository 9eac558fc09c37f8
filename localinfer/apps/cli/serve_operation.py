"""The options of `localinfer serve` for who runs it: logs, traces, limits, and what SIGHUP reads again."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.options import COUNT, byte_size, option, options_group_of
from localinfer.arguments import MAX_PRIORITY
from localinfer.errors import RequestError
from localinfer.storage.config import SERVE_SETTINGS, read_config
from localinfer.system.folders import expand_home

if TYPE_CHECKING:
    from pathlib import Path

    from localinfer.apps.server.operation.requests import Observer
    from localinfer.apps.server.replies.service import Observability
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.apps.server.transport.settings import AccessToken, ServerSettings

_LEAST_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class OperationOptions:
    """What the options below were given."""

    log_format: str = "text"
    log_requests: str | None = None
    log_requests_size: int | None = None
    otlp_endpoint: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    running_per_token: int | None = None
    queued_per_token: int | None = None
    min_priority: int | None = None
    ttft_objective: float | None = None

    @property
    def as_json(self) -> bool:
        """Whether the log is lines of JSON."""
        return self.log_format == "json"

    def limits(self) -> dict[str, Any]:
        """Members of the server's settings: what clients may ask for."""
        return {name: getattr(self, name) for name in _LIMITS}

    def say(self, line: str) -> None:
        """Tell the user something on standard error, in the form of the log."""
        if self.as_json:
            logging.getLogger("localinfer.server").info(line)
        else:
            click.echo(line, err=True)


_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "running_per_token",
    "queued_per_token",
    "min_priority",
    "ttft_objective",
)

operation_options = options_group_of(
    OperationOptions,
    "operation",
    option("--requests-per-minute", "N", "Most requests of each token per minute.", type=COUNT),
    option("--tokens-per-minute", "N", "Most tokens read and generated for each token per minute.", type=COUNT),
    option("--running-per-token", "N", "Most texts of each token that share a step; more wait.", type=COUNT),
    option(
        "--queued-per-token",
        "N",
        "Most texts of each token that wait; more are refused.",
        type=click.IntRange(min=0),
    ),
    option(
        "--min-priority",
        "N",
        "Most urgent priority that requests may ask for; lower is more urgent. Default with --token-file: 0.",
        type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY),
    ),
    option(
        "--ttft-objective",
        "SECONDS",
        "Refuse requests whose first token is predicted for later than this.",
        type=click.FloatRange(min=0),
    ),
    option(
        "--log-format",
        "FORMAT",
        "Log on stderr: text, or json: an object per line, one for each request.",
        type=click.Choice(["text", "json"]),
        default="text",
    ),
    option("--log-requests", "FILE", "For debugging: write requests and replies, with their texts, to a file."),
    option("--log-requests-size", "SIZE", "Maximum size of that file, and of its predecessor.", callback=byte_size),
    option(
        "--otlp-endpoint",
        "URL",
        "Export OpenTelemetry traces, without texts, to this URL (OTLP over HTTP).",
    ),
)


@contextmanager
def operating(
    options: OperationOptions, read_again: "Callable[[ServerSettings], tuple[ServerSettings, list[ModelSource]]]"
) -> "Iterator[Observability]":
    """What watches a server, until the context is left. read_again: reads the configuration for SIGHUP.

    Raises: RequestError, MissingPackageError.
    """
    from localinfer.apps.server.operation.requests import DEFAULT_BYTES, RequestLog
    from localinfer.apps.server.operation.tracing import RequestTracer, wants_traces
    from localinfer.apps.server.replies.service import Configuration, Observability

    with ExitStack() as stack:
        log = None
        if options.log_requests is not None:
            size = options.log_requests_size or DEFAULT_BYTES
            if size < _LEAST_LOG_BYTES:
                raise RequestError(f"--log-requests-size is {size:,} bytes; give 1MiB or more")
            log = stack.enter_context(RequestLog(expand_home(options.log_requests), size))
        elif options.log_requests_size is not None:
            raise RequestError("--log-requests-size bounds the file of --log-requests; name that file too")
        observers: tuple[Observer, ...] = ()
        if wants_traces(options.otlp_endpoint):
            observers = (stack.enter_context(RequestTracer(options.otlp_endpoint)).observe,)
        yield Observability(observers, log, lambda settings: Configuration(*read_again(settings)))


def read_tokens(path: "Path") -> "tuple[AccessToken, ...]":
    """The tokens of a file, a line each. Raises: RequestError naming the file."""
    from localinfer.apps.server.transport.settings import parse_tokens

    try:
        return parse_tokens(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise RequestError(
            f"the token file {path} is not in UTF-8; save it so, or give another with --token-file"
        ) from None
    except (OSError, RequestError) as error:
        raise RequestError(f"the token file {path} cannot be read: {error}; give another with --token-file") from None


class SettingsReader:
    """Reads again what settings of a server came from files: its tokens, and the table `[serve]` of the configuration.

    Made while the command runs: options of its line are not read again, and stay.
    """

    def __init__(self, token_file: "Path | None") -> None:
        self._token_file = token_file
        context = click.get_current_context()
        sources = {name: context.get_parameter_source(name) for name in SERVE_SETTINGS}
        reads_config = context.default_map is not None
        given = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
        self._names = [name for name, source in sources.items() if reads_config and source in given]

    def read(self, settings: "ServerSettings") -> "ServerSettings":
        """The settings as the files have them now. Raises: RequestError; then nothing is to change."""
        changed: dict[str, Any] = {}
        if self._token_file is not None:
            changed["tokens"] = read_tokens(self._token_file)
        if self._names:
            found = read_config().serve
            for name in self._names:
                member, default = SERVE_SETTINGS[name]
                changed[member] = found.get(name, default)
        return replace(settings, **changed)
