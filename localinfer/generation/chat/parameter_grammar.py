"""The grammar of arguments that stand one by one, each with its name: in the order of the schema, and what may be left
out may be missing."""

from collections.abc import Iterable, Mapping
from typing import Any

from localinfer.errors import ConstraintError
from localinfer.generation.chat.grammar_writer import ANY_NAME, NAME_BEFORE_COLON, GrammarWriter
from localinfer.generation.chat.messages import Tool
from localinfer.generation.chat.notation_grammar import NotationValues
from localinfer.generation.chat.value_grammar import TextValues
from localinfer.models.text.reply_format import PARAMETER_NAME, CallFormat

_PARAMETERS = frozenset(
    "type properties required additionalProperties $defs definitions $schema title description".split()
)


def parameter_rules(writer: GrammarWriter, calls: CallFormat, tool: Tool, rule: str, options: Any) -> list[str]:
    """Rules, the first named `rule`, for a call of a tool from its name to its end.

    options: llguidance's, for JSON. Raises: ConstraintError where a schema cannot be enforced, naming the keyword.
    """
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    is_strict = bool(tool.description["function"].get("strict"))
    written = (TextValues if form.notation is None else NotationValues)(writer, form, rule, options, is_strict)
    schema = tool.parameters or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for keyword in sorted(schema.keys() - _PARAMETERS):
        raise ConstraintError(
            f"{keyword!r} beside the parameters' names cannot be enforced; leave it out", keyword=keyword
        )
    required = schema.get("required") or ()
    for name in required:
        if name not in properties:
            raise ConstraintError(f"'required' names {name!r}, which has no schema; add one", keyword="required")
    if not properties or tool.parameters is None:
        return [*_any_parameters(writer, calls, tool, rule, written, schema), *written.rules]
    rules = [f"{rule}: {writer.literal(tool.name)} {rule}_first_0"]
    for index, (name, of_property) in enumerate(properties.items()):
        value = written.value(f"{rule}_value_{index}", name, of_property, schema)
        more = f"{rule}_rest_{index + 1}"
        may_miss = name not in required
        for start, between in (("first", calls.middle), ("rest", form.following)):
            taken = f"{writer.literal(between + name)} {value} {more}"
            missing = f" | {rule}_{start}_{index + 1}" if may_miss else ""
            rules.append(f"{rule}_{start}_{index}: {taken}{missing}")
    last = len(properties)
    first, rest = writer.literal(form.empty), writer.literal(calls.end)
    if (extra := schema.get("additionalProperties", False)) is not False:
        rules += _others(writer, calls, rule, written, extra, schema, besides=properties)
        first, rest = f"{rule}_other {rest} | {first}", f"{rule}_further* {rest}"
    rules += [f"{rule}_first_{last}: {first}", f"{rule}_rest_{last}: {rest}"]
    return rules + written.rules


def _any_parameters(
    writer: GrammarWriter,
    calls: CallFormat,
    tool: Tool,
    rule: str,
    written: TextValues | NotationValues,
    schema: Mapping[str, Any],
) -> list[str]:
    """A call with parameters of any names."""
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    extra = schema.get("additionalProperties", True)
    name, end = writer.literal(tool.name), writer.literal(calls.end)
    if extra is False:
        return [f"{rule}: {name} {writer.literal(form.empty)}"]
    others = _others(writer, calls, rule, written, extra, schema)
    return [f"{rule}: {name} ({rule}_other {end} | {writer.literal(form.empty)})", *others]


def _others(
    writer: GrammarWriter,
    calls: CallFormat,
    rule: str,
    written: TextValues | NotationValues,
    extra: object,
    schema: Mapping[str, Any],
    besides: Iterable[str] = (),
) -> list[str]:
    """Rules `RULE_other` for parameters of any names but some, from behind the call's name on, and `RULE_further` for
    one behind others. extra: the schema of their values."""
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    value = written.value(f"{rule}_value", PARAMETER_NAME, extra if isinstance(extra, Mapping) else {}, schema)
    any_name = NAME_BEFORE_COLON if form.assign.startswith(":") else ANY_NAME
    return [
        f"{rule}_other: {rule}_name {value} {rule}_further*",
        f"{rule}_further: {rule}_next {value}",
        *writer.naming(f"{rule}_name", calls.middle, any_name, besides),
        *writer.naming(f"{rule}_next", form.following, any_name, besides),
    ]
