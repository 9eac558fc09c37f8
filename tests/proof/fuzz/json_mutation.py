"""Changes a JSON document in its own terms: values, members and texts, also those of other documents."""

import copy
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

HALVES = ("\ud800", "a\udfff b", "\udc80")
"""Half characters, which JSON can spell and no text holds."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 255, 256, 65_536),
    *(2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, -1.5, 1e-9, 1e9, 1e308, 5e-324),
    *("", " ", "a", "\x00", "\n", "é", "😀", "\ufeff", "\ufffd", "x" * 300, "0", "-1", "null", *HALVES),
    *([], {}, [[]], [None], [1, "a"], ["a", "b"], {"a": 1}, {"": None}, [0] * 50),
)
"""What somebody's program may write in place of anything."""
_MOST_KEYS = 12
_MOST_CHARACTERS = 1 << 17
_MOST_SIMPLIFIED = 400


def read(data: bytes) -> Any:
    """The document of an input, None if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def written(document: Any) -> bytes:
    """A document as an input; half characters and numbers that are none are kept."""
    return json.dumps(document, separators=(",", ":")).encode()


def places(random: Random, value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something could be changed: at most some members of every list and object."""
    if not isinstance(value, dict | list):
        return [path] if path else []
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    chosen = keys if len(keys) <= _MOST_KEYS else random.sample(keys, _MOST_KEYS)
    found = [place for key in chosen for place in places(random, value[key], (*path, key))]
    return [path, *found] if path else found


def at(value: Any, path: Sequence[Any]) -> Any:
    """The part of a document at a path."""
    for key in path:
        value = value[key]
    return value


def change(
    random: Random,
    document: Any,
    others: Sequence[Any] = (),
    values: Sequence[Any] = VALUES,
    pieces: Sequence[str] = (),
) -> None:
    """Change one place of a document.

    others: documents to take parts of. values: what may stand anywhere. pieces: parts of texts that mean something.
    """
    found = places(random, document)
    if not found:
        return
    path = random.choice(found)
    holder, last = at(document, path[:-1]), path[-1]
    old = holder[last]
    kind = random.randrange(12)
    if isinstance(old, str) and random.random() < 0.6:
        holder[last] = changed_text(random, old, pieces)
    elif type(old) in (int, float) and random.random() < 0.5:
        holder[last] = _changed_number(random, old)
    elif kind < 3:
        holder[last] = copy.deepcopy(random.choice(values))
    elif kind < 5:
        del holder[last]
    elif kind < 6:
        holder[last] = copy.deepcopy(at(document, random.choice(found)))
    elif kind < 9 and others:
        holder[last] = copy.deepcopy(_like(random, random.choice(others), last))
    elif kind < 10:
        holder[last] = random.choice(([old], [old, old], {"a": old}, [old] * random.choice((3, 40))))
    elif isinstance(holder, dict):
        names = [name for other in (holder, *others) if isinstance(other, dict) for name in list(other)[:40]]
        holder[random.choice((*names, *pieces[:40], *HALVES, "", "type", "a"))] = copy.deepcopy(old)
    else:
        holder.insert(last, copy.deepcopy(random.choice((old, random.choice(values)))))


def _like(random: Random, other: Any, key: Any) -> Any:
    """A part of another document: most often one of the same name."""
    found = places(random, other)
    alike = [path for path in found if path[-1] == key]
    chosen = alike if alike and random.random() < 0.8 else found
    return at(other, random.choice(chosen)) if chosen else other


def _changed_number(random: Random, number: float) -> Any:
    try:
        return random.choice((number + 1, number - 1, -number, number * 2, number // 2, number * 1000, str(number)))
    except OverflowError:
        return 0


def changed_text(random: Random, text: str, pieces: Sequence[str] = ()) -> str:
    """A text with a part put in, left out, said again, moved, or of other characters."""
    if len(text) > _MOST_CHARACTERS:
        return text[: random.randrange(1000)]
    start = random.randrange(len(text) + 1)
    end = min(len(text), start + random.choice((0, 1, 1, 2, 5, 20, len(text))))
    part = text[start:end]
    match random.randrange(8):
        case 0 | 1 | 2:
            part = random.choice(pieces) if pieces and random.random() < 0.8 else any_text(random)
        case 3:
            part = ""
        case 4:
            part = part * random.choice((2, 2, 3, 9, 200 if len(part) < 50 else 2))
        case 5:
            part = random.choice((part[::-1], part.upper(), part.swapcase()))
        case 6:
            part += any_text(random)
        case _:
            part = random.choice((*pieces, "")) + part + random.choice((*pieces, ""))
    return text[:start] + part + text[end:]


def any_text(random: Random) -> str:
    """A few characters of any script, with those that programs stumble over."""
    ranges = ((32, 127), (32, 127), (0, 32), (0x80, 0x250), (0x300, 0x370), (0x4E00, 0x4F00), (0x1F600, 0x1F640))
    count = random.choice((1, 1, 2, 4, 12))
    made = "".join(chr(random.randrange(*random.choice(ranges))) for _ in range(count))
    return made if random.random() < 0.95 else made + random.choice(("\u200b", "\ufeff", "\u2028", "\ufffe", "\ufdd0"))


def simpler(data: bytes) -> Iterator[bytes]:
    """An input with less in it: parts left out, the largest first, then texts and numbers made short."""
    document = read(data)
    if not isinstance(document, dict | list):
        return
    for path in sorted(_all_places(document), key=len):
        yield written(_without(document, path))
    for path in _all_places(document):
        value = at(document, path)
        for less in _less_of(value):
            yield written(_replaced(document, path, less))


def _all_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    below = [place for key in keys[:_MOST_SIMPLIFIED] for place in _all_places(value[key], (*path, key))]
    return [path, *below] if path else below


def _less_of(value: Any) -> list[Any]:
    if isinstance(value, str) and value:
        half = len(value) // 2
        return [value[:half], value[half:], value[1:], value[:-1]] if half else [""]
    if isinstance(value, list) and len(value) > 1:
        return [value[: len(value) // 2], value[len(value) // 2 :]]
    return [0] if isinstance(value, int) and not isinstance(value, bool) and value not in (0, 1) else []


def _without(document: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(document)
    del at(changed, path[:-1])[path[-1]]
    return changed


def _replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    at(changed, path[:-1])[path[-1]] = value
    return changed
