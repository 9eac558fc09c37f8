"""Documents are true of the repository: links, paths, options and commands that they name exist."""

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from localinfer.apps.cli import localinfer_command
from localinfer.apps.config import read_config
from tests.support.documents import REPOSITORY, anchors, blocks, documents, guides, links, parts_of, prose, read

LONGEST_README = 9_000
MOST_FILES_OF_THE_SPINE = 25
ROOTS = ("localinfer", "kernels", "models", "quant", "tests", "examples", "docs", ".ci")
PATH = re.compile(rf"(?:{'|'.join(map(re.escape, ROOTS))})/[\w./-]*|[a-z][\w/-]*/[a-z]\w*\.py")
RECORDS = ("CHANGELOG.md", "tests/bench/RESULTS.md")
"""They name files as they were called at their time."""
CHECKED_BY_SIGHT = {"git", "curl", "claude", "hf", "pipx", "sha256sum", "uv", "uvx"}
"""Programs of others, without arguments that this repository could check; `test_snippets.py` sends what curl does."""


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def option_strings(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for one in getattr(command, "commands", {}).values():
        yield from option_strings(one)


def inline_code(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))]


def commands(name: str) -> list[str]:
    """The commands of a document: lines of its blocks, and those that its sentences name."""
    lines = [line for text in blocks(name, "sh") for line in text.splitlines()]
    named = [code for code in inline_code(read(name)) if re.match(r"(localinfer|python -m|bash|pip install) \S", code)]
    return [line for line in lines if line.strip()] + named


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    broken = []
    for target in links(document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        found = document if not path else document.parent / path
        is_broken = not found.exists() or (
            anchor and found.suffix == ".md" and anchor not in anchors(found.read_text(encoding="utf-8"))
        )
        broken += [target] if is_broken else []
    assert broken == []


@pytest.mark.parametrize("document", [path for path in documents() if relative(path) not in RECORDS], ids=relative)
def test_paths_that_sentences_name_exist(document: Path) -> None:
    named = {code for code in inline_code(document.read_text(encoding="utf-8")) if PATH.fullmatch(code)}
    folders = (REPOSITORY, document.parent, REPOSITORY / "tests")
    assert {code for code in named if not any((folder / code).exists() for folder in folders)} == set()


def test_the_readme_is_one_page_and_its_spine_short() -> None:
    text = read("README.md")
    assert len(text.encode()) <= LONGEST_README
    files = re.findall(r"^\d+\. `([^`]+)`", text.partition("## Reading the code")[2], re.MULTILINE)
    assert 10 < len(files) <= MOST_FILES_OF_THE_SPINE
    (told,) = re.findall(r"([\d,]+) lines: ", text)
    lines = sum(len(read(file).splitlines()) for file in files)
    assert abs(lines / int(told.replace(",", "")) - 1) < 0.1, f"the files of the spine have {lines} lines"


@pytest.mark.parametrize("name", guides()[1:])
def test_a_page_begins_with_what_its_reader_can_do_then(name: str) -> None:
    heading, first = read(name).split("\n\n")[:2]
    assert heading.startswith("# ") and first.startswith("After reading this page you ")


@pytest.mark.parametrize("name", guides())
def test_options_that_sentences_name_exist(name: str) -> None:
    known = set(option_strings(localinfer_command)) | {"--help", "--help-all"}
    alone = {code.split()[0].partition("=")[0] for code in inline_code(read(name)) if re.match(r"--?[a-z]", code)}
    scripts = {"--plant"}
    """Of a script, which the page names before."""
    assert alone - known - scripts == set()


@pytest.mark.parametrize("name", guides())
def test_commands_are_understood(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in commands(name):
        for words in parts_of(line):
            check(words, tmp_path)


def check(words: list[str], folder: Path) -> None:
    """Fail if a program would not take its arguments."""
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "localinfer":
        if arguments:
            parse(arguments, folder)
    elif program.startswith("python") and arguments[:2] == ["-m", "venv"]:
        pass
    elif program.startswith("python") and arguments[0] == "-m":
        check_module(arguments[1], arguments[2:])
    elif program == "pip":
        check_install(arguments)
    elif program == "bash":
        assert (REPOSITORY / arguments[0]).is_file(), arguments
    elif program == "mkdocs":
        assert (REPOSITORY / "mkdocs.yml").is_file()
    elif program == "serve":
        module, _, attribute = arguments[-1].partition(":")
        assert arguments[0] == "run" and importlib.util.find_spec(module) and attribute
    else:
        assert program in CHECKED_BY_SIGHT, words


def parse(arguments: list[str], folder: Path) -> None:
    """The command line's own parser takes these, where the files that they name are there."""
    for word in arguments:
        if re.fullmatch(r"[\w-]+(\.(gguf|txt|json|jinja|toml|cert|jsonl))?", word):
            (folder / word).touch()
    if arguments[0] == "--offline":
        arguments = arguments[1:]
    command = localinfer_command.commands[arguments[0]]
    rest = arguments[1:]
    while isinstance(command, click.Group) and rest and rest[0] in command.commands and arguments[0] != "bench":
        command, rest = command.commands[rest[0]], rest[1:]
    # Words in capitals stand for what a reader types.
    command.make_context(" ".join(arguments), ["9" if word == "N" else word for word in rest])


def check_module(name: str, arguments: list[str]) -> None:
    """A module exists, and knows the options that it is given."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    if not name.startswith("tests."):
        return
    found = [Path(folder) / "__main__.py" for folder in spec.submodule_search_locations or ()] or [
        Path(spec.origin or "")
    ]
    source = "".join(path.read_text(encoding="utf-8") for path in found)
    for word in arguments:
        assert not word.startswith("--") or f'"{word}"' in source, f"{name} has no {word}"


def check_install(arguments: list[str]) -> None:
    """Pip installs this project, with extras that it has."""
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert arguments[0] in ("install", "download")
    for word in arguments[1:]:
        if word not in ("-e", "--dest", "--no-index", "--find-links", "bundle"):
            named = re.fullmatch(r"(?:\.|localinfer)(?:\[([\w,]+)\])?", word)
            assert named and set((named[1] or "dev").split(",")) <= extras.keys(), word


@pytest.mark.parametrize("name", guides())
def test_settings_of_pages_are_read(name: str, tmp_path: Path) -> None:
    for text in blocks(name, "json"):
        json.loads(text)
    for text in blocks(name, "toml"):
        if "[models." in text:
            assert tomllib.loads(text)
            continue
        (tmp_path / "config.toml").write_text(text, encoding="utf-8")
        read_config(tmp_path / "config.toml")
