"""The options of `localinfer serve` for agents: programs that send a long conversation again with every request."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localinfer.cli.options import Command, flag, options_group

if TYPE_CHECKING:
    from localinfer.llm import LLM


@dataclass(frozen=True)
class AgentOptions:
    """What the options below were given."""

    move_volatile_head: bool = False

    def prepared(self, llm: "LLM") -> "LLM":
        """A loaded model that follows them."""
        if self.move_volatile_head and "chat" in llm.capabilities:
            llm.move_volatile_heads()
        return llm


_NAMES = tuple(AgentOptions.__dataclass_fields__)


def _gather(command: Command) -> Command:
    """Pass the options on as `agents`."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        return command(agents=AgentOptions(**{name: values.pop(name) for name in _NAMES}), **values)

    return call


agent_options = options_group(
    flag(
        "--move-volatile-head",
        "Give models lines of system messages that vary, such as the date, behind the rest, which stays cached. "
        "Replies differ.",
    ),
    _gather,
)
