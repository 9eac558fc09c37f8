"""How a model writes tool calls, learned from its own chat template.

Calls with names and arguments that occur nowhere else are rendered; what stands around these is the format. So most
families need no code of their own: `<tool_call>` around JSON (Hermes, Qwen), bare JSON with "parameters" (Llama 3),
`[TOOL_CALLS]` before a list (Mistral), a name between markers (DeepSeek), parameters one by one (Qwen3-Coder, GLM).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any, Protocol

from localinfer.errors import TemplateError
from localinfer.models.text.parameter_format import KEY, ParameterFormat, find_parameter, learn_parameter_format
from localinfer.models.text.special_tokens import SpellingFinder

_NAMES = ("zqxfirst", "zqxsecond")
_VALUES = ("zqxvalue", "zqxother")
# Mistral's templates insist on nine letters and digits.
_IDS = ("zqxid0001", "zqxid0002")
ASK: dict[str, str] = {"role": "user", "content": "zqxask"}
_ID_FIELD = re.compile(rf',\s*"\w+":\s*"{_IDS[0][:-1]}\d"|"\w+":\s*"{_IDS[0][:-1]}\d",\s*')
_MARKER = re.compile(r"<[^<>\s{{]+>|\[[A-Z_/]+\]|[^\s\w{{\[\"'<]\S*")

_WHOLE_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_CUT_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")


class Template(Protocol):
    """What learning asks of a chat template; `chat_template.ChatTemplate` is one."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str: ...


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The text around calls: `begin name middle arguments end`, joined by `separator`, in `opening` and `closing`.

    separator: None where a reply can have but one call. arguments_as_text: the template wants the arguments of former
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
"""What most models have at least seen, for those whose templates know no tools."""


def learn_call_format(template: Template, ends: SpellingFinder, *, after: str | None = None) -> CallFormat:
    """Learn the format of a template.

    ends: spellings of the tokens that end a reply. after: the marker that ends reasoning, which may stand before calls.

    Returns HERMES, which is not native, where the template ignores tools, or writes calls in no way known here.
    """
    tool = {"name": _NAMES[0], "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        shown = template.render([ASK], tools=[{"type": "function", "function": tool}])
    except TemplateError:
        return HERMES
    if _NAMES[0] not in shown:
        return HERMES
    for as_text in (False, True):
        one = _rendered_calls(template, 1, as_text)
        if one is not None:
            parameters = None
            if _find_arguments(one, one.index(_NAMES[0]), 0, None) is None:
                parameters = learn_parameter_format(partial(_rendered_call, template, as_text), _NAMES[0], _VALUES[0])
            two = _rendered_calls(template, 2, as_text)
            found = _format(one, two, _prompt(template), ends, after, as_text, parameters)
            if found is not None:
                return found
    return HERMES


def reply_start(text: str, prompt: str) -> int:
    """Where the reply begins in a rendered chat, given the rendered prompt for it."""
    start = len(commonprefix((text, prompt)))
    if ASK["content"] in text[start:]:
        start = text.index(ASK["content"]) + len(ASK["content"])
    # Two markers may begin alike.
    cut = _CUT_MARKER.search(text[:start])
    return start if cut is None or start == len(prompt) else cut.start()


def _prompt(template: Template) -> str:
    try:
        return template.render([ASK])
    except TemplateError:
        return ""


def _rendered_calls(template: Template, count: int, as_text: bool) -> str | None:
    return _rendered(template, [{KEY: value} for value in _VALUES[:count]], as_text)


def _rendered_call(template: Template, as_text: bool, arguments: Mapping[str, Any]) -> str | None:
    return _rendered(template, [arguments], as_text)


def _rendered(template: Template, all_arguments: Sequence[Mapping[str, Any]], as_text: bool) -> str | None:
    calls: list[dict[str, Any]] = []
    for name, call_id, arguments in zip(_NAMES, _IDS, all_arguments, strict=False):
        function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    for content in ("", None):
        try:
            text = template.render(
                [ASK, {"role": "assistant", "content": content, "tool_calls": calls}], add_generation_prompt=False
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
    start = min(place, reply_start(one, prompt))
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
    if between is None:
        return CallFormat(
            opening="",
            begin=before,
            middle=middle,
            end=after,
            separator=None,
            closing="",
            arguments_as_text=as_text,
            parameters=parameters,
        )
    begin = commonprefix((before[::-1], between[::-1]))[::-1]
    begin = before[_marker_around(before, len(before) - len(begin))[1] :].lstrip()
    end = commonprefix((between[: len(between) - len(begin)], after))
    end = after[: _marker_around(after, len(end))[0]]
    closing = after[len(end) :]
    if parameters is not None:
        parameters = replace(parameters, empty=parameters.empty.removesuffix(closing))
    return CallFormat(
        opening=before[: len(before) - len(begin)],
        begin=begin,
        middle=middle,
        end=end,
        separator=between[len(end) : len(between) - len(begin)],
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
        return find_parameter(text, start, _VALUES[index], parameters)
    decoder = json.JSONDecoder()
    place = text.find("{", start)
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            value, end = None, place
        if value == {KEY: _VALUES[index]}:
            return place, end
        place = text.find("{", place + 1)
    return None


def _until_end(text: str, ends: SpellingFinder) -> str:
    found = next(iter(ends.find(text)), None)
    return (text if found is None else text[: found.start]).rstrip()
