"""Texts for calibration and evaluation: the bundled ones, or the user's files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localinfer.errors import RequestError

_HELD_BACK = 10
"""One part in so many of every user file is held back for evaluation."""
_SUFFIXES = (".txt", ".md")
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


@dataclass(frozen=True)
class CalibrationText:
    """A text for calibration."""

    name: str
    text: str
    held_back: str
    """The rest of the files, for evaluation; "" for the bundled text."""


def evaluation_text(path: str | os.PathLike[str] | None = None) -> str:
    """Read an evaluation text; None: the bundled one, which is not in the bundled calibration text.

    Raises: RequestError if the file cannot be read or is not UTF-8.
    """
    return read_text(Path(__file__).parent / "evaluation.txt" if path is None else path)


def read_calibration(path: str | os.PathLike[str] | None = None) -> CalibrationText:
    """Read a file, or every .txt and .md file directly in a folder; None: the bundled text.

    Raises: RequestError if there is no text, or a file cannot be read or is not UTF-8.
    """
    if path is None:
        shipped = Path(__file__).parent / "calibration.txt"
        return CalibrationText("localinfer's own text", shipped.read_text(encoding="utf-8"), "")
    place = Path(path)
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix.lower() in _SUFFIXES and file.is_file())
    texts = [read_text(file) for file in files]
    if not any(text.strip() for text in texts):
        raise RequestError(f"{place} has no text; wanted a text file, or a folder of {' and '.join(_SUFFIXES)} files")
    cuts = [_cut(text) for text in texts]
    text = "\n\n".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    held_back = "\n\n".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    return CalibrationText(str(place), text, held_back)


def _cut(text: str) -> int:
    """The start of the held-back part: after a line, near nine tenths."""
    wanted = len(text) - len(text) // _HELD_BACK
    return text.rfind("\n", 0, wanted) + 1 or wanted


def picture_files(paths: Sequence[str]) -> list[Path]:
    """Files, and the pictures directly in folders, by name. Raises: RequestError if a folder has none."""
    found: list[Path] = []
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in _PICTURES and file.is_file())
        if not files:
            raise RequestError(f"{path} has no pictures; wanted a folder with {', '.join(_PICTURES)} files, or files")
        found += files
    return found


def read_text(file: str | os.PathLike[str], *, option: str = "", encoding: str = "utf-8") -> str:
    """Read a file of text. option: begins the message if there is no such file.

    Raises: RequestError if the file cannot be read or is not UTF-8.
    """
    try:
        return Path(file).read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); convert the text") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{option}{file} cannot be read: {reason}; check the path") from None
