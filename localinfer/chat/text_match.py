"""Whether a text that is still arriving begins with what a format writes."""


def match_length(text: str, literal: str) -> int | None:
    """How much of a text spells a literal, whatever white space either has; -1 if none does, None while it may yet."""
    place = 0
    for letter in literal:
        if letter.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text):
            return None
        if text[place] != letter:
            return -1
        place += 1
    return place
