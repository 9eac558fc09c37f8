"""How a model sets its reasoning apart from its answer, learned from its own chat template."""

from dataclasses import dataclass
from typing import Any

from localinfer.errors import TemplateError
from localinfer.models.text.tool_format import ASK, Template, reply_start

_THOUGHT, _ANSWER = "zqxthought", "zqxanswer"
# Of models whose templates do not write reasoning themselves, but name these when they cut it out.
_KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates take whether the model is to reason."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning, without white space; closing: the end marker as the template writes it."""

    begin: str
    end: str
    closing: str

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside the reasoning, so that the reply begins with it."""
        return prompt.rstrip().endswith(self.begin)

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends behind the reasoning, so that the reply has none."""
        return prompt.rstrip().endswith(self.end)


def thinking_variables(thinking: bool | None) -> dict[str, Any]:
    """What a template is told; None leaves the choice to it."""
    return {} if thinking is None else dict.fromkeys(SWITCHES, thinking)


def learn_reasoning_format(template: Template, source: str | None) -> ReasoningFormat | None:
    """Learn the markers of a template, whose Jinja text is `source`; None where it knows no reasoning."""
    reply: dict[str, Any] = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    reply |= {"reasoning": _THOUGHT, "thinking": _THOUGHT}
    for variables in (thinking_variables(None), thinking_variables(True)):
        try:
            text = template.render([ASK, reply], add_generation_prompt=False, **variables)
            prompt = template.render([ASK], **variables)
        except TemplateError:
            continue
        found = _around(text, prompt)
        if found is not None:
            return found
    for begin, end in _KNOWN:
        if source is not None and begin in source and end in source:
            return ReasoningFormat(begin, end, f"\n{end}\n\n")
    if source is not None and "</think>" in source:
        return ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
    return None


def _around(text: str, prompt: str) -> ReasoningFormat | None:
    place = text.find(_THOUGHT)
    answer = text.find(_ANSWER, place)
    if place < 0 or answer < 0:
        return None
    closing = text[place + len(_THOUGHT) : answer]
    end = closing.strip()
    if not end:
        return None
    begin = text[reply_start(text, prompt) : place].strip()
    if not begin:
        # The prompt has it already.
        before = text[:place].rstrip()
        begin = next((known for known, _ in _KNOWN if before.endswith(known)), "")
    return ReasoningFormat(begin, end, closing) if begin else None
