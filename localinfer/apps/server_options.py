"""Options of a server, each declared once with its flag, help, type, range and key of config.toml.

The flags of `localinfer serve`, the table `[serve]`, `ServerSettings` (also of `localinfer.ray`) and the checks of all
follow from the fields here: a new option is a field, and its effect."""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

from localinfer.arguments import MAX_PRIORITY, check_number, shown
from localinfer.errors import RequestError

Group = Literal["clients", "limits"]
_OPTION = "option"
"""Key of a `ServerOption` in a field's metadata."""


@dataclass(frozen=True, kw_only=True)
class ServerOption:
    """The description of an option."""

    flag: str
    """As typed; its name without the dashes is the key of config.toml."""
    metavar: str | None
    """The value as help shows it, None for a switch."""
    help: str
    kind: type
    """bool for a switch, tuple for names, of which the flag may be repeated, int or float for a number, str for one of
    `choices`."""
    group: Group | None = None
    """The part of help that lists it; None for one that the command lists by itself."""
    choices: tuple[str, ...] = ()
    """Words to choose from."""
    least: int = 0
    """Bound of a number."""
    most: int | None = None
    """Bound of a number, None for none."""
    in_config: bool = True
    """True if config.toml sets it."""
    member: str = ""
    """The field that it sets."""
    default: Any = None
    """The field's default."""

    @property
    def key(self) -> str:
        """The name of the command's parameter, and of the key of config.toml."""
        return self.flag.lstrip("-").replace("-", "_")

    def read(self, key: str, value: Any) -> Any:
        """Check a value of config.toml. Raises: RequestError."""
        if self.kind in (int, float):
            return self.kind(self._checked(key, value))
        if not isinstance(value, list) or not all(isinstance(one, str) and one.isprintable() for one in value):
            raise RequestError(f'{key} is {shown(value)}; wanted a list of names, such as {key} = ["example.org"]')
        return tuple(value)

    def check(self, value: Any) -> None:
        """Check a value of the settings. Raises: RequestError."""
        if self.kind in (int, float):
            self._checked(self.member, value, none="for none" if self.default is None else None)

    def _checked(self, name: str, value: Any, none: str | None = None) -> Any:
        bounds = (self.least,) if self.most is None else (self.least, self.most)
        return check_number(name, value, *bounds, kind=self.kind, none=none)


def _option(default: Any, flag: str, metavar: str | None, help: str, kind: type, **more: Any) -> Any:
    option = ServerOption(flag=flag, metavar=metavar, help=help, kind=kind, **more)
    return field(default=default, metadata={_OPTION: option})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server that have flags: access, limits of each token that has none of its own, and routes."""

    isolates_cache: bool = _option(
        False,
        "--isolate-cache",
        None,
        "Share nothing between tokens: cached prompts, slots, sessions, kept responses.",
        bool,
        group="clients",
        in_config=False,
    )
    """Cached prompts, slots and responses of a token are used for that token alone, and shown to no other."""
    allowed_hosts: tuple[str, ...] = _option(
        (), "--allow-host", "NAME", "Accept this Host header too; may be repeated.", tuple, group="clients"
    )
    """Names beside the loopback's that a `Host` header may hold."""
    allowed_origins: tuple[str, ...] = _option(
        (),
        "--allow-origin",
        "ORIGIN",
        "Accept requests from pages of this origin (CORS); may be repeated.",
        tuple,
        group="clients",
    )
    """Web pages that may ask."""
    allows_media_urls: bool = _option(
        False,
        "--allow-media-urls",
        None,
        "Fetch pictures and sounds that requests name by http(s) URLs, from addresses of the internet only.",
        bool,
        group="clients",
        in_config=False,
    )
    """Only then does the server connect to anything by itself."""
    allows_private_network: bool = _option(
        False,
        "--allow-private-network",
        None,
        "Accept them from pages on the public internet too.",
        bool,
        group="clients",
        in_config=False,
    )
    """Let browsers send pages of the internet here, those of `allowed_origins`."""
    requests_per_minute: int | None = _option(
        None,
        "--requests-per-minute",
        "N",
        "Most requests of each token per minute.",
        int,
        group="limits",
        least=1,
    )
    tokens_per_minute: int | None = _option(
        None,
        "--tokens-per-minute",
        "N",
        "Most tokens read and generated for each token per minute.",
        int,
        group="limits",
        least=1,
    )
    running_per_token: int | None = _option(
        None,
        "--running-per-token",
        "N",
        "Most texts of each token that share a step; more wait.",
        int,
        group="limits",
        least=1,
    )
    queued_per_token: int | None = _option(
        None,
        "--queued-per-token",
        "N",
        "Most texts of each token that wait; more are refused.",
        int,
        group="limits",
    )
    min_priority: int | None = _option(
        None,
        "--min-priority",
        "N",
        "Most urgent priority that requests may ask for; lower is more urgent. Default with --token-file: 0.",
        int,
        group="limits",
        least=-MAX_PRIORITY,
        most=MAX_PRIORITY,
    )
    """The most urgent priority, see `Quota`; None: 0 where tokens have names, else any."""
    ttft_objective: float | None = _option(
        None,
        "--ttft-objective",
        "SECONDS",
        "Refuse requests whose first token is predicted for later than this.",
        float,
        group="limits",
    )
    """Seconds in which a first token is wanted; requests for which a later one is predicted are refused."""
    compacts_chats: bool = _option(
        False,
        "--compact",
        None,
        "Let a model sum up the older messages of a chat that fills the context, and answer from its summary.",
        bool,
        in_config=False,
    )
    """Chats that take more than four fifths of the context are compacted."""
    port: int = _option(8080, "--port", "N", "TCP port; 0: any free one.", int, least=0, most=65535, in_config=False)
    """0: one that the system chooses."""
    num_slots: int = _option(
        16,
        "--parallel",
        "N",
        "Generations that share a step, and slots; others wait.",
        int,
        least=1,
        in_config=False,
    )
    """Texts that are generated at one time."""
    serves_page: bool = _option(True, "--no-page", None, "Serve no chat page at /.", bool, in_config=False)
    """True if there is a chat page at `/`, which everybody may read; without, a token is asked for there too."""
    strict_model: bool = _option(
        False,
        "--strict-model",
        None,
        "Refuse unknown model names even if only one model is served.",
        bool,
        in_config=False,
    )
    """Refuse a model name that is not ours even where only one model is served."""
    max_generations: int = _option(
        64,
        "--max-generations",
        "N",
        "Maximum number of running and waiting generations.",
        int,
        least=1,
        in_config=False,
    )
    """Texts generated and waiting at one time; one more is refused with 429."""
    shutdown_seconds: float = _option(
        5.0,
        "--shutdown-seconds",
        "SECONDS",
        "Time for running replies to finish at shutdown.",
        float,
        in_config=False,
    )
    """Time for running replies to finish after SIGTERM."""
    pooling: str | None = _option(
        None,
        "--pooling",
        None,
        "How vectors of tokens become one, on every route. Default: as models say.",
        str,
        choices=("mean", "first", "cls", "last", "none"),
        in_config=False,
    )
    """Pooling of the vectors of tokens, None as models say."""
    shows_slots: bool = _option(
        True, "--no-slots", None, "Do not show on /slots what is generated.", bool, in_config=False
    )
    """True if /slots is there."""
    shows_metrics: bool = _option(True, "--no-metrics", None, "Do not show /metrics.", bool, in_config=False)
    """True if /metrics is there."""

    def check_options(self) -> None:
        """Check every value. Raises: RequestError naming the option."""
        for option in server_options():
            option.check(getattr(self, option.member))


@cache
def server_options() -> tuple[ServerOption, ...]:
    """Every option, in the order of help."""
    return tuple(replace(one.metadata[_OPTION], member=one.name, default=one.default) for one in fields(ServerOptions))
