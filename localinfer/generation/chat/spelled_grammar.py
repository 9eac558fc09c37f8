r"""Grammars of texts, written for llguidance in the spelling that a text has in a call.

llguidance cuts a text into words by their longest match, and looks one byte ahead. In JSON a line break is two bytes,
of which the first begins other letters too, so a word of any letters would swallow the half of what ends it. Two ways
out:

- A grammar whose rules do not contain themselves is one word: its rules become parts of one expression, which is exact
  wherever its parts begin and end, and fast, as no words have to be told apart.
- In other grammars, a word that could go on with such a letter is cut at each of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from localinfer.errors import ConstraintError
from localinfer.generation.chat.grammar_writer import quoted, without
from localinfer.generation.chat.text_spelling import (
    Expression,
    Joined,
    Letters,
    Lexeme,
    OneOf,
    Repeated,
    RuleName,
    Text,
    TextSpelling,
)


class SpelledGrammar(NamedTuple):
    """A grammar in llguidance's dialect of Lark."""

    rules: list[str]
    """Lines of it, of which none is named `start`."""
    start: str
    """The name of the rule or terminal that it begins with."""
    is_word: bool
    """True if that is a terminal."""


class TextGrammar(NamedTuple):
    """A grammar of texts, which begins at the rule `start`."""

    rules: Mapping[str, Expression]
    """Rules and terminals, which are used by rules and other terminals."""
    terminals: frozenset[str]
    """Names of those of them that are terminals."""
    ignored: tuple[Expression, ...] = ()
    """Texts that may stand between words."""

    def spelled(self, spelling: TextSpelling) -> SpelledGrammar:
        """The grammar of spelled texts.

        Raises: ConstraintError for a terminal that contains itself, and for rules that use each other too deeply.
        """
        try:
            return _Writer(self, spelling).written()
        except RecursionError:
            raise ConstraintError("the grammar's rules use each other too deeply; write some of them out") from None


class _Writer:
    """Writes one grammar in one spelling."""

    def __init__(self, grammar: TextGrammar, spelling: TextSpelling) -> None:
        self._grammar = grammar
        self._spelling = spelling
        self._numbers = {name: number for number, name in enumerate(grammar.rules)}
        self._terminals: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self._letters: dict[Letters, str] = {}
        self._words: dict[Expression, str] = {}
        self._runs: dict[str, str] = {}
        self._cuts: dict[str, str] = {}
        # By the name of a terminal, so that each is looked at once however often others use it.
        self._going_on: dict[str, bool] = {}
        self._empty: dict[str, bool] = {}
        self._respelled: dict[str, bool] = {}
        recursive = _recursive(grammar.rules)
        for name in recursive & grammar.terminals:
            raise ConstraintError(f"the terminal {name!r:.60} contains itself; make it a rule, in small letters")
        self._is_one_word = not recursive

    def written(self) -> SpelledGrammar:
        """The whole grammar."""
        if self._is_one_word:
            start = "WHOLE"
            self._terminals[start] = f"({self._between()} {self._named('start')}){self._without_end}"
        else:
            start = self._ruled(RuleName("start"))
        ignored = [] if self._is_one_word else [f"%ignore {self._word(one)}" for one in self._grammar.ignored]
        rules = [f"{name}: {body}" for name, body in (*self._rules.items(), *self._terminals.items())]
        return SpelledGrammar([*rules, *ignored], start, self._is_one_word)

    @property
    def _without_end(self) -> str:
        """Term behind a terminal by which it does not hold the end of a text that stands as it is."""
        if self._spelling.is_json or not self._spelling.end:
            return ""
        return f" & {without(self._spelling.end)}"

    def _between(self) -> str:
        """Texts that may stand between words, where the grammar is one."""
        ignored = [self._regular(one, is_rule=False) for one in self._grammar.ignored]
        return f"({' | '.join(ignored)})*" if ignored else ""

    def _named(self, name: str) -> str:
        """The terminal that a rule or terminal becomes."""
        made = f"T{self._numbers[name]}"
        if made not in self._terminals:
            self._terminals[made] = ""
            is_rule = name not in self._grammar.terminals
            self._terminals[made] = self._regular(self._grammar.rules[name], is_rule=is_rule)
        return made

    def _regular(self, part: Expression, *, is_rule: bool) -> str:
        """An expression of a terminal. is_rule: its words may have something between them."""
        match part:
            case Lexeme(inner):
                return self._spaced(self._regular(inner, is_rule=False), is_rule)
            case Text(text):
                return self._spaced(quoted(self._spelling.text(text)), is_rule)
            case Letters():
                return self._letter(part)
            case RuleName(name):
                return self._spaced(self._named(name), is_rule and name in self._grammar.terminals)
            case Joined(parts):
                return " ".join(self._regular(one, is_rule=is_rule) for one in parts) or '""'
            case OneOf(choices):
                return f"({' | '.join(self._regular(one, is_rule=is_rule) for one in choices)})"
            case Repeated(inner):
                return f"({self._regular(inner, is_rule=is_rule)}){_times(part)}"
        raise AssertionError(part)

    def _spaced(self, written: str, is_rule: bool) -> str:
        between = self._between() if is_rule else ""
        return f"({written} {between})" if between else written

    def _letter(self, letters: Letters) -> str:
        """The terminal of one letter."""
        if letters not in self._letters:
            choices = (
                [quoted(self._spelling.text(one)) for one in letters.respelled()] if self._spelling.is_json else []
            )
            if plain := letters.as_they_are(self._spelling):
                choices.append(f"/{plain}/")
            name = f"L{len(self._letters)}"
            self._letters[letters] = name
            self._terminals[name] = " | ".join(choices)
        return self._letters[letters]

    def _ruled(self, part: Expression) -> str:
        """An expression of a rule, with words in it."""
        match part:
            case RuleName(name) if name in self._grammar.terminals:
                return self._worded(self._grammar.rules[name])
            case RuleName(name):
                made = f"r{self._numbers[name]}"
                if made not in self._rules:
                    self._rules[made] = ""
                    self._rules[made] = self._ruled(self._grammar.rules[name])
                return made
            case Lexeme(inner):
                return self._worded(inner)
            case Joined(parts):
                return " ".join(self._ruled(one) for one in parts) or '""'
            case OneOf(choices):
                return f"({' | '.join(self._ruled(one) for one in choices)})"
            case Repeated(inner):
                return f"({self._ruled(inner)}){_times(part)}"
        return self._word(part)

    def _worded(self, part: Expression) -> str:
        """A word; where it could go on with a letter that is spelled otherwise, the words that it is cut into."""
        return self._cut(part) if self._spelling.is_json and self._goes_on(part) else self._word(part)

    def _word(self, part: Expression) -> str:
        if part not in self._words:
            self._words[part] = f"W{len(self._words)}"
            self._terminals[self._words[part]] = f"({self._regular(part, is_rule=False)}){self._without_end}"
        return self._words[part]

    def _cut(self, part: Expression) -> str:
        if not self._has_respelled(part):
            return self._word(part)
        match part:
            case RuleName(name):
                if name not in self._cuts:
                    self._cuts[name] = f"c{self._numbers[name]}"
                    self._rules[self._cuts[name]] = self._cut(self._grammar.rules[name])
                return self._cuts[name]
            case Lexeme(inner):
                return self._cut(inner)
            case Joined(parts):
                return " ".join(map(self._cut, parts))
            case OneOf(choices):
                return f"({' | '.join(map(self._cut, choices))})"
            case Repeated(Letters() as letters, least, None) if least < 2:
                others = self._others(letters)
                if plain := letters.as_they_are(self._spelling):
                    others.append(self._named_word(f"/{plain}+/"))
                return f"({' | '.join(others)}){'*+'[least]}"
            case Repeated(inner):
                return f"({self._cut(inner)}){_times(part)}"
            case Letters():
                plain = part.as_they_are(self._spelling)
                return f"({' | '.join([*self._others(part), *([self._named_word(f'/{plain}/')] if plain else [])])})"
        return self._word(part)

    def _others(self, letters: Letters) -> list[str]:
        """Words of the letters of a class that are spelled otherwise, each by itself."""
        return [self._word(Text(one)) for one in letters.respelled()]

    def _named_word(self, body: str) -> str:
        if body not in self._runs:
            self._runs[body] = f"P{len(self._runs)}"
            self._terminals[self._runs[body]] = body
        return self._runs[body]

    def _has_respelled(self, part: Expression) -> bool:
        """True if a text of an expression of a terminal may have a letter that is spelled otherwise."""
        match part:
            case Letters():
                return bool(part.respelled())
            case Text(text):
                return text != self._spelling.text(text)
            case RuleName(name):
                if name not in self._respelled:
                    self._respelled[name] = self._has_respelled(self._grammar.rules[name])
                return self._respelled[name]
        return any(map(self._has_respelled, _inner(part)))

    def _may_be_empty(self, part: Expression) -> bool:
        match part:
            case Text(text):
                return not text
            case RuleName(name):
                if name not in self._empty:
                    self._empty[name] = self._may_be_empty(self._grammar.rules[name])
                return self._empty[name]
            case Joined(parts):
                return all(map(self._may_be_empty, parts))
            case OneOf(choices):
                return any(map(self._may_be_empty, choices))
            case Repeated(inner, least):
                return least == 0 or self._may_be_empty(inner)
            case Lexeme(inner):
                return self._may_be_empty(inner)
        return False

    def _goes_on(self, part: Expression) -> bool:
        """True if a text of an expression can be the start of a longer one that has another such letter behind it."""
        match part:
            case RuleName(name):
                if name not in self._going_on:
                    self._going_on[name] = self._goes_on(self._grammar.rules[name])
                return self._going_on[name]
            case Lexeme(inner):
                return self._goes_on(inner)
            case Joined(parts):
                for one in reversed(parts):
                    if self._goes_on(one):
                        return True
                    if not self._may_be_empty(one):
                        return False
                    if self._has_respelled(one):
                        return True
                return False
            case OneOf(choices):
                return any(map(self._goes_on, choices)) or self._has_respelled(part)
            case Repeated(inner, least, most):
                return self._goes_on(inner) or ((most is None or most > least) and self._has_respelled(inner))
        return False


def _times(part: Repeated) -> str:
    return f"{{{part.least},{'' if part.most is None else part.most}}}"


def _inner(part: Any) -> "list[Expression]":
    """The parts of an expression."""
    match part:
        case Joined(parts) | OneOf(parts):
            return list(parts)
        case Repeated(inner) | Lexeme(inner):
            return [inner]
    return []


def _recursive(rules: Mapping[str, Expression]) -> frozenset[str]:
    """Names of the rules that contain themselves, or contain one that does."""
    uses = {name: _used(part) for name, part in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in uses.items():
        for one in used:
            users[one].append(name)
    left = {name: len(used) for name, used in uses.items()}
    done = [name for name, number in left.items() if not number]
    for name in done:
        for user in users[name]:
            left[user] -= 1
            if not left[user]:
                done.append(user)
    return frozenset(rules) - frozenset(done)


def _used(part: Expression) -> set[str]:
    """Names of rules that an expression refers to."""
    found, waiting = set(), [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, RuleName):
            found.add(one.name)
        waiting += _inner(one)
    return found
