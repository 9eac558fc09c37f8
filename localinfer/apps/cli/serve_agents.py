"""The options of `localinfer serve` for agents: programs that send a long conversation again with every request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localinfer.apps.cli.options import flag, options_group_of

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


agent_options = options_group_of(
    AgentOptions,
    "agents",
    flag(
        "--move-volatile-head",
        "Give models lines of system messages that vary, such as the date, behind the rest, which stays cached. "
        "Replies differ.",
    ),
)
