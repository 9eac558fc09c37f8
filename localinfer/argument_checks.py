"""Checks of the kinds of arguments that several parts of the public API take; each error names the argument."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.user_folders import expand_home


def check_flag(name: str, value: object) -> bool:
    """Return a yes or no; None is a no. Raises: RequestError."""
    if value is None:
        return False
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise RequestError(f"{name} is {shown(value)}; give True or False", field=name)


def check_whole(name: str, value: object, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`. Raises: RequestError."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or not least <= int(value) <= most:  # type: ignore[call-overload]
        raise RequestError(f"{name} is {shown(value)}; it must be a whole number from {least} to {most}", field=name)
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_hashable(name: str, value: object) -> None:
    """Raise RequestError for what cannot be a key."""
    try:
        hash(value)
    except Exception:
        raise RequestError(
            f"{name} is {shown(value)}; give something hashable, such as a number or a text", field=name
        ) from None


def check_callable(name: str, value: Callable[..., Any] | None) -> None:
    """Raise RequestError for what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise RequestError(f"{name} is {shown(value)}; give a function, or None")


def shown(value: object) -> str:
    """A value as an error shows it: short, and in characters that every terminal can print."""
    try:
        text = ascii(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_path(name: str, value: object, instead: str = "") -> Path:
    """Return what names a file or a folder; instead: what else may be given, for the error. Raises: RequestError."""
    try:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
        if isinstance(text, str) and text and "\0" not in text:
            os.fsencode(text)
            return expand_home(text)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise RequestError(f"{name} is {shown(value)}; give the path of a file or folder as text{instead}")
