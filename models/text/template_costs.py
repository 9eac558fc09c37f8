"""Budget of a chat template's rendering: every operation is charged before it happens.

A template is a program, and much of what it does happens inside one call of C code, which no clock interrupts. So the
cost is charged before such a call: the size of everything reachable from its operands, counted as often as a conversion
or a comparison meets it. A list that holds one list twice holds it twice in its text too. Methods of plain values that
have no rule here are refused: whatever Python adds later is closed until it has a rule.

Time: a chat is rendered several times, to see what a longer one shares with it, so one request's renderings share the
time of one. Addresses: a template that prints a function, or a filter's iterator, prints `<list_iterator object at
0x7f96289e4460>`, which differs each time, so that no token after it could be cached; addresses are left out of texts.
"""

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from types import GeneratorType
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedFormatter
from markupsafe import Markup

Text = TypeVar("Text", bound=str)

# Windows writes capitals, and zeros before them.
_ADDRESS = re.compile(r" at 0x([0-9A-Fa-f]+)")
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def without_addresses(text: Text, values: Iterable[object]) -> Text:
    """A text made of values, without the addresses of the objects among and in them; like texts in them stay."""
    if " at 0x" not in text:
        return text
    addresses = {id(found) for found in _objects(values)}
    made = _ADDRESS.sub(lambda match: "" if int(match[1], 16) in addresses else match[0], text)
    return text if made == text else type(text)(made)


def _objects(values: Iterable[object]) -> Iterable[object]:
    """All objects that values hold, and the owners of methods, which a method's text names."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Mapping):
            waiting += chain(value.keys(), value.values())
        elif isinstance(value, _CONTAINERS):
            waiting += value
        elif (owner := getattr(value, "__self__", None)) is not None:
            waiting.append(owner)


MAX_RENDER_SECONDS = 3.0
"""Processor time."""


@dataclass
class _Allowance:
    """Rest of the time that renderings share."""

    seconds: float


_shared: ContextVar[_Allowance | None] = ContextVar("shared render time", default=None)


@contextmanager
def sharing_render_time(seconds: float | None = None) -> Iterator[None]:
    """Let all renderings within a block take so long together, by default as long as one alone may.

    A block within another one has no more than what that one has left.
    """
    outer = _shared.get()
    wanted = MAX_RENDER_SECONDS if seconds is None else seconds
    given = wanted if outer is None else min(wanted, outer.seconds)
    inner = _Allowance(given)
    token = _shared.set(inner)
    try:
        yield
    finally:
        _shared.reset(token)
        if outer is not None:
            outer.seconds -= given - inner.seconds


def render_seconds() -> float:
    """Time that the next rendering may take."""
    shared = _shared.get()
    return MAX_RENDER_SECONDS if shared is None else min(MAX_RENDER_SECONDS, shared.seconds)


def take_render_time(seconds: float) -> None:
    """Take what a rendering took from the time that it shares."""
    shared = _shared.get()
    if shared is not None:
        shared.seconds -= seconds


T = TypeVar("T")
Size = tuple[int, int, int]
"""Sizes of a value: characters of its text before escapes, values in it, levels of containers."""

MAX_OUTPUT_CHARACTERS = 4 << 20
# Units of work: the making of a character, of up to four bytes. It bounds memory too, as if nothing were ever freed.
MAX_WORK = 16 * MAX_OUTPUT_CHARACTERS
STEP_WORK = 16
ENTRY_WORK = 2
CONTAINER_WORK = 64
# What one value may hold, so that one comparison, or the hash of a key, takes milliseconds.
MAX_VALUE_CHARACTERS = 4 * MAX_OUTPUT_CHARACTERS
MAX_LEVELS = 200
MAX_INTEGER_BITS = 4096
_LOOK_EVERY = 1 << 12
_LEAF: Size = (24, 1, 0)

# Searches from the right, and sets of characters, compare all with all in the worst case.
_MAX_PAIRS = 1 << 28
# Of Python's own codecs; some others take quadratic time.
_ENCODINGS = ("utf8", "ascii", "latin1", "utf16", "utf32", "iso88591")
_ESCAPED_WIDTH = 6
_TRANSLATED_CHARACTERS = 64
_NUMBER = re.compile(r"\d+")
_CONVERSION = re.compile(r"[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_PARENTHESIS = re.compile(r"[()]")
_MAX_CONVERSIONS = 1 << 14

_LINEAR = (
    "capitalize casefold count endswith find hex index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper lower removeprefix removesuffix startswith swapcase title upper "
    "escape unescape striptags"
)
_PAIRWISE = "strip lstrip rstrip rfind rindex"
_SPLITTING = "split rsplit splitlines partition rpartition"
_PADDING = "center ljust rjust zfill"
_OWN_RULE = "encode decode expandtabs format format_map join maketrans replace translate"
_TEXT_METHODS = frozenset(" ".join((_LINEAR, _PAIRWISE, _SPLITTING, _PADDING, _OWN_RULE)).split())
_NUMBER_METHODS = frozenset("as_integer_ratio bit_count bit_length conjugate hex is_integer to_bytes".split())
_CONTAINER_METHODS = frozenset("copy count get index isdisjoint items keys values".split())
_TYPE_METHODS = frozenset("fromhex fromkeys from_bytes maketrans".split())


class CostError(SecurityError):
    """The template takes more time or memory than a template may."""


class TemplateBudget:
    """The work of one rendering at a time: counted, and timed by the clock of its thread."""

    def __init__(self) -> None:
        self._work = 0
        self._look_at = MAX_WORK
        self._began = 0.0
        self._deadline = float("inf")
        # Nothing that a template reaches can change, so a size holds; the value is kept so that its id stays its own.
        self._sizes: dict[int, tuple[object, Size]] = {}

    @property
    def work(self) -> int:
        """Units of MAX_WORK that were charged since the start."""
        return self._work

    def start(self) -> None:
        """Begin a rendering."""
        self._work = 0
        self._look_at = _LOOK_EVERY
        self._began = time.thread_time()
        self._deadline = self._began + render_seconds()
        self._sizes.clear()

    def end(self) -> None:
        """Release the values that were measured, and count the time that it took."""
        take_render_time(time.thread_time() - self._began)
        self._sizes.clear()

    def charge(self, amount: int = 0) -> None:
        """Count one step and `amount` units. Raises: CostError where the budget or the time ends."""
        self._work += STEP_WORK + amount
        if self._work > self._look_at:
            self._look()

    def _look(self) -> None:
        if self._work > MAX_WORK:
            raise CostError(f"it takes more than {MAX_WORK} units of work; a character it makes is one")
        if time.thread_time() > self._deadline:
            raise CostError(f"rendering one chat takes longer than {MAX_RENDER_SECONDS:g} s")
        self._look_at = min(self._work + _LOOK_EVERY, MAX_WORK)

    def charge_text(self, length: int) -> None:
        """Count a text about to be made. Raises: CostError if it, or the sum of all, is too long."""
        self.check_text(length)
        self.charge(length)

    def check_text(self, length: int) -> None:
        """Allow one text to be made, to be charged when it is there. Raises: CostError if it is too long."""
        if length > MAX_OUTPUT_CHARACTERS:
            raise CostError(f"it makes a text of more than {MAX_OUTPUT_CHARACTERS} characters")

    def charge_made(self, text: str) -> str:
        """Charge for the memory of a text that was made, and return it: ASCII takes a quarter. Raises: CostError."""
        self.charge(len(text) >> 2 if text.isascii() else len(text))
        return text

    def charge_entries(self, count: int) -> None:
        """Count the entries of a list or dict about to be made. Raises: CostError."""
        if count > MAX_OUTPUT_CHARACTERS:
            raise CostError(f"it makes a list of more than {MAX_OUTPUT_CHARACTERS} entries")
        self.charge(ENTRY_WORK * count)

    def steps(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield what an iterable yields, and charge each step."""
        for item in iterable:
            self._work += STEP_WORK
            if self._work > self._look_at:
                self._look()
            yield item

    def size(self, value: object) -> Size:
        """Measure a value. Raises: CostError if it is larger than any may be, or an integer of thousands of digits."""
        if isinstance(value, str | bytes):
            return len(value) + 2, 1, 0
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise CostError("it computes with an integer of thousands of digits")
            return (6 if isinstance(value, bool) else value.bit_length() // 3 + 2), 1, 0
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, Mapping):
            parts: Iterable[object] = chain(value.keys(), value.values())
        elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            parts = value
        else:
            return _LEAF
        return self.remember(value, self._sum(value, parts))

    def _sum(self, value: object, parts: Iterable[object]) -> Size:
        characters, entries, levels = 2, 1, 0
        size = self.size
        for part in parts:
            if type(part) is str:
                characters += len(part) + 4
                entries += 1
                continue
            part_characters, part_entries, part_levels = size(part)
            characters += part_characters + 2
            entries += part_entries
            if part_levels > levels:
                levels = part_levels
            if characters > MAX_VALUE_CHARACTERS:
                break
        return characters, entries, levels + 1

    def remember(self, value: object, size: Size) -> Size:
        """Take a size for a container's. Raises: CostError if it is larger than any may be."""
        if size[0] > MAX_VALUE_CHARACTERS:
            raise CostError(f"it makes a value whose text has more than {MAX_VALUE_CHARACTERS} characters")
        if size[2] > MAX_LEVELS:
            raise CostError(f"it nests lists or dicts {size[2]} levels deep, more than {MAX_LEVELS}")
        self.charge(CONTAINER_WORK)
        self._sizes[id(value)] = (value, size)
        return size

    def weigh(self, value: T) -> T:
        """Charge for comparing or hashing a value once, and return it. Raises: CostError."""
        if isinstance(value, str):
            self.charge(len(value) >> 4)
        elif value is None or value is True or value is False:
            self.charge()
        else:
            characters, entries, _ = self.size(value)
            self.charge((characters >> 4) + ENTRY_WORK * entries)
        return value

    def admit(self, value: Any) -> Any:
        """Charge for a value that was just made, and return it; one that comes bit by bit is made whole."""
        kind = type(value)
        if kind is bool or value is None:
            return value
        if isinstance(value, str | bytes):
            self.charge_text(len(value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self.charge_entries(len(value))
            self.size(value)
        elif isinstance(value, GeneratorType):
            return iter(self.admit(list(self.steps(value))))
        else:
            self.size(value)
        return value

    def check_keys(self, keys: Iterable[object]) -> None:
        """Charge for hashing values that are to be distinguished. Raises: CostError, for numbers above a few thousand.

        Numbers may be chosen so that all have one hash, and then each is compared with all others.
        """
        num_other = 0
        for key in keys:
            self.weigh(key)
            num_other += not isinstance(key, str)
        if num_other > 1 << 12:
            raise CostError(f"it tells apart {num_other} values that are not text, more than {1 << 12}")


def methods_of(owner: object) -> frozenset[str]:
    """The names of the methods that a template may call on a plain value."""
    if isinstance(owner, type) or owner is None:
        return _TYPE_METHODS
    if isinstance(owner, str | bytes):
        return _TEXT_METHODS
    return _NUMBER_METHODS if isinstance(owner, int | float) else _CONTAINER_METHODS


def charge_method(budget: TemplateBudget, owner: Any, name: str, arguments: list[Any]) -> None:
    """Charge for `owner.name(*arguments)`; the arguments are no iterators. Raises: CostError."""
    if name not in methods_of(owner):
        raise CostError(f"it calls {name} of a {type(owner).__name__}, which a template has no need of")
    sizes = [budget.size(argument)[0] for argument in arguments]
    budget.charge(sum(sizes) >> 2)
    if isinstance(owner, str | bytes):
        _charge_text_method(budget, owner, name, arguments, sizes)
    elif name == "to_bytes":
        budget.charge_text(max(_integers(arguments), default=0))
    elif name in ("fromkeys", "maketrans", "get"):
        keys: Iterable[Any] = arguments[:1]
        if name != "get":
            keys = arguments[0] if arguments and isinstance(arguments[0], Iterable) else ()
        budget.check_keys(keys)
    elif name in ("count", "index"):
        budget.weigh(owner)
    elif name == "copy":
        budget.charge_entries(len(owner))


def _charge_text_method(budget: TemplateBudget, text: Any, name: str, arguments: list[Any], sizes: list[int]) -> None:
    # Text that is marked as safe escapes what it is joined, formatted or replaced with.
    growth = _ESCAPED_WIDTH if isinstance(text, Markup) else 1
    length = len(text)
    budget.charge(length >> 2 if text.isascii() else length)
    if name in _PAIRWISE or name in ("rsplit", "rpartition"):
        longest = max((size for size, value in zip(sizes, arguments, strict=True) if isinstance(value, str)), default=0)
        if length * longest > _MAX_PAIRS:
            raise CostError(f"it gives {name} two texts of thousands of characters")
    if name in _SPLITTING:
        # Each part is an object of its own.
        separator: Any = next((value for value in arguments if isinstance(value, str | bytes) and value), None)
        parts = length // 2 if separator is None else text.count(separator)
        budget.charge_entries(_TRANSLATED_CHARACTERS // 4 * (parts + 1))
    elif name in _PADDING:
        budget.charge_text(max(_integers(arguments), default=0))
    elif name == "expandtabs":
        budget.charge_text(length + text.count("\t") * max(_integers(arguments), default=8))
    elif name == "replace":
        charge_replace(budget, text, arguments, growth)
    elif name == "join":
        items = arguments[0] if arguments and hasattr(arguments[0], "__len__") else ()
        budget.charge_text(growth * (sum(sizes) + length * len(items)))
    elif name == "translate":
        entries = arguments[0].values() if arguments and isinstance(arguments[0], Mapping) else ()
        budget.charge_text(length * max(map(_length, entries), default=1))
    elif name in ("encode", "decode"):
        named = [re.sub("[-_ ]", "", value).lower() for value in arguments if isinstance(value, str)]
        if any(value not in (*_ENCODINGS, "strict", "ignore", "replace") for value in named):
            raise CostError(f"it calls {name} with {named[0]:.20}; UTF-8, ASCII and Latin-1 are those it may use")
        budget.charge_text(4 * length)
    elif name == "escape":
        budget.charge_text(_ESCAPED_WIDTH * sum(sizes))


def charge_replace(budget: TemplateBudget, text: Any, arguments: list[Any], growth: int = 1) -> None:
    """Charge for `text.replace(old, new, count)`."""
    if len(arguments) >= 2 and isinstance(arguments[0], str | bytes):
        found = text.count(arguments[0]) if arguments[0] else len(text) + 1
        limit = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else -1
        found = found if limit < 0 else min(found, limit)
        budget.charge_text(len(text) + growth * found * _length(arguments[1]))


def charge_percent(budget: TemplateBudget, text: str, values: Any) -> None:
    """Charge for `text % values`, at most what its conversions can make."""
    characters = budget.size(values)[0]
    if isinstance(values, Mapping):
        characters = max((budget.size(value)[0] for value in values.values()), default=0)
    num_values = len(values) if isinstance(values, tuple) else 1
    conversions, width, named = 0, 0, False
    stars = max(_integers(values if isinstance(values, tuple) else ()), default=0)
    position = text.find("%")
    while position >= 0:
        conversions += 1
        if conversions > _MAX_CONVERSIONS:
            raise CostError(f"it formats more than {_MAX_CONVERSIONS} values at once")
        start = position + 1
        if text.startswith("(", start):
            named = True
            start = _end_of_parentheses(text, start)
        match = _CONVERSION.match(text, start)
        assert match is not None, "it matches nothing too"
        width += sum(stars if number == "*" else _bounded(number) for number in match.groups() if number)
        position = text.find("%", match.end() + 1)
    growth = _ESCAPED_WIDTH if isinstance(text, Markup) else 1
    repeats = conversions if named or num_values == 1 else 1
    budget.charge_text(growth * (len(text) + width + repeats * characters + 24 * conversions))


def _end_of_parentheses(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _bounded(digits: str) -> int:
    return int(digits) if len(digits) < 8 else MAX_OUTPUT_CHARACTERS + 1


def charge_operator(budget: TemplateBudget, operator: str, left: Any, right: Any) -> None:
    """Charge for `left operator right`, of two values that may be anything. Raises: CostError."""
    budget.charge()
    if isinstance(left, int) and isinstance(right, int):
        _check_integers(budget, operator, left, right)
    elif operator == "%" and isinstance(left, str):
        charge_percent(budget, left, right)
    elif operator == "%" and isinstance(left, bytes):
        raise CostError("it formats bytes, which a template has no need of")
    elif operator == "-" and hasattr(left, "__rand__") and not isinstance(left, int):
        raise CostError("it subtracts sets of keys, which a template has no need of")
    elif operator == "+" and isinstance(left, str | bytes) and isinstance(right, str | bytes):
        growth = _ESCAPED_WIDTH if isinstance(left, Markup) or isinstance(right, Markup) else 1
        budget.check_text(growth * (len(left) + len(right)))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.charge_entries(len(left) + len(right))
    elif operator == "*":
        sequence, factor = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sequence, str | bytes) and isinstance(factor, int):
            budget.check_text(len(sequence) * max(factor, 0))
        elif isinstance(sequence, list | tuple) and isinstance(factor, int):
            budget.charge_entries(len(sequence) * max(factor, 0))
    else:
        budget.size(left)
        budget.size(right)


def _check_integers(budget: TemplateBudget, operator: str, left: int, right: int) -> None:
    budget.size(left)
    budget.size(right)
    bits = 0
    if operator == "**":
        bits = left.bit_length() * max(right, 1)
    elif operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > MAX_INTEGER_BITS:
        raise CostError("it computes with an integer of thousands of digits")


def operator_result(budget: TemplateBudget, operator: str, left: Any, right: Any, result: Any) -> Any:
    """Take in what an operator made: a list's size follows from its parts', without going through it."""
    if isinstance(result, list | tuple):
        if operator == "+":
            first, second = budget.size(left), budget.size(right)
            size = (first[0] + second[0], first[1] + second[1], max(first[2], second[2]))
        else:
            sequence = right if isinstance(left, int) else left
            factor = len(result) // max(len(sequence), 1)
            characters, entries, levels = budget.size(sequence)
            size = (characters * max(factor, 1), entries * max(factor, 1), levels)
        budget.remember(result, size)
    elif type(result) is int:
        budget.size(result)
    return result


def formatter_of(budget: TemplateBudget, kind: type[SandboxedFormatter]) -> type[SandboxedFormatter]:
    """A formatter for `str.format` that charges each field, with the width that it really has."""

    class Metered(kind):  # type: ignore[valid-type, misc]
        def convert_field(self, value: Any, conversion: Any) -> Any:
            budget.charge_text(budget.size(value)[0])
            converted = budget.admit(super().convert_field(value, conversion))
            return without_addresses(converted, (value,)) if isinstance(converted, str) else converted

        def format_field(self, value: Any, format_spec: str) -> Any:
            widths = sum(map(_bounded, _NUMBER.findall(format_spec)))
            budget.charge_text(budget.size(value)[0] + widths)
            return without_addresses(budget.admit(super().format_field(value, format_spec)), (value,))

    return Metered


def _integers(values: Iterable[Any]) -> Iterator[int]:
    return (abs(value) for value in values if isinstance(value, int))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1
