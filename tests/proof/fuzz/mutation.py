"""Mutations that targets share: of bytes, of text, and of values as JSON has them.

All draw from the generator they are given and change nothing else.
"""

import copy
import json
import math
import random
from collections.abc import Sequence
from typing import Any

INTEGERS = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 257, 1000, 4096, 32767, 32768, 65535),
    *(1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 53) + 1, (1 << 62) + 1),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -128, -(1 << 31), -(1 << 63)),
)
"""Numbers at which something overflows, is empty, or changes its kind."""
FLOATS = (0.0, -0.0, 0.5, -1.0, 1e-45, 1e-300, 1.5, 1e10, 3.5e38, 1e308, math.inf, -math.inf, math.nan)
TEXTS = (
    *("", " ", "\0", "a", "\n", "\x1b[2J", "%s%n", "{{", "}}", "{%", "../../x", "-", "null", "0", "\ufeff", "\u202e"),
    *("\ud800", "é", "e\u0301", "😀", "\U0010ffff", "ﷺ", "▁", "Ġ", "<|im_start|>", "<s>", "</s>", "a" * 300),
)
_MOST_REPEATED = 64


def mutate_bytes(generator: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One change: bits, a number, a stretch gone, doubled, moved or of another input, or an early end."""
    if not data:
        return bytes(generator.randrange(256) for _ in range(generator.randint(1, 8)))
    changed = bytearray(data)
    where = generator.randrange(len(changed))
    size = min(len(changed) - where, 1 << generator.randrange(8))
    choice = generator.randrange(8)
    if choice == 0:
        changed[where] ^= 1 << generator.randrange(8)
    elif choice == 1:
        changed[where] = generator.randrange(256)
    elif choice == 2:
        width = generator.choice((1, 2, 4, 8))
        changed[where : where + width] = number_bytes(generator.choice(INTEGERS), width, generator.random() < 0.2)
    elif choice == 3:
        del changed[where : where + size]
    elif choice == 4:
        changed[where:where] = changed[where : where + size] * generator.randint(1, 4)
    elif choice == 5:
        piece = changed[where : where + size]
        del changed[where : where + size]
        target = generator.randrange(len(changed) + 1)
        changed[target:target] = piece
    elif choice == 6:
        del changed[where:]
    else:
        other = generator.choice(others) if others else data
        start = generator.randrange(len(other) or 1)
        changed[where : where + size] = other[start : start + size]
    return bytes(changed)


def number_bytes(number: int, width: int, is_big_endian: bool = False) -> bytes:
    """The lowest bytes of a number, as an overflow leaves it."""
    return (number % (1 << 8 * width)).to_bytes(width, "big" if is_big_endian else "little")


def near(generator: random.Random, number: int) -> int:
    """A number beside this one, a multiple of it, or one of `INTEGERS`."""
    choices = (number + 1, number - 1, number * 2, number // 2, -number, number << 32, generator.choice(INTEGERS))
    return generator.choice(choices)


def mutate_text(generator: random.Random, text: str, words: Sequence[str] = TEXTS) -> str:
    """One change to a text: something inserted, gone, doubled, swapped, repeated many times, or cut off."""
    where = generator.randrange(len(text) + 1)
    size = 1 << generator.randrange(6)
    choice = generator.randrange(6)
    if choice == 0:
        return text[:where] + generator.choice(words) + text[where:]
    if choice == 1:
        return text[:where] + text[where + size :]
    if choice == 2:
        return text[:where] + text[where : where + size] * generator.randint(2, _MOST_REPEATED) + text[where + size :]
    if choice == 3:
        return text[:where] + generator.choice(words) + text[where + size :]
    if choice == 4:
        return text[:where]
    return text[:where] + chr(generator.choice((generator.randrange(128), generator.randrange(0x11000)))) + text[where:]


def any_value(generator: random.Random, depth: int = 0) -> Any:
    """A JSON value, often one that nobody expects."""
    choice = generator.randrange(8 if depth < 3 else 5)
    if choice == 0:
        return generator.choice(INTEGERS)
    if choice == 1:
        return generator.choice(FLOATS)
    if choice == 2:
        return generator.choice(TEXTS)
    if choice == 3:
        return generator.choice((None, True, False))
    if choice == 4:
        return generator.choice(([], {}, ""))
    if choice == 5:
        return [any_value(generator, depth + 1) for _ in range(generator.randrange(4))]
    if choice == 6:
        return {generator.choice(TEXTS): any_value(generator, depth + 1) for _ in range(generator.randrange(3))}
    return [any_value(generator, depth + 1)] * generator.choice((1, 64, 300))


def mutate_value(generator: random.Random, value: Any, keys: Sequence[str] = ()) -> Any:
    """A copy of a JSON value with one change, somewhere in it. keys: names that objects may get beside their own."""
    changed = copy.deepcopy(value)
    places = list(_places(changed))
    if not places:
        return any_value(generator)
    holder, key = generator.choice(places)
    held = holder[key]
    choice = generator.randrange(10)
    if choice < 3:
        holder[key] = _other(generator, held)
    elif choice == 3:
        holder[key] = any_value(generator)
    elif choice == 4:
        del holder[key]
    elif choice == 5 and isinstance(holder, list):
        holder.insert(generator.randrange(len(holder) + 1), copy.deepcopy(held))
    elif choice == 6 and isinstance(holder, dict):
        name = generator.choice(keys) if keys and generator.random() < 0.7 else generator.choice(TEXTS)
        holder[name] = any_value(generator) if generator.random() < 0.5 else held
    elif choice == 7 and isinstance(holder, dict):
        name = generator.choice(keys) if keys else mutate_text(generator, key)
        holder[name] = holder.pop(key)
    else:
        # What stands elsewhere in the same document is of its kind, in the wrong place.
        other, other_key = generator.choice(places)
        holder[key] = copy.deepcopy(other[other_key])
    return changed


def to_json(value: Any) -> bytes:
    """A JSON text; with NaN, infinities and lone surrogates, as careless writers leave them."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _other(generator: random.Random, value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return near(generator, value)
    if isinstance(value, float):
        return generator.choice((*FLOATS, -value, value * 1e6))
    if isinstance(value, str):
        return mutate_text(generator, value)
    if isinstance(value, list):
        return value * generator.randint(0, 3) if len(value) < 1000 else value[::-1]
    if isinstance(value, dict):
        return dict(reversed(value.items()))
    return any_value(generator)


def _places(value: Any) -> Any:
    """Every (container, key) below a value."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in list(items):
        yield value, key
        yield from _places(held)
