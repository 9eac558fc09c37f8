"""What one token may ask for: by the minute, at one time, and how urgently."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

from localinfer.arguments import MAX_PRIORITY, check_number
from localinfer.errors import RequestError

_MOST = 10**12
_LEAST: Mapping[str, int] = MappingProxyType({"max_queued": 0, "min_priority": -MAX_PRIORITY})
_LIMIT = re.compile(r"(?P<name>[A-Za-z_-]+)=(?P<value>.*)")
_HOW = "write NAME: TOKEN LIMIT=NUMBER LIMIT=NUMBER"


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


def read_quota(words: Sequence[str]) -> Quota:
    """The limits behind a token on its line: `max_running=2 tokens_per_minute=5000`, in square brackets or without.

    Raises: RequestError for what is no limit.
    """
    written = " ".join(words)
    if written.startswith("[") and written.endswith("]"):
        written = written[1:-1]
    if "#" in written:
        raise RequestError("a comment stands behind the token; give it a line of its own, which begins with #")
    if "[" in written or "]" in written:
        raise RequestError(
            f"a bracket of the limits is missing, or one too many; {_HOW}, with [...] around all or none"
        )
    names = [field.name for field in fields(Quota)]
    limits: dict[str, int] = {}
    for item in written.replace(",", " ").split():
        found = _LIMIT.fullmatch(item)
        if found is None and not limits:
            raise RequestError(
                "there is white space in the token or its name, which neither may hold; "
                f"{_HOW}, and names of letters, digits and _ . @ -"
            )
        name = "" if found is None else found["name"].replace("-", "_")
        if found is None or name not in names or name in limits or not re.fullmatch(r"-?\d{1,12}", found["value"]):
            # What is no name of a limit may be a part of a token.
            shown = item if name in names else f"{name:.32}=..."
            raise RequestError(
                f"{shown!r:.80} is no limit of a token; write NAME=NUMBER, each once, of: {', '.join(names)}"
            )
        limits[name] = int(found["value"])
    return Quota(**limits)


def looks_like_a_limit(word: str) -> bool:
    """Whether a word where the token should stand holds a limit, or the brackets of one."""
    names = "|".join(field.name for field in fields(Quota))
    return re.search(rf"^\[|\[[A-Za-z_]*=|(?:^|[,;(])(?:{names})=", word.replace("-", "_")) is not None
