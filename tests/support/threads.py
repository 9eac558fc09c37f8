"""Threads that a test has started, without those of models and pools that other tests left open."""

import threading
import weakref
from collections.abc import Callable

_of_others: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def leave_out_present() -> None:
    """From now on the threads that exist belong to others."""
    _of_others.update(threading.enumerate())


def own_threads(is_wanted: Callable[[str], object]) -> list[threading.Thread]:
    """Threads that began since, of the names that are wanted."""
    return [thread for thread in threading.enumerate() if thread not in _of_others and is_wanted(thread.name)]
