"""What a folder of the cache is of: one file in it that says so, for people and for explanations.

It is believed in nothing: pages are found and proven without it.
"""

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from localinfer.files import read_bounded, write_all, write_atomically

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 16
_MAX_PAGE_SIZE = 1 << 40


class Description(TypedDict):
    """A model's name, the parts of its fingerprint by name, and the tokens and bytes of a page."""

    model: str
    parts: dict[str, str]
    page_tokens: int
    page_bytes: int


def describe_folder(path: Path, description: Description) -> None:
    """Write what a folder is of, unless it says so already. A disk that refuses costs an explanation only."""
    try:
        if read_description(path)["parts"] == description["parts"]:
            return
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.info("%s is written anew: %s", path, error)
    text = json.dumps(description, indent=1).encode()
    with contextlib.suppress(OSError):
        write_atomically(path, lambda file: write_all(file, text))


def read_description(path: Path) -> Description:
    """Read what a folder is of, which anybody may have written. Raises: OSError, ValueError."""
    try:
        fields = json.loads(read_bounded(path, _MAX_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(fields, dict):
        raise ValueError("it is no object")
    model, parts = fields.get("model"), fields.get("parts")
    if not isinstance(model, str) or not isinstance(parts, dict):
        raise ValueError("it names no model, or no parts")
    if not all(isinstance(value, str) for value in parts.values()):
        raise ValueError("a part is no text")
    page_tokens, page_bytes = _size(fields.get("page_tokens")), _size(fields.get("page_bytes"))
    return Description(model=model, parts=parts, page_tokens=page_tokens, page_bytes=page_bytes)


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_PAGE_SIZE:
        raise ValueError("a page has an impossible size")
    return value


def describe_differences(stored: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Which parts of two fingerprints differ, in words."""
    names = [name for name in {**ours, **stored} if stored.get(name) != ours.get(name)]
    return f"it was stored with different {', '.join(names)}"
