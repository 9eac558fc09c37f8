"""What one token may ask for: by the minute, at one time, and how urgently."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from localinfer.arguments import MAX_PRIORITY, check_number
from localinfer.errors import RequestError

_MOST = 10**12
_LEAST: Mapping[str, int] = MappingProxyType({"max_queued": 0, "min_priority": -MAX_PRIORITY})
_WRITTEN = re.compile(r"(?P<before>.*\S)\s+\[(?P<quota>[^\[\]]*)\]")


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits of one token, or of each that has none of its own; None where there is none.

    requests_per_minute, tokens_per_minute: that it asks for; tokens are those read and generated. max_running: texts
    that are generated at one time, by each model. max_queued: texts that may wait for that. min_priority: the most
    urgent that it may ask for, and what it gets where it asks for none and the number is above 0.
    Raises: RequestError naming the limit.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_running: int | None = None
    max_queued: int | None = None
    min_priority: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name = field.name
            most = MAX_PRIORITY if name == "min_priority" else _MOST
            check_number(name, getattr(self, name), _LEAST.get(name, 1), most, none="for no limit")

    def over(self, other: "Quota") -> "Quota":
        """These limits, and another's where there is none."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return Quota(**{name: getattr(other, name) if value is None else value for name, value in given.items()})


def split_quota(line: str) -> tuple[str, Quota]:
    """A line of a token file without its quota, and that: `NAME: TOKEN [max_running=2 tokens_per_minute=5000]`.

    Raises: RequestError for what is no limit.
    """
    found = _WRITTEN.fullmatch(line)
    if found is None:
        return line, Quota()
    names = [field.name for field in fields(Quota)]
    limits: dict[str, int] = {}
    for item in found["quota"].replace(",", " ").split():
        name, _, value = item.partition("=")
        name = name.replace("-", "_")
        if name not in names or name in limits or not re.fullmatch(r"-?\d{1,12}", value):
            raise RequestError(
                f"{item!r:.80} is no limit of a token; write NAME=NUMBER, each once, of: {', '.join(names)}"
            )
        limits[name] = int(value)
    return found["before"], Quota(**limits)
