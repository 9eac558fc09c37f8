"""Jinja's filters and tests, each charged before it runs for what it may cost.

They do what Jinja's do. What Jinja makes bit by bit is made whole, so that its cost is known, and given as an iterator.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2.filters import FILTERS, make_attrgetter
from jinja2.tests import TESTS

from localinfer.models.text.template_addresses import without_addresses
from localinfer.models.text.template_costs import CostError, charge_percent, charge_replace

if TYPE_CHECKING:
    from localinfer.models.text.template_sandbox import TemplateSandbox

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
