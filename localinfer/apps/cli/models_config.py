"""The file of `serve --models-config`: per model its aliases, how it is loaded and sampled, and how long it stays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.options import LOAD_ARGUMENTS, LoadOptions, changes_of, load_options
from localinfer.apps.config import SAMPLING_KEYS, Check, TomlFile
from localinfer.arguments import check_number, shown
from localinfer.errors import LocalinferError, RequestError
from localinfer.storage.hub.installed import find_model
from localinfer.system.folders import expand_home

if TYPE_CHECKING:
    from localinfer.apps.server.router.model_folder import ModelSettings

_WAY_OUT = "correct it, or leave out --models-config"
_DEFAULTS, _MODELS, _SAMPLING = "defaults", "models", "sampling"
_PATHS = ("model", "draft", "chat_template", "disk_cache_folder")
"""Options whose values may be files beside this one."""


@dataclass(frozen=True)
class ModelEntry:
    """One model of the file."""

    name: str
    settings: "ModelSettings"
    aliases: tuple[str, ...] = ()
    model: str | None = None
    """As -m takes it, of a model that no folder of models has."""


@dataclass(frozen=True)
class ModelsConfig:
    """The file as a whole."""

    defaults: "ModelSettings"
    """Of models without an entry."""
    entries: dict[str, ModelEntry] = field(default_factory=dict)
    file: TomlFile | None = None

    def fault(self, name: str, what: str) -> RequestError:
        """The error that an entry is wrong, with its file and line."""
        assert self.file is not None, "entries come from a file"
        return self.file.fault((_MODELS, name), what)


def read_models_config(path: str | None, options: LoadOptions) -> ModelsConfig:
    """Read the file; None: there is none. options: what the command line says, where the file says nothing.

    Raises: RequestError naming the file, the line and the key, for what is unknown there or cannot be.
    """
    from localinfer.apps.server.router.model_folder import ModelSettings

    if path is None:
        return ModelsConfig(ModelSettings())
    location = expand_home(path)
    try:
        file = TomlFile(location, _WAY_OUT)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"the file {location} of --models-config does not exist; write it, or name another"
        ) from None
    file.checked([], file.content, {_DEFAULTS: _kept, _MODELS: _kept})
    reader = _EntryReader(file, options)
    defaults = reader.read((_DEFAULTS,), file.table(file.content, _DEFAULTS), ModelEntry("", ModelSettings()))
    models = file.table(file.content, _MODELS)
    entries = {
        name: reader.read((_MODELS, name), file.table(models, name, _MODELS), replace(defaults, name=name))
        for name in models
    }
    return ModelsConfig(defaults.settings, entries, file)


class _EntryReader:
    """Reads tables of one file. options: the command line's, which an entry's replace one by one."""

    def __init__(self, file: TomlFile, options: LoadOptions) -> None:
        self._file = file
        self._options = options
        self._folder = file.path.absolute().parent
        self._parameters = _load_parameters()

    def read(self, keys: tuple[str, ...], table: Mapping[str, Any], defaults: ModelEntry) -> ModelEntry:
        """The entry of a table. keys: lead to it. Raises: RequestError."""
        file = self._file
        values = {key.replace("-", "_"): value for key, value in table.items() if key != _SAMPLING}
        known: dict[str, Check] = {"pinned": _flag, "keep_alive": _seconds}
        if keys[0] == _MODELS:
            known |= {"aliases": _names, "model": self._load_option}
        known |= {key: self._load_option for key in self._parameters if key != "model"}
        found = file.checked(keys, values, known, also=(f"[{'.'.join(keys)}.{_SAMPLING}]",))
        sampling = file.table(table, _SAMPLING, *keys)
        own_sampling = file.checked((*keys, _SAMPLING), sampling, SAMPLING_KEYS)
        settings = defaults.settings
        load = self._merged(settings.load, {key: found[key] for key in self._parameters if key in found})
        try:
            changes_of({**self._options, **load})
            if load.get("draft") is not None:
                load["draft"] = str(find_model(load["draft"]))
        except LocalinferError as error:
            raise file.fault(keys, str(error)) from None
        return ModelEntry(
            defaults.name,
            replace(
                settings,
                load=load,
                sampling={**settings.sampling, **own_sampling},
                is_pinned=found.get("pinned", settings.is_pinned),
                keep_alive_seconds=found.get("keep_alive", settings.keep_alive_seconds),
            ),
            found.get("aliases", ()),
            found.get("model", {}).get("model"),
        )

    def _merged(self, load: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Arguments of `load`, one after the other; those that have parts are replaced by parts."""
        merged = dict(load)
        for part in found.values():
            for name, value in part.items():
                before: Any = merged.get(name, self._options[name])
                if name == "rope":
                    value = replace(before, **value)
                elif name in ("overrides", "template_variables"):
                    value = {**before, **value}
                merged[name] = value
        merged.pop("model", None)
        return merged

    def _load_option(self, key: str, value: Any) -> dict[str, Any]:
        """The arguments of `load` that an option becomes, read as the command line reads it."""
        parameter = self._parameters[key]
        flag = max(parameter.opts, key=len)
        if getattr(parameter, "is_flag", False):
            words = [flag] if _flag(key, value) else []
        else:
            values = value if parameter.multiple and isinstance(value, list) else [value]
            words = [f"{flag}={self._word(key, one)}" for one in values]
        try:
            options = read_load_options(words)
        except click.UsageError as error:
            raise RequestError(f"{key} is {shown(value)}: {error.message.rstrip('.')}") from None
        name = LOAD_ARGUMENTS.get(str(parameter.name), str(parameter.name))
        if name != "rope":
            return {name: options[name]}
        part = str(parameter.name).removeprefix("rope_")
        return {name: {part: getattr(options[name], part)}}

    def _word(self, key: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise RequestError(f"{key} is {shown(value)}; wanted a text or a number, as the option of that name takes")
        if key not in _PATHS or not isinstance(value, str):
            return str(value)
        beside = self._folder / expand_home(value)
        if key == "disk_cache_folder" or beside.exists():
            return str(beside)
        if key == "chat_template":
            raise RequestError(f"{key} is {shown(value)}, and there is no file {beside}")
        return value


@click.command(add_help_option=False)
@load_options
def _take_load_options(options: LoadOptions) -> LoadOptions:
    return options


def read_load_options(words: Sequence[str]) -> LoadOptions:
    """Options of a command line about loading; defaults for the others. Raises: click.UsageError."""
    options: LoadOptions = _take_load_options.invoke(_take_load_options.make_context("serve", list(words)))
    return options


def _load_parameters() -> dict[str, click.Option]:
    """The options of `serve` that decide how a model is loaded, by what a file calls them."""
    options = [parameter for parameter in _take_load_options.params if isinstance(parameter, click.Option)]
    return {max(one.opts, key=len).lstrip("-").replace("-", "_"): one for one in options}


def _kept(key: str, value: Any) -> Any:
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{key} is {shown(value)}; wanted true or false")
    return value


def _seconds(key: str, value: Any) -> float:
    hint = "seconds without requests; 0: unload it as soon as it is unused, -1: never"
    check_number(key, value, -1, kind=float, hint=hint)
    return math.inf if value < 0 else float(value)


def _names(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() == name != "" for name in names):
        raise RequestError(f'{key} is {shown(value)}; wanted names, such as {key} = ["small", "gpt-4o-mini"]')
    return tuple(names)
