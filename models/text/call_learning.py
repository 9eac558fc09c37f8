"""Learns how a model writes tool calls from its own chat template.

Calls with names and arguments that occur nowhere else are rendered; what stands around these is the format. So most
families need no code of their own: `<tool_call>` around JSON (Hermes, Qwen), bare JSON with "parameters" (Llama 3),
`[TOOL_CALLS]` before a list (Mistral), a name between markers (DeepSeek), parameters one by one (Qwen3-Coder, GLM), or
in a notation of their own (Gemma 4, LFM2). Templates that write no calls are recognized by what they name.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from os.path import commonprefix
from typing import Any

from localinfer.errors import TemplateError
from localinfer.models.text.known_calls import AS_MODELS_WRITE, HERMES, ID_FORMS, KNOWN_CALLS
from localinfer.models.text.parameter_learning import learn_parameter_format
from localinfer.models.text.probes import (
    ANSWER,
    ASK,
    IDS,
    KEY,
    NAMES,
    PROBE_CALL,
    VALUES,
    marker_around,
    reply_start,
    until_reply_end,
)
from localinfer.models.text.reply_format import (
    CALL_ID,
    CALL_NAME,
    CALL_NUMBER,
    CallFormat,
    ParameterFormat,
    ReasoningFormat,
    Template,
    first_marker,
)
from localinfer.models.text.splitting import SpellingFinder

_ID_FIELD = re.compile(rf',\s*"\w+":\s*"{IDS[0][:-1]}\d"|"\w+":\s*"{IDS[0][:-1]}\d",\s*')
_ID = re.compile(rf"{IDS[0][:-1]}\d")


@dataclass(frozen=True)
class _Probe:
    """Renders calls in one of the ways that templates expect. id_form: of ids, None for nine letters. content: beside
    the calls."""

    template: Template
    id_form: str | None
    content: str | None
    as_text: bool

    def render(self, *all_arguments: Mapping[str, Any]) -> str | None:
        """A chat that ends in calls with these arguments; None where the template does not write them."""
        calls: list[dict[str, Any]] = []
        for number, (name, arguments) in enumerate(zip(NAMES, all_arguments, strict=False)):
            function = {"name": name, "arguments": json.dumps(arguments) if self.as_text else arguments}
            call_id = IDS[number] if self.id_form is None else self.id_form.format(name=name, number=number)
            calls.append({"id": call_id, "type": "function", "function": function})
        message = {"role": "assistant", "content": self.content, "tool_calls": calls}
        try:
            text = self.template.render([ASK, message], add_generation_prompt=False)
        except TemplateError:
            return None
        return text if all(call["function"]["name"] in text for call in calls) else None


def learn_call_format(
    template: Template, ends: SpellingFinder, *, reasoning: ReasoningFormat | None = None, source: str | None = None
) -> CallFormat:
    """Learn the format of a template, whose Jinja text is `source`.

    ends: spellings of the tokens that end a reply. reasoning: what may stand before calls.

    Returns a format that is not native where the template writes no calls, or writes them in no way known here: that of
    the model's family where the source tells it, else HERMES.
    """
    tool = {"name": NAMES[0], "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        describes_tools = NAMES[0] in template.render([ASK], tools=[{"type": "function", "function": tool}])
    except TemplateError:
        return HERMES
    reads_tools = not describes_tools and _reads_tools(template)
    for id_form, content, as_text in product((None, *ID_FORMS), ("", None), (False, True)):
        found = _learn(_Probe(template, id_form, content, as_text), ends, reasoning)
        if found is not None:
            known = AS_MODELS_WRITE.get(found.opening + found.begin, {})
            return replace(
                found,
                describes_tools=describes_tools,
                reads_tools=reads_tools,
                holds_results=_holds_results(template),
                **known,
            )
    if (describes_tools or reads_tools) and source is not None:
        form = next((form for marker, form in KNOWN_CALLS.items() if marker in source), HERMES)
        return replace(form, describes_tools=False, reads_tools=True) if reads_tools else form
    return HERMES


def _reads_tools(template: Template) -> bool:
    """Whether a template describes the tools that a system message holds."""
    system = {"role": "system", "content": "", "tools": NAMES[0]}
    try:
        return NAMES[0] in template.render([system, ASK])
    except TemplateError:
        return False


def _holds_results(template: Template) -> bool:
    """Whether a template writes results that a calling message holds, and messages of results in another way."""
    calling = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
    holding = {**calling, "tool_responses": [{"name": NAMES[0], "response": ANSWER}]}
    result = {"role": "tool", "content": ANSWER, "name": NAMES[0], "tool_call_id": IDS[0]}
    try:
        held = template.render([ASK, holding])
        return ANSWER in held and held != template.render([ASK, calling, result])
    except TemplateError:
        return False


def _learn(probe: _Probe, ends: SpellingFinder, reasoning: ReasoningFormat | None) -> CallFormat | None:
    first, second = ({KEY: value} for value in VALUES)
    one = probe.render(first)
    if one is None:
        return None
    try:
        prompt, asked = (probe.template.render([ASK], add_generation_prompt=added) for added in (True, False))
    except TemplateError:
        prompt, asked = "", ""
    parameters = None
    if _find_arguments(one, one.index(NAMES[0]), 0, None) is None:
        parameters = learn_parameter_format(probe.render, NAMES[0], VALUES[0])
    found = _format(
        one,
        probe.render(first, second),
        prompt,
        partial(until_reply_end, ends=ends, asked=asked),
        reasoning,
        parameters,
    )
    if found is None or not found.opening + found.begin:
        return None
    return replace(
        found, arguments_as_text=probe.as_text, id_form=probe.id_form, allows_content=probe.content is not None
    )


def _format(
    one: str,
    two: str | None,
    prompt: str,
    until_end: Callable[[str], str],
    reasoning: ReasoningFormat | None,
    parameters: ParameterFormat | None,
) -> CallFormat | None:
    place = one.index(NAMES[0])
    start = min(place, reply_start(one, prompt))
    if reasoning is not None and reasoning.end in one[start:place]:
        start = one.rindex(reasoning.end, start, place) + len(reasoning.end)
    first = _find_arguments(one, place + len(NAMES[0]), 0, parameters)
    if first is None:
        return None
    before = _without_ids(_without_frame(one[start:place].lstrip(), prompt, reasoning))
    middle = _without_ids(one[place + len(NAMES[0]) : first[0]])
    after = _without_ids(until_end(one[first[1] :]))
    between = number = None
    if two is not None:
        between, next_middle, after = _between(two, after, until_end, parameters)
        before, between, _ = _counted(before, between)
        middle, _, number = _counted(middle, next_middle)
    empty = "" if parameters is None else _without_ids(until_end(parameters.empty))
    if number is not None:
        empty = _with_number(empty, number)
    opening, begin, end, closing = "", before, after, ""
    separator: str | None = None
    if between is not None:
        begin = commonprefix((before[::-1], between[::-1]))[::-1]
        begin = before[marker_around(before, len(before) - len(begin))[1] :].lstrip()
        end = commonprefix((between[: len(between) - len(begin)], after))
        end = after[: marker_around(after, len(end))[0]]
        opening, closing = before[: len(before) - len(begin)], after[len(end) :]
        separator = between[len(end) : len(between) - len(begin)]
        empty = empty.removesuffix(closing)
    if parameters is not None:
        parameters = replace(parameters, empty=empty.replace(NAMES[0], CALL_NAME))
    return CallFormat(
        opening=opening,
        begin=begin,
        middle=middle.replace(NAMES[0], CALL_NAME),
        end=end,
        separator=separator,
        closing=closing,
        parameters=parameters,
    )


def _without_ids(text: str) -> str:
    """A text of the format without the member of JSON that holds an id, and with a sign for an id that stands alone."""
    return _ID.sub(CALL_ID, _ID_FIELD.sub("", text))


def _without_frame(text: str, prompt: str, reasoning: ReasoningFormat | None) -> str:
    """What stands before a call, without what the prompt has already and without the frame of an empty answer."""
    marker = first_marker(text)
    if marker and prompt.rstrip().endswith(marker):
        text = text[len(marker) :]
    if reasoning is not None:
        text = text.removeprefix(reasoning.following)
        if reasoning.answer_begin:
            text = text.removeprefix(reasoning.answer_begin + reasoning.answer_end)
    return text


def _with_number(text: str, number: int) -> str:
    return re.sub(rf"(?<!\w){number}(?!\w)", CALL_NUMBER, text)


def _counted(first: str, second: str | None) -> tuple[str, str | None, int | None]:
    """Texts of the first and the second call, with a sign where they have the number of the call; and that number."""
    for number in (0, 1):
        texts = _with_number(first, number), _with_number(second or "", number + 1)
        if CALL_NUMBER in texts[0] and CALL_NUMBER in texts[1]:
            return *texts, number
    return first, second, None


def _between(
    two: str, after: str, until_end: Callable[[str], str], parameters: ParameterFormat | None
) -> tuple[str | None, str | None, str]:
    """What stands between the arguments of one call and the name of the next, between that and its arguments, and
    after these."""
    first = _find_arguments(two, two.index(NAMES[0]) + len(NAMES[0]), 0, parameters)
    place = two.index(NAMES[1])
    second = _find_arguments(two, place + len(NAMES[1]), 1, parameters)
    if first is None or second is None or first[1] > place:
        return None, None, after
    between = _without_ids(two[first[1] : place])
    if until_end(between) != between.rstrip():
        return None, None, after
    middle = _without_ids(two[place + len(NAMES[1]) : second[0]])
    return between, middle, _without_ids(until_end(two[second[1] :]))


def _find_arguments(text: str, start: int, index: int, parameters: ParameterFormat | None) -> tuple[int, int] | None:
    """Where the arguments of a call stand, from `start` on: a JSON object, or its only parameter."""
    if parameters is not None:
        place = text.find(KEY, start)
        quote = "" if parameters.notation is None else parameters.notation.quotes[0]
        value_end = parameters.named(parameters.value_end, KEY)
        written = f"{KEY}{parameters.assign}{quote}{VALUES[index]}{quote}{value_end}"
        return (place, place + len(written)) if place >= 0 and text.startswith(written, place) else None
    decoder = json.JSONDecoder()
    place = text.find("{", start)
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            value, end = None, place
        if value == {KEY: VALUES[index]}:
            return place, end
        place = text.find("{", place + 1)
    return None
