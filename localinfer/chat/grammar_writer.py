"""Parts of llguidance's dialect of Lark: texts in which control tokens stand as tokens, and what ends with a text."""

import json
from collections.abc import Iterator

from localinfer.models.text.splitting import SpellingFinder

ANY = "/(?s:.*)/"


class GrammarWriter:
    """Writes texts as Lark literals, control tokens in them as tokens. specials: the spellings of these."""

    def __init__(self, specials: SpellingFinder) -> None:
        self._specials = specials

    def literal(self, text: str) -> str:
        """A text."""
        return " ".join(self._pieces(text))

    def until(self, name: str, before: str, text: str) -> list[str]:
        """Rules, the first named `name`, for what ends with the first place of a text; before: what comes before it."""
        first, *rest = self._pieces(text)
        if first.startswith("<["):
            return [f"{name}: {before} {' '.join([first, *rest])}"]
        if not rest:
            return [f"{name}[lazy]: {before} {first}"]
        return [f"{name}: {name}_start {' '.join(rest)}", f"{name}_start[lazy]: {before} {first}"]

    def _pieces(self, text: str) -> Iterator[str]:
        position = 0
        for spelling in self._specials.find(text):
            if spelling.start < position:
                continue
            if spelling.start > position:
                yield quoted(text[position : spelling.start])
            yield f"<[{spelling.token_id}]>"
            position = spelling.end
        if position < len(text):
            yield quoted(text[position:])


def quoted(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    made = "".join("\\" + letter if letter in r"\.+*?()|[]{}^$/&~#-<>" else letter for letter in text)
    return made.replace("\n", "\\n").replace("\\<", "<").replace("\\>", ">")
