"""Parts of llguidance's dialect of Lark: texts in which control tokens stand as tokens, and what ends with a text.

Structural tags, as vLLM, SGLang and xgrammar have them, are written with these: free text in which tags hold what is
between them to a form. Text up to a trigger is a rule marked `lazy`, which ends at the first position where it can.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from localinfer.errors import ConstraintError
from localinfer.generation.chat.json_schema import MAX_CHARACTERS, check_depth, enforced_schema
from localinfer.models.text.reply_format import CALL_ID, CALL_NUMBER, PARAMETER_NAME
from localinfer.models.text.tokenizer import SpellingFinder

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


def without(marker: str) -> str:
    """A term of a terminal for texts that do not hold a marker.

    Where its first letter comes once, it is an expression of its own: llguidance finds nothing that follows the
    complement of one amid parts that are counted.
    """
    first, rest = marker[0], marker[1:]
    if first in rest:
        return f"~/(?s:.*){escaped(marker)}(?s:.*)/"
    begin, behind = _code(first), ""
    for letter in reversed(rest):
        goes_on = f"|{_code(letter)}{behind}" if behind else ""
        behind = f"(?:[^{begin}{_code(letter)}][^{begin}]*{goes_on})?"
    return f"/[^{begin}]*{f'(?:{begin}{behind})*' if rest else ''}/"


def _code(letter: str) -> str:
    return f"\\x{{{ord(letter):x}}}"


_MOST_PARTS = 1_000
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}


def structural_tag_grammar(tag: Mapping[str, Any] | str, json_options: Mapping[str, Any]) -> str:
    """The grammar of a structural tag, {"format": ...} or the older {"structures": [...], "triggers": [...]}.

    tag: as a mapping or as JSON text. json_options: llguidance's, for JSON. Raises: ConstraintError naming the part
    that is unknown.
    """
    if isinstance(tag, str):
        if len(tag) > MAX_CHARACTERS:
            raise _refusal(f"has {len(tag)} characters, more than {MAX_CHARACTERS}")
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise _refusal(f"is not JSON: {error}") from None
    if not isinstance(tag, Mapping):
        raise _refusal(f"is {tag!r:.40}")
    check_depth(tag)
    form = tag.get("format")
    if form is None and "structures" in tag:
        tags = [_older_tag(one) for one in _list_of(tag, "structures")]
        form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    writer = _FormatWriter(json_options)
    writer.rules.insert(0, f"start: {writer.written(form, '')}")
    return "\n".join(["%llguidance {}", *writer.rules, f"TEXT: {ANY}", ""])


def _older_tag(one: object) -> dict[str, Any]:
    if not isinstance(one, Mapping):
        raise _refusal(f"has {one!r:.40} among its structures")
    content = {"type": "json_schema", "json_schema": one.get("schema", {})}
    return {"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end", "")}


def _refusal(found: str) -> ConstraintError:
    return ConstraintError(
        f'the structural tag {found}; give {{"format": {{"type": ...}}}} of const_string, json_schema, regex, '
        "any_text, sequence, or, optional, star, plus, tag, triggered_tags and tags_with_separator",
        keyword="structural_tag",
    )


def _list_of(form: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = form.get(name)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise _refusal(f"has {name} that are {found!r:.40}, no list of some")
    return found


def _text_of(form: Mapping[str, Any], name: str) -> str:
    found = form.get(name)
    if not isinstance(found, str):
        raise _refusal(f"has a {name} that is {found!r:.40}, no text")
    return found


class _FormatWriter:
    """Writes the rules of formats. rules: those that were written so far."""

    def __init__(self, json_options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._options = json_options
        self._count = 0

    def written(self, form: object, end: str | None) -> str:
        """A format and the text that ends it, as an expression; end: None where another format follows."""
        if not isinstance(form, Mapping):
            raise _refusal(f"has a format that is {form!r:.40}")
        self._count += 1
        if self._count > _MOST_PARTS:
            raise _refusal(f"has more than {_MOST_PARTS} parts")
        kind, rule = form.get("type"), f"format_{self._count}"
        behind = f" {quoted(end)}" if end else ""
        match kind:
            case "any_text":
                return self._any_text(rule, end)
            case "triggered_tags":
                return self._triggered(rule, form, end)
            case "sequence":
                *others, last = _list_of(form, "elements")
                return " ".join([*(self.written(one, None) for one in others), self.written(last, end)])
            case "or":
                choices = [self.written(one, end) for one in _list_of(form, "elements")]
                return self._rule(rule, " | ".join(choices))
            case "optional" | "star" | "plus":
                return f"({self.written(form.get('content'), None)}){_REPEATS[kind]}{behind}"
            case "const_string":
                return f"{quoted(_text_of(form, 'value'))}{behind}"
            case "json_schema":
                schema = {**enforced_schema(form.get("json_schema")), "x-guidance": self._options}
                return f"{self._rule(rule, f'%json {json.dumps(schema)}')}{behind}"
            case "regex":
                pattern = _text_of(form, "pattern").replace("\\/", "/").replace("/", "\\/")
                return f"{self._rule(rule.upper(), f'/{pattern}/')}{behind}"
            case "tag":
                return f"{self._tag(form, '')}{behind}"
            case "tags_with_separator":
                return f"{self._separated(rule, form)}{behind}"
        raise _refusal(f"has a format of type {kind!r:.40}")

    def _rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def _any_text(self, rule: str, end: str | None) -> str:
        if end is None:
            raise _refusal("has any_text before something that does not tell where it ends")
        if not end:
            return "TEXT"
        self.rules.append(f"{rule}[lazy]: TEXT {quoted(end)}")
        return rule

    def _tag(self, form: object, trigger: str) -> str:
        """A tag behind its trigger."""
        if not isinstance(form, Mapping):
            raise _refusal(f"has {form!r:.40} among its tags")
        begin, ends = _text_of(form, "begin"), form.get("end", "")
        ends = [ends] if isinstance(ends, str) else _list_of(form, "end")
        if not all(isinstance(end, str) for end in ends):
            raise _refusal(f"has a tag with ends {ends!r:.40}")
        choices = [self.written(form.get("content"), end) for end in ends]
        rest = begin[len(trigger) :]
        content = choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"
        return f"{quoted(rest)} {content}" if rest else content

    def _triggered(self, rule: str, form: Mapping[str, Any], end: str | None) -> str:
        if end is None:
            raise _refusal("has triggered_tags before something that does not tell where their text ends")
        triggers, tags = _list_of(form, "triggers"), _list_of(form, "tags")
        by_trigger: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text_of(tag, "begin") if isinstance(tag, Mapping) else ""
            trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
            if trigger is None:
                raise _refusal(f"has a tag that begins with {begin!r:.40}, which no trigger does")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, trigger))
        made = []
        for index, (trigger, written) in enumerate(by_trigger.items()):
            self.rules.append(f"{rule}_head_{index}[lazy]: TEXT {quoted(trigger)}")
            made.append(f"{rule}_head_{index} ({' | '.join(written)})")
        one = self._rule(f"{rule}_one", " | ".join(made))
        text = self._any_text(f"{rule}_text", end)
        if form.get("stop_after_first"):
            behind = f" {quoted(end)}" if end else ""
            return f"({one}{behind})" if form.get("at_least_one") else f"({one}{behind} | {text})"
        return f"{one}{'+' if form.get('at_least_one') else '*'} {text}"

    def _separated(self, rule: str, form: Mapping[str, Any]) -> str:
        tags = " | ".join(self._tag(tag, "") for tag in _list_of(form, "tags"))
        one = self._rule(f"{rule}_one", tags)
        more = "" if form.get("stop_after_first") else f" ({quoted(_text_of(form, 'separator'))} {one})*"
        return f"({one}{more}){'' if form.get('at_least_one') else '?'}"
