"""A Jinja environment for templates of unknown origin: no escape, and a bound on what they cost.

Jinja's own sandbox stops access to Python's insides, not `'x' * 10**9` or a loop that never ends. Here everything that
a template can reach is charged to a budget (template_costs) before it happens: operators, comparisons, output, loops
and calls in this file, filters and tests in template_filters. Nothing is computed while a template is compiled.
"""

import datetime
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType, NoneType
from typing import Any, NoReturn

from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, generate_lorem_ipsum
from markupsafe import Markup

from localinfer.models.text.template_addresses import without_addresses
from localinfer.models.text.template_costs import (
    ENTRY_WORK,
    MAX_OUTPUT_CHARACTERS,
    CostError,
    TemplateBudget,
    charge_method,
    charge_operator,
    formatter_of,
    operator_result,
)
from localinfer.models.text.template_filters import guarded_filters, guarded_tests

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
    """Whether a call is `name.attribute.append(value)`, or with `pop`."""
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
