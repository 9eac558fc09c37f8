"""Checks of model files: what each found is a `Finding`."""

from collections.abc import Iterable

from localinfer.types import Record

_SHOWN = 3


class Finding(Record):
    """Something about a model that is likely wrong."""

    check: str
    """Name of the check, for programs."""
    message: str
    """One line without a full stop: what was found, what was wanted, and the way out."""
    is_error: bool = False
    """The model cannot work so, and is refused unless its caller wants it all the same."""


def shortened(findings: Iterable[Finding]) -> list[Finding]:
    """The first of each check, and how many others there are: a model has some hundred tensors that may be alike."""
    kinds: dict[tuple[str, bool], list[Finding]] = {}
    for one in findings:
        kinds.setdefault((one.check, one.is_error), []).append(one)
    found: list[Finding] = []
    for (check, is_error), members in kinds.items():
        found += members[: _SHOWN if len(members) > _SHOWN + 1 else None]
        left = len(members) - _SHOWN
        if left > 1:
            last = members[-1].message.split(" ", 1)[0]
            found.append(
                Finding(check, f"{left} more tensors are so too, the last {last}; see the lines above", is_error)
            )
    return found
