"""Change single values in the text of a settings file, and leave everything else as it is: order, comments, spacing.

A value is found by its path of keys and handled as text, so that a former one can be put back as it was written. JSON
may have comments and trailing commas. TOML takes values and tables of string keys, YAML values of top-level keys.
"""

import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localinfer.errors import RequestError

SettingsFormat = Literal["json", "toml", "yaml"]
KeyPath = tuple[str, ...]
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_INDENT = "  "


class SettingsText(ABC):
    """The text of a settings file. name: of the file, for errors."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self._name = name

    @abstractmethod
    def find(self, path: KeyPath) -> str | None:
        """The text of a value, or None where there is none. Raises: RequestError for a file that cannot be read."""

    @abstractmethod
    def put(self, path: KeyPath, written: str) -> None:
        """Write a value in place of the one of this path, or as a new one. Raises: RequestError."""

    @abstractmethod
    def drop(self, path: KeyPath, kept: int) -> None:
        """Remove a value, and what holds it where that is empty then. kept: keys of the path that stay in any case."""

    @abstractmethod
    def holds(self, path: KeyPath) -> bool:
        """True if there is a value, or a table, of this path."""

    @staticmethod
    @abstractmethod
    def written(value: Any) -> str:
        """A value in the notation of the file."""

    @abstractmethod
    def is_same(self, written: str, other: str) -> bool:
        """True if two texts of values mean the same."""

    def depth(self, path: KeyPath) -> int:
        """The number of keys of a path, from its beginning, that are there."""
        return next((count for count in range(len(path), 0, -1) if self.holds(path[:count])), 0)

    def _refused(self, what: str) -> RequestError:
        return RequestError(f"{self._name}: {what}; mend it, or write the settings that --print shows by hand")


@dataclass
class _Node:
    """A value of JSON and its place."""

    start: int
    """Index of its first character."""
    end: int = 0
    """Index behind its last character."""
    value: Any = None
    """The value itself."""
    members: "dict[str, _Member] | None" = None
    """Of an object, by key; None for other values."""
    has_trailing_comma: bool = False
    """True if a comma follows the last member."""


@dataclass
class _Member:
    """A member of an object of JSON."""

    start: int
    """Index of its key's first character."""
    node: _Node
    """Its value."""
    comma: int | None = None
    """Index of the comma behind it."""


@dataclass
class _JsonReader:
    """Reads JSON with comments and trailing commas, and notes where everything stands."""

    text: str
    """The whole text."""
    index: int = 0
    """Of the next character."""
    decoder: json.JSONDecoder = field(default_factory=json.JSONDecoder)
    """Reads texts, numbers and words."""

    _SPACE = re.compile(r"(?:[\s\ufeff]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)

    def skip(self) -> None:
        """Pass space and comments."""
        found = self._SPACE.match(self.text, self.index)
        self.index = found.end() if found else self.index

    def document(self) -> _Node:
        """The whole text as one value. Raises: ValueError."""
        self.skip()
        node = self.value()
        self.skip()
        if self.index != len(self.text):
            raise ValueError(f"character {self.index} is behind the value")
        return node

    def value(self) -> _Node:
        """The value that begins here. Raises: ValueError."""
        node = _Node(self.index)
        opening = self.text[self.index : self.index + 1]
        if opening == "{":
            node.members = {}
            self._members(node, node.members)
            node.value = {key: member.node.value for key, member in node.members.items()}
        elif opening == "[":
            node.value = self._entries()
        else:
            node.value, self.index = self.decoder.raw_decode(self.text, self.index)
        node.end = self.index
        return node

    def _members(self, node: _Node, members: dict[str, _Member]) -> None:
        self.index += 1
        while True:
            self.skip()
            if self._takes("}"):
                return
            start = self.index
            key, self.index = self.decoder.raw_decode(self.text, start)
            self.skip()
            if not isinstance(key, str) or key in members or not self._takes(":"):
                raise ValueError(f"character {start} begins no member")
            self.skip()
            member = members[key] = _Member(start, self.value())
            node.has_trailing_comma = False
            self.skip()
            if self.text[self.index : self.index + 1] == ",":
                member.comma = self.index
                node.has_trailing_comma = True
                self.index += 1
            elif self.text[self.index : self.index + 1] != "}":
                raise ValueError(f"character {self.index} is neither a comma nor the end of an object")

    def _entries(self) -> list[Any]:
        found: list[Any] = []
        self.index += 1
        while True:
            self.skip()
            if self._takes("]"):
                return found
            found.append(self.value().value)
            self.skip()
            if not self._takes(",") and self.text[self.index : self.index + 1] != "]":
                raise ValueError(f"character {self.index} is neither a comma nor the end of a list")

    def _takes(self, character: str) -> bool:
        if self.text[self.index : self.index + 1] != character:
            return False
        self.index += 1
        return True


class JsonText(SettingsText):
    """JSON, with comments and trailing commas where the program that reads it allows them."""

    def find(self, path: KeyPath) -> str | None:
        node, rest = self._walk(path)
        return None if rest else self.text[node.start : node.end]

    def holds(self, path: KeyPath) -> bool:
        return not self._walk(path)[1]

    def put(self, path: KeyPath, written: str) -> None:
        if not self.text.strip("\ufeff \t\r\n"):
            self.text = "{}\n"
        node, rest = self._walk(path)
        if not rest:
            self.text = f"{self.text[: node.start]}{self._placed(written, node.start)}{self.text[node.end :]}"
            return
        if node.members is None:
            raise self._refused(f"{'.'.join(path[: len(path) - len(rest)]) or 'the whole'} is no object")
        self._insert(node, node.members, rest, written)

    def drop(self, path: KeyPath, kept: int) -> None:
        if self.find(path) is None:
            return
        self._remove(path)
        for count in range(len(path) - 1, kept, -1):
            if self._walk(path[:count])[0].value != {}:
                return
            self._remove(path[:count])

    @staticmethod
    def written(value: Any) -> str:
        return json.dumps(value, indent=len(_INDENT), ensure_ascii=False)

    def is_same(self, written: str, other: str) -> bool:
        return bool(_JsonReader(written).document().value == _JsonReader(other).document().value)

    def _walk(self, path: KeyPath) -> tuple[_Node, KeyPath]:
        """The innermost value on the path that is there, and the keys that are not."""
        try:
            node = _JsonReader(self.text if self.text.strip("\ufeff \t\r\n") else "{}").document()
        except (ValueError, RecursionError) as error:
            raise self._refused(f"it is no JSON ({error})") from None
        for index, key in enumerate(path):
            if node.members is None or key not in node.members:
                return node, path[index:]
            node = node.members[key].node
        return node, ()

    def _insert(self, node: _Node, members: "Mapping[str, _Member]", rest: KeyPath, written: str) -> None:
        for key in reversed(rest[1:]):
            inner = written.replace("\n", f"\n{_INDENT}")
            written = f"{{\n{_INDENT}{json.dumps(key, ensure_ascii=False)}: {inner}\n}}"
        outer = self._indent(node.start)
        last = list(members.values())[-1] if members else None
        closing = node.end - 1
        inside = self.text[node.start + 1 : closing]
        # The new member stands behind comments that follow the last one.
        place = node.start + 1 + len(inside.rstrip())
        if last is not None and "\n" not in inside:
            written, before, after = json.dumps(json.loads(written), ensure_ascii=False), " ", self.text[place:closing]
        else:
            indent = self._indent(next(iter(members.values())).start) if members else outer + _INDENT
            written, before, after = written.replace("\n", f"\n{indent}"), f"\n{indent}", f"\n{outer}"
        member = f"{json.dumps(rest[0], ensure_ascii=False)}: {written}{',' if node.has_trailing_comma else ''}"
        text = f"{self.text[:place]}{before}{member}{after}{self.text[closing:]}"
        if last is not None and not node.has_trailing_comma:
            text = f"{text[: last.node.end]},{text[last.node.end :]}"
        self.text = text

    def _remove(self, path: KeyPath) -> None:
        parent = self._walk(path[:-1])[0]
        members = parent.members or {}
        names = list(members)
        place = names.index(path[-1])
        member = members[path[-1]]
        start, end = member.start, member.node.end if member.comma is None else member.comma + 1
        line = self.text.rfind("\n", 0, start) + 1
        after = re.compile(r"[ \t]*(?:\r?\n|$)").match(self.text, end)
        if not self.text[line:start].strip() and after:
            start, end = line, after.end()
        elif member.comma is not None:
            end += len(self.text[end:]) - len(self.text[end:].lstrip(" \t"))
        else:
            start -= len(self.text[:start]) - len(self.text[:start].rstrip(" \t"))
        text = self.text[:start] + self.text[end:]
        previous = members[names[place - 1]].comma if place else None
        if previous is not None and member.comma is None:
            text = text[:previous] + text[previous + 1 :]
        self.text = text
        node = self._walk(path[:-1])[0]
        if not self.text[node.start + 1 : node.end - 1].strip():
            self.text = f"{self.text[: node.start]}{{}}{self.text[node.end :]}"

    def _indent(self, index: int) -> str:
        line = self.text[self.text.rfind("\n", 0, index) + 1 : index]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def _placed(self, written: str, index: int) -> str:
        return written.replace("\n", f"\n{self._indent(index)}")


@dataclass
class _Statement:
    """A header or an assignment of TOML."""

    start: int
    """Index of its first line."""
    end: int
    """Index behind its last line."""
    header: KeyPath | None
    """Keys of a header; None for an assignment."""
    value: dict[str, Any]
    """An assignment alone, as it is read."""


class TomlText(SettingsText):
    """TOML, by lines: a value is `key = value` at the top, or in the table whose header has the keys before it."""

    def find(self, path: KeyPath) -> str | None:
        found = self._assignment(path)
        return None if found is None else self._parts(found)[1]

    def holds(self, path: KeyPath) -> bool:
        value: Any = self._read(self.text)
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return False
            value = value[key]
        return True

    def put(self, path: KeyPath, written: str) -> None:
        wanted = self._merged(path, tomllib.loads(f"x = {written}")["x"])
        lines, statements = self._lines(), self._statements()
        found = self._assignment(path)
        if found is not None:
            before, _, after = self._parts(found)
            lines[found.start : found.end] = [f"{before}{written}{after}"]
        else:
            line = f"{self._key(path[-1])} = {written}\n"
            section = self._section(path[:-1], statements)
            if section is not None:
                place = max((one.end for one in section), default=0)
                if place and not lines[place - 1].endswith("\n"):
                    lines[place - 1] += "\n"
                blank = ["\n"] if not section and lines else []
                lines[place:place] = [line, *blank]
            else:
                if lines and not lines[-1].endswith("\n"):
                    lines[-1] += "\n"
                header = f"[{'.'.join(map(self._key, path[:-1]))}]\n"
                lines += [*(["\n"] if lines and lines[-1].strip() else []), header, line]
        self._take("".join(lines), wanted)

    def drop(self, path: KeyPath, kept: int) -> None:
        found = self._assignment(path)
        if found is None:
            return
        lines = self._lines()
        del lines[found.start : found.end]
        self.text = "".join(lines)
        section = self._section(path[:-1], self._statements())
        if len(path) - 1 > kept and section is not None and len(section) == 1:
            start, lines = section[0].start, self._lines()
            if start and not lines[start - 1].strip():
                start -= 1
            del lines[start : section[0].end]
            self.text = "".join(lines)

    @staticmethod
    def written(value: Any) -> str:
        if isinstance(value, Mapping):
            inner = (f"{TomlText._key(key)} = {TomlText.written(one)}" for key, one in value.items())
            return f"{{ {', '.join(inner)} }}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return f"[{', '.join(map(TomlText.written, value))}]"
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def is_same(self, written: str, other: str) -> bool:
        return bool(tomllib.loads(f"x = {written}") == tomllib.loads(f"x = {other}"))

    def _take(self, text: str, wanted: dict[str, Any]) -> None:
        """Take a changed text that reads as wanted: what this editor does not understand must not be lost."""
        try:
            found = tomllib.loads(text)
        except ValueError:
            found = {}
        if found != wanted:
            raise self._refused("its notation cannot be changed without loss")
        self.text = text

    def _read(self, text: str) -> dict[str, Any]:
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise self._refused(f"it is no TOML ({error})") from None

    def _merged(self, path: KeyPath, value: Any) -> dict[str, Any]:
        whole = table = self._read(self.text)
        for key in path[:-1]:
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise self._refused(f"{key} is no table")
            table = inner
        table[path[-1]] = value
        return whole

    def _lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    def _statements(self) -> list[_Statement]:
        """Headers and assignments: each the fewest lines that can be read alone."""
        self._read(self.text)
        lines, found, start = self._lines(), [], 0
        while start < len(lines):
            end = start + 1
            while True:
                text = "".join(lines[start:end])
                try:
                    value = tomllib.loads(text)
                    break
                except ValueError:
                    if end == len(lines):
                        raise self._refused(f"line {start + 1} cannot be read alone") from None
                    end += 1
            if value:
                is_header = text.lstrip().startswith("[")
                found.append(_Statement(start, end, _header_keys(text, value) if is_header else None, value))
            start = end
        return found

    def _section(self, table: KeyPath, statements: list[_Statement]) -> list[_Statement] | None:
        """The header and the assignments of a table; those before any header for the whole; None if there is none."""
        found: list[_Statement] | None = None if table else []
        is_inside = not table
        for one in statements:
            if one.header is not None:
                is_inside = one.header == table and bool(table)
                if is_inside:
                    found = []
            if is_inside and found is not None:
                found.append(one)
        return found

    def _assignment(self, path: KeyPath) -> _Statement | None:
        section = self._section(path[:-1], self._statements()) or []
        names = [one for one in section if one.header is None and list(one.value) == [path[-1]]]
        # A dotted key is another assignment, of the same first key.
        return next((one for one in names if "." not in self._parts(one)[0].partition("=")[0].strip(" \t\"'")), None)

    def _parts(self, found: _Statement) -> tuple[str, str, str]:
        """A statement's text before, in and behind its value: a comment and the end of the line are behind."""
        text = "".join(self._lines()[found.start : found.end])
        equals = text.index("=", text.index(next(iter(found.value))))
        start = equals + 1 + len(text[equals + 1 :]) - len(text[equals + 1 :].lstrip(" \t"))
        ends = (index for index in range(start + 1, len(text)) if text[index] in "#\r\n")
        end = next((index for index in ends if _reads_as(text[:index], found.value)), len(text))
        end = len(text[:end].rstrip(" \t"))
        return text[:start], text[start:end], text[end:]

    @staticmethod
    def _key(key: str) -> str:
        return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _reads_as(text: str, value: dict[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == value
    except ValueError:
        return False


def _header_keys(text: str, value: Any) -> KeyPath:
    """Keys of a header; of a list of tables a path that no setting has."""
    keys: list[str] = []
    while isinstance(value, dict) and value:
        key = next(iter(value))
        keys.append(key)
        value = value[key]
    return (*keys, "[]") if text.lstrip().startswith("[[") else tuple(keys)


class YamlText(SettingsText):
    """YAML with values of top-level keys on one line each."""

    def find(self, path: KeyPath) -> str | None:
        found = self._line(path)
        return None if found is None else _yaml_value(self._lines()[found], path[0])[1]

    def holds(self, path: KeyPath) -> bool:
        return self._line(path) is not None

    def put(self, path: KeyPath, written: str) -> None:
        found, lines = self._line(path), self._lines()
        if found is None:
            if lines and not lines[-1].endswith("\n"):
                lines[-1] += "\n"
            lines.append(f"{path[0]}: {written}\n")
        else:
            before, _, after = _yaml_value(lines[found], path[0])
            lines[found] = f"{before}{written}{after}"
        self.text = "".join(lines)

    def drop(self, path: KeyPath, kept: int) -> None:
        found, lines = self._line(path), self._lines()
        if found is not None:
            del lines[found]
            self.text = "".join(lines)

    @staticmethod
    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def is_same(self, written: str, other: str) -> bool:
        return _unquoted(written) == _unquoted(other)

    def _lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    def _line(self, path: KeyPath) -> int | None:
        """The line of a key; one whose value goes on in the next lines is refused, and so is what is no block."""
        lines = self._lines()
        told = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        starts = [line for line in told if line.startswith("---")]
        if told and told[0].lstrip()[:1] in ("{", "[", "%") or starts[1:] or any(one.startswith("...") for one in told):
            raise self._refused("it is not a block of keys, as this editor of YAML needs it")
        (key,) = path
        for index, line in enumerate(lines):
            if not re.match(rf"{re.escape(key)}[ \t]*:(?:\s|$)", line):
                continue
            follows = next((one for one in lines[index + 1 :] if one.strip()), "")
            if follows.startswith((" ", "\t", "- ")) and not follows.lstrip().startswith("#"):
                raise self._refused(f"the value of {key} has several lines")
            return index
        return None


def _yaml_value(line: str, key: str) -> tuple[str, str, str]:
    """A line's text before, in and behind its value: a comment and the end of the line are behind."""
    found = re.fullmatch(
        rf"({re.escape(key)}[ \t]*:[ \t]*)(\"(?:[^\"\\\\]|\\\\.)*\"|'(?:[^']|'')*'|.*?)([ \t]*(?:[ \t]#.*)?\r?\n?)",
        line,
    )
    assert found is not None, "a line of a key and its value"
    before, value, after = found.groups()
    return (before if before.endswith((" ", "\t")) else f"{before} "), value, after


def _unquoted(written: str) -> str:
    text = written.strip()
    if text[:1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text[1:-1].replace("''", "'") if text[:1] == "'" == text[-1:] else text


def settings_text(text: str, form: SettingsFormat, name: str) -> SettingsText:
    """The text of a file in one of the notations. name: of the file, for errors."""
    kinds: dict[SettingsFormat, type[SettingsText]] = {"json": JsonText, "toml": TomlText, "yaml": YamlText}
    return kinds[form](text, name)
