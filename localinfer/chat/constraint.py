"""What a generation may be held to: a JSON object, a JSON Schema, a regular expression or a grammar.

These are descriptions; `constraint_compiler` turns them into masks over a vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localinfer.arguments import owned


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object, on one line as `json.dumps` writes it: a space after each comma and colon."""


@dataclass(frozen=True)
class JsonSchema:
    """A JSON text that a schema accepts (JSON Schema 2020-12), on one line as `json.dumps` writes it.

    schema: as a mapping, which is copied, or as JSON text; properties come in the order in which it lists them. What
        it asks for is enforced to the letter, or refused: ConstraintError names the keyword that cannot be.
    """

    schema: Mapping[str, Any] | str | bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", owned(self.schema))


@dataclass(frozen=True)
class Regex:
    """A text that a regular expression matches as a whole.

    pattern: in the syntax of Rust's regex crate, which is Python's without look-around and back-references.
    """

    pattern: str


@dataclass(frozen=True)
class Grammar:
    """A text of a context-free grammar.

    text: in Lark's syntax, beginning at the rule `start`, or in llama.cpp's GBNF, beginning at `root`; which of them is
        read off the rules' signs, `:` or `::=`.
    """

    text: str


Constraint = JsonObject | JsonSchema | Regex | Grammar
"""What the option `constraint` takes."""
