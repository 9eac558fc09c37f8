"""Which models `localinfer serve` has: of -m, of a folder, of `localinfer pull`, and of a file about them."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.grouped_help import Command
from localinfer.apps.cli.options import LoadOptions, changes_of, flag, load_with, option, options_group
from localinfer.errors import RequestError
from localinfer.system.folders import expand_home

if TYPE_CHECKING:
    from localinfer.apps.cli.models_config import ModelsConfig
    from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSource
    from localinfer.apps.server.router.model_loader import LoadThreads
    from localinfer.llm import LLM
    from localinfer.types import ProgressCallback


@dataclass(frozen=True)
class ModelsOptions:
    """Which models are served beside that of -m, and how they share the memory.

    folder, config: paths. pulled: those of `localinfer pull` too. load_wait: how long a request for a model waits for
    memory that running replies hold, in seconds.
    """

    folder: str | None = None
    pulled: bool = False
    config: str | None = None
    load_wait: float = 300.0

    @property
    def names_some(self) -> bool:
        """Whether it says itself where models are, and not only how they are loaded."""
        return self.folder is not None or self.pulled


def _gather(command: Command) -> Command:
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
    _gather,
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
    """What a model takes, loaded with these options. Raises: ModelFileError and below, RequestError."""
    from localinfer.apps.server.router.model_folder import measure_need

    chosen = load_options_of(source, options)
    return measure_need(
        source.path, chosen["kv_type"], changes_of(chosen), chosen["context_length"], draft=chosen["draft"]
    )


def load_source(
    source: "ModelSource", options: LoadOptions, threads: "LoadThreads", report: "ProgressCallback | None" = None
) -> "LLM":
    """Load a model of the server; beside replies with what they leave of the processors, and measuring nothing.

    options: those of the command line. report: told of its progress. Raises: LocalinferError.
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
    from localinfer.storage.hub.find import find_model

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
    """What was pulled and is whole, as `localinfer list` names it, and without quantization where that is clear."""
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
