"""Options of a chat's reply, beside those of any completion, and the choice of tools that the model may call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from localinfer.arguments import shown
from localinfer.errors import RequestError
from localinfer.generation.chat.messages import Tool

ToolChoice = Literal["auto", "none", "required", "any"] | Mapping[str, Any]
"""auto: the model decides. none: it may not call. required, any: it has to. {"type": "function", "function": {"name":
...}}: it has to call that one, once; the name may stand beside the type, which may be "tool". {"type": "allowed_tools",
"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}: it may call these, or has to; mode and tools may stand
beside the type."""

_WAYS = (
    """give 'auto', 'none', 'required', {"type": "function", "function": {"name": ...}} with the name of a tool, or """
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
)


@dataclass(frozen=True)
class ChosenTools:
    """The tools that may be called: none, where none may. must_call: one has to be. is_single: only once."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    is_single: bool = False


def choose_tools(tools: tuple[Tool, ...], choice: ToolChoice | None) -> ChosenTools:
    """What a choice means with these tools. Raises: RequestError for a choice that is none, or of unknown tools."""
    kind: object = choice if isinstance(choice, str) else None
    if isinstance(choice, Mapping):
        kind = _word(choice.get("type"))
        if kind in ("function", "tool") or "function" in choice:
            return ChosenTools((_named(choice, tools, choice),), must_call=True, is_single=True)
        if kind == "allowed_tools":
            return _allowed(choice, tools)
    match kind:
        case None if choice is None:
            return ChosenTools(tools)
        case "auto":
            return ChosenTools(tools)
        case "none":
            return ChosenTools(())
        case "required" | "any":
            return ChosenTools(_some(tools, kind), must_call=True)
    raise RequestError(f"tool_choice is {shown(choice)}; {_WAYS}")


def _allowed(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> ChosenTools:
    given = choice.get("allowed_tools", choice)
    allowed = given.get("tools") if isinstance(given, Mapping) else None
    mode = _word(given.get("mode", "auto")) if isinstance(given, Mapping) else None
    if not isinstance(allowed, Sequence) or isinstance(allowed, str | bytes) or mode not in ("auto", "required"):
        raise RequestError(f"tool_choice is {shown(choice)}; give allowed_tools a mode, auto or required, and tools")
    named = [_named(one, tools, choice) for one in allowed]
    found = tuple(tool for tool in tools if tool in named)
    return ChosenTools(_some(found, mode) if mode == "required" else found, must_call=mode == "required")


def _word(value: object) -> str | None:
    """A text; None for anything else, which may not even compare with one."""
    return value if isinstance(value, str) else None


def _some(tools: tuple[Tool, ...], choice: object) -> tuple[Tool, ...]:
    if not tools:
        raise RequestError(f"tool_choice is {choice!r}, but there are no tools; give some, or leave it out")
    return tools


def _named(one: object, tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> Tool:
    """The tool that a choice names, with or without a wrapper."""
    function = one.get("function", one) if isinstance(one, Mapping) else None
    name = _word(function.get("name")) if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools) or "none"
    raise RequestError(f"tool_choice is {choice!r:.80}; {_WAYS} (there are: {known})")


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
