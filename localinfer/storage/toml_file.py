"""Files of settings in TOML: read as tables with known keys, and every fault told with its line."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from localinfer.arguments import shown
from localinfer.errors import RequestError

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
                current = _names(f"{words.split(']')[0]}]")
                if current[: len(keys)] == keys:
                    return number
            elif "=" in words and (*current, *_names(f"{words.split('=')[0]}=0"))[: len(keys)] == keys:
                return number
        return None


def _names(line: str) -> tuple[str, ...]:
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
