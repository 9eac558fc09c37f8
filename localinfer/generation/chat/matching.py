"""Texts of a format found in what a model writes: white space may differ, and names, numbers and ids are its own."""

import re
from typing import Literal, NamedTuple

from localinfer.models.text.reply_format import (
    CALL_ID,
    CALL_NAME,
    CALL_NUMBER,
    TYPE_NAME,
    CallFormat,
    ReasoningFormat,
    first_marker,
)

_HOLES = {CALL_ID: r"[A-Za-z0-9_.:-]", CALL_NUMBER: "[0-9]", CALL_NAME: r"[A-Za-z0-9_.:-]", TYPE_NAME: "[a-z]"}
_LETTER_OF = {hole: re.compile(letters) for hole, letters in _HOLES.items()}


def match_length(text: str, literal: str) -> int | None:
    """How much of a text spells a literal, whatever white space either has; -1 if none does, None while it may yet."""
    place = 0
    for letter in literal:
        if letter.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if (allowed := _LETTER_OF.get(letter)) is not None:
            start = place
            while place < len(text) and allowed.match(text[place]):
                place += 1
            if place < len(text) and place == start:
                return -1
        if place == len(text):
            return None
        if letter not in _LETTER_OF:
            if text[place] != letter:
                return -1
            place += 1
    return place


def id_in(text: str, literal: str) -> str | None:
    """The id in a text that spells a literal; None if it has no place for one."""
    if CALL_ID not in literal:
        return None
    letters = (letter for letter in literal if not letter.isspace())
    parts = (f"({_HOLES[letter]}+)" if letter in _HOLES else re.escape(letter) for letter in letters)
    which = sum(letter in _HOLES for letter in literal[: literal.index(CALL_ID)]) + 1
    found = re.match(r"\s*".join(parts), text.lstrip())
    return None if found is None else found[which]


def name_length(text: str, run: int, following: list[str]) -> int | None:
    """How long a name at the start of a text is, of which one of several texts follows; None while that may yet come.

    run: letters of names at the start; a text that follows may begin with such letters too. It is all of them where
    nothing follows.
    """
    is_open = False
    for length in range(run, 0, -1):
        found = [match_length(text[length:], one) for one in following if one]
        if any(size is not None and size >= 0 for size in found):
            return length
        is_open = is_open or None in found
    return None if is_open else run


class Mark(NamedTuple):
    """What may stand in a text: its first marker, the whole, and what it begins."""

    first: str
    literal: str
    state: Literal["call", "frame", "reasoning"]


def marks_of(reasoning: ReasoningFormat, calls: CallFormat | None) -> list[Mark]:
    """What may stand in the text of a reply: calls, what stands around answers, and reasoning that begins again."""
    begins = [] if calls is None or not calls.trigger else [calls.opening + calls.begin, *calls.other_begins]
    if calls is not None and not reasoning.answer_begin:
        begins += calls.late_begins
    literals: list[tuple[str, Literal["call", "frame", "reasoning"]]] = []
    literals += [(begin, "call") for begin in begins[:1] if first_marker(begin)]
    literals += [(begin, "call") for begin in begins[1:]]
    if reasoning.answer_begin:
        literals += [(text, "frame") for text in reasoning.frame]
        literals.append((reasoning.begin, "reasoning"))
    if following := reasoning.following:
        frames = (reasoning.answer_begin, *reasoning.other_answers)
        for before in (reasoning.end + following, following):
            literals += [(before + begin, "call") for begin in begins]
            literals += [(before + text, "frame") for text in frames]
            literals.append((before + reasoning.begin, "reasoning"))
    return [Mark(first_marker(text) or text, text, state) for text, state in literals]
