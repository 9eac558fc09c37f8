"""Chat messages to the text a model was trained on, by the Jinja template its file carries."""

import json
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from localinfer.errors import RequestError, TemplateError
from localinfer.models.text.template_costs import sharing_render_time
from localinfer.models.text.tokenizer import SpellingFinder, Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template, nodes

    from localinfer.models.text.template_sandbox import TemplateSandbox

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names under which templates take whether the model is to reason."""
ASK, ANSWER = {"role": "user", "content": "zqxask"}, "zqxanswer"
"""A question and an answer that no template has in itself, for trial renderings."""
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
    """Names that one template reads and has to be given."""

    reads: frozenset[str]
    """Known names that the template does not set before it reads them."""
    undated: frozenset[str]
    """Names of dates that it reads without asking whether they are given, having none of its own."""
    reasons_by: tuple[str, ...]
    """Switches for reasoning that it takes for off where they are not given, without asking whether they are."""

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
        """Values that the template is given, by name, unless the caller gives others.

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
    """Return whether a template has something in place of a name that is not given: it sets it, or asks for it."""
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
    """Return whether a template tests `not NAME`, and nowhere gives a default or asks for a value."""
    from jinja2 import nodes

    def reads(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == name and node.ctx == "load"

    if any(node.name == name and node.ctx == "store" for node in parsed.find_all(nodes.Name)):
        return False
    if any(reads(node.node) for node in parsed.find_all((nodes.Test, nodes.Filter)) if node.node is not None):
        return False
    return any(reads(node.node) for node in parsed.find_all(nodes.Not))


_KEY = "tokenizer.chat_template"
_MAX_SOURCE_CHARACTERS = 1 << 17
# ChatML, which most models have at least seen.
_FALLBACK_SOURCE = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Whose parts all differ, and the number of their characters with some of their names.
_ONE_DAY, _ANOTHER_DAY = datetime(2001, 2, 3, 4, 5, 6), datetime(2012, 11, 20, 17, 38, 49)
_FALLBACK_STOPS = ("<|im_end|>", "<|im_start|>")
# Characters that Unicode keeps for a program's own use and never assigns (U+FDD0 to U+FDEF).
_MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))


_PART_TYPES = re.compile(r"""\[\s*['"]type['"]\s*\]|\.type\b|selectattr\(\s*['"]type['"]""")
"""Looks at the types of parts, of which no template asks that takes strings alone."""
_PROBE = "qzx7"
"""Word that no template writes itself."""


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose words are a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class ChatTemplateWarning(UserWarning):
    """The file's chat template is missing or unusable, and a general one takes its place."""


class ChatTemplate:
    """The chat template of one model file; threads may share it.

    `source` is the Jinja text, None where the file has none; `tool_source` that of the variant for tools, where there
    is one. It is compiled at the first use, inside a sandbox that bounds time and output (template_sandbox). Where
    there is none, or it does not compile, ChatML takes its place, with a ChatTemplateWarning. `now` is the clock of
    templates that write the date.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str = "",
        eos_token: str = "",
        *,
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.tool_source = tool_source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._now = now
        self._lock = threading.Lock()
        self._sandbox: TemplateSandbox | None = None
        self._compiled: dict[str | None, tuple[Template, bool]] = {}
        self._names: dict[str | None, TemplateNames] = {}
        self._parts_only: dict[str, bool] = {}

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], tokenizer: Tokenizer | None = None, *, key: str = _KEY
    ) -> "ChatTemplate":
        """Read the template, or that of another key, from GGUF metadata; with a tokenizer, `bos_token` and `eos_token`
        are its own."""
        ends = (None, None) if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
        bos_token, eos_token = (
            "" if tokenizer is None or token_id is None else tokenizer.token_text(token_id) for token_id in ends
        )
        source, tool_source = (
            value if isinstance(value := metadata.get(name), str) else None for name in (key, f"{key}.tool_use")
        )
        return cls(source, bos_token, eos_token, tool_source=tool_source)

    @property
    def is_fallback(self) -> bool:
        """Return whether ChatML stands in for the file's template."""
        with self._lock:
            return self._template(None)[1]

    def reads(self, name: str) -> bool:
        """Return whether the file's template reads a variable that it does not set itself."""
        from jinja2 import meta

        with self._lock:
            if self._template(None)[1] or self._sandbox is None or self.source is None:
                return False
            return name in meta.find_undeclared_variables(self._sandbox.parse(self.source))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Text that ends a reply beside the vocabulary's own ends: only the fallback has any."""
        return _FALLBACK_STOPS if self.is_fallback else ()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text for messages with "role" and "content".

        `add_generation_prompt` ends it where the assistant's reply begins. `variables` reach the template as they are,
        whatever their names: the parameters before them have none, so that no variable can be taken for one;
        `template_date` among them, "today" or a day such as "2026-10-01", is the date that it writes if it writes one,
        in place of its own.
        Raises: TemplateError if the template refuses the messages, fails, or costs too much; RequestError for a
        `template_date` that is no day.
        """
        values = {**variables, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._render(values)

    def render_segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        spellings: SpellingFinder,
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[tuple[str, bool]]:
        """Return the prompt as segments (text, is_template_text); joined, they are its text.

        False marks each special token, as `spellings` finds them, that messages, tools or variables
        spell out: it is text there, whatever the template does around it. Everything else is True.

        How: before rendering, a character that nothing else holds goes into every such spelling, after
        its first character, and comes out again afterwards, telling where it was. So `trim`, `upper`,
        `split`, `in` and `tojson` see the content as it is, but for those spellings.
        Raises: TemplateError as `render` does.
        """
        values = {**variables, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            strings = set(_strings_in(values))
            marker = _Marker(spellings, strings, self.source or "", self.tool_source or "")
            if not marker.is_needed:
                return [(self._render(values), True)]
            marked = {name: marker.mark(value) for name, value in values.items()}
        except RecursionError as error:
            raise TemplateError("the messages are nested too deeply; wanted at most some hundred levels") from error
        return marker.unmark(self._render(marked, marker.character))

    def writes_date(self) -> bool:
        """Return whether prompts of two days differ if no date is asked for.

        The answer for a template that does not compile is ChatML's, with the warning.
        """
        ask = {"role": "user", "content": "?"}
        chats = ([ask], [{"role": "system", "content": "!"}, ask])
        tools = [{"type": "function", "function": {"name": "f", "description": "?", "parameters": {"type": "object"}}}]

        def prompts(day: datetime) -> list[str]:
            clocked = ChatTemplate(
                self.source, self.bos_token, self.eos_token, tool_source=self.tool_source, now=lambda: day
            )
            made = []
            for chat in chats:
                for some in (None, tools):
                    with suppress(TemplateError):
                        made.append(clocked.render(chat, tools=some))
            return made

        return prompts(_ONE_DAY) != prompts(_ANOTHER_DAY)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of the prompt, in which only the template's own text makes control tokens.

        They are those of the rendered text but for control tokens that the messages spell out. BOS comes
        first where the vocabulary wants one and the template wrote none.
        Raises: TemplateError as `render` does, RequestError for half characters.
        """
        spellings = tokenizer.special_spellings
        ids = tokenizer.encode_segments(
            self.render_segments(messages, spellings, add_generation_prompt, tools, **variables)
        )
        if tokenizer.adds_bos and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
            ids.insert(0, tokenizer.bos_token_id)
        return ids

    def _render(self, values: Mapping[str, Any], mark: str = "") -> str:
        with sharing_render_time():
            if self._shows_parts_only(values["tools"]):
                values = {**values, "messages": [_with_parts(message) for message in values["messages"]]}
            try:
                return self._render_once(values, mark)
            except TemplateError as error:
                # Templates made for tools alone go through them without asking whether there are any.
                if values["tools"] is not None or not isinstance(error.__cause__, TypeError):
                    raise
                with suppress(TemplateError):
                    return self._render_once({**values, "tools": []}, mark)
                raise

    def _shows_parts_only(self, tools: object) -> bool:
        """Return whether the template shows words only where a message's content is a list of parts.

        Templates of models that see go through parts, and some (LLaVA's, SmolVLM's) lose a content that is a string.
        """
        source = self.tool_source if tools and self.tool_source is not None else self.source
        if source is None or not _PART_TYPES.search(source):
            return False
        if source not in self._parts_only:
            shown = []
            for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
                values = {"messages": [{"role": "user", "content": content}], "tools": tools}
                try:
                    shown.append(_PROBE in self._render_once({**values, "add_generation_prompt": True}, ""))
                except TemplateError:
                    shown.append(False)
            self._parts_only[source] = shown == [False, True]
        return self._parts_only[source]

    def _render_once(self, values: Mapping[str, Any], mark: str) -> str:
        with self._lock:
            template, _ = self._template(values["tools"])
            sandbox = self._sandbox
            assert sandbox is not None, "compiling made it"
            today = self._now()
            asked = asked_day(values, today)
            sandbox.mark = mark
            sandbox.now = (lambda: asked) if asked is not None else self._now
            context = {"bos_token": self.bos_token, "eos_token": self.eos_token}
            context |= {**self._other_names(values, today, asked), **values}
            sandbox.budget.start()
            try:
                # As Template.render does, which would make a traceback anew for each level of a recursion.
                return str(sandbox.concat(template.root_render_func(template.new_context(context))))
            # A template is a program: it may fail in any way, running out of stack or memory included.
            except Exception as error:
                raise TemplateError(
                    f"the chat template stopped{_line_of(error, template)}: {_reason_of(error):.500}. Wanted messages "
                    "it accepts; change the messages, or use another template."
                ) from error
            finally:
                sandbox.budget.end()

    def _other_names(self, values: Mapping[str, Any], today: datetime, asked: datetime | None) -> dict[str, Any]:
        """Values of the names that only some templates read."""
        source = self.tool_source if values["tools"] and self.tool_source is not None else self.source
        names = self._names.get(source)
        return {} if names is None else names.values(values["tools"], today, asked)

    def _template(self, tools: object) -> tuple["Template", bool]:
        """Return the compiled template and whether it is the fallback."""
        source = self.tool_source if tools and self.tool_source is not None else self.source
        if source not in self._compiled:
            self._compiled[source] = self._compile(source)
        return self._compiled[source]

    def _compile(self, source: str | None) -> tuple["Template", bool]:
        from jinja2 import TemplateError as JinjaError

        from localinfer.models.text.template_sandbox import TemplateSandbox

        if self._sandbox is None:
            self._sandbox = TemplateSandbox()
        if source is None:
            found = "missing"
        elif len(source) > _MAX_SOURCE_CHARACTERS:
            found = f"{len(source)} characters long, more than {_MAX_SOURCE_CHARACTERS}"
        else:
            try:
                compiled = self._sandbox.from_string(source), False
                self._names[source] = TemplateNames.of(self._sandbox.parse(source))
                return compiled
            # Jinja reports syntax; Python's compiler may add stack, memory and nesting limits of its own.
            except Exception as error:
                line = getattr(error, "lineno", None)
                where = f" at line {line}" if isinstance(line, int) and isinstance(error, JinjaError) else ""
                found = f"not a template that compiles ({type(error).__name__}{where}: {str(error):.200})"
        warnings.warn(
            f"{_KEY} is {found}; ChatML is used instead, which this model may not know. Give the template that the "
            "model was trained with.",
            ChatTemplateWarning,
            stacklevel=4,
        )
        return self._sandbox.from_string(_FALLBACK_SOURCE), True


class _Marker:
    """Marks spellings of special tokens inside values and finds them again in the rendered text."""

    def __init__(self, spellings: SpellingFinder, strings: Iterable[str], *sources: str) -> None:
        strings = list(strings)
        self._spellings = spellings
        # A template may change the case, so a spelling counts in any.
        self._any_case = spellings.ignoring_case()
        self.is_needed = any(any(True for _ in self._find(text)) for text in strings)
        # Neither the character nor its escape, which texts of values and JSON make of it, stands anywhere else.
        texts = [text.lower() for text in (*strings, *sources)]
        self.character = next(
            (mark for mark in _MARKS if not any(mark in text or f"{ord(mark):x}" in text for text in texts)), _MARKS[0]
        )

    def _find(self, text: str) -> set[int]:
        """Return where spellings start, in any case."""
        lowered = text.lower()
        found = {spelling.start for spelling in self._spellings.find(text)}
        if len(lowered) == len(text):
            found.update(spelling.start for spelling in self._any_case.find(lowered))
        return found

    def mark(self, value: Any) -> Any:
        """Return a copy of a value, of dicts, lists and strings, with every spelling marked."""
        if isinstance(value, str):
            starts = sorted(self._find(value))
            cuts = [0, *(start + 1 for start in starts), len(value)]
            return self.character.join(value[start:end] for start, end in zip(cuts, cuts[1:], strict=False))
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def unmark(self, text: str) -> list[tuple[str, bool]]:
        """Take the marks out of a rendered text; return it as segments (text, is_template_text)."""
        parts = text.split(self.character)
        plain = "".join(parts)
        marked: set[int] = set()
        length = 0
        for part in parts[:-1]:
            length += len(part)
            marked.add(length - 1)
        segments: list[tuple[str, bool]] = []
        position = 0
        for spelling in self._spellings.find(plain):
            if spelling.start not in marked or spelling.end <= position:
                continue
            start = max(spelling.start, position)
            if start > position:
                segments.append((plain[position:start], True))
            segments.append((plain[start : spelling.end], False))
            position = spelling.end
        if position < len(plain):
            segments.append((plain[position:], True))
        return segments


def _line_of(error: BaseException, template: "Template") -> str:
    """Say where in a template an error came up: the last line of it that was running."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        # What stands in for a filter that is missing takes any arguments, and has no line of its own.
        is_missing_filter = code.co_name.startswith("t_") and not code.co_argcount
        if trace.tb_frame.f_globals.get("__jinja_template__") is template and not is_missing_filter:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return "" if line is None else f" at line {line}"


def _reason_of(error: Exception) -> str:
    try:
        text = str(error)
    # An error that names a value makes its text, which may fail as anything else may.
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if isinstance(error, LookupError) or not text else text


def _strings_in(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings_in(key)
            yield from _strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_in(item)
