"""Whose requests are: what fairness and the limits of one owner go by."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Owner:
    """An owner with a limit; anything hashable is one without.

    key: what owners differ by. max_running: how many of its texts may share steps at once, None for as many as may.
    """

    key: Hashable
    max_running: int | None = field(default=None, compare=False)


def may_run(owner: Hashable, num_running: int) -> bool:
    """Whether one more text of an owner may run beside so many of its own."""
    return not isinstance(owner, Owner) or owner.max_running is None or num_running < owner.max_running
