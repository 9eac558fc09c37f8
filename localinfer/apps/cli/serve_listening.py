"""Where `localinfer serve` listens, and who may reach it: its options, and the settings that they become."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.options import flag, option, options_group_of
from localinfer.apps.cli.serve_operation import OperationOptions, read_tokens
from localinfer.errors import RequestError
from localinfer.system.folders import expand_home
from localinfer.terminal import check_text

if TYPE_CHECKING:
    from localinfer.apps.server.transport.settings import ServerSettings


@dataclass(frozen=True)
class SocketPlace:
    """Where the Unix socket is to be, None for none. is_named: by the user. own_files: to be removed in the end."""

    path: Path | None
    is_named: bool = False
    own_files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ListeningOptions:
    """What the options below were given."""

    host: str
    port: int
    no_tcp: bool
    socket_path: str | None
    no_socket: bool
    token_file: str | None
    token_env: str | None
    isolate_cache: bool
    allow_host: tuple[str, ...]
    allow_origin: tuple[str, ...]
    allow_private_network: bool
    no_page: bool

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

    def settings(
        self, place: SocketPlace, api_key: str | None, operation: OperationOptions, **more: Any
    ) -> "ServerSettings":
        """The server's settings. more: further members of them. Raises: RequestError."""
        from localinfer.apps.server.transport.settings import ServerSettings

        if api_key is not None and (self.token_file is not None or self.token_env is not None):
            raise RequestError("--api-key is the token, and another option says where it is; leave one of them out")
        for name, values in (("--allow-host", self.allow_host), ("--allow-origin", self.allow_origin)):
            for value in values:
                check_text(value, name)
        token = _token(self.token_env, is_in_file=self.token_file is not None) if api_key is None else api_key
        return ServerSettings(
            host=None if self.no_tcp else self.host,
            port=self.port,
            socket_path=place.path,
            needs_socket=place.is_named,
            token=token,
            isolates_cache=self.isolate_cache,
            tokens=() if self.token_file is None else read_tokens(expand_home(self.token_file)),
            allowed_hosts=self.allow_host,
            allowed_origins=self.allow_origin,
            allows_private_network=self.allow_private_network,
            serves_page=not self.no_page,
            **operation.limits(),
            **more,
        )


def _own_socket() -> Path | None:
    """A place for the socket of one process, as every sidecar needs one; None where none can be made."""
    from localinfer.apps.server.transport.sockets import MAX_SOCKET_PATH_BYTES, default_socket_path
    from localinfer.system.folders import make_private

    default = default_socket_path()
    if default is None:
        return None
    path = default.with_name(f"{secrets.token_hex(6)}.sock")
    problem = make_private(path.parent)
    if problem is None and not os.access(path.parent, os.W_OK):
        problem = f"{path.parent} cannot be written"
    if problem is None and len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        problem = f"the path {path} is too long"
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
    option("--port", "N", "TCP port; 0: any free one.", type=click.IntRange(0, 65535), default=8080),
    flag("--no-tcp", "Listen on the Unix socket only."),
    option("--socket socket_path", "PATH", "Path of the Unix socket. Default: in your runtime folder, if it is free."),
    flag("--no-socket", "Listen on TCP only."),
    option(
        "--token-file",
        "FILE",
        "File with the bearer tokens accepted over TCP, one per line: TOKEN, or NAME: TOKEN LIMIT=NUMBER ...",
    ),
    option("--token-env", "NAME", "Environment variable with that token."),
    flag("--isolate-cache", "Share nothing between tokens: cached prompts, slots, sessions, kept responses."),
    option("--allow-host", "NAME", "Accept this Host header too; may be repeated.", multiple=True),
    option(
        "--allow-origin", "ORIGIN", "Accept requests from pages of this origin (CORS); may be repeated.", multiple=True
    ),
    flag("--allow-private-network", "Accept them from pages on the public internet too."),
    flag("--no-page", "Serve no chat page at /."),
)
