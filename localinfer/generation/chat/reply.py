"""The form of a chat's reply: tools, reasoning and its budget, a constraint and an assistant prefill."""

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from localinfer.arguments import check_flag, check_number
from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.sampling.mask import Allowed, GuidingMask
from localinfer.errors import ConstraintError, MessageError, RequestError, TemplateError
from localinfer.generation.chat.constraints import ConstraintCompiler, grammar_of, is_json, json_grammar
from localinfer.generation.chat.grammar import ReasoningState, reply_grammar
from localinfer.generation.chat.loop_stop import LoopStop, RepeatedCall, arguments_of, with_notes
from localinfer.generation.chat.messages import (
    SYSTEM_ROLES,
    Tool,
    choose_tools,
    has_late_system,
    placed_system,
    read_tools,
    template_messages,
    with_reasoning_as,
)
from localinfer.generation.chat.parser import ReplyParser, call_ids
from localinfer.generation.chat.value_types import parameter_types
from localinfer.generation.options import Constraint, ReplyOptions
from localinfer.models.text.chat_template import THINKING_VARIABLES, asked_day
from localinfer.models.text.reply_format import CALL_NAME, CallFormat, ReasoningFormat
from localinfer.models.text.reply_learning import Trials, learn_call_format, learn_reasoning_format
from localinfer.models.text.tokenizer import SpellingFinder
from localinfer.types import TokenIds

if TYPE_CHECKING:
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.tokenizer import Tokenizer


class _Progress(NamedTuple):
    """State after some tokens: the end of the text, and the tokens after which reasoning began and was used up."""

    tail: bytes
    began: int | None
    spent: int | None
    is_closed: bool


class ThinkingBudget:
    """A mask that lets reasoning take so many tokens, over another mask or none.

    begin: the marker that opens reasoning, None where the prompt has opened it. end: the one that closes it.
    closing_ids: what is forced after `budget` tokens of reasoning, as soon as the text is whole characters.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        mask: GuidingMask | None,
        *,
        start: int,
        vocab_size: int,
        begin: str | None,
        end: str,
        closing_ids: Sequence[int],
        budget: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._mask = mask
        self._start = start
        self._begin = None if begin is None else begin.encode()
        self._end = end.encode()
        self._closing_ids = tuple(closing_ids)
        self._budget = budget
        self._followed = np.empty(0, np.int32)
        self._progress = [self._checked(_Progress(b"", 0 if begin is None else None, None, False), 0)]
        self._everything = np.ones(vocab_size, np.bool_)

    def __call__(self, history: TokenIds) -> Allowed:
        forced = self._forced(history)
        if forced:
            allowed = np.zeros_like(self._everything)
            allowed[forced[0]] = True
            return allowed
        return self._everything if self._mask is None else self._mask(history)

    def forced(self, history: TokenIds, most: int) -> list[int]:
        forced = self._forced(history)
        if forced:
            return forced[:most]
        return [] if self._mask is None else self._mask.forced(history, most)

    def prepare(self, history: TokenIds, position: int) -> None:
        if self._mask is not None:
            self._mask.prepare(history, position)

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        count = len(draft) if self._mask is None else self._mask.count_allowed(history, draft)
        for index in range(count):
            forced = self._forced(np.concatenate((history, np.array(draft[:index], np.int32))))
            if forced and forced[0] != draft[index]:
                return index
        return count

    def _forced(self, history: TokenIds) -> list[int]:
        """Rest of the closing marker that is still to come, if it has to."""
        token_ids = history[self._start :]
        self._follow(token_ids)
        spent = self._progress[-1].spent
        return [] if spent is None else list(self._closing_ids[token_ids.size - spent :])

    def _follow(self, token_ids: TokenIds) -> None:
        shared = min(token_ids.size, self._followed.size)
        differs = np.flatnonzero(token_ids[:shared] != self._followed[:shared])
        if differs.size:
            shared = int(differs[0])
        del self._progress[shared + 1 :]
        for token_id in token_ids[shared:].tolist():
            spelled = self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""
            self._progress.append(self._after(self._progress[-1], spelled, len(self._progress)))
        self._followed = token_ids.copy()

    def _after(self, progress: _Progress, spelled: bytes, size: int) -> _Progress:
        """The progress after one more token, the `size`-th."""
        if progress.is_closed or progress.spent is not None:
            return progress
        text = progress.tail + spelled
        if progress.began is None:
            assert self._begin is not None, "else it began with the reply"
            stripped = text.lstrip()
            if stripped.startswith(self._begin):
                return self._checked(_Progress(stripped[len(self._begin) :], size, None, False), size)
            return _Progress(text, None, None, not self._begin.startswith(stripped))
        return self._checked(progress._replace(tail=text), size)

    def _checked(self, progress: _Progress, size: int) -> _Progress:
        """Reasoning ends where its marker stands, or where it has used up its tokens."""
        if progress.began is None:
            return progress
        if self._end in progress.tail:
            return progress._replace(is_closed=True)
        if size >= progress.began + self._budget and _is_whole(progress.tail):
            return progress._replace(spent=size)
        return progress._replace(tail=progress.tail[-len(self._end) - 4 :])


def _is_whole(text: bytes) -> bool:
    """True if a text does not end inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-4:])
    return not decoder.getstate()[0]


Segments = list[tuple[str, bool]]


@dataclass(frozen=True)
class AssistantPrefill:
    """The last message of a chat, of the role "assistant", as far as it was written.

    Without content, the reasoning continues; without either, the reply is a new one.
    """

    content: str
    reasoning: str

    @classmethod
    def split(cls, messages: Sequence[Mapping[str, Any]]) -> "tuple[Sequence[Mapping[str, Any]], AssistantPrefill]":
        """Messages as `read_messages` gives them without the last, and the last. Raises: MessageError."""
        last, path = messages[-1], f"messages[{len(messages) - 1}]"
        if last["role"] != "assistant" or last.get("tool_calls") or len(messages) == 1:
            found = "calls tools" if last.get("tool_calls") else f"is of the role {last['role']!r:.40}"
            found = "is the only one" if len(messages) == 1 else found
            raise MessageError(
                f"{path} {found}, and a reply can only be continued where it is the last message, after others, of "
                'the role "assistant", with text; leave continue_final_message out',
                path,
            )
        return messages[:-1], cls(last["content"], last.get("reasoning_content", ""))

    def segments(self, prompt: str, form: ReasoningFormat | None, spellings: SpellingFinder) -> Segments:
        """The prefill behind a rendered prompt, as segments (text, is_template_text).

        form: how the model sets reasoning apart. spellings: of special tokens, which are text in what was written.
        """
        if form is None:
            return _plain(self.content, spellings)
        made: Segments = []
        is_open = form.is_open(prompt)
        if (self.reasoning or is_open) and not form.is_closed(prompt):
            if not is_open:
                made.append((form.begin + _gap(form), True))
            made += _plain(self.reasoning, spellings)
            if self.content:
                made.append((form.closing, True))
        if self.content and form.answer_begin and not form.closing.endswith(form.answer_begin):
            made.append((form.answer_begin, True))
        return made + _plain(self.content, spellings)

    def rest_format(self, format: "ReplyFormat") -> "ReplyFormat":
        """Format of the rest of the reply; `format`: of a new reply after the same prompt."""
        if self.content:
            # Answers between marks were begun as such, and end so: the grammar of calls would begin anew.
            calls = None if format.reasoning is not None and format.reasoning.answer_begin else format.calls
            return replace(format, state="none", calls=calls, tools=format.tools if calls is not None else ())
        return replace(format, state="open") if self.reasoning and format.state == "possible" else format


def _gap(form: ReasoningFormat) -> str:
    """White space between the opening marker and the reasoning: that which templates write before the closing one."""
    return form.closing[: len(form.closing) - len(form.closing.lstrip())]


def _plain(text: str, spellings: SpellingFinder) -> Segments:
    """A text in which control tokens that it spells out are none."""
    made: Segments = []
    position = 0
    for spelling in spellings.find(text):
        if spelling.end > position:
            start = max(spelling.start, position)
            made += [(text[position:start], True), (text[start : spelling.end], False)]
            position = spelling.end
    return [(part, is_open) for part, is_open in (*made, (text[position:], True)) if part]


def check_template_variables(variables: object) -> Mapping[str, Any]:
    """Check `template_variables`; None is an empty mapping. Raises: RequestError."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(f"template_variables are {variables!r:.60}; give a mapping of names to values")
    taken = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"} & variables.keys()
    if taken:
        raise RequestError(f"template_variables hold {', '.join(sorted(taken))}, which are not theirs to set")
    asked_day(variables, datetime.now())
    return variables


@dataclass(frozen=True, kw_only=True)
class ReplyFormat:
    """Format by which the reply to one prompt is constrained and read.

    tools: that may be called; where there are none, `calls` is a format that no text may have. shown_ids: control
    tokens that are part of the format, so that their spelling belongs to the text that is parsed.
    """

    reasoning: ReasoningFormat | None
    state: ReasoningState
    calls: CallFormat | None
    tools: tuple[Tool, ...]
    must_call: bool
    is_parallel: bool
    budget: int | None
    shown_ids: frozenset[int]
    stops_loops: bool = False
    repeated: tuple[RepeatedCall, ...] = ()
    """Calls that this reply may not make again."""

    @property
    def _has_frame(self) -> bool:
        """True if answers have marks around them."""
        return self.reasoning is not None and bool(self.reasoning.answer_begin)

    @property
    def _has_calls_in_reasoning(self) -> bool:
        """True if a call may end the reasoning: not where a number of tokens ends it, perhaps amid a call."""
        return self.budget is None

    def parser(self, prompt_ids: TokenIds, seed: int) -> ReplyParser:
        """A parser for the reply to one prompt; calls are named after both where the model's format has no names."""
        reasoning = None if self.state == "none" and not self._has_frame else self.reasoning
        types = {tool.name: parameter_types(tool) for tool in self.tools}
        calls = self.calls if self.tools else None
        return ReplyParser(
            reasoning,
            calls,
            starts_reasoning=self.state == "open",
            calls_in_reasoning=self._has_calls_in_reasoning,
            types=types,
            new_id=call_ids(prompt_ids, seed),
        )

    def mask(
        self,
        compiler: ConstraintCompiler,
        tokenizer: "Tokenizer",
        constraint: Constraint | None,
        *,
        start: int,
        vocab_size: int,
        salt: bytes = NO_SALT,
        notices: list[str] | None = None,
    ) -> GuidingMask | None:
        """The mask of one reply after `start` tokens; None where everything is allowed.

        salt: whose former masks need not be compiled. notices: gets what is left out of schemas that are not strict.
        Raises: ConstraintError.
        """
        if notices is not None:
            notices += [f"tool {tool.name!r}: {line}" for tool in self.tools for line in tool.left_out]
        if constraint is None and self.calls is None:
            mask: GuidingMask | None = None
        elif not self.tools and self.state == "none" and constraint is not None and not self._has_frame:
            mask = compiler.mask(constraint, start=start, salt=salt, notices=notices)
        else:
            grammar = reply_grammar(
                reasoning=self.reasoning,
                state=self.state,
                calls=self.calls,
                tools=self.tools,
                must_call=self.must_call,
                is_parallel=self.is_parallel,
                answer=None if constraint is None else grammar_of(constraint, notices),
                specials=tokenizer.special_spellings,
                calls_in_reasoning=self._has_calls_in_reasoning,
            )
            assert grammar is not None, "there are calls or a constraint"
            mask = compiler.grammar_mask(
                grammar, start=start, what="schema", salt=salt, bounds_numbers=is_json(constraint)
            )
        if self.budget is not None and self.reasoning is not None and self.state != "none":
            mask = self._budgeted(self.reasoning, self.budget, tokenizer, mask, start=start, vocab_size=vocab_size)
        if not self.stops_loops:
            return mask
        if notices is not None:
            notices += [
                f"the call of {call.function['name']!r} had come {call.times} times with the same result, and is not "
                "made again (loop_stop: false allows it)"
                for call in self.repeated
            ]
        return LoopStop(
            tokenizer, mask, start=start, vocab_size=vocab_size, banned=self._banned_texts(), notices=notices
        )

    def _banned_texts(self) -> list[str]:
        """Repeated calls up to the end of their arguments, in formats that write them as JSON."""
        form = self.calls
        if form is None or form.parameters is not None:
            return []
        return [
            f"{call.function['name']}{form.middle.replace(CALL_NAME, call.function['name'])}"
            f"{json.dumps(arguments_of(call.function), ensure_ascii=False)}"
            for call in self.repeated
        ]

    def _budgeted(
        self,
        reasoning: ReasoningFormat,
        budget: int,
        tokenizer: "Tokenizer",
        mask: GuidingMask | None,
        *,
        start: int,
        vocab_size: int,
    ) -> ThinkingBudget:
        return ThinkingBudget(
            tokenizer,
            mask,
            start=start,
            vocab_size=vocab_size,
            begin=None if self.state == "open" else reasoning.begin,
            end=reasoning.end,
            closing_ids=tokenizer.encode_segments([(reasoning.closing, True)], continues_run=True),
            budget=budget,
        )


@dataclass(frozen=True, kw_only=True)
class ReplyRequest:
    """A chat's options, checked against a model: how its prompt is rendered, and how its reply is to be read."""

    format: ReplyFormat
    described: tuple[Tool, ...]
    """Tools that the prompt describes."""
    template_tools: tuple[Mapping[str, Any], ...]
    """Tools for the template; `variables` are its other variables."""
    variables: Mapping[str, Any]
    formats: "TemplateFormats"
    continues: bool
    """True if the last message is a reply to be continued."""

    def split(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], AssistantPrefill | None]:
        """Messages as the template expects them, and the reply that is to be continued. Raises: MessageError."""
        prefill = None
        if self.continues:
            messages, prefill = AssistantPrefill.split(messages)
        return self._messages(messages), prefill

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages as the template expects them."""
        messages = self.formats.with_system_taken(messages)
        if self.format.reasoning is not None:
            messages = with_reasoning_as(self.format.reasoning.member, messages)
        if not self.described and not any(
            message.get("tool_calls") or message["role"] == "tool" for message in messages
        ):
            return messages
        formats = self.formats
        if self.format.stops_loops:
            messages, _ = with_notes(messages)
        return template_messages(messages, formats.calls, self.described, has_system=formats.has_system)

    def format_after(
        self,
        prompt: str,
        prefill: AssistantPrefill | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> ReplyFormat:
        """Format of the reply to a rendered prompt, or of the rest of a reply that was begun.

        messages: of which the prompt was made, for the calls among them that are not to be made again.
        """
        reasoning = self.format.reasoning
        if reasoning is None or reasoning.is_closed(prompt):
            made = replace(self.format, state="none")
        else:
            made = replace(self.format, state="open" if reasoning.is_open(prompt) else "possible")
        if made.stops_loops and messages:
            made = replace(made, repeated=tuple(with_notes(messages)[1]))
        return made if prefill is None else prefill.rest_format(made)


class TemplateFormats:
    """The formats of one model, learned from its template when they are first needed."""

    def __init__(self, template: "ChatTemplate", tokenizer: "Tokenizer", compiler: ConstraintCompiler) -> None:
        self._source = template.source
        self._trials = Trials(template)
        self._tokenizer = tokenizer
        self._compiler = compiler

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """Format of the model's reasoning, None if its template has none."""
        return learn_reasoning_format(self._trials, self._source, self._ends)

    @cached_property
    def calls(self) -> CallFormat:
        """Format of the model's tool calls."""
        return learn_call_format(self._trials, self._ends, reasoning=self.reasoning, source=self._source)

    @cached_property
    def has_system(self) -> bool:
        """True if the template takes a system message."""
        try:
            self._trials.render([{"role": role, "content": role} for role in ("system", "user")])
        except TemplateError:
            return False
        return True

    @cached_property
    def _has_late_system(self) -> bool:
        """True if the template takes system messages behind others, and writes them."""
        late = "late system message"
        roles = ("system", "user", "system", "user")
        try:
            text = self._trials.render(
                [{"role": role, "content": late if i == 2 else role} for i, role in enumerate(roles)]
            )
        except TemplateError:
            return False
        return late in text

    def with_system_taken(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages with system messages only where the template takes them; see `placed_system`."""
        if has_late_system(messages) and not self._has_late_system:
            return placed_system(messages, takes_one=self.has_system)
        if messages and messages[0]["role"] in SYSTEM_ROLES and not self.has_system:
            return placed_system(messages, takes_one=False)
        return messages

    @cached_property
    def _ends(self) -> SpellingFinder:
        """Spellings of the tokens that end a reply."""
        tokenizer = self._tokenizer
        return SpellingFinder({tokenizer.token_text(token_id): token_id for token_id in tokenizer.eog_token_ids})

    def request(self, options: ReplyOptions, salt: bytes = NO_SALT) -> ReplyRequest:
        """Check the options of one chat. salt: see `ConstraintCompiler.mask`.

        Raises: RequestError; ConstraintError naming a tool and a keyword.
        """
        described = read_tools(options.get("tools"))
        chosen = choose_tools(described, options.get("tool_choice"))
        tools = tuple(self._enforceable(tool, salt) for tool in chosen.tools)
        thinking = options.get("thinking")
        if thinking is not None and not isinstance(thinking, bool):
            raise RequestError(f"thinking is {thinking!r}; give True, False, or None for the template's choice")
        budget = check_number("thinking_budget", options.get("thinking_budget"), 0, none="for no limit")
        is_parallel = options.get("parallel_tool_calls")
        is_parallel = is_parallel is None or check_flag("parallel_tool_calls", is_parallel)
        stops_loops = options.get("loop_stop")
        stops_loops = bool(tools) if stops_loops is None else check_flag("loop_stop", stops_loops)
        if self.reasoning is None and (thinking or budget is not None):
            raise RequestError(
                "thinking was asked for, but the model's chat template has no reasoning; leave thinking and "
                "thinking_budget out"
            )
        variables = check_template_variables(options.get("template_variables"))
        calls = self.calls if described else None
        return ReplyRequest(
            format=ReplyFormat(
                reasoning=self.reasoning,
                state="none",
                calls=calls,
                tools=tools,
                must_call=chosen.must_call,
                is_parallel=not chosen.is_single and is_parallel,
                budget=0 if thinking is False else budget,
                shown_ids=self._shown_ids(calls if tools else None),
                stops_loops=stops_loops,
            ),
            described=described,
            template_tools=tuple(tool.description for tool in described)
            if calls is not None and calls.describes_tools
            else (),
            variables={**self._thinking_variables(thinking), **variables},
            formats=self,
            continues=check_flag("continue_final_message", options.get("continue_final_message")),
        )

    def _thinking_variables(self, thinking: bool | None) -> dict[str, Any]:
        """Template variables that turn reasoning on or off."""
        if thinking is None:
            return {}
        flags: dict[str, Any] = dict.fromkeys(THINKING_VARIABLES, thinking)
        return flags | self._effort if thinking else flags

    @cached_property
    def _effort(self) -> dict[str, Any]:
        """Variables for templates that close the reasoning unless they are given an effort."""
        flags: dict[str, Any] = dict.fromkeys(THINKING_VARIABLES, True)
        effort: dict[str, Any] = {"reasoning_effort": "high"}
        ask = [{"role": "user", "content": "?"}]
        try:
            prompts = [self._trials.render(ask, **flags, **more) for more in ({}, effort)]
        except TemplateError:
            return {}
        closed = [self.reasoning is not None and self.reasoning.is_closed(prompt) for prompt in prompts]
        return effort if closed == [True, False] else {}

    def _enforceable(self, tool: Tool, salt: bytes) -> Tool:
        """A tool with what can be enforced of its schema. Raises: ConstraintError where all of it has to be."""
        function = tool.description["function"]
        if tool.form is not None:
            try:
                self._compiler.grammar_mask(self._call_grammar(tool), start=0, what="grammar", salt=salt)
            except ConstraintError as error:
                raise ConstraintError(
                    f"the format of tool {tool.name!r} cannot be enforced: {error}", field="tools"
                ) from None
            return tool
        try:
            if tool.parameters is not None:
                self._check_calls(tool, salt)
                return tool
        except ConstraintError as error:
            if function.get("strict"):
                raise ConstraintError(
                    f"the parameters of tool {tool.name!r} cannot be enforced: {error}",
                    keyword=error.keyword,
                    field="tools",
                ) from None
        try:
            made, left_out = self._compiler.relaxed({"type": "object", **(function.get("parameters") or {})})
            if made.get("type") == "object":
                relaxed = replace(tool, parameters=made, left_out=tuple(left_out))
                self._check_calls(relaxed, salt)
                return relaxed
        except ConstraintError:
            pass
        return replace(tool, parameters=None, left_out=("its parameters cannot be enforced; check the whole call",))

    def _check_calls(self, tool: Tool, salt: bytes) -> None:
        """Raise ConstraintError if the calls of a tool cannot be held to its schema."""
        self._compiler.grammar_mask(json_grammar(dict(tool.parameters or {})), start=0, what="schema", salt=salt)
        if self.calls.parameters is not None:
            self._compiler.grammar_mask(self._call_grammar(tool), start=0, what="schema", salt=salt)

    def _call_grammar(self, tool: Tool) -> str:
        """The grammar of one call of a tool whose parameters stand one by one. Raises: ConstraintError."""
        grammar = reply_grammar(
            reasoning=None,
            state="none",
            calls=self.calls,
            tools=[tool],
            must_call=True,
            is_parallel=False,
            answer=None,
            specials=self._tokenizer.special_spellings,
        )
        assert grammar is not None, "there are calls"
        return grammar

    def _shown_ids(self, calls: CallFormat | None) -> frozenset[int]:
        texts = [] if self.reasoning is None else self.reasoning.texts
        if calls is not None:
            texts += calls.texts
        return frozenset(
            spelling.token_id for text in texts for spelling in self._tokenizer.special_spellings.find(text)
        )
