"""A Jinja environment for templates of unknown origin: no escape, and a bound on what they cost.

Jinja's own sandbox stops access to Python's insides, not `'x' * 10**9` or a loop that never ends. Here everything that
a template can reach is charged to a budget (template_costs) before it happens: operators, comparisons, output, loops
and calls in this file, filters and tests in template_filters. Nothing is computed while a template is compiled.

Jinja's filters and tests, each charged before it runs for what it may cost.

They do what Jinja's do. What Jinja makes bit by bit is made whole, so that its cost is known, and given as an iterator.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType, NoneType
from typing import Any, NoReturn
from urllib.parse import quote

from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace, generate_lorem_ipsum
from markupsafe import Markup

from localinfer.models.text.template_costs import (
    ENTRY_WORK,
    MAX_OUTPUT_CHARACTERS,
    CostError,
    TemplateBudget,
    charge_method,
    charge_operator,
    charge_percent,
    charge_replace,
    formatter_of,
    operator_result,
    without_addresses,
)

Filter = Callable[..., Any]

# They split by regular expressions, lay out lines or sort: more than linear time, or much memory for each word.
_SLOW_TEXT = ("pprint", "striptags", "title", "truncate", "urlize", "wordcount", "wordwrap")
_SORTING = ("dictsort", "groupby", "max", "min", "sort", "unique")
_MAX_SLOW_INPUT = 1 << 16
# Filters that go through an iterable, which is then made whole; the others take an iterator as it is.
_CONSUMING = (
    "batch dictsort groupby join list map max min reject rejectattr select selectattr slice sort sum unique urlencode"
).split()
# These look at what is in a list or dict, not into it.
_SHALLOW = "batch items list map reject rejectattr reverse select selectattr slice".split()
# Escapes for HTML and URLs make a character at most so many.
_GROWTH = dict.fromkeys(("e", "escape", "forceescape", "xmlattr"), 6) | {"urlencode": 12, "urlize": 12}
_ATTRIBUTE_USERS = "groupby join map max min rejectattr selectattr sort sum unique".split()
_MAX_ATTRIBUTE = 1000
_LETTER_ENTRIES = 8
_MAX_PRECISION = 1000
# What these look at takes no time, or is bounded by whatever made it.
_FREE_FILTERS = ("attr", "count", "d", "default", "first", "last", "length")
_FREE_TESTS = (
    "boolean callable defined escaped false filter float integer iterable mapping none number sameas sequence string "
    "test true undefined"
).split()


def guarded_filters(sandbox: "TemplateSandbox") -> dict[str, Filter]:
    """All of Jinja's filters, charged to the sandbox's budget."""
    special = _special_filters(sandbox)
    return {
        name: function if name in _FREE_FILTERS else _charged(sandbox, name, function, special.get(name))
        for name, function in FILTERS.items()
    }


def guarded_tests(sandbox: "TemplateSandbox") -> dict[str, Filter]:
    """All of Jinja's tests, charged to the sandbox's budget."""
    weigh = sandbox.budget.weigh

    def charged(name: str, function: Filter) -> Filter:
        def test(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                weigh(value)
            if name in ("lower", "upper"):
                args = (sandbox.text_of(args[0]), *args[1:])
            return function(*args, **kwargs)

        # Some of Jinja's take the environment as an argument, which is said by a mark on the function.
        return functools.wraps(function)(test)

    plain: Mapping[str, Filter] = TESTS  # type: ignore[assignment]
    return {name: function if name in _FREE_TESTS else charged(name, function) for name, function in plain.items()}


def _charged(sandbox: "TemplateSandbox", name: str, function: Filter, special: Filter | None) -> Filter:
    """A filter that is charged for its input first; `special` is called in its place, without Jinja's own argument."""
    budget = sandbox.budget
    growth, is_slow, sorts = _GROWTH.get(name, 1), name in _SLOW_TEXT, name in _SORTING
    consumes, uses_attribute, is_shallow = name in _CONSUMING, name in _ATTRIBUTE_USERS, name in _SHALLOW
    first = int(hasattr(function, "jinja_pass_arg"))

    # What is copied marks which argument of Jinja's own the filter takes.
    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        values = args[first:]
        if consumes and values and isinstance(values[0], Iterator):
            values = (list(budget.steps(values[0])), *values[1:])
        size = 0
        for value in values:
            size += len(value) if type(value) is str else budget.size(value)[0]
        for value in kwargs.values():
            size += budget.size(value)[0]
        if growth > 1:
            budget.charge_text(growth * size)
        if is_slow and size > _MAX_SLOW_INPUT:
            raise CostError(f"it gives the filter {name} more than {_MAX_SLOW_INPUT} characters")
        if sorts and values:
            if hasattr(values[0], "__len__") and len(values[0]) > _MAX_SLOW_INPUT:
                raise CostError(f"it gives the filter {name} more than {_MAX_SLOW_INPUT} entries")
            if name == "unique" and isinstance(values[0], list | tuple | range):
                budget.check_keys(values[0])
        if uses_attribute:
            names = [*values[1:], *kwargs.values()][1:]
            if any(isinstance(value, str) and len(value) > _MAX_ATTRIBUTE for value in names):
                raise CostError(f"it gives the filter {name} a name of more than {_MAX_ATTRIBUTE} characters")
        budget.charge(0 if is_shallow else size)
        result = function(*args[:first], *values, **kwargs) if special is None else special(*values, **kwargs)
        result = budget.admit(result)
        if not isinstance(result, str):
            return result
        result = without_addresses(result, (*values, *kwargs.values()))
        return sandbox.restore_mark(result) if sandbox.mark else result

    return charged


def _special_filters(sandbox: "TemplateSandbox") -> dict[str, Filter]:
    """The filters whose result can be longer than what they are given, or that take what is no text for one."""
    budget, text_of = sandbox.budget, sandbox.text_of

    def replace(s: object, old: object, new: object, count: int | None = None) -> str:
        text, old, new = str(text_of(s)), str(text_of(old)), str(text_of(new))
        limit = -1 if count is None else count
        charge_replace(budget, text, [old, new, limit])
        return text.replace(old, new, limit)

    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        padding = len(width) if isinstance(width, str) else max(width, 0)
        # Every kind of line break counts, and each line is an object.
        lines = len(s.splitlines()) + 1
        budget.charge_text(len(s) + lines * (padding + 1))
        return FILTERS["indent"](s, width, first, blank)

    def join(value: Iterable[Any], d: object = "", attribute: str | int | None = None) -> str:
        texts = [str(text_of(item)) for item in budget.steps(parts_of(value, attribute))]
        separator = str(text_of(d))
        budget.charge_text(sum(map(len, texts)) + len(separator) * len(texts))
        return separator.join(texts)

    def sum_(iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        if isinstance(start, str):
            raise TypeError("sum() can't sum strings [use ''.join(seq) instead]")
        total = start
        for item in budget.steps(parts_of(iterable, attribute)):
            total = sandbox.operate("+", total, item)
        return total

    def parts_of(value: Iterable[Any], attribute: str | int | None) -> Iterable[Any]:
        return value if attribute is None else map(make_attrgetter(sandbox, attribute), value)

    def list_(value: Iterable[Any]) -> list[Any]:
        if isinstance(value, str):
            # Each character becomes an object of its own.
            budget.charge_entries(_LETTER_ENTRIES * len(value))
        return list(value)

    def center(value: object, width: int = 80) -> Any:
        budget.charge_text(width)
        return FILTERS["center"](text_of(value), width)

    def wordwrap(
        s: str,
        width: int = 79,
        break_long_words: bool = True,
        wrapstring: str | None = None,
        break_on_hyphens: bool = True,
    ) -> Any:
        budget.charge_text((len(s) + 1) * (len(wrapstring or "\n") + 1))
        return FILTERS["wordwrap"](sandbox, s, width, break_long_words, wrapstring, break_on_hyphens)

    def batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
        budget.charge_entries(linecount)
        return FILTERS["batch"](value, linecount, fill_with)

    def slice_(value: Iterable[Any], slices: int, fill_with: Any = None) -> Any:
        budget.charge_entries(_LETTER_ENTRIES * slices)
        # Jinja has one more of it, for templates that run asynchronously.
        return getattr(FILTERS["slice"], "__wrapped__", FILTERS["slice"])(value, slices, fill_with)

    def round_(value: float, precision: int = 0, method: Any = "common") -> Any:
        if isinstance(precision, int) and abs(precision) > _MAX_PRECISION:
            raise CostError(f"it rounds to more than {_MAX_PRECISION} digits")
        return FILTERS["round"](value, precision, method)

    def format_(value: object, *args: Any, **kwargs: Any) -> Any:
        text = text_of(value)
        charge_percent(budget, text, kwargs or args)
        return FILTERS["format"](text, *args, **kwargs)

    def on_text(name: str) -> Filter:
        return lambda value, *args, **kwargs: FILTERS[name](text_of(value), *args, **kwargs)

    special: dict[str, Filter] = {
        name: on_text(name) for name in "capitalize lower string title trim upper wordcount".split()
    }
    return special | {
        "batch": batch,
        "center": center,
        "format": format_,
        "indent": indent,
        "join": join,
        "list": list_,
        "replace": replace,
        "round": round_,
        "slice": slice_,
        "sum": sum_,
        "tojson": functools.partial(_to_json, sandbox),
        "urlencode": functools.partial(_url_encode, sandbox),
        "wordwrap": wordwrap,
    }


def _url_encode(sandbox: "TemplateSandbox", value: Any) -> str:
    text: str = FILTERS["urlencode"](value)
    return text.replace(quote(sandbox.mark), sandbox.mark) if sandbox.mark else text


def _to_json(
    sandbox: "TemplateSandbox",
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: nothing is escaped for HTML, and letters beyond ASCII stay."""
    budget = sandbox.budget
    if isinstance(value, Iterator):
        # What `map` and `select` give.
        value = list(budget.steps(value))
    characters, entries, levels = budget.size(value)
    between = sum(map(len, separators)) if separators is not None else 4
    if indent is not None:
        between += 1 + levels * (len(indent) if isinstance(indent, str) else max(indent, 0))
    budget.charge_text(characters + entries * between)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_MAX_CODE_CHARACTERS = 2 << 20
# Jinja copies all names that are assigned, for each branch.
_MAX_BRANCHES_BY_NAMES = 1 << 20
_MAX_TIME_FORMAT = 1000
_WIDE_TIME_FORMAT = re.compile(r"%[^a-zA-Z%]*\d{2,}")
_LOREM_WORD = 16
# Objects of these types have only methods that are known; all others are the caller's. Methods of classes,
# such as dict.fromkeys, belong to a class or to nothing.
_PLAIN_TYPES: tuple[type, ...] = (
    *(str, bytes, int, float, complex, list, tuple, dict, set, frozenset, range, type, NoneType),
    *(type({}.keys()), type({}.values()), type({}.items())),
)


class _GuardedCodeGenerator(CodeGenerator):
    """Sends the constructs that no hook of Jinja's sandbox sees through the environment."""

    _written = 0

    def write(self, x: str) -> None:
        self._written += len(x)
        if self._written > _MAX_CODE_CHARACTERS:
            raise CostError(f"it compiles to more than {_MAX_CODE_CHARACTERS} characters of code")
        super().write(x)

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        num_branches = sum(1 for _ in node.find_all(nodes.If))
        num_names = len({name.name for name in node.find_all(nodes.Name) if name.ctx != "load"})
        if num_branches * num_names > _MAX_BRANCHES_BY_NAMES:
            raise CostError(f"it has {num_branches} branches and assigns to {num_names} names, too many together")
        super().visit_Template(node, frame)

    @contextmanager
    def _within(self, call: str) -> Iterator[None]:
        self.write(f"environment.{call}(")
        yield
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        with self._within("join_operands"):
            self.write("(")
            for operand in node.nodes:
                self.visit(operand, frame)
                self.write(", ")
            self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        with self._within("take_slice"):
            self.visit(node.node, frame)
            for bound in (node.arg.start, node.arg.stop, node.arg.step):
                self.write(", ")
                self.visit(nodes.Const(None) if bound is None else bound, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = _environment_call("metered", node.iter)
        super().visit_For(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):
            with self._within(node.node.name):
                self.visit(node.args[0], frame)
        elif _is_queue_call(node):
            assert isinstance(node.node, nodes.Getattr) and isinstance(node.node.node, nodes.Getattr)
            with self._within("queue"):
                self.write("context, ")
                self.visit(node.node.node.node, frame)
                self.write(f", {node.node.node.attr!r}, {node.node.attr!r}, (")
                for argument in node.args:
                    self.visit(argument, frame)
                    self.write(", ")
                self.write(")")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Weigh both sides, unless one is a constant, which ends the comparison at once."""
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        is_search = [operand.op in ("in", "notin") for operand in node.ops]
        is_light = not any(is_search) and any(isinstance(operand, nodes.Const) for operand in operands)
        if not is_light or len(operands) > 2:
            node.expr = self._weighed(node.expr)
            for operand in node.ops:
                operand.expr = self._weighed(operand.expr)
        super().visit_Compare(node, frame)

    def _weighed(self, node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else _environment_call("weigh", node)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        with self._within("admit"):
            super().visit_List(node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        with self._within("admit"):
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for pair in node.items:
            pair.key = self._weighed(pair.key)
        with self._within("admit"):
            super().visit_Dict(node, frame)


def _environment_call(name: str, argument: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None, lineno=argument.lineno)


def _is_queue_call(node: nodes.Call) -> bool:
    """Return whether a call is `name.attribute.append(value)`, or with `pop`."""
    called = node.node
    return (
        isinstance(called, nodes.Getattr)
        and called.attr in ("append", "pop")
        and isinstance(called.node, nodes.Getattr)
        and isinstance(called.node.node, nodes.Name)
        and len(node.args) <= 1
        and not (node.kwargs or node.dyn_args or node.dyn_kwargs)
    )


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

    intercepted_binops = frozenset(("*", "**", "+", "%", "-", "/", "//"))
    code_generator_class = _GuardedCodeGenerator

    def __init__(self) -> None:
        self.budget = TemplateBudget()
        self.weigh = self.budget.weigh
        self.admit = self.budget.admit
        # A character that no template may see the escaped form of; see ChatTemplate.render_segments.
        self.mark = ""
        # What strftime_now takes for now.
        self.now: Callable[[], datetime.datetime] = datetime.datetime.now
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            # A constant expression costs what any other does: it too is computed when it is rendered.
            optimized=False,
            finalize=self._finalize,
        )
        # Jinja's code takes these from the environment.
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters = guarded_filters(self)
        self.tests.update(guarded_tests(self))
        self._formatters = {
            Markup: formatter_of(self.budget, SandboxedEscapeFormatter),
            str: formatter_of(self.budget, SandboxedFormatter),
        }
        self.globals.update(
            dict=self._make_dict,
            namespace=_namespace_type(self),
            cycler=lambda *items: Cycler(*items),
            joiner=lambda sep=", ": Joiner(sep),
            lipsum=self._make_lipsum,
            raise_exception=self._raise_exception,
            strftime_now=self._strftime_now,
        )

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > _MAX_TIME_FORMAT or _WIDE_TIME_FORMAT.search(pattern):
            raise CostError("it calls strftime_now with a format that has a width")
        return self.now().strftime(pattern)

    # What generated code calls.

    def metered(self, iterable: Iterable[object]) -> Iterable[object]:
        """Charge every step of a loop; its length stays visible to the template."""
        budget = self.budget
        return _MeteredList(budget, iterable) if isinstance(iterable, list | tuple) else budget.steps(iterable)

    def join_operands(self, operands: tuple[object, ...]) -> str:
        """Do what `~` does."""
        texts = [operand if type(operand) is str else str(self.text_of(operand)) for operand in operands]
        self.budget.check_text(sum(map(len, texts)))
        return self.budget.charge_made("".join(texts))

    def take_slice(self, sequence: Any, start: Any, stop: Any, step: Any) -> Any:
        """Do what `sequence[start:stop:step]` does."""
        part = sequence[start:stop:step]
        # A slice is no larger than what it is of, so it may be charged when it is made.
        self.budget.charge(ENTRY_WORK * len(part))
        return part

    def queue(self, context: Context, owner: Any, name: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Do `owner.name.append(value)` or `owner.name.pop(index)` by a new list, where the owner is a namespace.

        So no value changes that has another name too. Lists elsewhere are left to the sandbox, which refuses.
        """
        items = self.getattr(owner, name)
        if not isinstance(owner, Namespace) or type(items) is not list or (method == "append" and not arguments):
            return self.call(context, self.getattr(items, method), *arguments)
        if method == "append":
            owner[name] = self.operate("+", items, self.budget.admit(list(arguments)))
            return None
        made = list(items)
        popped = made.pop(*arguments)
        # What is left is no larger than what it is of.
        self.budget.charge_entries(len(made))
        owner[name] = made
        return popped

    @pass_eval_context
    def _finalize(self, eval_context: object, value: object) -> object:
        return value if type(value) is str else self.text_of(value)

    def _concat(self, parts: Iterable[str]) -> str:
        texts: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            if length > MAX_OUTPUT_CHARACTERS:
                break
            texts.append(part)
        self.budget.check_text(length)
        return self.budget.charge_made("".join(texts))

    # What Jinja's runtime calls.

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Do what `obj[argument]` does."""
        if type(argument) is not str:
            self.budget.weigh(argument)
        else:
            self.budget.charge()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do what `left operator right` does."""
        return self.operate(operator, left, right)

    def operate(self, operator: str, left: Any, right: Any) -> Any:
        """Do an operation after charging for its result."""
        charge_operator(self.budget, operator, left, right)
        result = self.binop_table[operator](left, right)
        if operator == "%" and isinstance(result, str):
            result = self.restore_mark(without_addresses(result, (right,)))
        if type(result) is str:
            return self.budget.charge_made(result)
        return operator_result(self.budget, operator, left, right, result)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function after charging for what it will make."""
        budget = self.budget
        budget.charge()
        kind = type(function)
        if kind is Macro:
            return super().call(context, function, *args, **kwargs)
        if kind is LoopContext:
            args = (self.metered(args[0]), *args[1:]) if args else args
        elif kind is BuiltinMethodType or kind is MethodType:
            owner = function.__self__
            if isinstance(owner, _PLAIN_TYPES if kind is BuiltinMethodType else Markup):
                args = tuple(list(budget.steps(value)) if isinstance(value, Iterator) else value for value in args)
                charge_method(budget, owner, function.__name__, [*args, *_own_arguments(kwargs)])
                return budget.admit(super().call(context, function, *args, **kwargs))
        for value in (*args, *_own_arguments(kwargs)):
            budget.weigh(value)
        return super().call(context, function, *args, **kwargs)

    def call_filter(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a filter by its name, as `map` does."""
        self.budget.charge()
        return super().call_filter(name, value, *args, **kwargs)

    def call_test(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a test by its name, as `select` does."""
        self.budget.charge()
        return super().call_test(name, value, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Return the charged form of `str.format` or `str.format_map`, or None for anything else."""
        if not isinstance(value, BuiltinMethodType | MethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"
        if not isinstance(text, str):
            return None
        if isinstance(text, Markup):
            formatter = self._formatters[Markup](self, escape=text.escape)
        else:
            formatter = self._formatters[str](self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            self.budget.charge_text(len(text))
            if is_map:
                (kwargs,), args = args, ()
            made = formatter.vformat(text, args, kwargs)
            self.budget.charge_text(len(made))
            return type(text)(self.restore_mark(made))

        return formatted

    # Values as text.

    def text_of(self, value: Any) -> str:
        """Return a value's text, as printing makes it, after charging for it."""
        if isinstance(value, str):
            return value
        if value is None or type(value) is bool:
            return str(value)
        budget = self.budget
        characters = budget.size(value)[0]
        budget.charge_text(characters)
        text = without_addresses(str(value), (value,))
        if len(text) > characters:
            budget.charge_text(len(text))
        return self.restore_mark(text)

    def restore_mark(self, text: str) -> str:
        """Undo the escape that text of values and JSON make of the mark."""
        return text.replace(f"\\u{ord(self.mark):04x}", self.mark) if self.mark else text

    # Functions that templates call.

    def _make_dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        args = tuple(list(self.budget.steps(value)) if isinstance(value, Iterator) else value for value in args)
        if args and isinstance(args[0], list | tuple):
            self.budget.check_keys(pair[0] if isinstance(pair, list | tuple) and pair else pair for pair in args[0])
        made: dict[Any, Any] = self.budget.admit(dict(*args, **kwargs))
        return made

    def _make_lipsum(self, n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
        self.budget.charge_text(_LOREM_WORD * (abs(n) + 1) * (abs(max) + 1))
        return generate_lorem_ipsum(n, html, min, max)

    def _raise_exception(self, message: object) -> NoReturn:
        raise TemplateError(str(self.text_of(message)))


def _namespace_type(sandbox: TemplateSandbox) -> type[Namespace]:
    class ChargedNamespace(Namespace):
        """It may change, and may hold itself, so its size is taken anew each time that it is made a text."""

        def __repr__(self) -> str:
            values = dict(object.__getattribute__(self, "_Namespace__attrs"))
            return f"<Namespace {sandbox.text_of(values)}>"

    return ChargedNamespace


class _MeteredList:
    """A sequence whose iteration is charged; `loop.length` still works."""

    def __init__(self, budget: TemplateBudget, items: list[Any] | tuple[Any, ...]) -> None:
        self._budget = budget
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return self._budget.steps(self._items)


def _own_arguments(kwargs: dict[str, Any]) -> list[Any]:
    """The keyword arguments that a template wrote, without those that Jinja adds."""
    return [value for name, value in kwargs.items() if not name.startswith("_")] if kwargs else []
