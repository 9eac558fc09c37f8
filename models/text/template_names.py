"""What some templates read beside what is documented: tools by other names, today's date, and whether to reason."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from localinfer.models.text.reply_format import THINKING_VARIABLES

if TYPE_CHECKING:
    from jinja2 import nodes

_NAMES = frozenset(("tools", "xml_tools", "functions", "datetime", "date_string"))


@dataclass(frozen=True)
class TemplateNames:
    """What one template reads that it has to be given.

    reads: of the names known here those that the template does not set before it reads them. reasons_by: names of
    switches for reasoning that it takes for off where they are not given, without asking whether they are.
    """

    reads: frozenset[str]
    reasons_by: tuple[str, ...]

    @classmethod
    def of(cls, parsed: "nodes.Template") -> "TemplateNames":
        """Read them off a parsed template."""
        from jinja2 import meta, nodes

        reads = _NAMES & meta.find_undeclared_variables(parsed)
        if any(node.name == "strftime_now" for node in parsed.find_all(nodes.Name)):
            # It writes the date in a form of its own.
            reads -= {"date_string"}
        return cls(
            reads,
            tuple(name for name in THINKING_VARIABLES if _is_off_unless_given(parsed, name)),
        )

    def values(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """By name what the template is given, unless the caller gives something else."""
        made: dict[str, Any] = dict.fromkeys(self.reasons_by, True)
        if "xml_tools" in self.reads and tools:
            made["xml_tools"] = tools
        if "functions" in self.reads and "tools" not in self.reads:
            made["functions"] = json.dumps(tools or [], ensure_ascii=False)
        if "datetime" in self.reads:
            made["datetime"] = datetime.now().strftime("%b %d %Y")
        if "date_string" in self.reads:
            made["date_string"] = datetime.now().strftime("%d %b %Y")
        return made


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
