"""A Jinja environment for templates from strangers: no escape, and a bound on what they cost.

Jinja's own sandbox stops access to Python's insides, not `'x' * 10**9` or a loop that never ends. Here
every way to make text or lists grow is charged to a budget before it happens, and every loop step and
call looks at the clock. Numbers in the tests of this file hold the bounds.
"""

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARACTERS = 4 << 20
MAX_RENDER_SECONDS = 1.0
# All text and list entries a rendering makes on the way, thrown away or not.
_MAX_WORK = 16 * MAX_OUTPUT_CHARACTERS
_MAX_WIDTH = 1000
_MAX_INTEGER_BITS = 4096
_WIDE_PERCENT_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")
_WIDE_BRACE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(\d{4,}|\{)")
_WIDE_TIME_FORMAT = re.compile(r"%[^a-zA-Z%]*\d{2,}")
# Filters that make text as wide as they are told, cost more than linear time, or hold other people's text.
_DROPPED_FILTERS = ("center", "wordwrap", "urlize", "pprint", "random", "xmlattr", "striptags")
_SLOW_FILTERS = ("title", "wordcount", "unique", "sort", "dictsort", "groupby", "truncate")
_MAX_SLOW_INPUT = 1 << 16
_WIDTH_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class CostError(SecurityError):
    """The template asks for more time or memory than a template may."""


class _GuardedCodeGenerator(CodeGenerator):
    """Sends the constructs that no hook of Jinja's sandbox sees through the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_operands((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.take_slice(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            self.visit(nodes.Const(None) if bound is None else bound, frame)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        metered = nodes.Call(nodes.EnvironmentAttribute("metered"), [node.iter], [], None, None, lineno=node.lineno)
        node.iter = metered.set_environment(self.environment)
        super().visit_For(node, frame)


class _GenerationBlock(Extension):
    """Accepts `{% generation %}`, which marks the assistant's part for training and prints its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment; one rendering at a time, so a rendering makes its own.

    Blocks are trimmed and `tojson`, `raise_exception` and `strftime_now` behave as in transformers.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = _GuardedCodeGenerator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        # A character that no template may see the escaped form of; see ChatTemplate.render_segments.
        self.mark = ""
        self._work = 0
        self._deadline = float("inf")
        # Jinja's code takes these from the environment.
        self.concat = self._concat  # type: ignore[method-assign]
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._guard_filters()

    def start_clock(self) -> None:
        """Start the time and the budget of one rendering."""
        self._work = 0
        self._deadline = time.monotonic() + MAX_RENDER_SECONDS

    def charge(self, amount: int) -> None:
        """Count text or entries about to be made. Raises: CostError where the budget or the time ends."""
        self._work += amount
        if amount > MAX_OUTPUT_CHARACTERS or self._work > _MAX_WORK:
            raise CostError(f"it makes more than {MAX_OUTPUT_CHARACTERS} characters")
        if time.monotonic() > self._deadline:
            raise CostError(f"it takes longer than {MAX_RENDER_SECONDS:g} s")

    def metered(self, iterable: Iterable[object]) -> Iterable[object]:
        """Charge every step of a loop; its length stays visible to the template."""
        return _MeteredList(self, iterable) if isinstance(iterable, list | tuple) else self._steps(iterable)

    def _steps(self, iterable: Iterable[object]) -> Iterator[object]:
        for item in iterable:
            self.charge(1)
            yield item

    def join_operands(self, operands: tuple[object, ...]) -> str:
        """Do what `~` does."""
        return self._concat(map(str, operands))

    def take_slice(self, sequence: Any, start: Any, stop: Any, step: Any) -> Any:
        """Do what `sequence[start:stop:step]` does."""
        self.charge(_length(sequence))
        return sequence[start:stop:step]

    def _concat(self, parts: Iterable[str]) -> str:
        pieces: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            if length > MAX_OUTPUT_CHARACTERS:
                self.charge(length)
            pieces.append(part)
        self.charge(length)
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do `*`, `**`, `+` or `%` after charging for the result."""
        self.charge(1)
        if operator == "%" and isinstance(left, str):
            self._check_format(_WIDE_PERCENT_FORMAT, left, [right])
        elif operator == "+" and _has_length(left) and _has_length(right):
            self.charge(len(left) + len(right))
        elif operator == "*" and (_has_length(left) or _has_length(right)):
            sequence, factor = (left, right) if _has_length(left) else (right, left)
            if isinstance(factor, int):
                self.charge(len(sequence) * max(factor, 0))
        elif isinstance(left, int) and isinstance(right, int) and operator != "%":
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise CostError("it computes with an integer of thousands of digits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function after charging for what text methods will make."""
        self.charge(1)
        # The sandbox wraps str.format in a function of its own.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str | bytes):
            self._check_method(owner, function.__name__, [*args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)

    def _check_method(self, text: Any, name: str, arguments: list[Any]) -> None:
        if name in _WIDTH_METHODS:
            self._check_widths(arguments)
            self.charge(len(text) * (_MAX_WIDTH if name == "expandtabs" and "\t" in text else 1))
        elif name == "replace":
            self._check_replace(text, arguments)
        elif name in ("format", "format_map"):
            self._check_format(_WIDE_BRACE_FORMAT, text, arguments)
        elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
            self.charge(sum(map(_length, arguments[0])) + len(text) * len(arguments[0]))
        elif name == "translate":
            raise CostError("it uses translate, which a template has no need of")
        else:
            self.charge(len(text))

    def _check_widths(self, arguments: Iterable[Any]) -> None:
        if any(isinstance(argument, int) and abs(argument) > _MAX_WIDTH for argument in arguments):
            raise CostError(f"it pads text to more than {_MAX_WIDTH} characters")

    def _check_replace(self, text: Any, arguments: list[Any]) -> None:
        if len(arguments) >= 2 and _has_length(arguments[0]) and _has_length(arguments[1]):
            count = text.count(arguments[0]) if arguments[0] else len(text) + 1
            self.charge(len(text) + count * len(arguments[1]))

    def _check_format(self, wide: re.Pattern[str], text: str, arguments: Iterable[Any]) -> None:
        if wide.search(text):
            raise CostError("it formats with a computed width, or one of more than three digits")
        values = [part for value in arguments for part in (value if isinstance(value, tuple) else (value,))]
        fields = text.count("%") + text.count("{")
        self.charge(len(text) + fields * (_MAX_WIDTH + sum(map(_length, values))))

    def _guard_filters(self) -> None:
        """Put the same checks before the filters that make their input longer."""
        original = dict(self.filters)

        def replace(eval_context: Any, s: Any, old: str, new: str, count: int | None = None) -> Any:
            self._check_replace(str(s), [str(old), str(new)])
            return original["replace"](eval_context, s, old, new, count)

        def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
            padding = width if isinstance(width, int) else len(width)
            self._check_widths([padding])
            self.charge((str(s).count("\n") + 1) * abs(padding) + len(s))
            return original["indent"](s, width, first, blank)

        def join(eval_context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
            items = list(self._steps(value))
            self.charge(sum(map(_length, items)) + len(d) * len(items))
            return original["join"](eval_context, items, d, attribute)

        def batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
            self._check_widths([linecount])
            return original["batch"](value, linecount, fill_with)

        def slice_(value: Iterable[Any], slices: int, fill_with: Any = None) -> Any:
            self._check_widths([slices])
            return original["slice"](value, slices, fill_with)

        def round_(value: float, precision: int = 0, method: Any = "common") -> Any:
            self._check_widths([precision])
            return original["round"](value, precision, method)

        def sum_(value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
            if not isinstance(start, int | float):
                raise CostError("it sums up what are not numbers")
            return original["sum"](value, attribute, start)

        def format_(value: str, *args: Any, **kwargs: Any) -> Any:
            self._check_format(_WIDE_PERCENT_FORMAT, str(value), [*args, *kwargs.values()])
            return original["format"](value, *args, **kwargs)

        self.filters.update(replace=pass_eval_context(replace), join=pass_eval_context(join), tojson=self._to_json)
        self.filters.update(indent=indent, batch=batch, slice=slice_, round=round_, format=format_, sum=sum_)
        for name, function in self.filters.items():
            self.filters[name] = self._charged(name, function)

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that is charged for the size of its input."""

        @functools.wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            size = sum(map(_length, args))
            if name in _SLOW_FILTERS and size > _MAX_SLOW_INPUT:
                raise CostError(f"it gives the filter {name} more than {_MAX_SLOW_INPUT} characters")
            self.charge(size + 1)
            return function(*args, **kwargs)

        return charged

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        self._check_widths([indent])
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self.charge(len(text))
        if self.mark and ensure_ascii:
            text = text.replace(json.dumps(self.mark)[1:-1], self.mark)
        return text


class _MeteredList:
    """A sequence whose iteration is charged; `loop.length` still knows its end."""

    def __init__(self, sandbox: TemplateSandbox, items: list[Any] | tuple[Any, ...]) -> None:
        self._sandbox = sandbox
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return self._sandbox._steps(self._items)


def _has_length(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict)


def _length(value: Any) -> int:
    return len(value) if _has_length(value) else 0


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_WIDTH or _WIDE_TIME_FORMAT.search(pattern):
        raise CostError("it asks strftime_now for a format with a width")
    return datetime.datetime.now().strftime(pattern)
