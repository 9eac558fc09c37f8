"""A reader finds things by name: questions of CONTRIBUTING.md, drawings and glossary of localinfer/README.md."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.project.figures import REPOSITORY, sources, text_of
from tests.support.documents import read

_NAME = re.compile(r"^( *)(?:(?:async )?def |class )(\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)
_PLACE = re.compile(r"`([\w./]+\.py)`(?:: ((?:`[\w.]+`(?:, )?)+))?")
"""A file, and names of it."""
_PREFIXES = ("", "localinfer/", "localinfer/generation/", "localinfer/engine/", "localinfer/apps/server/")
"""Folders that the drawings leave out of a path."""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes, their methods and the tables of a module."""
    found, owner = set(), ""
    for indent, name, table in _NAME.findall(text_of(path)):
        if not indent:
            owner = name
            found.add(name or table)
        elif len(indent) == 4:
            found.add(f"{owner}.{name}")
    return frozenset(found)


def files() -> list[str]:
    """Paths of the packages as git lists them."""
    return sorted(path.relative_to(REPOSITORY).as_posix() for path in sources().values())


def section(name: str, title: str) -> str:
    """A section of a document."""
    return re.split(r"^## ", read(name).partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def missing(cell: str) -> list[str]:
    """Files and names of a cell of a table that do not exist."""
    found = []
    for path, names in _PLACE.findall(cell):
        if not (REPOSITORY / path).is_file():
            found.append(path)
            continue
        found += [f"{path}: {one}" for one in re.findall(r"[\w.]+", names) if one not in names_in(REPOSITORY / path)]
    return found


_QUESTION = re.compile(r"^\| (.+?) \| (files|functions): `(.+?)` \| (`.+) \|$", re.MULTILINE)
_TERM = re.compile(r"^\| (?!term|---)(.+?) \| .+? \| (.*?) \| ", re.MULTILINE)
QUESTIONS = _QUESTION.findall(section("CONTRIBUTING.md", "Where things are"))


@pytest.mark.parametrize(("where", "kind", "word", "found"), QUESTIONS)
def test_a_search_by_name_finds_it_first(where: str, kind: str, word: str, found: str) -> None:
    if kind == "files":
        hits = (path for path in files() if re.search(word, path))
    else:
        pattern = re.compile(rf"(?:def|class) _?{word}")
        hits = (path for path in files() if pattern.search(text_of(REPOSITORY / path)))
    assert found.startswith(f"`{next(hits, None)}`")
    assert missing(found) == []


def test_ten_questions_are_answered() -> None:
    assert len(QUESTIONS) >= 10


def test_terms_of_the_glossary_stand_where_it_says() -> None:
    rows = _TERM.findall(section("localinfer/README.md", "Glossary"))
    assert len(rows) > 30
    assert [term for term, where in rows if not _PLACE.search(where)] == []
    assert [one for _, where in rows for one in missing(where)] == []


@pytest.mark.parametrize("title", ["The path of one token", "The path of one chat request"])
def test_drawings_name_what_is_there(title: str) -> None:
    drawing = "\n".join(line for line in section("localinfer/README.md", title).splitlines() if line.startswith("    "))
    known, packages = set(files()), {path.rpartition("/")[0] for path in files()}
    paths = re.findall(r"\b[a-z_]+(?:/[a-z_]+)+(?:\.py)?\b|\b\w+\.py\b", drawing)
    assert len(paths) > 8
    folder, absent = "", []
    for path in paths:
        file = path.removesuffix(".py") + ".py"
        # In the drawing of a token a file without a folder is in that of the line above.
        candidates = [prefix + file for prefix in (*_PREFIXES, f"{folder}/")]
        found = next((one for one in candidates if one in known), None)
        if found is None and not any(prefix + path in packages for prefix in _PREFIXES):
            absent.append(path)
        folder = folder if found is None else found.rpartition("/")[0]
    assert absent == []
    everywhere = frozenset(name for path in sources().values() for name in names_in(path))
    methods = {name.rpartition(".")[2] for name in everywhere}
    called = re.findall(r"\b([A-Z]\w*[a-z]\w*(?:\.\w+)?)\b(?!\.py| ->)|\b(\w+)\(\)", drawing)
    assert [name for name in (one for pair in called for one in pair if one) if name not in everywhere | methods] == []
