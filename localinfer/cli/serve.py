"""The `localinfer serve` command."""

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.cli.config_option import is_from_config, takes_config
from localinfer.cli.options import COUNT, LoadOptions, byte_size, changes_of, flag, load_options, load_with, option
from localinfer.errors import RequestError
from localinfer.folders import expand_home
from localinfer.terminal import check_text

if TYPE_CHECKING:
    from localinfer.server.app import LocalServer
    from localinfer.server.replies.metrics import Metrics
    from localinfer.server.replies.model_folder import ModelSource
    from localinfer.server.replies.models import ModelRegistry
    from localinfer.server.transport.settings import ServerSettings


_SECONDS = click.FloatRange(min=0)


@click.command("serve")
@load_options
@takes_config()
@option("--models", "FOLDER", "Serve every model in a folder and its subfolders, loaded on demand.")
@option("--host", "ADDRESS", "TCP address to listen on.", default="127.0.0.1")
@option("--port", "N", "TCP port; 0: any free one.", type=click.IntRange(0, 65535), default=8080)
@flag("--no-tcp", "Listen on the Unix socket only.")
@option("--socket socket_path", "PATH", "Path of the Unix socket. Default: in your runtime folder.")
@option("--token-file", "FILE", "File with the bearer token required over TCP.")
@option("--allow-host", "NAME", "Accept this Host header too; may be repeated.", multiple=True)
@option("--allow-origin", "ORIGIN", "Accept requests from pages of this origin (CORS); may be repeated.", multiple=True)
@flag("--allow-private-network", "Accept them from pages on the public internet too.")
@flag("--strict-model", "Refuse unknown model names even if only one model is served.")
@option(
    "--idle-unload", "SECONDS", "Unload a model after so long without requests; 0: never.", type=_SECONDS, default=900
)
@option("--memory-limit", "SIZE", "Maximum memory of all models. Default: what is free.", callback=byte_size)
@option("--max-generations", "N", "Maximum number of running and waiting generations.", type=COUNT, default=64)
@option(
    "--shutdown-seconds",
    "SECONDS",
    "Time for running replies to finish at shutdown.",
    type=_SECONDS,
    default=5,
)
@flag("--until-stdin-ends", "Exit at the end of standard input, such as when the parent exits.")
@flag("--verbose", "Log each request, and what of its prompt was cached, without its text, to stderr.")
def serve_command(
    options: LoadOptions,
    models: str | None,
    idle_unload: float,
    memory_limit: int | None,
    until_stdin_ends: bool,
    verbose: bool,
    **listening: Any,
) -> None:
    """Serve OpenAI's and Anthropic's APIs locally.

    Listens on a Unix socket that only you can open, and on TCP on the loopback interface unless --no-tcp. Point clients
    at http://127.0.0.1:8080/v1, and a browser at http://127.0.0.1:8080 to chat; a line on stdout says when the server
    is ready. Ctrl-C ends it after the running replies.

    All clients share one prompt cache, and replies report how much of a prompt was cached (cached_tokens): a client can
    find out, token by token, what others have sent. Give access only to people who may read your texts.
    """
    from localinfer.server.app import LocalServer
    from localinfer.server.replies.models import LoadThreads, ModelRegistry, measure_need

    # It warns of every client that disconnects during a stream, which is normal.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    if verbose:
        _log_requests()
    if models is not None and is_from_config("model"):
        # A folder that is named says what to serve; a default does not add to it.
        options["model"] = None
    settings = _settings(**listening)
    context_length = options["context_length"]
    sources = _sources(options["model"], models)
    threads = LoadThreads()

    def make_registry(metrics: "Metrics") -> "ModelRegistry":
        return ModelRegistry(
            sources,
            lambda source: load_with({**options, "model": str(source.path)}, stopping=threads.stopping),
            lambda source: measure_need(source.path, options["kv_type"], changes_of(options), context_length),
            metrics,
            strict=settings.strict_model,
            idle_unload_seconds=idle_unload or None,
            memory_limit=memory_limit,
            context_length=context_length,
            threads=threads,
        )

    with LocalServer(settings, make_registry, preloads=models is None or options["model"] is not None) as server:
        if settings.socket_path is None:
            click.echo("this system has no Unix sockets for Python: TCP only", err=True)
        names = ", ".join(source.id for source in sources[:5]) + (", ..." if len(sources) > 5 else "")
        places = " and ".join(server.addresses)
        click.echo(f"listening on {places}" + ("" if server.service.is_ready else f", loading {names}"), err=True)
        if until_stdin_ends:
            threading.Thread(target=_stop_after_stdin, args=(server,), daemon=True).start()
        server.run(on_ready=lambda: _say_ready(f"serving {names} on {places}"))
        if not server.has_ended():
            # The interpreter's own exit would wait for a kernel that is being compiled.
            server.close()
            sys.stdout.flush()
            os._exit(0)


def _say_ready(line: str) -> None:
    """Print the line that says the server is ready; a closed pipe does not end the server."""
    with contextlib.suppress(OSError):
        click.echo(line)
        sys.stdout.flush()


def _stop_after_stdin(server: "LocalServer") -> None:
    # Not through `sys.stdin`: its lock, held by a blocked thread, would break the interpreter's shutdown.
    with contextlib.suppress(OSError):
        while _has_more():
            pass
    server.stop()


def _has_more() -> bool:
    """Wait for standard input, and say whether it goes on, as it does where memory for what came is short."""
    try:
        return bool(os.read(0, 512))
    except MemoryError:
        return True


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("localinfer.server")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)


def _settings(
    *,
    host: str,
    no_tcp: bool,
    socket_path: str | None,
    token_file: str | None,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    allow_private_network: bool,
    **more: Any,
) -> "ServerSettings":
    from localinfer.server.transport.settings import ServerSettings
    from localinfer.server.transport.sockets import default_socket_path

    for name, values in (("--allow-host", allow_host), ("--allow-origin", allow_origin)):
        for value in values:
            check_text(value, name)
    return ServerSettings(
        socket_path=default_socket_path() if socket_path is None else expand_home(socket_path).absolute(),
        host=None if no_tcp else host,
        token=None if token_file is None else _read_token(expand_home(token_file)),
        allowed_hosts=allow_host,
        allowed_origins=allow_origin,
        allows_private_network=allow_private_network,
        **more,
    )


def _read_token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the token file {path} cannot be read: {error}") from None


def _sources(path: str | None, folder: str | None) -> "list[ModelSource]":
    """The models to serve, the one named by -m first; the demo model if none is named."""
    from localinfer.hub.find import find_model
    from localinfer.load_options import model_path
    from localinfer.server.replies.model_folder import ModelSource, find_models, model_source

    sources = [] if folder is None else find_models(expand_home(folder))
    if path is None and sources:
        return sources
    file = model_path(None) if path is None else find_model(path)
    first = model_source(file)
    if first is None and path is not None and file.is_file() and file != expand_home(path):
        # Files of Ollama have checksums for names: the model's name is the one that it was found by.
        first = ModelSource(path, file, int(file.stat().st_mtime))
    if first is None:
        raise RequestError(f"{file} is not a model; give a GGUF file, the first part of a split one, or a model folder")
    return [first, *(other for other in sources if other.id != first.id and not other.path.samefile(first.path))]
