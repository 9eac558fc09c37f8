"""Chats of names and values that occur nowhere else: rendered, they show how a template writes calls and reasoning."""

import re
import time
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from localinfer.errors import TemplateError
from localinfer.models.text.render_time import sharing_render_time
from localinfer.models.text.reply_format import Template
from localinfer.models.text.splitting import SpellingFinder

NAMES = ("zqxfirst", "zqxsecond")
VALUES = ("zqxvalue", "zqxother")
# In the order of the alphabet, into which some templates bring them.
KEY, LAST_KEY, MOST_KEY, LAST_VALUE = "zqxkey", "zqxlast", "zqxmost", "zqxfinal"
NUMBER = 90817263
THOUGHT, ANSWER = "zqxthought", "zqxanswer"
# Mistral's templates insist on nine letters and digits.
IDS = ("zqxid0001", "zqxid0002")
ASK: dict[str, str] = {"role": "user", "content": "zqxask"}
PROBE_CALL: dict[str, Any] = {
    "id": IDS[0],
    "type": "function",
    "function": {"name": NAMES[0], "arguments": {KEY: VALUES[0]}},
}
WHOLE_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_CUT_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")

_TRIAL_SECONDS = 1.5
"""Of the processor, for all trials of one template: hundred times what the dearest of honest ones takes."""


class Trials:
    """A template while it is tried out: once its renderings took too long altogether, it refuses every other.

    Each alone is bounded, but a template that makes use of that would be rendered dozens of times.
    """

    def __init__(self, template: Template) -> None:
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
        """As the template's. Raises: TemplateError also where the time for trials is over."""
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
    """Where the reply begins in a rendered chat, given the rendered prompt for it."""
    start = len(commonprefix((text, prompt)))
    if ASK["content"] in text[start:]:
        start = text.index(ASK["content"]) + len(ASK["content"])
    # Two markers may begin alike.
    cut = _CUT_MARKER.search(text[:start])
    return start if cut is None or start == len(prompt) else cut.start()


def until_reply_end(text: str, ends: SpellingFinder, asked: str) -> str:
    """What is the reply's of a text that goes on to the end of a chat.

    A token that ends replies is not, nor what a chat without a reply, `asked`, ends with too.
    """
    shared = len(commonprefix((text[::-1], asked[::-1])))
    text = text[: marker_around(text, len(text) - shared)[1]]
    found = next(iter(ends.find(text)), None)
    return (text if found is None else text[: found.start]).rstrip()


def marker_around(text: str, place: int) -> tuple[int, int]:
    """Where the marker begins and ends that a place is inside of; the place itself where it is in none."""
    for found in WHOLE_MARKER.finditer(text):
        if found.start() < place < found.end():
            return found.span()
    return place, place
