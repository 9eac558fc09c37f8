"""How long a model stays loaded: Ollama's `keep_alive`, as a number of seconds or a text such as 5m."""

import math
import re

from localinfer.apps.server.transport.http import ApiError

KeepAlive = float | str
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_PART = re.compile(rf"(?P<number>{_NUMBER})(?P<unit>{'|'.join(_UNITS)})", re.ASCII)
_DURATION = re.compile(rf"(?P<sign>[-+]?)(?P<parts>(?:{_NUMBER}(?:{'|'.join(_UNITS)}))+|{_NUMBER})", re.ASCII)
_LONGEST_TEXT = 40


def keep_alive_seconds(value: KeepAlive) -> float | None:
    """The seconds of a duration; None, for ever, if it is negative. Raises: ApiError for what is none.

    Numbers without a unit are seconds, also as text, which Ollama's own server refuses.
    """
    seconds = float(value) if isinstance(value, int | float) else _seconds_of(value)
    if seconds is None or math.isnan(seconds):
        raise ApiError(
            400,
            f'keep_alive is {value!r:.60}; give seconds, or a duration such as "5m", "1h30m" or "500ms"; 0 unloads '
            "the model, a negative one keeps it",
            param="keep_alive",
        )
    return None if seconds < 0 or math.isinf(seconds) else seconds


def _seconds_of(text: str) -> float | None:
    found = _DURATION.fullmatch(text.strip()) if len(text) <= _LONGEST_TEXT else None
    if found is None:
        return None
    parts = found["parts"]
    seconds = sum(float(part["number"]) * _UNITS[part["unit"]] for part in _PART.finditer(parts))
    if _PART.match(parts) is None:
        seconds = float(parts)
    return -seconds if found["sign"] == "-" else seconds
