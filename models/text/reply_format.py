"""Formats of tool calls and reasoning: the text that a model writes around them.

`reply_learning` learns these from a chat template, and has a table of those that no template writes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

CALL_ID, CALL_NUMBER, CALL_NAME, PARAMETER_NAME, TYPE_NAME = map(chr, range(0xE000, 0xE005))
"""Stand in a format's texts for what differs from call to call: the call's id, its number, its name (where that comes
twice), the name of a parameter (where that comes behind its value too) and the JSON type of a value."""

_MARKER = re.compile(r"""<[^<>\s{]+>|<[A-Za-z][\w:.-]*(?:=|\s+\w+=")|\[[A-Z_/]+\]|[^\s\w{\["'<]\S*""")
_LATE_MARKER = re.compile(r"<[A-Za-z|｜]")


class RenderableTemplate(Protocol):
    """Renderer of chats, such as `chat_template.ChatTemplate`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ValueNotation:
    """Notation of values that are neither plain text nor JSON."""

    quotes: tuple[str, ...]
    """Texts around strings; the model writes the first, and may write any."""
    has_bare_keys: bool
    """Names in objects stand without quotes."""
    item: str = ", "
    """Text between items."""
    key: str = ": "
    """Text between a name and its value."""

    @property
    def is_json(self) -> bool:
        """Return whether values may be written as JSON: single quotes are all that differs."""
        return '"' in self.quotes and not self.has_bare_keys


@dataclass(frozen=True, kw_only=True)
class ParameterFormat:
    """The text around the parameters of a call: `name assign value value_end`, joined by `following`.

    Without a notation, values that are strings stand as they are, all others as JSON. json_assign: stands for `assign`
    before what is no string, where that differs. empty: what stands behind the name of a call without parameters, its
    end included. value_end may hold PARAMETER_NAME, json_assign TYPE_NAME.
    """

    assign: str
    value_end: str
    following: str
    empty: str
    json_assign: str | None = None
    notation: ValueNotation | None = None

    @property
    def value_marker(self) -> str:
        """Text that ends a value, and is in none: `value_end` without the white space before it."""
        return self.value_end.lstrip()

    def named(self, text: str, name: str) -> str:
        """One of the format's texts for a parameter of this name."""
        return text.replace(PARAMETER_NAME, name)


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The text around calls: `begin name middle arguments end`, joined by `separator`, in `opening` and `closing`."""

    opening: str
    begin: str
    middle: str
    end: str
    separator: str | None
    """None where a reply can have but one call."""
    closing: str
    arguments_as_text: bool = False
    """The template expects the arguments of former calls as JSON text, not as an object."""
    is_native: bool = True
    """The template writes calls itself."""
    describes_tools: bool = True
    """The template describes tools itself."""
    parameters: ParameterFormat | None = None
    """Format of arguments that stand one by one; None where they are one JSON object."""
    allows_content: bool = True
    """The template writes calls in messages with content too, not only where it is None."""
    id_form: str | None = None
    """Form of {name} and {number} that a template which writes only ids expects of a call's id."""
    holds_results: bool = False
    """The template reads results of calls in the message that made them, as `tool_responses`, and knows no messages
    of their own."""
    reads_tools: bool = False
    """The template describes the tools that a system message holds as `tools`, in JSON text."""
    other_begins: tuple[str, ...] = ()
    """Texts that may also stand for `opening begin`."""
    name_end: str = ""
    """End of the text between name and arguments, where the model may write more than `middle`."""

    @property
    def texts(self) -> list[str]:
        """All that the format itself writes."""
        texts = [self.opening, self.begin, self.middle, self.end, self.separator or "", self.closing, self.name_end]
        texts += self.other_begins
        form = self.parameters
        if form is not None:
            texts += [form.assign, form.value_end, form.following, form.empty, form.json_assign or ""]
            texts += () if form.notation is None else form.notation.quotes
        return texts

    def for_tool(self, name: str) -> "CallFormat":
        """The format of calls to one tool, where its name comes twice."""
        if CALL_NAME not in self.middle:
            return self
        form = self.parameters
        parameters = None if form is None else replace(form, empty=form.empty.replace(CALL_NAME, name))
        return replace(self, middle=self.middle.replace(CALL_NAME, name), parameters=parameters)

    @property
    def late_begins(self) -> tuple[str, ...]:
        """Texts that begin a call of models which leave out the first markers of `opening begin`."""
        whole = self.opening + self.begin
        positions = [found.start() for found in _LATE_MARKER.finditer(whole) if found.start() > 0]
        return (
            tuple(whole[position:] for position in positions if first_marker(whole[position:])) if self.trigger else ()
        )

    @property
    def trigger(self) -> str:
        """Marker that no other text of a reply has, so that it always begins a call; "" where only the beginning
        of the reply tells calls from text."""
        return first_marker(self.opening + self.begin)


def first_marker(text: str) -> str:
    """The marker that a text of a format begins with, "" if it begins with none."""
    found = _MARKER.match(text)
    return "" if found is None else found[0]


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning, without white space; closing: the end marker as the template writes it.

    Where reasoning, answer and calls are messages of their own: following is what stands between two of them,
    answer_begin and answer_end stand around an answer, other_answers are what may also begin one. member: of a message,
    in which the template looks for the reasoning.
    """

    begin: str
    end: str
    closing: str
    following: str = ""
    answer_begin: str = ""
    answer_end: str = ""
    other_answers: tuple[str, ...] = ()
    member: str = "reasoning_content"

    @property
    def texts(self) -> list[str]:
        """All that the format itself writes."""
        return [self.begin, self.end, *self.frame]

    @property
    def frame(self) -> list[str]:
        """Texts around answers, which are no part of them."""
        texts = (self.following, self.answer_begin, self.answer_end, *self.other_answers)
        return [self.end + self.following] * bool(self.following) + [text for text in texts if text]

    def is_open(self, prompt: str) -> bool:
        """Return whether a prompt ends inside the reasoning, so that the reply begins with it."""
        return prompt.rstrip().endswith(self.begin.rstrip())

    def is_closed(self, prompt: str) -> bool:
        """Return whether a prompt ends behind the reasoning, so that the reply has none."""
        return prompt.rstrip().endswith(self.end)


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
"""Format that most models have at least seen, for templates without tools."""

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
"""Formats of calls, by a text of a template that describes tools, but writes no calls."""

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
"""Differences in replies, by the template's text before the name of the first call."""

ID_FORMS = ("functions.{name}:{number}",)
"""Ids of calls that hold the name, for templates that write nothing else of it (Kimi K2)."""
