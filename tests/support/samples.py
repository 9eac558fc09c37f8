"""Which cases of a long table a run of the tests tries: some of each class, or with `CASES=all` every one."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case")

ALL = os.environ.get("CASES") == "all"


def one_of_each(cases: Iterable[Case], kind: Callable[[Case], Hashable]) -> list[Case]:
    """The first case of each kind."""
    found = list(cases)
    return found if ALL else list({kind(case): case for case in reversed(found)}.values())[::-1]


def by_turns(cases: Sequence[Case], turn: int, num_turns: int) -> list[Case]:
    """The cases whose turn it is, so that neighbours of a table, with the next turn each, try all between them."""
    return list(cases) if ALL else list(cases[turn % num_turns :: num_turns])
