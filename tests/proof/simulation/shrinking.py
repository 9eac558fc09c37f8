"""From a run that fails to the few operations that make it fail: delta debugging (Zeller and Hildebrandt, 2002)."""

import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def signature(error: BaseException) -> str:
    """What two failures have in common that are the same: the kind and the words, without numbers."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'-?[0-9][0-9.,e+-]*', '#', first)[:160]}"


def shrink(
    items: Sequence[Item],
    fails: Callable[[Sequence[Item]], bool],
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Item]:
    """The fewest items found that still fail, within a time; the last of them is what fails.

    fails: whether some of the items, in order, fail in the same way.
    """
    end = clock() + seconds
    kept = list(items)
    size = max(1, len(kept) // 2)
    while clock() < end:
        start, has_shrunk = 0, False
        while start < len(kept) and clock() < end:
            fewer = kept[:start] + kept[start + size :]
            if len(fewer) < len(kept) and fewer and fails(fewer):
                kept, has_shrunk = fewer, True
            else:
                start += size
        if size == 1 and not has_shrunk:
            break
        size = max(1, size // 2)
    return kept
