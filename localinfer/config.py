"""The configuration file: a user's own defaults for commands, `config.toml` in their configuration folder.

Only the command line reads it; the Python API never does.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from localinfer.arguments import check_number, shown
from localinfer.errors import RequestError
from localinfer.sampling.params import MAX_SEED, NUMBER_OPTIONS, SamplingParams
from localinfer.system.folders import expand_home, user_folder

FILE_NAME = "config.toml"
DEVICES = ("auto", "cpu", "cuda")
_WAY_OUT = "correct it, or pass --no-config to do without the file"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Defaults of the command line; None, or an absent name, where the file says nothing.

    path: the file they were read from, None without one. model: a path or a name, as -m takes it. sampling: values by
    the names of `localinfer.sampling.params.SamplingParams`. system: the system prompt of a chat.
    """

    path: Path | None = None
    model: str | None = None
    threads: int | None = None
    context_length: int | None = None
    kv_type: str | None = None
    device: str | None = None
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    system: str | None = None

    def defaults(self) -> dict[str, Any]:
        """The values that the file gives, by the names of the commands' parameters."""
        names = ("model", "threads", "context_length", "kv_type", "device", "system")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, **self.sampling}


def config_path() -> Path | None:
    """Where the file is looked for, whether it exists or not; None for a user without a home folder."""
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
        text = file.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return Config()
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); {_WAY_OUT}") from None
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror or error}; {_WAY_OUT}") from None
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{file} is not TOML: {error}; {_WAY_OUT}") from None
    return _Reader(file, text).read(content)


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


class _Reader:
    """Checks the tables of one file. What is wrong is told with its line."""

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        self._lines = text.splitlines()

    def read(self, content: dict[str, Any]) -> Config:
        """The configuration that a parsed file gives. Raises: RequestError."""
        chat = self._table(content, "chat", {"system": self._text})
        sampling = self._table(content, "sampling", dict.fromkeys((*NUMBER_OPTIONS, "seed"), self._sampling_value))
        loading = self._checked(
            "",
            {key: value for key, value in content.items() if key not in ("chat", "sampling")},
            {
                "model": self._model,
                "threads": self._count,
                "context_length": self._count,
                "kv_type": self._kv_type,
                "device": self._device,
            },
            also=("[sampling]", "[chat]"),
        )
        return Config(path=self._file, sampling=sampling, **chat, **loading)

    def _table(self, content: dict[str, Any], name: str, known: dict[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
        table = content.get(name, {})
        if not isinstance(table, dict):
            self._refuse("", name, f"{name} is {shown(table)}; it is a table: write [{name}], and its keys below")
        return self._checked(name, table, known)

    def _checked(
        self,
        table: str,
        values: dict[str, Any],
        known: dict[str, Callable[[str, Any], Any]],
        also: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        found = {}
        for key, value in values.items():
            if key not in known:
                place = f" in [{table}]" if table else ""
                self._refuse(
                    table, key, f"there is no setting {shown(key)}{place}; known: {', '.join((*known, *also))}"
                )
            try:
                found[key] = known[key](key, value)
            except RequestError as error:
                self._refuse(table, key, str(error))
        return found

    def _refuse(self, table: str, key: str, what: str) -> NoReturn:
        line = self._line_of(table, key)
        place = f"{self._file}, line {line}" if line else str(self._file)
        raise RequestError(f"{place}: {what}; {_WAY_OUT}") from None

    def _line_of(self, table: str, key: str) -> int | None:
        """The line that sets a key or opens its table, from 1; None where it is spelled in another way."""
        current = ""
        for number, line in enumerate(self._lines, start=1):
            words = line.strip()
            if words.startswith("["):
                current = words.split("]")[0].strip("[ ")
                if not table and current.split(".")[0].strip("\"' ") == key:
                    return number
            elif current == table and words.split("=")[0].split(".")[0].strip("\"' ") == key and "=" in words:
                return number
        return None

    @staticmethod
    def _text(key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise RequestError(f'{key} is {shown(value)}; wanted a text, such as {key} = "Be brief."')
        return value

    @staticmethod
    def _model(key: str, value: Any) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise RequestError(f'{key} is {shown(value)}; wanted a path or a name, such as {key} = "~/models/a.gguf"')
        path = expand_home(value)
        if not path.is_absolute() and (value.startswith(".") or value.lower().endswith(".gguf")):
            raise RequestError(f"{key} is {shown(value)}, which is another file in every folder; give the whole path")
        return str(path) if value.startswith("~") else value

    @staticmethod
    def _count(key: str, value: Any) -> int:
        check_number(key, value, 1)
        return int(value)

    @staticmethod
    def _kv_type(key: str, value: Any) -> str:
        from localinfer.kernels.kv_layout import parse_kv_type

        parse_kv_type(value)
        return str(value)

    @staticmethod
    def _device(key: str, value: Any) -> str:
        if value not in DEVICES:
            raise RequestError(f"{key} is {shown(value)}; wanted one of {', '.join(DEVICES)}")
        return str(value)

    @staticmethod
    def _sampling_value(key: str, value: Any) -> float | int:
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
