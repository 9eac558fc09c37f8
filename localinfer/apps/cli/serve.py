"""The `localinfer serve` command: which models are served, and its process."""

import contextlib
import functools
import gc
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.help import Command, GroupedCommand, titled
from localinfer.apps.cli.options import (
    LoadOptions,
    byte_size,
    changes_of,
    flag,
    is_from_config,
    load_options,
    load_with,
    option,
    options_group,
    prepare_in_background,
    takes_config,
)
from localinfer.apps.cli.serve_options import (
    AgentOptions,
    KeptResponses,
    KVEventsOptions,
    ListeningOptions,
    OperationOptions,
    RoleOptions,
    ServerDefaults,
    SettingsReader,
    SocketPlace,
    agent_options,
    default_options,
    kv_events_options,
    listening_options,
    llama_server_options,
    operating,
    operation_options,
    responses_options,
    role_options,
    server_option,
    with_events,
)
from localinfer.apps.cli.shutdown import ShutdownController
from localinfer.apps.cli.standard_streams import READY_JSON, ReadyLine, drain_stderr
from localinfer.errors import RequestError
from localinfer.system import interruption
from localinfer.system.folders import expand_home
from localinfer.system.free_memory import limit_arenas
from localinfer.system.parent_watch import OPTION, ParentWatcher, input_can_end

if TYPE_CHECKING:
    from localinfer.apps.cli.models_config import ModelsConfig
    from localinfer.apps.server.operation.observation import Metrics
    from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSource
    from localinfer.apps.server.router.models import LoadThreads, ModelRegistry
    from localinfer.apps.server.transport.settings import ServerSettings
    from localinfer.llm import LLM
    from localinfer.types import ProgressCallback


@dataclass(frozen=True)
class ModelsOptions:
    """Models beside that of -m, and how they share the memory."""

    folder: str | None = None
    """Path of a folder of models."""
    pulled: bool = False
    """True if the models of `localinfer pull` are served."""
    config: str | None = None
    """Path of the file of --models-config."""
    load_wait: float = 300.0
    """Seconds that a request waits for memory that running replies hold."""

    @property
    def names_some(self) -> bool:
        """True if it says itself where models are, and not only how they are loaded."""
        return self.folder is not None or self.pulled


def _gather_models(command: Command) -> Command:
    @functools.wraps(command)
    def call(models: str | None, pulled: bool, models_config: str | None, load_wait: float, **values: Any) -> Any:
        return command(models=ModelsOptions(models, pulled, models_config, load_wait), **values)

    return call


models_options = options_group(
    option("--models", "FOLDER", "Serve every model in a folder and its subfolders, loaded on demand."),
    flag("--pulled", "Serve the models of `localinfer pull`, loaded on demand."),
    option(
        "--models-config",
        "FILE",
        "TOML file with aliases and options per model; see localinfer/apps/server/router/README.md.",
    ),
    option(
        "--load-wait",
        "SECONDS",
        "Time that a request for a model waits for memory that running replies hold.",
        type=click.FloatRange(min=0),
        default=300,
    ),
    _gather_models,
)


def find_sources(model: str | None, options: ModelsOptions, load: LoadOptions) -> "tuple[list[ModelSource], list[str]]":
    """The models to serve, the one of -m first, and the names of those to load at once: that one, or the demo model.

    model: what -m names, None for the demo model if nothing else is served. load: options of the command line for all.
    Raises: RequestError.
    """
    from localinfer.apps.cli.models_config import read_models_config
    from localinfer.apps.server.router.model_folder import find_models

    config = read_models_config(options.config, load)
    found: list[ModelSource] = []
    if options.folder is not None:
        found += find_models(expand_home(options.folder))
    if options.pulled:
        found += _pulled_sources()
    named = [_named_source(entry.model, name, found, config) for name, entry in config.entries.items() if entry.model]
    if options.pulled and model is None and not (found or named):
        raise RequestError("there is nothing to serve for --pulled; `localinfer pull org/repo` brings a model")
    preload = []
    if model is not None or not (found or named):
        found.insert(0, _source_of(model))
        preload = [found[0].id]
    # A file may be served under several names, with other options, but only where that is asked for.
    names = {source.id for source in named}
    sources = [*(source for source in _each_once(found) if source.id not in names), *named]
    return _configured(sources, config), preload


def measure(source: "ModelSource", options: LoadOptions) -> "MemoryNeed":
    """Memory that a model takes, loaded with these options. Raises: ModelFileError and below, RequestError."""
    from localinfer.apps.server.router.model_folder import measure_need

    chosen = load_options_of(source, options)
    return measure_need(
        source.path,
        chosen["kv_type"],
        changes_of(chosen),
        chosen["context_length"],
        draft=chosen["draft"],
        mmproj=chosen["mmproj"],
    )


def load_source(
    source: "ModelSource", options: LoadOptions, threads: "LoadThreads", report: "ProgressCallback | None" = None
) -> "LLM":
    """Load a model of the server; beside replies with what they leave of the processors, and measuring nothing.

    options: those of the command line. report: called with its progress. Raises: LocalinferError.
    """
    from localinfer.storage.hub.places import Places
    from localinfer.storage.hub.records import PullRecords

    is_beside = threads.is_beside_replies
    chosen = load_options_of(source, options)
    if is_beside:
        chosen |= {"priority": "background", "may_measure": False}
    llm = load_with(chosen, stopping=threads.stopping, report=report)
    if is_beside:
        llm.set_priority("normal")
    if (records := Places.of_user().records) is not None:
        # Of the name of a model that was pulled there is one.
        PullRecords(records).mark_used(source.id)
    return llm


def load_options_of(source: "ModelSource", options: LoadOptions) -> LoadOptions:
    """The arguments of `localinfer.load` for one model; options: those of the command line."""
    return {**options, **source.settings.load, "model": str(source.path)}


def _source_of(path: str | None, name: str | None = None) -> "ModelSource":
    """The model that -m names, or the demo model. name: what clients call it, None for its own."""
    from localinfer.apps.server.router.model_folder import ModelSource, model_source
    from localinfer.loading.options import model_path
    from localinfer.storage.hub.installed import find_model

    file = model_path(None) if path is None else find_model(path)
    found = model_source(file)
    if found is None and path is not None and file.is_file() and file != expand_home(path):
        # Files of Ollama have checksums for names: the model's name is the one that it was found by.
        found = ModelSource(path, file, int(file.stat().st_mtime))
    if found is None:
        raise RequestError(f"{file} is not a model; give a GGUF file, the first part of a split one, or a model folder")
    return found if name is None else replace(found, id=name)


def _named_source(model: str, name: str, found: "Sequence[ModelSource]", config: "ModelsConfig") -> "ModelSource":
    """The model that an entry of the configuration names: one of those found, or what -m takes."""
    from localinfer.apps.server.router.model_folder import matching_sources

    same = matching_sources(model, found) or matching_sources(model.removesuffix(".gguf"), found)
    if len(same) == 1:
        return replace(same[0], id=name, aliases=())
    try:
        return _source_of(model, name)
    except RequestError as error:
        raise config.fault(name, str(error)) from None


def _pulled_sources() -> "list[ModelSource]":
    """Whole models that were pulled, as `localinfer list` names them, without quantization where that is clear."""
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.storage.hub.installed import find_pulled
    from localinfer.storage.hub.places import Places

    models = [model for model in find_pulled(Places.of_user()) if not model.problem]
    repositories = [model.name.rpartition(":")[0] for model in models]
    sources = []
    for model, repository in zip(models, repositories, strict=True):
        aliases = (repository,) if repository and repositories.count(repository) == 1 else ()
        sources.append(ModelSource(model.name, model.path, int(model.path.stat().st_mtime), aliases))
    return sources


def _each_once(sources: "Iterable[ModelSource]") -> "list[ModelSource]":
    """Models without those that have the name or the file of an earlier one."""
    kept: list[ModelSource] = []
    for source in sources:
        if not any(source.id == other.id or _is_same(source.path, other.path) for other in kept):
            kept.append(source)
    return kept


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _configured(sources: "list[ModelSource]", config: "ModelsConfig") -> "list[ModelSource]":
    """The models with their settings. Raises: RequestError for settings of a model that there is not."""
    from localinfer.apps.server.router.model_folder import matching_sources

    names = [source.id for source in sources]
    by_name = {
        # Names of repositories are short forms of ours, and no reason to refuse a model that has such a name.
        source.id: replace(
            source, settings=config.defaults, aliases=tuple(alias for alias in source.aliases if alias not in names)
        )
        for source in sources
    }
    for name, entry in config.entries.items():
        found = [source.id for source in matching_sources(name, sources)]
        if len(found) != 1:
            what = f"it may be any of {', '.join(found[:10])}" if found else f"there are {', '.join(names[:10])}"
            raise config.fault(name, f'no model is called {name}: {what}; or give its file, as model = "FILE"')
        source = by_name[found[0]]
        by_name[found[0]] = replace(source, aliases=(*source.aliases, *entry.aliases), settings=entry.settings)
    return list(by_name.values())


_SECONDS = click.FloatRange(min=0)
_SIDECAR_SHUTDOWN_SECONDS = 0.4
_SIDECAR_CLOSING_SECONDS = 0.8
"""Both together, and what the guard waits more, are less than the two seconds in which a sidecar is gone."""
_CLOSING_SECONDS = 8.0
"""Time of streams to send their last event, and of the prompt cache to be written, after the replies' own time."""


@dataclass(frozen=True)
class ServeProcess:
    """Rights of `serve` over its process: to end it, and to write its line to standard output, if that is wanted.

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
@server_option("strict_model")
@option(
    "--idle-unload", "SECONDS", "Unload a model after so long without requests; 0: never.", type=_SECONDS, default=900
)
@option("--memory-limit", "SIZE", "Maximum memory of all models. Default: what is free.", callback=byte_size)
@server_option("max_generations")
@server_option("shutdown_seconds")
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
    from localinfer.apps.server.operation.logs import log_to_stderr
    from localinfer.apps.server.router.models import LoadThreads, ModelRegistry

    if ending.owns_process:
        # What was imported stays: looked through now and then, it would hold up all replies for 40 ms at a time.
        gc.freeze()
    # It warns of every client that disconnects during a stream, which is normal.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    log_to_stderr(as_json=operation.as_json, verbose=verbose)
    if models.names_some and is_from_config("model"):
        # Models that are named say what to serve; a default does not add to them.
        options["model"] = None
    settings = listening.settings(place, defaults.api_key, **settings_of_server)
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
                # Some code has swallowed it, and still holds it.
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
