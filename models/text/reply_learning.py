"""Learns the format of tool calls and reasoning from a chat template, by rendering chats with it.

Calls with names and arguments that occur nowhere else are rendered; what stands around these is the format. So most
families need no code of their own: `<tool_call>` around JSON (Hermes, Qwen), bare JSON with "parameters" (Llama 3),
`[TOOL_CALLS]` before a list (Mistral), a name between markers (DeepSeek), parameters one by one (Qwen3-Coder, GLM), or
in a notation of their own (Gemma 4, LFM2). Templates that write no calls are recognized by what they name.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from os.path import commonprefix
from typing import Any, NamedTuple

from localinfer.errors import TemplateError
from localinfer.models.text.chat_template import ANSWER, ASK, THINKING_VARIABLES
from localinfer.models.text.reply_format import (
    AS_MODELS_WRITE,
    CALL_ID,
    CALL_NAME,
    CALL_NUMBER,
    HERMES,
    ID_FORMS,
    KNOWN_CALLS,
    PARAMETER_NAME,
    TYPE_NAME,
    CallFormat,
    ParameterFormat,
    ReasoningFormat,
    RenderableTemplate,
    ValueNotation,
    first_marker,
)
from localinfer.models.text.template_costs import sharing_render_time
from localinfer.models.text.tokenizer import SpellingFinder

NAMES = ("zqxfirst", "zqxsecond")
VALUES = ("zqxvalue", "zqxother")
# In the order of the alphabet, into which some templates bring them.
KEY, LAST_KEY, MOST_KEY, LAST_VALUE = "zqxkey", "zqxlast", "zqxmost", "zqxfinal"
NUMBER = 90817263
THOUGHT = "zqxthought"
# Mistral's templates insist on nine letters and digits.
IDS = ("zqxid0001", "zqxid0002")
PROBE_CALL: dict[str, Any] = {
    "id": IDS[0],
    "type": "function",
    "function": {"name": NAMES[0], "arguments": {KEY: VALUES[0]}},
}
WHOLE_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_CUT_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")

_TRIAL_SECONDS = 1.5
"""Processor time for all trials of one template: a hundred times that of the dearest honest one."""


class Trials:
    """A template while it is tried out: once its renderings took too long altogether, it refuses every other.

    Each alone is bounded, but a template that makes use of that would be rendered dozens of times.
    """

    def __init__(self, template: RenderableTemplate) -> None:
        self._template = template
        self._seconds = 0.0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render as the template does. Raises: TemplateError also when the time for trials is over."""
        if self._seconds >= _TRIAL_SECONDS:
            raise TemplateError(
                f"trying out the chat template took {self._seconds:.1f} s; it is taken for one without tools or "
                "reasoning. Use another template."
            )
        began = time.thread_time()
        try:
            with sharing_render_time(_TRIAL_SECONDS - self._seconds):
                return self._template.render(
                    messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
                )
        finally:
            self._seconds += time.thread_time() - began


def reply_start(text: str, prompt: str) -> int:
    """Start of the reply in a rendered chat, given the rendered prompt for it."""
    start = len(commonprefix((text, prompt)))
    if ASK["content"] in text[start:]:
        start = text.index(ASK["content"]) + len(ASK["content"])
    # Two markers may begin alike.
    cut = _CUT_MARKER.search(text[:start])
    return start if cut is None or start == len(prompt) else cut.start()


def until_reply_end(text: str, ends: SpellingFinder, asked: str) -> str:
    """Cut a text that reaches to the end of a chat at the end of the reply.

    A token that ends replies is not, nor what a chat without a reply, `asked`, ends with too.
    """
    shared = len(commonprefix((text[::-1], asked[::-1])))
    text = text[: marker_around(text, len(text) - shared)[1]]
    found = next(iter(ends.find(text)), None)
    return (text if found is None else text[: found.start]).rstrip()


def marker_around(text: str, position: int) -> tuple[int, int]:
    """Start and end of the marker around a position; the position itself where it is in none."""
    for found in WHOLE_MARKER.finditer(text):
        if found.start() < position < found.end():
            return found.span()
    return position, position


_PYTHON_QUOTES = ("'", '"')
Render = Callable[[Mapping[str, Any]], str | None]


class _Written(NamedTuple):
    """Texts between a parameter's name and its value, and behind that."""

    assign: str
    after: str


def learn_parameter_format(render: Render, name: str, value: str) -> ParameterFormat | None:
    """Learn how the parameters of a call to `name` are written; None where they do not stand one by one.

    render: a call with arguments. value: of the parameter KEY, a string that occurs nowhere else. `empty` has all that
    follows in its text.
    """
    two, none = render({KEY: value, LAST_KEY: LAST_VALUE}), render({})
    text, number = (
        _written(render({KEY: one}), name, written) for one, written in ((value, value), (NUMBER, str(NUMBER)))
    )
    if two is None or none is None or text is None or number is None or not number.assign.strip():
        return None
    start = two.find(value, two.index(name) + len(name))
    end = two.find(LAST_KEY, start)
    if start < 0 or end < 0:
        return None
    between = two[start + len(value) : end]
    empty = none[none.index(name) + len(name) :]
    quote = text.assign[len(number.assign) :] if text.assign.startswith(number.assign) else ""
    if quote and text.after.startswith(quote) and text.after[len(quote) :] == number.after:
        notation = _notation(render, name, quote)
        if notation is None or not between.startswith(quote):
            return None
        return ParameterFormat(
            assign=number.assign, value_end="", following=between[len(quote) :], empty=empty, notation=notation
        )
    if text.after != number.after:
        # Numbers end as strings do not: this is a notation of its own.
        return None
    json_assign = None if text.assign == number.assign else _typed(render, name, number.assign)
    after = text.after
    value_end = after[: marker_around(after, len(commonprefix((between, after))))[0]].rstrip()
    if not value_end and KEY in after:
        value_end = after[: after.rindex(KEY)]
    # The name may come again behind the value.
    value_end, following = (one.replace(KEY, PARAMETER_NAME) for one in (value_end, between))
    if not value_end or not text.assign.strip() or not following.startswith(value_end):
        return None
    return ParameterFormat(
        assign=text.assign,
        value_end=value_end,
        following=following[len(value_end) :],
        empty=empty,
        json_assign=json_assign,
    )


def _written(text: str | None, name: str, value: str) -> _Written | None:
    if text is None:
        return None
    key = text.find(KEY, text.index(name) + len(name))
    position = text.find(value, key)
    return None if key < 0 or position < 0 else _Written(text[key + len(KEY) : position], text[position + len(value) :])


def _typed(render: Render, name: str, assign: str) -> str:
    """Text before values that are no strings, with a sign where it names their type."""
    other = _written(render({KEY: {}}), name, "{}")
    if other is None or other.assign == assign:
        return assign
    words = re.findall(r"\w+|\W+", assign), re.findall(r"\w+|\W+", other.assign)
    if len(words[0]) != len(words[1]):
        return assign
    return "".join(one if one == same else TYPE_NAME for one, same in zip(*words, strict=True))


def _notation(render: Render, name: str, quote: str) -> ValueNotation | None:
    """The notation of values whose strings stand in such quotes."""
    text = render({KEY: {LAST_KEY: LAST_VALUE, MOST_KEY: NUMBER}})
    if text is None:
        return None
    found = re.search(
        rf"{LAST_KEY}(?P<quote>\S*?)(?P<key>:\s*)\S*?{LAST_VALUE}\S*?(?P<item>,\s*)", text[text.index(name) :]
    )
    if found is None:
        return None
    has_bare_keys = not found["quote"]
    quotes = (quote, *(other for other in _PYTHON_QUOTES if other != quote)) if quote in _PYTHON_QUOTES else (quote,)
    return ValueNotation(quotes=quotes, has_bare_keys=has_bare_keys, item=found["item"], key=found["key"])


_ID_FIELD = re.compile(rf',\s*"\w+":\s*"{IDS[0][:-1]}\d"|"\w+":\s*"{IDS[0][:-1]}\d",\s*')
_ID = re.compile(rf"{IDS[0][:-1]}\d")


@dataclass(frozen=True)
class _Probe:
    """Renders calls in one of the ways that templates expect. id_form: of ids, None for nine letters. content: beside
    the calls."""

    template: RenderableTemplate
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
    template: RenderableTemplate,
    ends: SpellingFinder,
    *,
    reasoning: ReasoningFormat | None = None,
    source: str | None = None,
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


def _reads_tools(template: RenderableTemplate) -> bool:
    """Return whether a template describes the tools that a system message holds."""
    system = {"role": "system", "content": "", "tools": NAMES[0]}
    try:
        return NAMES[0] in template.render([system, ASK])
    except TemplateError:
        return False


def _holds_results(template: RenderableTemplate) -> bool:
    """Return whether a template writes results that a calling message holds, and messages of results in another way."""
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
    position = one.index(NAMES[0])
    start = min(position, reply_start(one, prompt))
    if reasoning is not None and reasoning.end in one[start:position]:
        start = one.rindex(reasoning.end, start, position) + len(reasoning.end)
    first = _find_arguments(one, position + len(NAMES[0]), 0, parameters)
    if first is None:
        return None
    before = _without_ids(_without_frame(one[start:position].lstrip(), prompt, reasoning))
    middle = _without_ids(one[position + len(NAMES[0]) : first[0]])
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
    """Text before a call, without what the prompt has already and without the frame of an empty answer."""
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
    """Texts between the arguments of one call and the name of the next, between that and its arguments, and
    after these."""
    first = _find_arguments(two, two.index(NAMES[0]) + len(NAMES[0]), 0, parameters)
    position = two.index(NAMES[1])
    second = _find_arguments(two, position + len(NAMES[1]), 1, parameters)
    if first is None or second is None or first[1] > position:
        return None, None, after
    between = _without_ids(two[first[1] : position])
    if until_end(between) != between.rstrip():
        return None, None, after
    middle = _without_ids(two[position + len(NAMES[1]) : second[0]])
    return between, middle, _without_ids(until_end(two[second[1] :]))


def _find_arguments(text: str, start: int, index: int, parameters: ParameterFormat | None) -> tuple[int, int] | None:
    """Start and end of a call's arguments, from `start` on: a JSON object, or its only parameter."""
    if parameters is not None:
        position = text.find(KEY, start)
        quote = "" if parameters.notation is None else parameters.notation.quotes[0]
        value_end = parameters.named(parameters.value_end, KEY)
        written = f"{KEY}{parameters.assign}{quote}{VALUES[index]}{quote}{value_end}"
        return (position, position + len(written)) if position >= 0 and text.startswith(written, position) else None
    decoder = json.JSONDecoder()
    position = text.find("{", start)
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError:
            value, end = None, position
        if value == {KEY: VALUES[index]}:
            return position, end
        position = text.find("{", position + 1)
    return None


# Of models whose templates do not write reasoning themselves, but name these when they cut it out.
_KNOWN_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
_MEMBERS = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"<([^<>\s/]+)>$")
_OTHER_ANSWERS = {"<|channel|>final<|message|>": ("<|channel|>commentary<|message|>",)}
"""Beginnings of answers that templates do not write, by those that they do."""


def learn_reasoning_format(
    template: RenderableTemplate, source: str | None, ends: SpellingFinder | None = None
) -> ReasoningFormat | None:
    """Learn the markers of a template, whose Jinja text is `source`; None where it has no reasoning.

    ends: spellings of the tokens that end a reply.
    """
    thought = dict.fromkeys(_MEMBERS, THOUGHT)
    reply: dict[str, Any] = {"role": "assistant", "content": ANSWER, **thought}
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL], **thought}
    switched_on: dict[str, Any] = dict.fromkeys(THINKING_VARIABLES, True)
    # Some templates write the reasoning of replies with calls only.
    for message, answer in ((reply, ANSWER), (call, PROBE_CALL["function"]["name"])):
        for variables in ({}, switched_on):
            try:
                text = template.render([ASK, message], add_generation_prompt=False, **variables)
                prompt = template.render([ASK], **variables)
            except TemplateError:
                continue
            found = _around(text, prompt, answer)
            if found is not None:
                framed = _framed(template, found, ends or SpellingFinder({}), variables)
                return replace(framed, member=_member(template, (reply, call), variables))
    for begin, end in _KNOWN_MARKERS:
        if source is not None and begin in source and end in source:
            return ReasoningFormat(begin, end, f"\n{end}\n\n")
    if source is not None and "</think>" in source:
        return ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
    return None


def _member(template: RenderableTemplate, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The member of a message in which a template looks for reasoning; the usual one where it looks in several."""
    for member in _MEMBERS:
        for message in messages:
            others = {name: value for name, value in message.items() if name == member or name not in _MEMBERS}
            with suppress(TemplateError):
                if THOUGHT in template.render([ASK, others], add_generation_prompt=False, **variables):
                    return member
    return _MEMBERS[0]


def _around(text: str, prompt: str, answer: str) -> ReasoningFormat | None:
    position = text.find(THOUGHT)
    end_position = text.find(answer, position)
    if position < 0 or end_position < 0:
        return None
    closing = text[position + len(THOUGHT) : end_position]
    if answer != ANSWER:
        # What begins the call is no part of it.
        marker = first_marker(closing.lstrip())
        closing = closing[: closing.index(marker) + len(marker)]
    end = closing.strip()
    if not end:
        return None
    begin = text[reply_start(text, prompt) : position].strip()
    if not begin:
        # The prompt has it already, and perhaps it alone.
        before, asked = text[:position].rstrip(), prompt.rstrip()
        begin = next((known for known, _ in _KNOWN_MARKERS if before.endswith(known) or asked.endswith(known)), "")
        tag = _TAG.search(before)
        if not begin and tag is not None and end == f"</{tag[1]}>":
            begin = tag[0]
    return ReasoningFormat(begin, end, closing) if begin else None


def _framed(
    template: RenderableTemplate, found: ReasoningFormat, ends: SpellingFinder, variables: Mapping[str, Any]
) -> ReasoningFormat:
    """The format with what stands around answers, where these are messages of their own."""
    known = (end for begin, end in _KNOWN_MARKERS if found.begin == begin and found.end.startswith(end))
    first = next(known, first_marker(found.end))
    try:
        plain = template.render(
            [ASK, {"role": "assistant", "content": ANSWER}], add_generation_prompt=False, **variables
        )
        prompt, asked = (template.render([ASK], add_generation_prompt=added, **variables) for added in (True, False))
    except TemplateError:
        return found
    if not first or ANSWER not in plain:
        return found
    position = plain.index(ANSWER)
    before = plain[min(position, reply_start(plain, prompt)) : position]
    answer_begin = before.replace(found.begin, "").rpartition(first)[2].strip()
    if WHOLE_MARKER.search(answer_begin) is None:
        return found
    following = found.end.removeprefix(first).removesuffix(answer_begin)
    behind = plain[position + len(ANSWER) :]
    # Questions may end with the same marker.
    answer_end = until_reply_end(behind, ends, asked) or first_marker(until_reply_end(behind, ends, ""))
    return ReasoningFormat(
        begin=found.begin,
        end=first,
        closing=first + following,
        following=following,
        answer_begin=answer_begin,
        answer_end=answer_end.strip(),
        other_answers=_OTHER_ANSWERS.get(answer_begin, ()),
    )
