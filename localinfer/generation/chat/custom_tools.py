"""Custom tools: their input is a text, which may have to follow a grammar or a regular expression.

Models are trained to call functions whose arguments are JSON, or stand one by one. So a custom tool is a function with
one argument, and its form holds for the text of that argument as the model's format spells it.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from localinfer.errors import ConstraintError
from localinfer.generation.chat.text_spelling import TextSpelling

if TYPE_CHECKING:
    from localinfer.generation.chat.spelled_grammar import TextGrammar

CUSTOM_ARGUMENT = "input"
"""The one argument of the function that a custom tool becomes."""
_KINDS = {"lark": "Lark grammar", "regex": "regex"}

_TEXT = r"[^\x00-\x08\x0a-\x1f]*"
"""Of a line: tabs are the only control characters, so that no line break hides in it."""
_PATH = r"[^\x00-\x20]([^\x00-\x1f]{0,252}[^\x00-\x20])?\n"
_HUNKS = rf"""
hunks: (lines | hunk) hunk*
hunk: HUNK lines
lines: KEPT* CHANGED (KEPT | CHANGED)* END_OF_FILE?
HUNK: /@@( [^\x00-\x08\x0a-\x20]{_TEXT})?\n/
KEPT: / {_TEXT}\n/
CHANGED: /[-+]{_TEXT}\n/
END_OF_FILE: "*** End of File\n"
added: ADD ADDED+
ADD: /\*\*\* Add File: {_PATH}/
ADDED: /\+{_TEXT}\n/
DELETE: /\*\*\* Delete File: {_PATH}/
UPDATE: /\*\*\* Update File: {_PATH}/
"""
PATCH_BEGIN, PATCH_END = "*** Begin Patch\n", "*** End Patch"
APPLY_PATCH = rf"""start: "*** Begin Patch\n" (added | DELETE | updated)+ "*** End Patch" "\n"?
updated: UPDATE MOVE? hunks
MOVE: /\*\*\* Move to: {_PATH}/
{_HUNKS}"""
"""Patches of the V4A format, stricter than what agents send of it: every change has a line that changes something."""
APPLY_PATCH_ONCE = rf"""start: "*** Begin Patch\n" (added | DELETE | updated) "*** End Patch"
updated: UPDATE hunks
{_HUNKS}"""
"""Patches of one file, none moved: what one item `apply_patch_call` of the API of responses holds."""


_PATCH_TEXT = """{} The input is a patch:
*** Begin Patch
*** Update File: PATH
@@ LINE THAT COMES BEFORE
 LINE THAT STAYS
-LINE THAT GOES
+LINE THAT COMES
*** End Patch
A new file begins with *** Add File: PATH, each of its lines with +; *** Delete File: PATH stands alone."""


class TextForm(NamedTuple):
    """Form of the input of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: str

    def grammar(self) -> "TextGrammar":
        """Its rules. Raises: ConstraintError for what is not supported."""
        from localinfer.generation.chat.lark import LarkReader, regex_grammar

        return regex_grammar(self.definition) if self.syntax == "regex" else LarkReader(self.definition).read()


def custom_function(
    name: object, description: object = None, form: TextForm | None = None, *, shows_form: bool = True
) -> dict[str, Any]:
    """The function that a custom tool becomes. shows_form: with its form in the description, for the model."""
    parts = [description]
    if form is not None and shows_form:
        parts.append(f"The {CUSTOM_ARGUMENT} must follow this {_KINDS[form.syntax]}:\n{form.definition}")
    return {
        "name": name,
        "description": "\n\n".join(part for part in parts if isinstance(part, str) and part),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: {"type": "string", "description": "The input, as plain text."}},
            "required": [CUSTOM_ARGUMENT],
            "additionalProperties": False,
        },
    }


def read_custom(tool: Mapping[str, Any], path: str) -> tuple[dict[str, Any], TextForm | None]:
    """A custom tool, in the shape of either of OpenAI's APIs, as a function and its form.

    Raises: ConstraintError with the path of what is wrong.
    """
    inner = tool.get("custom")
    if isinstance(inner, Mapping):
        tool, path = inner, f"{path}.custom"
    form = read_form(tool.get("format"), f"{path}.format")
    return custom_function(tool.get("name"), tool.get("description"), form), form


def patch_tool(*, is_once: bool) -> tuple[dict[str, Any], TextForm]:
    """The function `apply_patch` and its form. is_once: one file for each patch."""
    form = TextForm("lark", APPLY_PATCH_ONCE if is_once else APPLY_PATCH)
    what = "Create, change or delete one file." if is_once else "Create, change, move or delete files."
    return custom_function("apply_patch", _PATCH_TEXT.format(what), form, shows_form=False), form


def read_form(format: object, path: str) -> TextForm | None:
    """The form of a custom tool's input, None for any text. Raises: ConstraintError with the path of what is wrong."""
    found = {"type": "text"} if format is None else format
    kind = found.get("type") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or kind not in ("text", "grammar"):
        raise ConstraintError(f'{path} is {format!r:.60}; give {{"type": "text"}} or a grammar', field=path)
    if kind == "text":
        return None
    # Chat completions have a wrapper more than responses.
    inner = found.get("grammar")
    if isinstance(inner, Mapping):
        found, path = inner, f"{path}.grammar"
    syntax, definition = found.get("syntax"), found.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise ConstraintError(
            f"{path} is a grammar; name lark or regex as its syntax, and give its definition", field=path
        )
    form = TextForm(syntax, definition)
    try:
        form.grammar().spelled(TextSpelling(is_json=True))
    except ConstraintError as error:
        where = f"{path}.definition"
        raise ConstraintError(f"{where} cannot be enforced: {error}", field=where) from None
    return form


def custom_arguments(text: str) -> str:
    """The arguments of the function that a custom tool became, for an input."""
    # Written as models are held to write it, so that a call in a conversation is found in the prefix cache.
    return json.dumps({CUSTOM_ARGUMENT: text}, ensure_ascii=False)
