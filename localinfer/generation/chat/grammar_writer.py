"""Parts of llguidance's dialect of Lark: texts in which control tokens stand as tokens, and what ends with a text."""

import json
import re
from collections.abc import Iterable, Iterator

from localinfer.models.text.reply_format import CALL_ID, CALL_NUMBER, PARAMETER_NAME
from localinfer.models.text.splitting import SpellingFinder

ANY = "/(?s:.*)/"
ANY_NAME = "/[A-Za-z0-9_.:-]{1,64}/"
NAME_BEFORE_COLON = "/[A-Za-z0-9_.-]{1,64}/"
_HOLES = {
    CALL_ID: ("CALL_ID", "/[A-Za-z0-9]{9}/"),
    CALL_NUMBER: ("CALL_NUMBER", "/[0-9]{1,3}/"),
    PARAMETER_NAME: ("PARAMETER_NAME", ANY_NAME),
}
"""Variable parts of a text of the format: the names and the expressions of their terminals."""
_NAMES = frozenset(name for name, _ in _HOLES.values())
_HOLE = re.compile(f"([{''.join(_HOLES)}])")


class GrammarWriter:
    """Writes texts as Lark literals, control tokens in them as tokens. specials: the spellings of these."""

    def __init__(self, specials: SpellingFinder) -> None:
        self._specials = specials
        self._terminals: set[tuple[str, str]] = set()

    @property
    def terminals(self) -> list[str]:
        """Rules for what literals that were written so far leave to the model."""
        return [f"{name}: {expression}" for name, expression in sorted(self._terminals)]

    def is_control(self, marker: str) -> bool:
        """True if a marker is a control token, or begins with one."""
        return any(found.start == 0 for found in self._specials.find(marker))

    def literal(self, text: str) -> str:
        """A text."""
        return " ".join(self._pieces(text))

    def naming(self, rule: str, text: str, name: str, besides: Iterable[str]) -> list[str]:
        """Rules, the first named `rule`, for a text and any name but some behind it.

        name: its regular expression between slashes. The end of the text is one terminal with the name: beside literals
        that begin alike, only a longer one is found.
        """
        *first, last = self._pieces(text)
        if last.startswith("<[") or last in _NAMES:
            first, last = [*first, last], '""'
        start = escaped(json.loads(last))
        terminal = rule.upper()
        taken = "|".join(map(escaped, besides))
        but = f" & ~/{start}({taken})/" if taken else ""
        return [f"{rule}: {' '.join([*first, terminal])}", f"{terminal}: /{start}{name.strip('/')}/{but}"]

    def until(self, name: str, before: str, text: str) -> list[str]:
        """Rules, the first named `name`, that end with the first occurrence of a text; before: what precedes it."""
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
            yield from self._plain(text[position : spelling.start])
            yield f"<[{spelling.token_id}]>"
            position = spelling.end
        yield from self._plain(text[position:])

    def _plain(self, text: str) -> Iterator[str]:
        for part in _HOLE.split(text):
            if part in _HOLES:
                self._terminals.add(_HOLES[part])
                yield _HOLES[part][0]
            elif part:
                yield quoted(part)


def quoted(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    made = "".join("\\" + letter if letter in r"\.+*?()|[]{}^$/&~#-<>" else letter for letter in text)
    return made.replace("\n", "\\n").replace("\\<", "<").replace("\\>", ">")
