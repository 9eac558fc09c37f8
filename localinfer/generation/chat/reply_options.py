"""What a caller may ask of a reply in a chat, beside what any completion takes."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from localinfer.generation.chat.tool_choice import ToolChoice


class ReplyOptions(TypedDict, total=False):
    """Keyword options of `chat` and `stream_chat` beside those of `complete`.

    tools: functions that the model may call, in OpenAI's shape: {"type": "function", "function": {"name",
        "description", "parameters", "strict"}}. Their calls come back in `tool_calls`, with arguments that their schema
        accepts. Where a part of a schema cannot be enforced, `"strict": true` makes that a ConstraintError naming the
        keyword; of any other tool that part is left out, and `Stats.notices` names it.
    tool_choice: "auto" (the default), "none", "required", {"type": "function", "function": {"name": ...}} for one call
        of that one, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}. The prompt
        describes all tools whatever is chosen, so that it stays the one that is cached.
    parallel_tool_calls: whether one reply may have several calls; yes by default, where the template can write them.
    thinking: whether the model reasons before it answers; None, the default, leaves that to its template.
    thinking_budget: most tokens of reasoning; then it is closed, and the answer follows. None sets no limit.
    template_variables: more variables for the chat template, by name. `template_date` among them, "today" or a day such
        as "2026-10-01", is the date that the template writes if it writes one; its own by default.
    continue_final_message: the last message is a reply that was cut short, which is continued where it ends; the
        completion has only what is new. Its `reasoning_content` counts too. Not with a constraint.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    thinking: bool | None
    thinking_budget: int | None
    template_variables: Mapping[str, Any]
    continue_final_message: bool
