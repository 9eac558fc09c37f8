"""The conversations of a fleet's long run: scripts of two tokens, whose texts name whose they are."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

USERS = ("alice", "bob")
LIMIT = 10
"""Requests a minute of a third token."""
OPERATOR = "sk-operator"
TOKEN_FILE = f"alice: sk-alice\nbob: sk-bob\ncarl: sk-carl [requests_per_minute={LIMIT}]\n"
_SYSTEM = "You tell long stories of animals and of their friends, in simple words that a child can read. " * 6
_ANIMALS = ("dog", "cat", "bird", "bear", "fox", "frog", "duck", "mouse", "horse", "fish")
_PLACES = ("garden", "forest", "house", "lake", "park", "farm")
_MOST_TOKENS = 120


@dataclass(frozen=True)
class Script:
    """A conversation. name: each its own. messages: of the user, one a turn."""

    name: str
    user: str
    seed: int
    system: str
    messages: tuple[str, ...]

    @property
    def turns(self) -> int:
        """How many replies it has."""
        return len(self.messages)

    def body(self, turn: int, replies: Sequence[str]) -> dict[str, Any]:
        """The request of a turn, after as many replies."""
        messages = [{"role": "system", "content": self.system}]
        for index in range(turn + 1):
            messages.append({"role": "user", "content": self.messages[index]})
            if index < turn:
                messages.append({"role": "assistant", "content": replies[index]})
        return {
            "messages": messages,
            "max_tokens": _MOST_TOKENS,
            "temperature": 0.9,
            "seed": self.seed + turn,
            "ignore_eos": True,
        }


def make_scripts(seed: int, count: int) -> list[Script]:
    """So many scripts, of one token and the other in turn."""
    numbers = random.Random(f"scripts {seed}")
    scripts = []
    for number in range(count):
        user = USERS[number % len(USERS)]
        turns = numbers.randint(3, 5)
        messages = tuple(
            f"Tell of a {numbers.choice(_ANIMALS)} and a {numbers.choice(_ANIMALS)} in the {numbers.choice(_PLACES)}."
            for _ in range(turns)
        )
        system = f"The secret-{user} {number} is {numbers.random()}. {_SYSTEM}"
        scripts.append(Script(f"{user} {number}", user, 1000 * number, system, messages))
    return scripts


def guess_of(script: Script, *, is_right: bool) -> dict[str, Any]:
    """What another asks to learn whether a script's beginning was sent; is_right: or something as long that was not."""
    system = script.system if is_right else script.system.replace("secret", "sacred")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": script.messages[0]}]
    return {"messages": messages, "max_tokens": 1}
