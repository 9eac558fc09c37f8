"""The operations of a simulation, and what is drawn of them next."""

import random
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.proof.simulation.world import World


class Operation(NamedTuple):
    """What is done: its number in the run, its name, which caller or text is meant (by the number of the operation
    that it began with), and a number to draw the rest from."""

    index: int
    name: str
    target: int
    number: int


WEIGHTS: dict[str, float] = {
    "complete": 40,
    "branch": 25,
    "score": 3,
    "read": 900,
    "cancel": 5,
    "close": 8,
    "beams": 1.5,
    "embed": 1,
    "clear": 0.7,
    "forget": 2,
    "evict": 3,
    "jump": 2,
    "fault": 2,
    "mend": 3,
    "interrupt": 6,
    "restart": 1.2,
    "write": 40,
    "save": 2,
    "load": 3,
    "spoil": 4,
}
_NAMES, _SUMS = list(WEIGHTS), list(accumulate(WEIGHTS.values()))


def draw_operation(world: "World", index: int, chooser: random.Random) -> Operation:
    """What comes next, if nothing of it is left out."""
    name = chooser.choices(_NAMES, cum_weights=_SUMS)[0]
    if name in ("read", "cancel", "close", "interrupt"):
        if not world.callers:
            name = "complete"
            target = -1
        else:
            numbers = list(world.callers)
            target = chooser.choice(numbers)
            if name == "read" and world.callers[target].is_slow and chooser.random() < 0.8:
                target = chooser.choice(numbers)
    elif name in ("branch", "forget", "save"):
        target = chooser.choice(list(world.texts)) if world.texts else -1
    else:
        target = -1
    return Operation(index, name, target, chooser.getrandbits(48))
