"""Options of `localinfer serve`, in the groups of its help, and the settings that they become."""

import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from localinfer.apps.cli.help import Command, Decorator
from localinfer.apps.cli.options import (
    COUNT,
    SAMPLING_NAMES,
    LoadOptions,
    byte_size,
    flag,
    option,
    options_group,
    options_group_of,
    sampling_options,
)
from localinfer.apps.config import read_config
from localinfer.apps.server_options import Group, ServerOption, server_options
from localinfer.errors import RequestError
from localinfer.system.folders import expand_home
from localinfer.terminal import check_text

if TYPE_CHECKING:
    from localinfer.apps.server.operation.observation import Observer
    from localinfer.apps.server.replies.service import Observability
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.apps.server.transport.settings import AccessToken, KVTransferOptions, Role, ServerSettings
    from localinfer.llm import LLM
    from localinfer.storage.kv_events import KVEventPublisher
    from localinfer.storage.response_store import ResponseStoreOptions


_LEAST_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class OperationOptions:
    """Values of the options below."""

    log_format: str = "text"
    log_requests: str | None = None
    log_requests_size: int | None = None
    otlp_endpoint: str | None = None

    @property
    def as_json(self) -> bool:
        """True if the log is lines of JSON."""
        return self.log_format == "json"

    def say(self, line: str) -> None:
        """Tell the user something on standard error, in the form of the log."""
        if self.as_json:
            logging.getLogger("localinfer.server").info(line)
        else:
            click.echo(line, err=True)


_FLAG_KINDS: dict[type, Callable[[ServerOption], dict[str, Any]]] = {
    bool: lambda option: {"is_flag": True},
    tuple: lambda option: {"multiple": True},
    str: lambda option: {"type": click.Choice(option.choices)},
    int: lambda option: {"type": click.IntRange(option.least, option.most)},
    float: lambda option: {"type": click.FloatRange(option.least, option.most)},
}


def server_option(member: str) -> Decorator:
    """The flag of a field of `ServerOptions`, whose value a command is given under the field's name."""
    declared = next(one for one in server_options() if one.member == member)
    more = _FLAG_KINDS[declared.kind](declared)
    if declared.kind in (int, float) and declared.default is not None:
        more["default"] = int(declared.default)
    add_flag = option(declared.flag, declared.metavar, declared.help, **more)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(**values: Any) -> Any:
            value = values.pop(declared.key)
            # A switch of what is on by default turns it off.
            return command(**values, **{member: not value if declared.default is True else value})

        return add_flag(call)

    return decorate


def _server_options(group: Group) -> list[Decorator]:
    """The flags of a part of help."""
    return [server_option(one.member) for one in server_options() if one.group == group]


operation_options = options_group_of(
    OperationOptions,
    "operation",
    *_server_options("limits"),
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
    """Open the observers of a server, until the context is left. read_again: reads the configuration for SIGHUP.

    Raises: RequestError, MissingPackageError.
    """
    from localinfer.apps.server.operation.logs import DEFAULT_BYTES, RequestLog, RequestTracer, wants_traces
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
        sources = {one: context.get_parameter_source(one.key) for one in server_options() if one.in_config}
        reads_config = context.default_map is not None
        given = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
        self._options = [one for one, source in sources.items() if reads_config and source in given]

    def read(self, settings: "ServerSettings") -> "ServerSettings":
        """The settings as the files have them now. Raises: RequestError; then nothing is to change."""
        changed: dict[str, Any] = {}
        if self._token_file is not None:
            changed["tokens"] = read_tokens(self._token_file)
        if self._options:
            found = read_config().serve
            changed |= {one.member: found.get(one.key, one.default) for one in self._options}
        return replace(settings, **changed)


@dataclass(frozen=True)
class SocketPlace:
    """Path of the Unix socket, None for none. is_named: by the user. own_files: to be removed in the end."""

    path: Path | None
    is_named: bool = False
    own_files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ListeningOptions:
    """Values of the options below."""

    host: str
    no_tcp: bool
    socket_path: str | None
    no_socket: bool
    token_file: str | None
    token_env: str | None

    def socket_place(self, *, needs_own: bool) -> SocketPlace:
        """needs_own: not where another server of this user may listen. Raises: RequestError."""
        from localinfer.apps.server.transport.sockets import default_socket_path

        if self.no_socket and self.socket_path is not None:
            raise RequestError("--no-socket and --socket were given; leave one of them out")
        if self.socket_path is not None:
            return SocketPlace(expand_home(self.socket_path).absolute(), is_named=True)
        if self.no_socket:
            return SocketPlace(None)
        if not needs_own:
            return SocketPlace(default_socket_path())
        path = _own_socket()
        return SocketPlace(path, own_files=() if path is None else (path, path.with_name(f"{path.name}.lock")))

    def settings(self, place: SocketPlace, api_key: str | None, **more: Any) -> "ServerSettings":
        """The server's settings. more: further members of them. Raises: RequestError."""
        from localinfer.apps.server.transport.settings import ServerSettings

        if api_key is not None and (self.token_file is not None or self.token_env is not None):
            raise RequestError("--api-key is the token, and another option says where it is; leave one of them out")
        for name, values in (("--allow-host", more["allowed_hosts"]), ("--allow-origin", more["allowed_origins"])):
            for value in values:
                check_text(value, name)
        token = _token(self.token_env, is_in_file=self.token_file is not None) if api_key is None else api_key
        return ServerSettings(
            host=None if self.no_tcp else self.host,
            socket_path=place.path,
            needs_socket=place.is_named,
            token=token,
            tokens=() if self.token_file is None else read_tokens(expand_home(self.token_file)),
            **more,
        )


def _own_socket() -> Path | None:
    """A path for the socket of one process, as every sidecar needs one; None where none can be made."""
    from localinfer.apps.server.transport.sockets import default_socket_path
    from localinfer.system.folders import make_private

    default = default_socket_path()
    if default is None:
        return None
    path = default.with_name(f"{secrets.token_hex(6)}.sock")
    problem = make_private(path.parent)
    if problem is None and not os.access(path.parent, os.W_OK):
        problem = f"{path.parent} cannot be written"
    if problem is not None:
        click.echo(f"warning: no Unix socket: {problem}; give a place with --socket", err=True)
        return None
    return path


def _token(variable: str | None, *, is_in_file: bool) -> str | None:
    if variable is None:
        return None
    if is_in_file:
        raise RequestError("the token is either in a file or in a variable; leave out --token-file or --token-env")
    # Processes that are started from here need not have it.
    token = os.environ.pop(variable, "").strip()
    if not token:
        raise RequestError(
            f"there is no token in the environment variable {variable:.80}, which --token-env names; put it there"
        )
    return token


listening_options = options_group_of(
    ListeningOptions,
    "listening",
    option("--host", "ADDRESS", "TCP address to listen on.", default="127.0.0.1"),
    server_option("port"),
    flag("--no-tcp", "Listen on the Unix socket only."),
    option("--socket socket_path", "PATH", "Path of the Unix socket. Default: in your runtime folder, if it is free."),
    flag("--no-socket", "Listen on TCP only."),
    option(
        "--token-file",
        "FILE",
        "File with the bearer tokens accepted over TCP, one per line: TOKEN, or NAME: TOKEN LIMIT=NUMBER ...",
    ),
    option("--token-env", "NAME", "Environment variable with that token."),
    *_server_options("clients"),
    server_option("serves_page"),
)


@dataclass(frozen=True)
class RoleOptions:
    """Values of the options below."""

    role: "Role" = "both"
    prefill_server: tuple[str, ...] = ()
    prefill_threshold: int | None = None
    prefill_deadline: float | None = None
    prefill_token_file: str | None = None

    def handover(self, load: Mapping[str, Any]) -> "KVTransferOptions":
        """The server's role. load: options with which its models are loaded. Raises: RequestError."""
        from localinfer.apps.server.transport.settings import KVTransferOptions, PrefillAddress

        if self.role != "both" and not load.get("disk_cache", True):
            raise RequestError(
                f"--role {self.role} hands prompts over in the folder of the prompt cache; leave out --no-disk-cache"
            )
        if self.role != "both" and load.get("kv_window") is not None:
            raise RequestError(
                f"--kv-window keeps no whole prompt, so none can be handed over; leave it out, or --role {self.role}"
            )
        for name, value in (
            ("--prefill-threshold", self.prefill_threshold),
            ("--prefill-deadline", self.prefill_deadline),
            ("--prefill-token-file", self.prefill_token_file),
        ):
            if value is not None and self.role != "decode":
                raise RequestError(f"{name} is of use to a server of --role decode only; leave it out")
        given: dict[str, Any] = {"threshold": self.prefill_threshold, "deadline_seconds": self.prefill_deadline}
        if self.prefill_token_file is not None:
            given["token"] = read_tokens(expand_home(self.prefill_token_file))[0].value
        return KVTransferOptions(
            role=self.role,
            servers=tuple(PrefillAddress(name) for name in self.prefill_server),
            **{name: value for name, value in given.items() if value is not None},
        )

    def prepared(self, llm: "LLM") -> "LLM":
        """A loaded model whose prompts can be handed over: its weights are hashed now, not beside the first streams.

        Raises: RequestError if it keeps none on disk.
        """
        if self.role != "both" and "completion" in llm.capabilities:
            llm.handover_fingerprint()
        return llm

    def described(self, handover: "KVTransferOptions") -> str | None:
        """Line about the role for the user, None where there is nothing to tell."""
        if self.role == "prefill":
            return "this server computes prompts for decode servers, and generates no text"
        if self.role == "decode":
            names = ", ".join(server.name for server in handover.servers)
            return f"prompts of {handover.threshold} tokens and more are computed by {names}"
        return None


role_options = options_group_of(
    RoleOptions,
    "roles",
    option(
        "--role",
        None,
        "prefill: compute prompts for other servers; decode: have long prompts computed by them.",
        type=click.Choice(["prefill", "decode", "both"]),
        default="both",
    ),
    option(
        "--prefill-server",
        "URL",
        "With --role decode: http://HOST:PORT or unix:PATH of a server of --role prefill; may be repeated. All share "
        "--disk-cache-folder.",
        multiple=True,
    ),
    option(
        "--prefill-threshold",
        "N",
        "Compute prompts of fewer tokens that are not cached here. Default: 256.",
        type=COUNT,
    ),
    option(
        "--prefill-deadline",
        "SECONDS",
        "Compute a prompt here that is not there after so long. Default: 120.",
        type=click.FloatRange(min=0, min_open=True),
    ),
    option("--prefill-token-file", "FILE", "File with the token that the prefill servers want, on its first line."),
)


_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class KeptResponses:
    """Responses that the server keeps. max_bytes: 0 for nothing, None for the default. days: None for the default."""

    max_bytes: int | None
    days: float | None

    def options(self, load: LoadOptions) -> "ResponseStoreOptions":
        """The options of the store; load: where the prompt cache is, beside which they are kept.

        Without a prompt cache on disk they are kept in memory: no prompts on the disk means no responses either.
        """
        from localinfer.storage.response_store import ResponseStoreOptions, responses_folder

        folder = responses_folder(load["disk_cache_folder"]) if load["disk_cache"] else None
        made: dict[str, Any] = {} if self.max_bytes is None else {"max_bytes": self.max_bytes}
        if self.days is not None:
            made["expiry_seconds"] = self.days * _DAY_SECONDS
        return ResponseStoreOptions(folder, **made)


def _size_or_nothing(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return 0 if value is not None and value.strip() == "0" else byte_size(context, parameter, value)


def _gather_responses(command: Command) -> Command:
    """Pass the options below as one record."""

    @functools.wraps(command)
    def call(*, no_store: bool, store_size: int | None, store_days: float | None, **values: Any) -> Any:
        return command(kept_responses=KeptResponses(0 if no_store else store_size, store_days), **values)

    return call


responses_options = options_group(
    flag("--no-store", "Keep no responses and conversations (previous_response_id, /v1/conversations)."),
    option(
        "--store-size",
        "SIZE",
        "Maximum size of those that are kept; 0: none. Default: 256MiB.",
        callback=_size_or_nothing,
    ),
    option(
        "--store-days",
        "N",
        "Delete those that were not used for so many days; 0: never. Default: 30.",
        type=click.FloatRange(min=0, max=36500),
    ),
    _gather_responses,
)


@dataclass(frozen=True)
class KVEventsOptions:
    """Values of the options below."""

    kv_events: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    buffer_steps: int | None = None
    encoding: Literal["map", "array"] | None = None
    connects: bool = False
    allows_remote: bool = False

    @contextmanager
    def publishing(self) -> "Iterator[KVEventPublisher | None]":
        """Open the publisher of a model's events while the context lasts, None where none are asked for.

        Raises: RequestError, MissingPackageError.
        """
        further = {name: value for name, value in vars(self).items() if name != "kv_events" and value}
        if self.kv_events is None:
            if further:
                name = next(parameter.opts[0] for parameter in _parameters() if parameter.name in further)
                raise RequestError(f"{name} needs an address for the events; add --kv-events, or leave it out")
            yield None
            return
        from localinfer.storage.kv_events import KVEventPublisher, config_of

        with KVEventPublisher(config_of(self.kv_events, **further)) as publisher:
            yield publisher

    def check_sources(self, sources: "list[ModelSource]") -> "list[ModelSource]":
        """The models of a server whose events can be published. Raises: RequestError where there are several."""
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


@dataclass(frozen=True)
class AgentOptions:
    """Values of the options below."""

    move_volatile_head: bool = False

    def prepared(self, llm: "LLM") -> "LLM":
        """A loaded model that follows them."""
        if self.move_volatile_head and "chat" in llm.capabilities:
            llm.move_volatile_heads()
        return llm


agent_options = options_group_of(
    AgentOptions,
    "agents",
    flag(
        "--move-volatile-head",
        "Give models lines of system messages that vary, such as the date, behind the rest, which stays cached. "
        "Replies differ.",
    ),
    server_option("compacts_chats"),
)


_REASONING = {"on": True, "off": False, "auto": None}


@dataclass(frozen=True, kw_only=True)
class ServerDefaults:
    """Options of generations that requests do not name, and the names of the server's model."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of generation, by name."""
    thinking: bool | None = None
    """True if models that can reason do so, None as their template says."""
    thinking_budget: int | None = None
    """Most tokens of reasoning, None for no limit."""
    aliases: tuple[str, ...] = ()
    """Names of the model of -m, the first of which is its id."""
    api_key: str | None = field(default=None, repr=False)
    """Token that clients must show; None for none, or for another option's."""

    def apply(self, llm: "LLM", own: Mapping[str, Any]) -> None:
        """Let a model that was just loaded follow them, over what its file recommends and under what is its own.

        Closes it where it cannot. own: options that are set for this model alone. Raises: RequestError.
        """
        thinking: dict[str, Any] = {"thinking": self.thinking, "thinking_budget": self.thinking_budget}
        try:
            if not llm.can_think:
                thinking = {}
            llm.set_defaults(**{**llm.defaults, **self.options, **thinking, **own})
        except BaseException:
            llm.close()
            raise

    def named(self, sources: "Sequence[ModelSource]", preload: Sequence[str]) -> "tuple[list[ModelSource], list[str]]":
        """The models to serve, and the ids of those to load at once, where the one of -m has its aliases.

        preload: begins with the id of that model, which is the first, if there is one. Raises: RequestError.
        """
        if not self.aliases:
            return list(sources), list(preload)
        if not preload or sources[0].id != preload[0]:
            raise RequestError("--alias names the model of -m, and there is none; give one, or --models-config")
        first, *others = sources
        taken = {name for other in others for name in (other.id, *other.aliases)}
        twice = next((name for name in self.aliases if name in taken), None)
        if twice is not None:
            raise RequestError(f"--alias {twice} is the name of another model that is served; give another name")
        aliases = dict.fromkeys((*self.aliases[1:], first.id, *first.aliases))
        renamed = replace(first, id=self.aliases[0], aliases=tuple(aliases.keys() - {self.aliases[0]}))
        return [renamed, *others], [renamed.id, *preload[1:]]


def _aliases(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in check_text(value, "--alias").split(",")))
    if not all(name.isprintable() and 0 < len(name) <= 256 for name in names):
        raise click.BadParameter(f"{value!r:.80} is not a name, or names with commas between.")
    return names


def _gather_defaults(command: Command) -> Command:
    """Pass the options below as one argument, `defaults`."""

    @functools.wraps(command)
    def call(
        *,
        options: LoadOptions,
        max_tokens: int | None,
        reasoning: str,
        reasoning_budget: int,
        no_loop_stop: bool,
        alias: tuple[str, ...],
        chat_template_file: Path | None,
        api_key: str | None,
        **values: Any,
    ) -> Any:
        if chat_template_file is not None:
            if options["chat_template"] is not None:
                raise RequestError("--chat-template and --chat-template-file are one option; leave one of them out")
            options["chat_template"] = chat_template_file
        given = {name: values.pop(name) for name in SAMPLING_NAMES if name in values}
        given |= {"max_tokens": max_tokens, "loop_stop": False if no_loop_stop else None}
        defaults = ServerDefaults(
            options={name: value for name, value in given.items() if value is not None},
            thinking=_REASONING[reasoning],
            thinking_budget=None if reasoning_budget < 0 else reasoning_budget,
            aliases=alias,
            api_key=api_key,
        )
        return command(options=options, defaults=defaults, **values)

    return call


default_options = options_group(
    sampling_options,
    option(
        "-n --max-tokens --predict --n-predict max_tokens",
        "N",
        "Maximum length of a reply. Default: what fits; 16 for /v1/completions.",
        type=COUNT,
    ),
    option(
        "--reasoning",
        None,
        "Whether models that can reason do so; auto: as their template says.",
        type=click.Choice(list(_REASONING)),
        default="auto",
    ),
    option(
        "--reasoning-budget",
        "N",
        "Maximum tokens of reasoning; -1: no limit.",
        type=click.IntRange(min=-1),
        default=-1,
    ),
    flag("--no-loop-stop", "Let replies that may call tools repeat lines and calls without end."),
    option("--alias", "NAME", "Name of the model of -m to clients, or several with commas.", callback=_aliases),
    option("--chat-template-file", "FILE", "The same as --chat-template.", type=click.Path(path_type=Path)),
    option(
        "--api-key",
        "KEY",
        "Bearer token required over TCP. Others see it among the processes of this machine: prefer --token-file.",
    ),
    _gather_defaults,
)
"""Of a command with `load_options`, which stand above."""


def llama_server_options(command: Command) -> Command:
    """Add the options, and pass them on as fields of `ServerSettings`.

    `--parallel` goes to the loading of models too, and `--context-shift` to the defaults of generations: the command
    has `load_options` and `default_options`, which stand above.
    """

    @functools.wraps(command)
    def call(
        *, num_slots: int, slot_save_path: str | None, context_shift: bool, defaults: ServerDefaults, **values: Any
    ) -> Any:
        from localinfer.engine.admission import EngineLimits

        folder = None if slot_save_path is None else _folder(slot_save_path)
        values["options"]["limits"] = EngineLimits(max_running=num_slots)
        if context_shift:
            defaults = replace(defaults, options={**defaults.options, "context_shift": True})
        return command(num_slots=num_slots, slot_folder=folder, defaults=defaults, **values)

    return options_group(
        server_option("num_slots"),
        option("--slot-save-path", "FOLDER", "Let clients save what is in a slot to files in this folder."),
        server_option("pooling"),
        flag("--context-shift", "At the end of the context, continue without the older half of a text."),
        server_option("shows_slots"),
        server_option("shows_metrics"),
    )(call)


def _folder(name: str) -> Path:
    path = expand_home(name)
    if not path.is_dir():
        raise RequestError(f"{path} is not a folder; name one for --slot-save-path, or make it")
    return path
