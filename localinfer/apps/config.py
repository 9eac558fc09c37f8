"""Files of settings in TOML, and `config.toml`, a user's own defaults for commands, in their configuration folder.

Tables have known keys, and every error names its line. Only commands read them; the Python API never does."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localinfer.apps.server_options import server_options
from localinfer.arguments import check_number, shown
from localinfer.engine.sampling.params import MAX_SEED, NUMBER_OPTIONS, SamplingParams
from localinfer.errors import RequestError
from localinfer.loading.load_options import LoadOptions, flags_of
from localinfer.system.folders import expand_home, user_folder

Check = Callable[[str, Any], Any]
"""From a key and its value to what is wanted of it. Raises: RequestError."""


class TomlFile:
    """A file in TOML. content: its tables. way_out: ends every error.

    Raises: RequestError if it cannot be read or is not TOML; FileNotFoundError, NotADirectoryError if there is none.
    """

    def __init__(self, path: Path, way_out: str) -> None:
        self.path = path
        self._way_out = way_out
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise RequestError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); {way_out}") from None
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror or error}; {way_out}") from None
        try:
            self.content: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RequestError(f"{path} is not TOML: {error}; {way_out}") from None
        self._lines = text.splitlines()

    def table(self, values: Mapping[str, Any], name: str, *above: str) -> dict[str, Any]:
        """The table of that name among values, empty if there is none; above: the tables that it is in.

        Raises: RequestError if it is something else.
        """
        table = values.get(name, {})
        if not isinstance(table, dict):
            place = ".".join((*above, name))
            raise self.fault(
                (*above, name), f"{name} is {shown(table)}; it is a table: write [{place}], and its keys below"
            )
        return table

    def checked(
        self, table: Sequence[str], values: Mapping[str, Any], known: Mapping[str, Check], also: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Values by key, each as its check returns it. table: the names that lead to it. also: keys that others read.

        Raises: RequestError for a key that is not known, and for what a check refuses.
        """
        found = {}
        for key, value in values.items():
            if key not in known:
                place = f" in [{'.'.join(table)}]" if table else ""
                what = f"there is no setting {shown(key)}{place}; known: {', '.join((*known, *also))}"
                raise self.fault((*table, key), what)
            try:
                found[key] = known[key](key, value)
            except RequestError as error:
                raise self.fault((*table, key), str(error)) from None
        return found

    def fault(self, keys: Sequence[str], what: str) -> RequestError:
        """The error that something is wrong with a key, or a table, by the names that lead to it."""
        line = self._line_of(tuple(keys))
        place = f"{self.path}, line {line}" if line else str(self.path)
        return RequestError(f"{place}: {what}; {self._way_out}")

    def _line_of(self, keys: tuple[str, ...]) -> int | None:
        """The line that sets a key or opens its table, from 1; None where it is spelled in another way."""
        current: tuple[str, ...] = ()
        for number, line in enumerate(self._lines, start=1):
            words = line.strip()
            if words.startswith("["):
                current = _known_names(f"{words.split(']')[0]}]")
                if current[: len(keys)] == keys:
                    return number
            elif "=" in words and (*current, *_known_names(f"{words.split('=')[0]}=0"))[: len(keys)] == keys:
                return number
        return None


def _known_names(line: str) -> tuple[str, ...]:
    """The names that lead to what a line opens or sets; none if it is no such line."""
    try:
        value: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    names = []
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        names.append(name)
    return tuple(names)


FILE_NAME = "config.toml"
DEVICES = ("auto", "cpu", "cuda")
_WAY_OUT = "correct it, or pass --no-config to do without the file"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Defaults of the command line; None, or an absent name, where the file says nothing."""

    path: Path | None = None
    """The file they were read from, None without one."""
    model: str | None = None
    """A path or a name, as -m takes it."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """Options of loading a model, by the names of `LoadOptions`."""
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Values by the names of `localinfer.engine.sampling.params.SamplingParams`."""
    system: str | None = None
    """The system prompt of a chat."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of chat templates."""
    serve: Mapping[str, tuple[str, ...] | float] = field(default_factory=dict)
    """Settings of a server."""

    def defaults(self) -> dict[str, Any]:
        """The values that the file gives, by the names of the commands' parameters."""
        values = {"model": self.model, **self.load, "system": self.system}
        given = {name: value for name, value in values.items() if value is not None}
        if self.template_kwargs:
            given["template_variables"] = [json.dumps(self.template_kwargs)]
        return {**given, **self.sampling, **self.serve}


def config_path() -> Path | None:
    """The file's path, whether it exists or not; None for a user without a home folder."""
    folder = user_folder("config")
    return None if folder is None else folder / FILE_NAME


def read_config(path: Path | None = None) -> Config:
    """Read the file, the user's own by default; one that does not exist is empty.

    Raises: RequestError naming the file, the line and the key, if the file cannot be read, is not TOML, or has an
        unknown key or a value that the option cannot have.
    """
    file = config_path() if path is None else path
    if file is None:
        return Config()
    try:
        return _read(TomlFile(file, _WAY_OUT))
    except (FileNotFoundError, NotADirectoryError):
        return Config()


def describe_config() -> list[str]:
    """Lines that say where the file is, what it sets, or what is wrong with it."""
    path = config_path()
    if path is None:
        return ["configuration: none, as this user has no home folder"]
    try:
        config = read_config(path)
    except RequestError as error:
        return [f"configuration: {error}"]
    if config.path is None:
        return [f'configuration: none; {path} may set defaults, such as model = "FILE" or threads = 4']
    return [f"configuration: {path}", *(f"  {name} = {value!r}" for name, value in config.defaults().items())]


def sampling_value(key: str, value: Any) -> float | int:
    """Check a sampling option of a file, by its name in SamplingParams. Raises: RequestError."""
    if key == "seed":
        check_number(key, value, 0, MAX_SEED)
        return int(value)
    option = NUMBER_OPTIONS[key]
    # TOML's 0 is no float, which a check would import NumPy to find out.
    number = float(value) if option.kind is float and type(value) is int else value
    found: float | int = check_number(
        key, number, option.least, option.most, kind=option.kind, hint=option.hint, field=key
    )
    if key == "mirostat" and found:
        SamplingParams(mirostat=int(found))
    return found


SAMPLING_KEYS = dict.fromkeys((*NUMBER_OPTIONS, "seed"), sampling_value)
"""Keys of a table of sampling options, and the check of each."""


def _read(file: TomlFile) -> Config:
    chat = file.checked(["chat"], file.table(file.content, "chat"), {"system": _text, "template_kwargs": _variables})
    table = file.table(file.content, "sampling")
    sampling = file.checked(["sampling"], table, SAMPLING_KEYS)
    loading = file.checked(
        [],
        {key: value for key, value in file.content.items() if key not in ("chat", "sampling", "serve")},
        {"model": _model, **{name: _LOAD_CHECKS[flag.kind] for name, flag in flags_of(LoadOptions) if flag.in_config}},
        also=("[sampling]", "[chat]", "[serve]"),
    )
    kinds = {option.key: option.read for option in server_options() if option.in_config}
    serve = file.checked(["serve"], file.table(file.content, "serve"), kinds)
    model = loading.pop("model", None)
    return Config(path=file.path, model=model, load=loading, sampling=sampling, serve=serve, **chat)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f'{key} is {shown(value)}; wanted a text, such as {key} = "Be brief."')
    return value


def _variables(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f'{key} is {shown(value)}; wanted a table, such as {key} = {{template_date = "today"}}')
    # TOML has days and times, and templates have their texts.
    made: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return made


def _model(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise RequestError(f'{key} is {shown(value)}; wanted a path or a name, such as {key} = "~/models/a.gguf"')
    path = expand_home(value)
    if not path.is_absolute() and (value.startswith(".") or value.lower().endswith(".gguf")):
        raise RequestError(f"{key} is {shown(value)}, which is another file in every folder; give the whole path")
    return str(path) if value.startswith("~") else value


def _count(key: str, value: Any) -> int:
    check_number(key, value, 1)
    return int(value)


def _kv_type(key: str, value: Any) -> str:
    from localinfer.kernels.kv_layout import parse_kv_type

    parse_kv_type(value)
    return str(value)


def _device(key: str, value: Any) -> str:
    # A list of GPUs is checked where they are looked for.
    if not isinstance(value, str) or (value not in DEVICES and not value.startswith("cuda:")):
        raise RequestError(
            f"{key} is {shown(value)}; wanted one of {', '.join(DEVICES)}, or GPUs such as cuda:0,cuda:1"
        )
    return str(value)


_LOAD_CHECKS: dict[Any, Check] = {"count": _count, "kv type": _kv_type, "devices": _device}
"""Checks of values by `Flag.kind`."""
