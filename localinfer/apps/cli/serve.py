"""The `localinfer serve` command."""

import contextlib
import gc
import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.grouped_help import GroupedCommand, titled
from localinfer.apps.cli.options import (
    COUNT,
    LoadOptions,
    byte_size,
    flag,
    is_from_config,
    load_options,
    option,
    prepare_in_background,
    takes_config,
)
from localinfer.apps.cli.serve_agents import AgentOptions, agent_options
from localinfer.apps.cli.serve_defaults import ServerDefaults, default_options
from localinfer.apps.cli.serve_kv_events import KVEventsOptions, kv_events_options, with_events
from localinfer.apps.cli.serve_listening import ListeningOptions, SocketPlace, listening_options
from localinfer.apps.cli.serve_llama_server import llama_server_options
from localinfer.apps.cli.serve_models import ModelsOptions, find_sources, load_source, measure, models_options
from localinfer.apps.cli.serve_operation import OperationOptions, SettingsReader, operating, operation_options
from localinfer.apps.cli.serve_responses import KeptResponses, responses_options
from localinfer.apps.cli.serve_roles import RoleOptions, role_options
from localinfer.apps.cli.shutdown import ShutdownController
from localinfer.apps.cli.standard_streams import READY_JSON, ReadyLine, drain_stderr
from localinfer.errors import RequestError
from localinfer.system import interruption
from localinfer.system.folders import expand_home
from localinfer.system.free_memory import limit_arenas
from localinfer.system.parent_watch import OPTION, ParentWatcher, input_can_end

if TYPE_CHECKING:
    from localinfer.apps.server.operation.metrics import Metrics
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.apps.server.router.models import ModelRegistry
    from localinfer.apps.server.transport.settings import ServerSettings
    from localinfer.llm import LLM


_SECONDS = click.FloatRange(min=0)
_SIDECAR_SHUTDOWN_SECONDS = 0.4
_SIDECAR_CLOSING_SECONDS = 0.8
"""Both together, and what the guard waits more, are less than the two seconds in which a sidecar is gone."""
_CLOSING_SECONDS = 8.0
"""What streams get to send their last event, and the prompt cache to be written, after the replies' own time."""


@dataclass(frozen=True)
class ServeProcess:
    """What `serve` may do with its process: end it, and write its line to standard output, if that is wanted.

    watch: what has watched the parent from the beginning.
    """

    owns_process: bool = False
    ready_line: ReadyLine | None = None
    watch: ParentWatcher | None = None


@click.command("serve", cls=GroupedCommand)
@load_options
@takes_config()
@titled("Defaults of requests", default_options, "alias max_tokens")
@titled("Models on demand", models_options, "models pulled")
@titled("Addresses and who may connect", listening_options, "host port token_file")
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
@titled("Prompts computed by another server", role_options)
@titled("Kept responses", responses_options)
@titled("Limits and logs", operation_options)
@titled("Agents", agent_options)
@titled("KV cache events", kv_events_options)
@titled("Slots, vectors and metrics", llama_server_options, "parallel")
@flag(OPTION, "Exit within two seconds of the end of standard input, or of the parent process.")
@flag(READY_JSON, "Print one line of JSON when ready, or with the error, and nothing else, on stdout.")
@flag("--verbose", "Log each request, and what of its prompt was cached, without its text, to stderr.")
def serve_command(
    listening: ListeningOptions,
    kept_responses: KeptResponses,
    roles: RoleOptions,
    shutdown_seconds: float,
    until_stdin_ends: bool,
    ready_json: bool,
    **served: Any,
) -> None:
    """Serve OpenAI's, Anthropic's, Ollama's and llama-server's APIs locally.

    Listens on a Unix socket that only you can open, and on TCP on the loopback interface unless --no-tcp. Point clients
    at http://127.0.0.1:8080/v1, those of Ollama at http://127.0.0.1:8080, and a browser at the same to chat; a line on
    stdout says when the server is ready. Ctrl-C ends it after the running replies. SIGHUP reads tokens, models, and the
    table [serve] of the configuration file again.

    All clients share one prompt cache, and replies report how much of a prompt was cached (cached_tokens): a client can
    find out, token by token, what others have sent. Give access only to people who may read your texts.
    """
    process = click.get_current_context().find_object(ServeProcess) or ServeProcess()
    if process.owns_process:
        limit_arenas()
    if until_stdin_ends and not input_can_end():
        raise RequestError(
            f"{OPTION} was given, but standard input is no pipe: its end says nothing of the program that started this "
            f"server; give it a pipe and keep that open (Node: stdio 'pipe'), or leave {OPTION} out"
        )
    is_sidecar = until_stdin_ends or ready_json
    if is_sidecar and _is_default("shutdown_seconds"):
        shutdown_seconds = _SIDECAR_SHUTDOWN_SECONDS
    watch = (process.watch or ParentWatcher(lambda: None)) if until_stdin_ends else None
    place = listening.socket_place(needs_own=ready_json)
    with ShutdownController(
        shutdown_seconds + (_SIDECAR_CLOSING_SECONDS if is_sidecar else _CLOSING_SECONDS),
        owns_process=process.owns_process,
        watch=watch,
        remove=place.own_files,
    ) as ending:
        _serve(
            ending,
            process.ready_line,
            listening,
            place,
            shutdown_seconds=shutdown_seconds,
            kept_responses=kept_responses.options(served["options"]),
            handover=roles.handover(served["options"]),
            roles=roles,
            **served,
        )


def _serve(
    ending: ShutdownController,
    ready_line: ReadyLine | None,
    listening: ListeningOptions,
    place: SocketPlace,
    *,
    options: LoadOptions,
    defaults: ServerDefaults,
    models: ModelsOptions,
    operation: OperationOptions,
    agents: AgentOptions,
    events: KVEventsOptions,
    idle_unload: float,
    memory_limit: int | None,
    roles: RoleOptions,
    verbose: bool,
    **settings_of_server: Any,
) -> None:
    from localinfer.apps.server.app import LocalServer
    from localinfer.apps.server.operation.requests import log_to_stderr
    from localinfer.apps.server.router.model_loader import LoadThreads
    from localinfer.apps.server.router.models import ModelRegistry

    if ending.owns_process:
        # What was imported stays: looked through now and then, it would hold up all replies for 40 ms at a time.
        gc.freeze()
    # It warns of every client that disconnects during a stream, which is normal.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    log_to_stderr(as_json=operation.as_json, verbose=verbose)
    if models.names_some and is_from_config("model"):
        # Models that are named say what to serve; a default does not add to them.
        options["model"] = None
    settings = listening.settings(place, defaults.api_key, operation, **settings_of_server)
    sources, preload = defaults.named(*find_sources(options["model"], models, options))
    events.check_sources(sources)
    threads = LoadThreads()

    def load(source: "ModelSource") -> "LLM":
        llm = load_source(source, with_events(options, publisher), threads, server.service.note_load)
        defaults.apply(llm, source.settings.sampling)
        return prepare_in_background(agents.prepared(roles.prepared(llm)))

    def make_registry(metrics: "Metrics") -> "ModelRegistry":
        return ModelRegistry(
            sources,
            load,
            lambda source: measure(source, options),
            metrics,
            strict=settings.strict_model,
            idle_unload_seconds=idle_unload or None,
            memory_limit=memory_limit,
            context_length=options["context_length"],
            threads=threads,
            wait_seconds=models.load_wait,
            preload=preload,
        )

    first = dict.fromkeys([*preload, *(source.id for source in sources if source.settings.is_pinned)])
    reader = SettingsReader(None if listening.token_file is None else expand_home(listening.token_file))

    def read_again(settings: "ServerSettings") -> "tuple[ServerSettings, list[ModelSource]]":
        found, _ = defaults.named(*find_sources(options["model"], models, options))
        return reader.read(settings), events.check_sources(found)

    def on_signal() -> None:
        interruption.take()
        ending.ask()

    with (
        events.publishing() as publisher,
        operating(operation, read_again) as watched,
        LocalServer(settings, make_registry, preloads=bool(first), on_signal=on_signal, operation=watched) as server,
    ):

        def leave() -> None:
            server.leave()
            drain_stderr()

        def on_ready() -> None:
            ending.serve()
            if interruption.is_pending():
                # Somebody has swallowed it, and holds it still.
                on_signal()
            if ready_line is None:
                _say_ready(f"serving {names} on {places}")
            else:
                socket_path = None if server.settings.socket_path is None else str(server.settings.socket_path)
                address = {"host": server.settings.host, "port": server.port, "socket": socket_path}
                ready_line.tell_ready(pid=os.getpid(), **address, models=[source.id for source in sources])

        ending.attach(server.stop, leave)
        if server.settings.socket_path is None:
            taken = "" if settings.socket_path is None else f": another server listens on {settings.socket_path}"
            operation.say(f"there is no Unix socket{taken}; TCP only")
        names = ", ".join(source.id for source in sources[:5]) + (", ..." if len(sources) > 5 else "")
        places = " and ".join(server.addresses)
        loading = "" if server.service.is_ready else f", loading {', '.join(first)}"
        operation.say(f"listening on {places}{loading}")
        if publisher is not None:
            operation.say(f"KV cache events at {publisher.places}")
        if (said := roles.described(settings.handover)) is not None:
            operation.say(said)
        server.run(on_ready=on_ready)
        has_ended = server.has_ended()
        server.close()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    ending.end(must=not has_ended)


def _is_default(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.DEFAULT


def _say_ready(line: str) -> None:
    """Print the line that says the server is ready; a closed pipe does not end the server."""
    with contextlib.suppress(OSError):
        click.echo(line)
        sys.stdout.flush()
