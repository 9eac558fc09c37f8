"""Learns how a model sets its reasoning apart from what its template makes of a reasoning that occurs nowhere else."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from localinfer.errors import TemplateError
from localinfer.models.text.probes import ANSWER, ASK, PROBE_CALL, THOUGHT, WHOLE_MARKER, reply_start, until_reply_end
from localinfer.models.text.reply_format import THINKING_VARIABLES, ReasoningFormat, Template, first_marker
from localinfer.models.text.splitting import SpellingFinder

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
"""By what begins an answer: what begins others that templates do not write."""


def learn_reasoning_format(
    template: Template, source: str | None, ends: SpellingFinder | None = None
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


def _member(template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The member of a message in which a template looks for reasoning; the usual one where it looks in several."""
    for member in _MEMBERS:
        for message in messages:
            others = {name: value for name, value in message.items() if name == member or name not in _MEMBERS}
            with suppress(TemplateError):
                if THOUGHT in template.render([ASK, others], add_generation_prompt=False, **variables):
                    return member
    return _MEMBERS[0]


def _around(text: str, prompt: str, answer: str) -> ReasoningFormat | None:
    place = text.find(THOUGHT)
    end_place = text.find(answer, place)
    if place < 0 or end_place < 0:
        return None
    closing = text[place + len(THOUGHT) : end_place]
    if answer != ANSWER:
        # What begins the call is no part of it.
        marker = first_marker(closing.lstrip())
        closing = closing[: closing.index(marker) + len(marker)]
    end = closing.strip()
    if not end:
        return None
    begin = text[reply_start(text, prompt) : place].strip()
    if not begin:
        # The prompt has it already, and perhaps it alone.
        before, asked = text[:place].rstrip(), prompt.rstrip()
        begin = next((known for known, _ in _KNOWN_MARKERS if before.endswith(known) or asked.endswith(known)), "")
        tag = _TAG.search(before)
        if not begin and tag is not None and end == f"</{tag[1]}>":
            begin = tag[0]
    return ReasoningFormat(begin, end, closing) if begin else None


def _framed(
    template: Template, found: ReasoningFormat, ends: SpellingFinder, variables: Mapping[str, Any]
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
    place = plain.index(ANSWER)
    before = plain[min(place, reply_start(plain, prompt)) : place]
    answer_begin = before.replace(found.begin, "").rpartition(first)[2].strip()
    if WHOLE_MARKER.search(answer_begin) is None:
        return found
    following = found.end.removeprefix(first).removesuffix(answer_begin)
    behind = plain[place + len(ANSWER) :]
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
