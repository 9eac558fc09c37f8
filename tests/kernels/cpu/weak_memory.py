"""Run functions of the thread pool, from their own source, on a model of weak memory, in chosen orders.

Memory is a list of messages per address, each with the view of its writer: of every address, the oldest message that a
thread may still read after it has acquired this one. A read may return any message that the thread's view allows, so
that writes seem late to others and reads come too early; acquire and release, read-modify-writes and fences pass views
on. This is the view machine of Kang et al., "A promising semantics for relaxed-memory concurrency" (POPL 2017),
sections 2 and 3, without promises: no read sees a write that its own thread's later writes lead to.
"""

import ast
import functools
import inspect
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

Step = Generator[tuple[Any, ...], Any, Any]
View = dict[int, int]
_PRIMITIVES = frozenset(
    (
        *("atomic_load", "atomic_store", "atomic_add", "atomic_exchange", "atomic_or", "atomic_replace"),
        *("load_i64", "store_i64", "sleep_while", "wake_sleeper", "is_waiting", "yield_processor"),
    )
)


class StuckError(AssertionError):
    """All threads that are left wait for each other."""


def generators(module: ModuleType, names: frozenset[str], **replaced: Any) -> dict[str, Callable[..., Step]]:
    """Functions of a module as generators, which yield what they do to memory.

    replaced: names that mean another thing; functions among them may be generators too.
    """
    called = names | {name for name, value in replaced.items() if inspect.isgeneratorfunction(value)}
    scope = dict(vars(module)) | replaced
    exec(_compiled(module, frozenset(names), frozenset(called)), scope)
    return {name: scope[name] for name in names}


@functools.cache
def _compiled(module: ModuleType, names: frozenset[str], called: frozenset[str]) -> CodeType:
    tree = ast.parse(inspect.getsource(module))
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in chosen} == names, "a function of the pool has another name now"
    for node in chosen:
        node.decorator_list = []
        _Yielding(called).visit(node)
        node.body.insert(0, ast.parse("if False: yield").body[0])
    code = ast.fix_missing_locations(ast.Module(body=list(chosen), type_ignores=[]))
    return compile(code, str(module.__file__), "exec")


class _Yielding(ast.NodeTransformer):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name):
            return node
        if node.func.id in self._names:
            return ast.YieldFrom(node)
        if node.func.id in _PRIMITIVES:
            return ast.Yield(ast.Tuple([ast.Constant(node.func.id), *node.args], ast.Load()))
        return node


@dataclass
class _Message:
    value: int
    view: View


@dataclass
class _Thread:
    step: Step
    view: View = field(default_factory=dict)
    released: View = field(default_factory=dict)
    """The view at the last fence, which plain writes pass on."""
    acquired: View = field(default_factory=dict)
    """Views of messages that plain reads returned, which the next fence takes over."""
    polled: int = 0
    """The address of its last atomic load."""
    answer: Any = None
    asleep_at: int | None = None
    waits: Callable[[], bool] | None = None
    """What has to be true before it goes on."""


class Machine:
    """Threads on one memory. choose: one of so many choices, of which the first is what is most usual."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._memory: dict[int, list[_Message]] = {}
        self._fence: View = {}
        self._threads: list[_Thread] = []
        self._semaphores: dict[int, list[View]] = {}

    def start(self, step: Step) -> None:
        """Add a thread."""
        self._threads.append(_Thread(step))

    def run(self, most_steps: int = 5000) -> None:
        """Run until all threads have ended. Raises: StuckError."""
        current = 0
        for _ in range(most_steps):
            if not self._threads:
                return
            for one in self._threads:
                if one.waits is not None and one.waits():
                    one.waits = None
            ready = [index for index, one in enumerate(self._threads) if one.waits is None]
            if not ready:
                raise StuckError("all threads wait")
            if current in ready:
                ready.remove(current)
                ready.insert(0, current)
            current = ready[self._choose(len(ready))]
            thread = self._threads[current]
            try:
                request = thread.step.send(thread.answer)
            except StopIteration:
                self._threads.pop(current)
                continue
            thread.answer = getattr(self, f"_{request[0]}")(thread, *request[1:])
        raise StuckError(f"{most_steps} steps did not suffice")

    def newest(self, address: int) -> int:
        """The last value that was written."""
        return self._messages(address)[-1].value

    def _messages(self, address: int) -> list[_Message]:
        return self._memory.setdefault(address, [_Message(0, {})])

    def _read(self, thread: _Thread, address: int) -> _Message:
        messages = self._messages(address)
        oldest = thread.view.get(address, 0)
        index = len(messages) - 1 - self._choose(len(messages) - oldest)
        _join(thread.view, {address: index})
        return messages[index]

    def _append(self, thread: _Thread, address: int, value: int, view: View) -> None:
        messages = self._messages(address)
        thread.view[address] = len(messages)
        messages.append(_Message(value, view | {address: len(messages)}))

    def _fenced(self, thread: _Thread) -> None:
        _join(thread.view, thread.acquired)
        _join(thread.view, self._fence)
        self._fence = dict(thread.view)
        thread.released = dict(thread.view)

    def _load_i64(self, thread: _Thread, address: int) -> int:
        message = self._read(thread, address)
        _join(thread.acquired, message.view)
        return message.value

    def _store_i64(self, thread: _Thread, address: int, value: int) -> None:
        self._append(thread, address, int(value), dict(thread.released))

    def _atomic_load(self, thread: _Thread, address: int) -> int:
        message = self._read(thread, address)
        _join(thread.view, message.view)
        thread.polled = address
        return message.value

    def _atomic_store(self, thread: _Thread, address: int, value: int) -> None:
        self._append(thread, address, value, dict(thread.view))
        self._fenced(thread)

    def _changed(self, thread: _Thread, address: int, change: Callable[[int], int | None]) -> int:
        """Read and write the newest message at once."""
        message = self._messages(address)[-1]
        _join(thread.view, message.view)
        _join(thread.view, {address: len(self._messages(address)) - 1})
        value = change(message.value)
        if value is not None:
            self._append(thread, address, value, dict(thread.view))
        return message.value

    def _atomic_add(self, thread: _Thread, address: int, value: int) -> int:
        return self._changed(thread, address, lambda before: before + value)

    def _atomic_or(self, thread: _Thread, address: int, value: int) -> int:
        return self._changed(thread, address, lambda before: before | value)

    def _atomic_exchange(self, thread: _Thread, address: int, value: int) -> int:
        before = self._changed(thread, address, lambda _: value)
        self._fenced(thread)
        return before

    def _atomic_replace(self, thread: _Thread, address: int, expected: int, value: int) -> int:
        return int(self._changed(thread, address, lambda before: value if before == expected else None) == expected)

    def _is_waiting(self, thread: _Thread, *_: int) -> int:
        return 0

    def _sleep_while(self, thread: _Thread, address: int, value: int) -> None:
        if self.newest(address) == value:
            thread.asleep_at = address
            thread.waits = lambda: thread.asleep_at is None

    def _wake_sleeper(self, _: _Thread, address: int) -> None:
        for other in self._threads:
            if other.asleep_at == address:
                other.asleep_at = None

    def _yield_processor(self, thread: _Thread) -> None:
        """Wait for news of the address that is polled, which come at last."""
        address, known = thread.polled, thread.view.get(thread.polled, 0)

        def is_news() -> bool:
            newest = len(self._messages(address)) - 1
            if newest == known:
                return False
            _join(thread.view, {address: newest})
            return True

        thread.waits = is_news

    def _acquire(self, thread: _Thread, semaphore: int) -> None:
        """Wait for a semaphore of Python, which passes on what was seen before its release."""

        def is_free() -> bool:
            views = self._semaphores.get(semaphore)
            if not views:
                return False
            _join(thread.view, views.pop())
            return True

        thread.waits = is_free

    def _release(self, thread: _Thread, semaphore: int) -> None:
        self._semaphores.setdefault(semaphore, []).append(dict(thread.view))


def _join(view: View, other: View) -> None:
    for address, index in other.items():
        if index > view.get(address, 0):
            view[address] = index


def orders(run: Callable[[Callable[[int], int]], None], budget: int, most: int, seed: int = 0) -> int:
    """Run a program in orders that differ from the usual one by at most `budget` choices; return how many.

    most: number of orders that are drawn by chance where there are more.
    """
    chance = random.Random(seed)
    waiting: list[tuple[int, ...]] = [()]
    count = 0
    while waiting and count < most:
        index = chance.randrange(len(waiting))
        waiting[index], waiting[-1] = waiting[-1], waiting[index]
        prefix = waiting.pop()
        taken: list[int] = []
        sizes: list[int] = []
        run(functools.partial(_choose, prefix, taken, sizes))
        count += 1
        if sum(choice != 0 for choice in prefix) < budget:
            for index in range(len(prefix), len(sizes)):
                waiting += [(*taken[:index], other) for other in range(1, sizes[index])]
    return count


def _choose(prefix: tuple[int, ...], taken: list[int], sizes: list[int], size: int) -> int:
    """The next choice of a prefix, and after it the usual one; noted with the number of choices there were."""
    choice = prefix[len(taken)] if len(taken) < len(prefix) else 0
    taken.append(choice)
    sizes.append(size)
    return choice
