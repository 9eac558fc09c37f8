"""Operators and calls in Numba's front end and in numba-cuda's: typed once, lowered without a search for constants.

numba-cuda has copies of Numba's classes, so neither front end can inherit from the other; both call this.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from numba import types


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Run a front end without Python's garbage collector.

    A kernel makes some 100,000 objects and needs them to its end; looking through them takes an eighth of its time.
    """
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()


class KnownTypes:
    """Types of functions, and of calls that kinds of numbers alone decide, as they were resolved before.

    Otherwise operators of whole arrays are tried every time, which takes a fifth of a front end's time.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}
        self._functions: dict[Any, Any] = {}

    def of_call(self, resolve: Callable[..., Any], function: Any, arguments: Any, named: Any) -> Any:
        """The signature of a call, which `resolve` finds."""
        is_simple = getattr(function, "__module__", "") == "_operator" or isinstance(function, types.Function)
        if named or not is_simple or not all(isinstance(one, (types.Number, types.Boolean)) for one in arguments):
            return resolve(function, arguments, named)
        key = (function, tuple(arguments))
        if key not in self._calls:
            self._calls[key] = resolve(function, arguments, named)
        return self._calls[key]

    def of_value(self, resolve: Callable[[Any], Any], value: Any) -> Any:
        """The type of a value, which `resolve` finds; that of a function as before."""
        if not callable(value):
            return resolve(value)
        if value not in self._functions:
            self._functions[value] = resolve(value)
        return self._functions[value]

    def forget(self, value: Any) -> None:
        """Have a function's type resolved anew: an operator gets another with every overload that is registered."""
        self._functions.pop(value, None)


def lower_operator(lowering: Any, result: Any, expression: Any, operator: Any) -> Any:
    """Lower an operator on two values that are no constants; Numba first tries three ways to have one of them."""
    context, signature = lowering.context, lowering.fndesc.calltypes[expression]
    values = [
        context.cast(lowering.builder, lowering.loadvar(one.name), lowering.typeof(one.name), kind)
        for one, kind in zip((expression.lhs, expression.rhs), signature.args, strict=True)
    ]
    function = context.typing_context.resolve_value_type(operator)
    exact = context.typing_context.resolve_function_type(function, signature.args, {})
    value = context.get_function(function, exact)(lowering.builder, values)
    return context.cast(lowering.builder, value, signature.return_type, result)
