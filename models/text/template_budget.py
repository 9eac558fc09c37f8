"""What one rendering of a chat template may cost, and what a value costs whoever goes through all of it.

A template is a program, and much of what it does happens inside one call of C code, which no clock interrupts. So the
cost is charged before such a call: the size of everything reachable from its operands, counted as often as a conversion
or a comparison meets it. A list that holds one list twice holds it twice in its text too.
"""

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import chain
from types import GeneratorType
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError

T = TypeVar("T")
Size = tuple[int, int, int]
"""Of a value: characters of its text before escapes, values in it, levels of containers."""

MAX_OUTPUT_CHARACTERS = 4 << 20
MAX_RENDER_SECONDS = 3.0
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


class CostError(SecurityError):
    """The template asks for more time or memory than a template may."""


class TemplateBudget:
    """The work of one rendering at a time: counted, and timed by the clock of its thread."""

    def __init__(self) -> None:
        self._work = 0
        self._look_at = MAX_WORK
        self._deadline = float("inf")
        # Nothing that a template reaches can change, so a size holds; the value is kept so that its id stays its own.
        self._sizes: dict[int, tuple[object, Size]] = {}

    @property
    def work(self) -> int:
        """How many units of MAX_WORK were charged since the start."""
        return self._work

    def start(self) -> None:
        """Begin a rendering."""
        self._work = 0
        self._look_at = _LOOK_EVERY
        self._deadline = time.thread_time() + MAX_RENDER_SECONDS
        self._sizes.clear()

    def end(self) -> None:
        """Let go of the values that were measured."""
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
            raise CostError(f"it takes longer than {MAX_RENDER_SECONDS:g} s")
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
        """Charge for hashing values that are to be told apart. Raises: CostError, for numbers above a few thousand.

        Numbers may be chosen so that all have one hash, and then each is compared with all others.
        """
        num_other = 0
        for key in keys:
            self.weigh(key)
            num_other += not isinstance(key, str)
        if num_other > 1 << 12:
            raise CostError(f"it tells apart {num_other} values that are not text, more than {1 << 12}")
