"""One command of a chat: its record, and arguments that are files."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localinfer.arguments import half_character
from localinfer.errors import RequestError
from localinfer.system.folders import expand_home


@dataclass(frozen=True)
class Command:
    """A command of the chat."""

    name: str
    """With its slash."""
    help: str
    run: Callable[[str], None]
    """Is called with the rest of the line."""
    arguments: str = ""
    """The form of the rest of the line, for help."""
    complete: Callable[[str], Iterable[str]] | tuple[str, ...] = ()
    """Completes the rest of the line from its beginning, or the words that it may be."""
    may_raise: bool = False
    """True: its errors are those of a message that cannot be answered; False: they are shown as notices."""

    def candidates(self, typed: str) -> Iterable[str]:
        """The ways to complete the rest of a line."""
        return beginning_with(typed, self.complete) if isinstance(self.complete, tuple) else self.complete(typed)


def beginning_with(typed: str, candidates: Iterable[str]) -> list[str]:
    """The candidates that begin like what is typed."""
    return [candidate for candidate in candidates if candidate.startswith(typed)]


class Exit(Exception):
    """The user asked to end the chat."""


_MOST_CANDIDATES = 200


def complete_path(typed: str) -> Iterator[str]:
    """Complete a path: folders end with the separator; names that cannot be printed are left out."""
    folder, name = os.path.split(typed)
    try:
        place = expand_home(folder) if folder else Path()
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)[: 1 << 14]
    except (OSError, ValueError, RequestError):
        return
    count = 0
    for entry in entries:
        is_wanted = entry.name.startswith(name) and entry.name.isprintable()
        if is_wanted and (name.startswith(".") or not entry.name.startswith(".")) and count < _MOST_CANDIDATES:
            count += 1
            try:
                end = os.sep if entry.is_dir() else ""
            except OSError:
                end = ""
            yield os.path.join(folder, entry.name) + end


def read_text(path: str, *, most_bytes: int) -> str:
    """The text of a file. Raises: RequestError for what is no file of UTF-8 text of at most so many bytes."""
    try:
        file = expand_home(path)
        if not file.is_file():
            found = "a folder" if file.is_dir() else "no file" if file.exists() else "not there"
            raise RequestError(f"{path} is {found}; give the path of a text file")
        size = file.stat().st_size
        if size > most_bytes:
            raise RequestError(f"{path} has {size:,} bytes, more than {most_bytes:,} can be of use; give a part of it")
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not text in UTF-8; convert it first") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if "\0" in text or half_character(text) is not None:
        raise RequestError(f"{path} is not text: it has NUL bytes; convert it first")
    return text.replace("\r\n", "\n")
