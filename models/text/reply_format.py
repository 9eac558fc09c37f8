"""How a model writes tool calls and sets its reasoning apart, learned from its own chat template.

Calls with names and arguments that occur nowhere else are rendered; what stands around these is the format. So most
families need no code of their own: `<tool_call>` around JSON (Hermes, Qwen), bare JSON with "parameters" (Llama 3),
`[TOOL_CALLS]` before a list (Mistral), a name between markers (DeepSeek), parameters one by one (Qwen3-Coder, GLM).
Likewise the markers around a reasoning and an answer that occur nowhere else.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any, Protocol

from localinfer.errors import TemplateError
from localinfer.models.text.splitting import SpellingFinder

_NAMES = ("zqxfirst", "zqxsecond")
_VALUES = ("zqxvalue", "zqxother")
_KEY, _LAST_KEY, _LAST_VALUE = "zqxkey", "zqxlast", "zqxfinal"
_NUMBER = 90817263
_THOUGHT, _ANSWER = "zqxthought", "zqxanswer"
# Mistral's templates insist on nine letters and digits.
_IDS = ("zqxid0001", "zqxid0002")
_ASK: dict[str, str] = {"role": "user", "content": "zqxask"}
_ID_FIELD = re.compile(rf',\s*"\w+":\s*"{_IDS[0][:-1]}\d"|"\w+":\s*"{_IDS[0][:-1]}\d",\s*')
_MARKER = re.compile(r"<[^<>\s{{]+>|\[[A-Z_/]+\]|[^\s\w{{\[\"'<]\S*")

_WHOLE_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_CUT_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")


class Template(Protocol):
    """What renders chats; `chat_template.ChatTemplate` does."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ParameterFormat:
    """The text around the parameters of a call: `name assign value value_end`, joined by `following`.

    Values that are strings stand as they are, all others as JSON. empty: what stands behind the name of a call without
    parameters, its end included.
    """

    assign: str
    value_end: str
    following: str
    empty: str

    @property
    def value_marker(self) -> str:
        """What ends a value, and is in none: `value_end` without the white space before it."""
        return self.value_end.lstrip()


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The text around calls: `begin name middle arguments end`, joined by `separator`, in `opening` and `closing`.

    separator: None where a reply can have but one call. arguments_as_text: the template expects the arguments of former
    calls as JSON text, not as an object. is_native: the template describes tools and writes calls itself. parameters:
    how arguments are written that stand one by one; None where they are one JSON object.
    """

    opening: str
    begin: str
    middle: str
    end: str
    separator: str | None
    closing: str
    arguments_as_text: bool = False
    is_native: bool = True
    parameters: ParameterFormat | None = None

    @property
    def texts(self) -> list[str]:
        """All that the format itself writes."""
        texts = [self.opening, self.begin, self.middle, self.end, self.separator or "", self.closing]
        form = self.parameters
        return texts if form is None else [*texts, form.assign, form.value_end, form.following, form.empty]

    @property
    def trigger(self) -> str:
        """What no other text of a reply has, so that a call begins wherever it stands; "" where only the beginning
        of the reply tells calls from text."""
        found = _MARKER.match(self.opening + self.begin)
        return "" if found is None else found[0]


HERMES = CallFormat(
    opening="",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    closing="",
    is_native=False,
)
"""What most models have at least seen, for templates without tools."""


def learn_call_format(template: Template, ends: SpellingFinder, *, after: str | None = None) -> CallFormat:
    """Learn the format of a template.

    ends: spellings of the tokens that end a reply. after: the marker that ends reasoning, which may stand before calls.

    Returns HERMES, which is not native, where the template ignores tools, or writes calls in no way known here.
    """
    tool = {"name": _NAMES[0], "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        shown = template.render([_ASK], tools=[{"type": "function", "function": tool}])
    except TemplateError:
        return HERMES
    if _NAMES[0] not in shown:
        return HERMES
    for as_text in (False, True):
        render = partial(_rendered, template, as_text)
        first, second = ({_KEY: value} for value in _VALUES)
        one = render(first)
        if one is not None:
            try:
                prompt = template.render([_ASK])
            except TemplateError:
                prompt = ""
            parameters = None
            if _find_arguments(one, one.index(_NAMES[0]), 0, None) is None:
                parameters = _learn_parameter_format(render, _NAMES[0], _VALUES[0])
            found = _format(one, render(first, second), prompt, ends, after, as_text, parameters)
            if found is not None:
                return found
    return HERMES


def _reply_start(text: str, prompt: str) -> int:
    """Where the reply begins in a rendered chat, given the rendered prompt for it."""
    start = len(commonprefix((text, prompt)))
    if _ASK["content"] in text[start:]:
        start = text.index(_ASK["content"]) + len(_ASK["content"])
    # Two markers may begin alike.
    cut = _CUT_MARKER.search(text[:start])
    return start if cut is None or start == len(prompt) else cut.start()


def _rendered(template: Template, as_text: bool, *all_arguments: Mapping[str, Any]) -> str | None:
    """Render a chat that ends in calls with these arguments; None where the template does not write them."""
    calls: list[dict[str, Any]] = []
    for name, call_id, arguments in zip(_NAMES, _IDS, all_arguments, strict=False):
        function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    for content in ("", None):
        try:
            text = template.render(
                [_ASK, {"role": "assistant", "content": content, "tool_calls": calls}], add_generation_prompt=False
            )
        except TemplateError:
            continue
        return text if all(call["function"]["name"] in text for call in calls) else None
    return None


def _format(
    one: str,
    two: str | None,
    prompt: str,
    ends: SpellingFinder,
    reasoning_end: str | None,
    as_text: bool,
    parameters: ParameterFormat | None,
) -> CallFormat | None:
    place = one.index(_NAMES[0])
    start = min(place, _reply_start(one, prompt))
    if reasoning_end is not None and reasoning_end in one[start:place]:
        start = one.rindex(reasoning_end, start, place) + len(reasoning_end)
    first = _find_arguments(one, place + len(_NAMES[0]), 0, parameters)
    if first is None:
        return None
    before = one[start:place].lstrip()
    middle = one[place + len(_NAMES[0]) : first[0]]
    after = _until_end(_ID_FIELD.sub("", one[first[1] :]), ends)
    before, middle = _ID_FIELD.sub("", before), _ID_FIELD.sub("", middle)
    between = None
    if two is not None:
        between, after = _between(two, after, ends, parameters)
    if parameters is not None:
        parameters = replace(parameters, empty=_until_end(_ID_FIELD.sub("", parameters.empty), ends))
    opening, begin, end, closing = "", before, after, ""
    separator: str | None = None
    if between is not None:
        begin = commonprefix((before[::-1], between[::-1]))[::-1]
        begin = before[_marker_around(before, len(before) - len(begin))[1] :].lstrip()
        end = commonprefix((between[: len(between) - len(begin)], after))
        end = after[: _marker_around(after, len(end))[0]]
        opening, closing = before[: len(before) - len(begin)], after[len(end) :]
        separator = between[len(end) : len(between) - len(begin)]
        if parameters is not None:
            parameters = replace(parameters, empty=parameters.empty.removesuffix(closing))
    return CallFormat(
        opening=opening,
        begin=begin,
        middle=middle,
        end=end,
        separator=separator,
        closing=closing,
        arguments_as_text=as_text,
        parameters=parameters,
    )


def _marker_around(text: str, place: int) -> tuple[int, int]:
    """Where the marker begins and ends that a place is inside of; the place itself where it is in none."""
    for found in _WHOLE_MARKER.finditer(text):
        if found.start() < place < found.end():
            return found.span()
    return place, place


def _between(two: str, after: str, ends: SpellingFinder, parameters: ParameterFormat | None) -> tuple[str | None, str]:
    """What stands between the arguments of one call and the name of the next, and what stands after the last."""
    first = _find_arguments(two, two.index(_NAMES[0]) + len(_NAMES[0]), 0, parameters)
    place = two.index(_NAMES[1])
    second = _find_arguments(two, place + len(_NAMES[1]), 1, parameters)
    if first is None or second is None or first[1] > place:
        return None, after
    between = _ID_FIELD.sub("", two[first[1] : place])
    if next(iter(ends.find(between)), None) is not None:
        return None, after
    return between, _until_end(_ID_FIELD.sub("", two[second[1] :]), ends)


def _find_arguments(text: str, start: int, index: int, parameters: ParameterFormat | None) -> tuple[int, int] | None:
    """Where the arguments of a call stand, from `start` on: a JSON object, or its only parameter."""
    if parameters is not None:
        place = text.find(_KEY, start)
        written = f"{_KEY}{parameters.assign}{_VALUES[index]}{parameters.value_end}"
        return (place, place + len(written)) if place >= 0 and text.startswith(written, place) else None
    decoder = json.JSONDecoder()
    place = text.find("{", start)
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            value, end = None, place
        if value == {_KEY: _VALUES[index]}:
            return place, end
        place = text.find("{", place + 1)
    return None


def _until_end(text: str, ends: SpellingFinder) -> str:
    found = next(iter(ends.find(text)), None)
    return (text if found is None else text[: found.start]).rstrip()


def _learn_parameter_format(
    render: Callable[[Mapping[str, Any]], str | None], name: str, value: str
) -> ParameterFormat | None:
    """Learn how the parameters of a call to `name` are written; None where they do not stand one by one.

    value: of the parameter _KEY, a string that occurs nowhere else. `empty` has all that follows in its text.
    """
    one, none = render({_KEY: value}), render({})
    two, number = render({_KEY: value, _LAST_KEY: _LAST_VALUE}), render({_KEY: _NUMBER})
    if one is None or two is None or none is None or number is None:
        return None
    if number != one.replace(value, json.dumps(_NUMBER)):
        # Numbers have other marks than strings: this is a notation of its own.
        return None
    start = one.index(name) + len(name)
    found = _text_between(one, start, _KEY, value)
    following = _text_between(two, start, value, _LAST_KEY)
    if found is None or following is None:
        return None
    assign, end = found
    after = one[end:]
    shared = commonprefix((following[0], after))
    value_end = after[: _marker_around(after, len(shared))[0]].rstrip()
    if not value_end or not assign.strip() or not following[0].startswith(value_end):
        return None
    return ParameterFormat(
        assign=assign,
        value_end=value_end,
        following=following[0][len(value_end) :],
        empty=none[none.index(name) + len(name) :],
    )


def _text_between(text: str, start: int, first: str, second: str) -> tuple[str, int] | None:
    """What stands between two words, and where the second one ends."""
    place = text.find(first, start)
    other = text.find(second, place + len(first))
    return None if place < 0 or other < 0 else (text[place + len(first) : other], other + len(second))


# Of models whose templates do not write reasoning themselves, but name these when they cut it out.
_KNOWN_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names under which templates take whether the model is to reason."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning, without white space; closing: the end marker as the template writes it."""

    begin: str
    end: str
    closing: str

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside the reasoning, so that the reply begins with it."""
        return prompt.rstrip().endswith(self.begin)

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends behind the reasoning, so that the reply has none."""
        return prompt.rstrip().endswith(self.end)


def learn_reasoning_format(template: Template, source: str | None) -> ReasoningFormat | None:
    """Learn the markers of a template, whose Jinja text is `source`; None where it has no reasoning."""
    reply: dict[str, Any] = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    reply |= {"reasoning": _THOUGHT, "thinking": _THOUGHT}
    switched_on: dict[str, Any] = dict.fromkeys(THINKING_VARIABLES, True)
    for variables in ({}, switched_on):
        try:
            text = template.render([_ASK, reply], add_generation_prompt=False, **variables)
            prompt = template.render([_ASK], **variables)
        except TemplateError:
            continue
        found = _around(text, prompt)
        if found is not None:
            return found
    for begin, end in _KNOWN_MARKERS:
        if source is not None and begin in source and end in source:
            return ReasoningFormat(begin, end, f"\n{end}\n\n")
    if source is not None and "</think>" in source:
        return ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
    return None


def _around(text: str, prompt: str) -> ReasoningFormat | None:
    place = text.find(_THOUGHT)
    answer = text.find(_ANSWER, place)
    if place < 0 or answer < 0:
        return None
    closing = text[place + len(_THOUGHT) : answer]
    end = closing.strip()
    if not end:
        return None
    begin = text[_reply_start(text, prompt) : place].strip()
    if not begin:
        # The prompt has it already.
        before = text[:place].rstrip()
        begin = next((known for known, _ in _KNOWN_MARKERS if before.endswith(known)), "")
    return ReasoningFormat(begin, end, closing) if begin else None
