"""Intrinsics of jitted code, each made of one function over an `Emitter`."""

import inspect
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from localinfer.kernels.cpu.compiled.simd.emit import Emitter

ADDRESS = types.int64
FLOAT = types.float32
VOID = types.void
LITERAL = object()
"""Type of an operand that chooses the code to emit: the function gets its value, a Python integer."""


def emitted(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function of an Emitter and the operands' IR values, which returns the result's.

    result and operands: Numba's types; of a VOID function nothing is returned.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            kinds = [found if kind is LITERAL else kind for kind, found in zip(operands, given, strict=True)]
            literals = [kind is LITERAL for kind in operands]
            if not all(
                isinstance(kinds[i], types.IntegerLiteral) for i, is_literal in enumerate(literals) if is_literal
            ):
                raise RequireLiteralValue("an operand that chooses the code that is emitted must be a literal")

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                chosen = [
                    kind.literal_value if is_literal else value
                    for kind, is_literal, value in zip(kinds, literals, values, strict=True)
                ]
                found = function(Emitter(context, builder), *chosen)
                return context.get_dummy_value() if found is None else found

            return result(*kinds), generate

        parameters = list(inspect.signature(function).parameters.values())[: 1 + len(operands)]
        typed.__signature__ = inspect.Signature([one.replace(annotation=Any) for one in parameters])  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__, typed.__module__ = function.__name__, function.__doc__, function.__module__
        return intrinsic(typed)

    return decorate
