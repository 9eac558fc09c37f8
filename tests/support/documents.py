"""The documents of the repository: which there are, their code, their headings and links."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@cache
def documents() -> tuple[Path, ...]:
    """Every tracked or new Markdown file; in an unpacked archive every one beside the sources."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split("\0")[:-1] if listed.returncode == 0 else []
    found = [REPOSITORY / name for name in names] or [
        path for path in REPOSITORY.rglob("*.md") if not any(part.startswith(".") for part in path.parts)
    ]
    return tuple(sorted(path for path in found if path.is_file()))


def guides() -> list[str]:
    """The documents for users, whose commands and code are run: the README, the pages of `docs/`, and AGENTS.md."""
    pages = [path.relative_to(REPOSITORY).as_posix() for path in documents() if path.parent == REPOSITORY / "docs"]
    return ["README.md", "AGENTS.md", *pages]


def read(name: str) -> str:
    """The text of a document, by its path in the repository."""
    return (REPOSITORY / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """The code of a language in a document, a text for each fence."""
    return [text for fence, text in _FENCE.findall(read(name)) if fence == language]


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The names that headings of a document have as targets of links, as GitHub and MkDocs make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        number = 1
        while (unique := name if number == 1 else f"{name}-{number - 1}") in found:
            number += 1
        found.add(unique)
    return found


def links(text: str) -> list[str]:
    """The targets of a document's links and pictures, outside of code."""
    plain = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", prose(text), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", plain)


def parts_of(line: str) -> list[list[str]]:
    """The programs of a command line with their arguments, without variables that are set for them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    programs: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            programs.append([])
        elif programs[-1] or not re.match(r"[A-Z_]+=", word):
            programs[-1].append(word)
    return [words for words in programs if words]
