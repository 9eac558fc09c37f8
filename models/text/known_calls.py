"""Formats of tool calls that no chat template shows, or not as models write them."""

from dataclasses import replace
from typing import Any

from localinfer.models.text.reply_format import CallFormat, ParameterFormat, ValueNotation

HERMES = CallFormat(
    opening="",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    closing="",
    is_native=False,
    describes_tools=False,
)
"""What most models have at least seen, for templates without tools."""

_LFM2 = CallFormat(
    opening="<|tool_call_start|>[",
    begin="",
    middle="(",
    end=")",
    separator=", ",
    closing="]<|tool_call_end|>",
    is_native=False,
    parameters=ParameterFormat(
        assign="=",
        value_end="",
        following=", ",
        empty="()",
        notation=ValueNotation(quotes=('"', "'"), has_bare_keys=False),
    ),
)
_LIST = CallFormat(
    opening="<|tool_call|>[",
    begin='{"name": "',
    middle='", "arguments": ',
    end="}",
    separator=", ",
    closing="]",
    is_native=False,
)
KNOWN_CALLS = {
    # Granite 3
    "respond only with <|tool_call|> followed by a JSON list": _LIST,
    # Phi-4-mini
    "<|tool|>": replace(_LIST, closing="]<|/tool_call|>"),
    # LFM2, whose later templates only name the list
    "<|tool_list_start|>": _LFM2,
    '"List of tools: ["': _LFM2,
    # SmolLM3, which describes tools that it is given by a name of its own
    "xml_tools": replace(HERMES, describes_tools=True),
}
"""By a text of a template that describes tools, but writes no calls: how the model calls them."""

AS_MODELS_WRITE: dict[str, dict[str, Any]] = {
    # Llama 3
    '{"name": "': {"other_begins": ('{"type": "function", "name": "', '<|python_tag|>{"name": "')},
    # Harmony: templates put the recipient before the channel, models behind it
    # (github.com/openai/harmony, docs/format.md)
    "to=functions.": {
        "begin": "<|channel|>commentary to=functions.",
        "middle": " <|constrain|>json<|message|>",
        "other_begins": ("to=functions.",),
        "name_end": "<|message|>",
    },
}
"""By what a template writes before the name of the first call: what differs in replies."""

ID_FORMS = ("functions.{name}:{number}",)
"""Ids of calls that hold the name, for templates that write nothing else of it (Kimi K2)."""
