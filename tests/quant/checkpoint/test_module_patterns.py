"""Patterns of module names match as Python's regular expressions do, and end whatever the pattern."""

import random
import re

import pytest

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.module_patterns import ModulePattern

NAMES = ["model.layers.0.mlp.up_proj", "model.layers.18.self_attn.q_proj", "aab", "ab", "", "a\n", "aaaa", "a{b"]
PATTERNS = [
    *(r".*\.mlp\..*", r"model\.layers\.(0|1[0-9])\..*q_proj$", "a*b", "(a|b)*?$", "[^a]+", "^a{2,3}", "(?!model).*"),
    *("(?:a?){3}a{2}$", "[]a]+", r"\w+\.\d", "a|", "(?=a)a$", "x*", "a{,2}$", "a{,}$", "a{b", "a{2,}$", r"[\]a]b"),
]
PIECES = ["a", "b", ".", "a*", "(a|b)+", "(ab)?", "$", "^", "|", "[ab]", r"\w", "a{2}", "(?!b)", "(a*)*", "(a|)+"]


def test_matches_are_those_of_python() -> None:
    rng = random.Random(1)
    drawn = ["".join(rng.choices(PIECES, k=rng.randint(1, 8))) for _ in range(1000)]
    found = set()
    for text in [*PATTERNS, *drawn]:
        pattern = ModulePattern(text)
        for name in NAMES:
            wanted = re.match(text, name) is not None
            assert pattern.matches(name) is wanted, (text, name)
            found.add(wanted)
    assert found == {True, False}


@pytest.mark.parametrize("text", [r"(\w+\.?)+X", "(a*)*b", ".*" * 200 + "X", "((.{0,9}){0,99}){0,99}X"])
def test_pattern_that_would_run_for_ever_ends(text: str) -> None:
    assert not ModulePattern(text).matches("model.layers.0.self_attn.q_proj" * 4)


@pytest.mark.parametrize("text", ["(a", "[a", "*", "a**", "(?P<x>"])
def test_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(CorruptFileError, match="is no regular expression"):
        ModulePattern(text)


@pytest.mark.parametrize(
    "text", [r"(a)\1", "(?<=a)b", "a" * 1001, "a{9999}", "(" * 60 + ")" * 60, "(?i)a", r"\bq", "a++"]
)
def test_syntax_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedFormatError, match="cannot be matched"):
        ModulePattern(text)
