"""Members of a chat request about tools and reasoning."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.server.replies.constraint_fields import ConstraintFields

Tools = Annotated[list[dict[str, Any]], Meta(max_length=256)]
Variables = Annotated[dict[str, Any], Meta(max_length=64)]


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether a model reasons first, and for how many tokens at most. display: reasoning is told as it is."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] = "enabled"
    budget_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    display: Literal["summarized"] | None = None


class ReplyFields(ConstraintFields):
    """Sampling, form, and how the model may reason."""

    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    thinking_budget: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    reasoning_effort: str | None = None

    def reply_options(self) -> dict[str, Any]:
        """The engine's options for reasoning and form."""
        variables = dict(self.chat_template_kwargs or {})
        thinks = variables.pop("enable_thinking", None)
        options: dict[str, Any] = {"constraint": self.constraint()}
        options["thinking"] = self.enable_thinking if self.enable_thinking is not None else thinks
        budget = self.thinking_budget
        if self.thinking is not None:
            options["thinking"] = self.thinking.type != "disabled"
            budget = self.thinking.budget_tokens if budget is None else budget
        if self.reasoning_effort in ("none", "minimal"):
            options["thinking"] = False
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if budget is not None and budget >= 0:
            options["thinking_budget"] = budget
        if variables:
            options["template_variables"] = variables
        return {name: value for name, value in options.items() if value is not None}
