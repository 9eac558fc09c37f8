"""What some templates read beside what is documented: tools by other names, the date, and whether to reason."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from localinfer.errors import RequestError
from localinfer.models.text.reply_format import THINKING_VARIABLES

if TYPE_CHECKING:
    from jinja2 import nodes

DAY_VARIABLE = "template_date"
"""The variable by which a caller sets the date that a template writes, however it does: "today", or a day."""

_DATES = {"datetime": "%b %d %Y", "date_string": "%d %b %Y"}
"""Names of dates -> how models that read them are used to see one."""
_NAMES = frozenset(("tools", "xml_tools", "functions", *_DATES))
_DEFAULT_FILTERS = frozenset(("default", "d"))
_PRESENCE_TESTS = frozenset(("defined", "undefined", "none"))


def asked_day(variables: Mapping[str, Any], today: datetime) -> datetime | None:
    """The day that a caller asks for by `template_date`, None for none. Raises: RequestError for what is no day."""
    value = variables.get(DAY_VARIABLE)
    if value is None:
        return None
    if value == "today":
        return today
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise RequestError(
            f'{DAY_VARIABLE} is {value!r:.40}; give "today", or a day such as "2026-10-01"',
            field="template_variables",
        ) from None


@dataclass(frozen=True)
class TemplateNames:
    """What one template reads that it has to be given.

    reads: of the names known here those that the template does not set before it reads them. undated: names of dates
    that it reads without asking whether they are given, having none of its own. reasons_by: names of switches for
    reasoning that it takes for off where they are not given, without asking whether they are.
    """

    reads: frozenset[str]
    undated: frozenset[str]
    reasons_by: tuple[str, ...]

    @classmethod
    def of(cls, parsed: "nodes.Template") -> "TemplateNames":
        """Read them off a parsed template."""
        from jinja2 import meta

        reads = _NAMES & meta.find_undeclared_variables(parsed)
        return cls(
            reads,
            frozenset(name for name in reads & _DATES.keys() if not _has_own(parsed, name)),
            tuple(name for name in THINKING_VARIABLES if _is_off_unless_given(parsed, name)),
        )

    def values(
        self, tools: Sequence[Mapping[str, Any]] | None, today: datetime, asked: datetime | None = None
    ) -> dict[str, Any]:
        """By name what the template is given, unless the caller gives something else.

        asked: a day that the caller wants written; without, the template's own stays, where it has one: a prompt that
        has the date in it is computed anew every day.
        """
        made: dict[str, Any] = dict.fromkeys(self.reasons_by, True)
        if "xml_tools" in self.reads and tools:
            made["xml_tools"] = tools
        if "functions" in self.reads and "tools" not in self.reads:
            made["functions"] = json.dumps(tools or [], ensure_ascii=False)
        dates = self.undated if asked is None else self.reads & _DATES.keys()
        day = today if asked is None else asked
        return made | {name: day.strftime(_DATES[name]) for name in dates}


def _has_own(parsed: "nodes.Template", name: str) -> bool:
    """Whether a template has something in place of a name that is not given: it sets it, or asks for it."""
    from jinja2 import nodes

    def names(node: nodes.Node | None) -> bool:
        return isinstance(node, nodes.Name) and node.name == name

    return (
        any(names(node) and node.ctx == "store" for node in parsed.find_all(nodes.Name))
        or any(names(node.node) and node.name in _PRESENCE_TESTS for node in parsed.find_all(nodes.Test))
        or any(names(node.node) for node in parsed.find_all(nodes.Not))
        or any(names(node.node) and node.name in _DEFAULT_FILTERS for node in parsed.find_all(nodes.Filter))
        or any(names(node.test) for node in parsed.find_all(nodes.If))
        or any(names(node.test) for node in parsed.find_all(nodes.CondExpr))
        or any(names(node.left) for node in parsed.find_all(nodes.And))
        or any(names(node.left) for node in parsed.find_all(nodes.Or))
    )


def _is_off_unless_given(parsed: "nodes.Template", name: str) -> bool:
    """Whether a template tests `not NAME`, and nowhere gives the name a default or asks whether it has a value."""
    from jinja2 import nodes

    def reads(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == name and node.ctx == "load"

    if any(node.name == name and node.ctx == "store" for node in parsed.find_all(nodes.Name)):
        return False
    if any(reads(node.node) for node in parsed.find_all((nodes.Test, nodes.Filter)) if node.node is not None):
        return False
    return any(reads(node.node) for node in parsed.find_all(nodes.Not))
