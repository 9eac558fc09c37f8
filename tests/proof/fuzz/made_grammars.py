"""Grammars as data: written in three notations, and matched by the obvious algorithm.

A rule is an expression: ["text", characters], ["set", characters], ["but", characters] for any others, ["all", parts],
["any", parts], ["repeat", part, least, most or null] or ["rule", number]. A grammar is a list of rules, and begins at
the first.
"""

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

Expression = list[Any]
_LETTERS = 'abc01 "-]\\\n{é😀/^'
_MOST_DEPTH = 4
_MOST_ROUNDS = 300


def random_rules(random: Random) -> list[Expression]:
    """A few rules, which may use each other."""
    count = random.choice((1, 1, 2, 3, 5))
    return [random_expression(random, count, random.randrange(1, _MOST_DEPTH)) for _ in range(count)]


def random_expression(random: Random, num_rules: int, depth: int) -> Expression:
    """An expression over so many rules."""
    kind = random.randrange(9 if depth else 4)
    letters = "".join(random.choice(_LETTERS) for _ in range(random.choice((1, 1, 2, 3))))
    if kind < 2:
        return ["text", letters]
    if kind == 2:
        return [random.choice(("set", "set", "but")), letters]
    if kind == 3:
        return ["rule", random.randrange(num_rules)] if random.random() < 0.4 else ["text", letters]
    parts = [random_expression(random, num_rules, depth - 1) for _ in range(random.choice((1, 2, 2, 3)))]
    if kind < 6:
        return ["all", parts]
    if kind < 8:
        return ["any", parts]
    least = random.choice((0, 0, 1, 2, 3))
    return ["repeat", parts[0], least, random.choice((None, least, least + 1, least + 4))]


def is_sound(rules: object) -> bool:
    """Whether a value has the shape of a grammar."""
    return (
        isinstance(rules, list) and 0 < len(rules) < 50 and all(_is_expression(rule, len(rules), 0) for rule in rules)
    )


def _is_expression(value: object, num_rules: int, depth: int) -> bool:
    match value:
        case ["text" | "set" | "but", str(letters)]:
            is_plain = not any("\ud800" <= letter <= "\udfff" or letter in "\0\r" for letter in letters)
            return is_plain and (value[0] == "text" or bool(letters)) and len(letters) < 100
        case ["all" | "any", list(parts)]:
            inner = (_is_expression(part, num_rules, depth + 1) for part in parts)
            return bool(parts) and depth < 20 and all(inner)
        case ["repeat", part, int(least), int() | None as most]:
            is_count = 0 <= least <= 5 and (most is None or least <= most <= 10) and most != 0
            return is_count and depth < 20 and _is_expression(part, num_rules, depth + 1)
        case ["rule", int(number)]:
            return 0 <= number < num_rules and not isinstance(number, bool)
    return False


def gbnf(rules: Sequence[Expression]) -> str:
    """In llama.cpp's notation."""
    names = ["root", *(f"rule-{index}" for index in range(1, len(rules)))]
    return "\n".join(f"{name} ::= {_gbnf(rule, names)}" for name, rule in zip(names, rules, strict=True))


def lark(rules: Sequence[Expression]) -> str:
    """In Lark's notation."""
    names = ["start", *(f"rule_{index}" for index in range(1, len(rules)))]
    return "\n".join(f"{name}: {_lark(rule, names)}" for name, rule in zip(names, rules, strict=True))


def regular(rules: Sequence[Expression]) -> str | None:
    """As one regular expression; None where rules use each other."""
    return None if "rule" in json.dumps(rules[0]) else _regex(rules[0])


def _gbnf(expression: Expression, names: list[str]) -> str:
    match expression:
        case ["text", letters]:
            return '"' + "".join(map(_gbnf_letter, letters)) + '"'
        case ["set" | "but" as kind, letters]:
            return "[" + "^" * (kind == "but") + "".join(map(_gbnf_letter, letters)) + "]"
        case ["rule", number]:
            return names[number]
        case _:
            return _joined(expression, lambda part: _gbnf(part, names))


def _gbnf_letter(letter: str) -> str:
    if letter in '"\\]^-[' or not letter.isprintable():
        code = ord(letter)
        spelled = f"\\x{code:02X}" if code < 256 else f"\\u{code:04X}" if code < 65536 else letter
        return {"\n": "\\n", "\\": "\\\\", '"': '\\"'}.get(letter) or spelled
    return letter


def _lark(expression: Expression, names: list[str]) -> str:
    match expression:
        case ["text", letters]:
            return json.dumps(letters, ensure_ascii=False)
        case ["set" | "but", _]:
            return "/" + _regex(expression).replace("/", "\\/") + "/"
        case ["rule", number]:
            return names[number]
        case _:
            return _joined(expression, lambda part: _lark(part, names))


def _joined(expression: Expression, write: Any) -> str:
    match expression:
        case ["all", parts]:
            return "(" + " ".join(map(write, parts)) + ")"
        case ["any", parts]:
            return "(" + " | ".join(map(write, parts)) + ")"
        case ["repeat", part, least, most]:
            return f"({write(part)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(expression)


def _regex(expression: Expression) -> str:
    match expression:
        case ["text", letters]:
            return "".join(re.escape(letter) if letter.isascii() else letter for letter in letters)
        case ["set" | "but" as kind, letters]:
            inside = "".join("\\" + letter if letter in "\\]^-[&~" else letter for letter in letters)
            return "[" + "^" * (kind == "but") + inside + "]"
        case ["all", parts]:
            return "".join(f"(?:{_regex(part)})" for part in parts)
        case ["any", parts]:
            return "(?:" + "|".join(map(_regex, parts)) + ")"
        case ["repeat", part, least, most]:
            return f"(?:{_regex(part)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(expression)


def accepts(rules: Sequence[Expression], text: str) -> bool:
    """Whether a text is of a grammar: the ends that each rule reaches from each place, until nothing is added."""
    reached = [[frozenset[int]()] * (len(text) + 1) for _ in rules]
    for _ in range(_MOST_ROUNDS):
        has_changed = False
        for number, rule in enumerate(rules):
            for place in range(len(text), -1, -1):
                found = _ends(rule, text, place, reached)
                if found != reached[number][place]:
                    reached[number][place] = found
                    has_changed = True
        if not has_changed:
            return len(text) in reached[0][0]
    raise AssertionError("the grammar's own oracle does not end")


def _ends(expression: Expression, text: str, place: int, reached: list[list[frozenset[int]]]) -> frozenset[int]:
    match expression:
        case ["text", letters]:
            return frozenset((place + len(letters),) if text.startswith(letters, place) else ())
        case ["set" | "but" as kind, letters]:
            is_one = place < len(text) and (text[place] in letters) == (kind == "set")
            return frozenset((place + 1,) if is_one else ())
        case ["rule", number]:
            return reached[number][place]
        case ["any", parts]:
            return frozenset[int]().union(*(_ends(part, text, place, reached) for part in parts))
        case ["all", parts]:
            ends = frozenset((place,))
            for part in parts:
                ends = frozenset[int]().union(*(_ends(part, text, end, reached) for end in ends))
            return ends
        case ["repeat", part, least, most]:
            return _repeated_ends(part, least, most, text, place, reached)
    raise AssertionError(expression)


def _repeated_ends(
    part: Expression, least: int, most: int | None, text: str, place: int, reached: list[list[frozenset[int]]]
) -> frozenset[int]:
    ends = frozenset((place,))
    found = ends if least == 0 else frozenset[int]()
    for count in range(1, (least + len(text) + 1 if most is None else most) + 1):
        ends = frozenset[int]().union(*(_ends(part, text, end, reached) for end in ends))
        if count >= least:
            if ends <= found:
                break
            found |= ends
    return found


def derived(random: Random, rules: Sequence[Expression], expression: Expression, budget: int = 40) -> str | None:
    """A text of an expression, None where it takes too many steps."""
    if budget <= 0:
        return None
    match expression:
        case ["text", letters]:
            return str(letters)
        case ["set", letters]:
            return str(random.choice(letters))
        case ["but", letters]:
            return next((letter for letter in random.sample("xyzXYZ.,;", 9) if letter not in letters), None)
        case ["rule", number]:
            return derived(random, rules, rules[number], budget - 1)
        case ["any", parts]:
            return derived(random, rules, random.choice(parts), budget - 1)
        case ["all", parts]:
            made = [derived(random, rules, part, budget // 2) for part in parts]
        case ["repeat", part, least, most]:
            count = random.randint(least, least + 2 if most is None else most)
            made = [derived(random, rules, part, budget // 2) for _ in range(count)]
        case _:
            raise AssertionError(expression)
    return None if None in made else "".join(text for text in made if text is not None)
