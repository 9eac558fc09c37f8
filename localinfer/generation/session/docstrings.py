"""What a function's docstring says of it: its first sentence, and a line for each parameter.

Parameters are read in the styles of Google ("Args:"), NumPy ("Parameters" underlined) and Sphinx (":param name:").
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import cleandoc

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")
_SECTION = re.compile(r"[A-Z][A-Za-z ]{2,30}:")
_PARAMETERS = ("Args:", "Arguments:", "Parameters:", "Params:")
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?")
_SPHINX = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
_FIELD = re.compile(r":[a-z]+[^:]*:")


@dataclass(frozen=True)
class Docstring:
    """summary: the first sentence, on one line. parameters: what is said of each, on one line, by name."""

    summary: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docstring:
    """Read a docstring; of what it does not have, the result has none."""
    lines = cleandoc(text or "").splitlines()
    first: list[str] = []
    for index, line in enumerate(lines):
        if not line.strip() or _begins_section(lines, index) or _FIELD.match(line):
            break
        first.append(line.strip())
    summary = _SENTENCE_END.split(" ".join(first), maxsplit=1)[0]
    found = {**_google(lines), **_numpy(lines), **_sphinx(lines)}
    return Docstring(summary, {name: " ".join(text.split()) for name, text in found.items() if text.strip()})


def _begins_section(lines: list[str], index: int) -> bool:
    is_underlined = index + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[index + 1]) is not None
    return is_underlined or _SECTION.fullmatch(lines[index].strip()) is not None


def _google(lines: list[str]) -> dict[str, str]:
    starts = [index for index, line in enumerate(lines) if line.rstrip() in _PARAMETERS]
    return _entries(_indented(lines[starts[0] + 1 :]), _GOOGLE) if starts else {}


def _sphinx(lines: list[str]) -> dict[str, str]:
    return _entries(iter(lines), _SPHINX)


def _numpy(lines: list[str]) -> dict[str, str]:
    starts = [i for i, line in enumerate(lines) if line.strip() == "Parameters" and _begins_section(lines, i)]
    found: dict[str, str] = {}
    names: list[str] = []
    for index in range(starts[0] + 2 if starts else len(lines), len(lines)):
        line = lines[index]
        if _begins_section(lines, index):
            break
        if line.strip() and not line[0].isspace():
            head = _NUMPY.fullmatch(line.rstrip())
            names = [] if head is None else re.split(r"\s*,\s*", head[1])
        else:
            found |= {name: f"{found.get(name, '')} {line}" for name in names}
    return found


def _indented(lines: list[str]) -> Iterator[str]:
    """The lines of a section, without what is indented on every line of it."""
    first = next((line for line in lines if line.strip()), "")
    indent = len(first) - len(first.lstrip())
    for line in lines:
        if line.strip() and not line[0].isspace():
            return
        yield line[indent:]


def _entries(lines: Iterator[str], head: re.Pattern[str]) -> dict[str, str]:
    """Entries that begin with `head` at the margin; lines that are further in continue them, an empty one ends them."""
    found: dict[str, str] = {}
    name = None
    for line in lines:
        begin = head.match(line)
        if begin is not None:
            name = begin[1]
            found[name] = begin[2]
        elif name is not None and line[:1].isspace() and line.strip():
            found[name] += f" {line}"
        else:
            name = None
    return found
