"""The grammar of a whole reply: reasoning, then an answer that a constraint allows, or text with tool calls in it.

In llguidance's dialect of Lark: a rule marked `lazy` ends at the first place where it can, and `<[5]>` is the control
token with id 5, which no text can spell.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from localinfer.generation.chat.constraints import ONE_LINE
from localinfer.generation.chat.grammar_writer import ANY, GrammarWriter, escaped
from localinfer.generation.chat.messages import Tool
from localinfer.generation.chat.parameter_grammar import parameter_rules
from localinfer.models.text.reply_format import CallFormat, ReasoningFormat, first_marker
from localinfer.models.text.splitting import SpellingFinder

ReasoningState = Literal["open", "possible", "none"]
"""open: the prompt ends inside the reasoning. possible: the reply may begin with it. none: it has none."""


def reply_grammar(
    *,
    reasoning: ReasoningFormat | None,
    state: ReasoningState,
    calls: CallFormat | None,
    tools: Sequence[Tool],
    must_call: bool,
    is_parallel: bool,
    answer: str | None,
    specials: SpellingFinder,
    calls_in_reasoning: bool = False,
) -> str | None:
    """The grammar in llguidance's form, or None where everything is allowed.

    answer: the grammar of what is neither reasoning nor call, from `constraint_compiler.grammar_of`; None allows any
    text. calls: None where the prompt has no tools; where it has some, but `tools` are none, no call may be written.
    specials: the spellings of control tokens. calls_in_reasoning: a call may also end the reasoning.
    Raises: ConstraintError for a tool whose parameters cannot be enforced where they stand one by one.
    """
    if calls is None and answer is None:
        return None
    writer = GrammarWriter(specials)
    frame = reasoning if reasoning is not None and reasoning.answer_begin else None
    called = calls if tools and calls_in_reasoning and frame is None else None
    rules = [*_reasoning_rules(writer, reasoning, state, called)]
    not_text = []
    if state == "possible" and reasoning is not None:
        not_text.append(reasoning.begin)
    options = []
    nowhere = []
    if calls is not None and not tools:
        nowhere.append(calls.opening + calls.begin)
        not_text.append(calls.opening + calls.begin)
    elif calls is not None:
        rules += _call_rules(writer, calls, tools, is_parallel)
        if must_call or answer is not None:
            options.append("section")
        elif frame is not None:
            between = frame.end + frame.following if frame.following else frame.answer_end
            alone = "" if frame.following else " | head preamble"
            rules += [f"text_and_calls: (head preamble)? section{alone}", *writer.until("preamble", "TEXT", between)]
            options.append("text_and_calls")
        elif not calls.trigger:
            options += ["section", *(f"{writer.literal(begin)} first_call" for begin in calls.other_begins)]
            not_text += calls.other_begins
        else:
            rules += _calls_behind(writer, "text_and_calls", "TEXT", calls)
            options.append("text_and_calls")
        if not calls.trigger:
            not_text.append(calls.opening + calls.begin)
    end = f"({writer.literal(frame.answer_end)})?" if frame is not None and frame.answer_end else ""
    if answer is not None:
        options.append("@answer" if frame is None else f"{writer.literal(frame.answer_begin)} @answer {end}")
    elif not must_call:
        options.append("TEXT" if frame is None else f"head TEXT {end}")
    if frame is not None:
        rules.append(f"head: {' | '.join(map(writer.literal, (frame.answer_begin, *frame.other_answers)))}")
    rules += [f"reply: {' | '.join(options)}", r"GAP: /[ \t\r\n]{0,8}/"]
    exclusions = "".join(rf" & ~/\s*{escaped(text)}(?s:.*)/" for text in not_text)
    exclusions += "".join(rf" & ~/(?s:.*){_spaced(text)}(?s:.*)/" for text in nowhere if first_marker(text))
    # A call right behind the marker that opens reasoning is none of its text.
    called_first = "" if called is None else rf" & ~/\s*{escaped(called.opening + called.begin)}(?s:.*)/"
    rules += [f"TEXT: {ANY}{exclusions}", f"THOUGHT: {ANY}{called_first}", *writer.terminals]
    grammars: list[dict[str, Any]] = [{"name": "reply", "lark_grammar": "\n".join(["%llguidance {}", *rules, ""])}]
    if answer is not None:
        grammars.append({**json.loads(answer)["grammars"][0], "name": "answer"})
    return json.dumps({"grammars": grammars})


def _reasoning_rules(
    writer: GrammarWriter, reasoning: ReasoningFormat | None, state: ReasoningState, calls: CallFormat | None
) -> list[str]:
    """Rules, the first named `start`; calls: the format of those that may also end the reasoning."""
    if reasoning is None or state == "none":
        return ["start: reply"]
    rules = writer.until("thought", "THOUGHT", reasoning.end)
    behind = f"thought GAP {writer.literal(reasoning.following)} reply"
    if calls is not None and calls.trigger:
        rules += _calls_behind(writer, "thought_and_calls", "THOUGHT", calls, is_about_calls=True)
        behind = f"({behind} | thought_and_calls | GAP section)"
    if state == "open":
        return [f"start: {behind}", *rules]
    return [f"start: GAP {writer.literal(reasoning.begin)} {behind} | reply", *rules]


def _calls_behind(
    writer: GrammarWriter, rule: str, text: str, calls: CallFormat, *, is_about_calls: bool = False
) -> list[str]:
    """Rules, the first named `rule`, for calls behind a text, which ends where the first of them begins.

    is_about_calls: the text may have the marker that calls begin with, unless that is a control token, but no more.
    """
    made, choices = [], []
    for index, begin in enumerate((calls.opening + calls.begin, *calls.late_begins)):
        marker = first_marker(begin)
        head = begin if is_about_calls and not writer.is_control(marker) else marker
        made += writer.until(f"{rule}_{index}", text, head)
        rest = writer.literal(begin[len(head) :])
        choices.append(f"{rule}_{index} {rest} {'late_call' if index else 'first_call'}")
    return [f"{rule}: {' | '.join(choices)}", *made]


def _call_rules(writer: GrammarWriter, calls: CallFormat, tools: Sequence[Tool], is_parallel: bool) -> list[str]:
    rules = [f"call: {' | '.join(f'tool_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        form = calls.for_tool(tool.name)
        if form.parameters is not None:
            rules += parameter_rules(writer, form, tool, f"tool_{index}", ONE_LINE)
            continue
        arguments, end = json.dumps(_arguments_schema(tool.parameters)), writer.literal(form.end)
        rules.append(f"tool_{index}: {writer.literal(tool.name + form.middle)} %json {arguments} {end}")
    more = ""
    if is_parallel and calls.separator is not None:
        more = f" ({writer.literal(calls.separator + calls.begin)} call)*"
    closing = writer.literal(calls.closing)
    rules.append(f"first_call: call{more} {closing}")
    rules.append(f"late_call: call{more}" + (f" ({closing})?" if closing else ""))
    rules.append(f"section: {writer.literal(calls.opening + calls.begin)} first_call")
    return rules


def _spaced(text: str) -> str:
    """A text as a regular expression, whatever white space is in it."""
    return r"\s*".join(map(escaped, text.split()))


def _arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**({"type": "object"} if parameters is None else parameters), "x-guidance": ONE_LINE}
