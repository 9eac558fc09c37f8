"""The target behind Numba's front end: a kernel is one module of all that it calls, typed as Numba types it."""

import itertools
import operator
from typing import Any

import pytest
from numba import types
from numba.core import typed_passes, untyped_passes
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.core.target_extension import target_override
from numba.extending import overload

from localinfer.kernels.jit import host, numba_target
from localinfer.kernels.jit.compile_ahead import shares_of
from localinfer.kernels.jit.numba import _keep_only, inline, optimised, outline
from localinfer.kernels.jit.object_cache import target_machine
from localinfer.kernels.jit.operators import KnownTypes

WORD = types.int64
NUMBERS = (types.int64, types.uint32, types.uint64, types.float32, types.float64, types.boolean)
OPERATORS = (operator.add, operator.floordiv, operator.truediv, operator.rshift, operator.and_, operator.lt)


@inline
def _doubled(value: int) -> int:
    return value + value


@outline
def _squared(value: int) -> int:
    return _doubled(value) * value


def _kernel(first: int, second: int) -> int:
    return _squared(first) + _squared(second) + _doubled(second)


def test_a_kernel_is_one_module_with_each_function_once_and_nothing_of_numbas_runtime() -> None:
    module, entry = numba_target.module_of(_kernel, WORD(WORD, WORD))
    defined = [one for one in module.functions if not one.is_declaration]
    assert [entry] == [one.name for one in defined if one.name == entry]
    assert len(defined) == 4, "the entry, the kernel, and both functions that it calls"
    assert not [one.name for one in module.functions if one.is_declaration]
    outlined = [one.name for one in defined if any(b"noinline" in attributes for attributes in one.attributes)]
    assert len(outlined) == 1 and "squared" in outlined[0]


def test_a_functions_code_is_made_for_kernels_only() -> None:
    """Numba's own back end, which optimises and compiles every function, has no part in it."""
    numba_target.module_of(_kernel, WORD(WORD, WORD))
    library = next(iter(_squared.overloads.values())).library
    assert isinstance(library, numba_target.Library)
    assert _squared.targetctx is not cpu_target.target_context


def test_functions_are_made_for_the_cpu_and_the_features_that_they_are_compiled_for() -> None:
    codegen = numba_target.function(_kernel).targetctx.codegen()
    assert codegen.magic_tuple()[1:] == (host.target_cpu(), host.target_features())


def _code() -> bytes:
    """Machine code of a kernel of loops, branches and constants, and of a function that it calls, compiled anew."""

    @inline
    def mixed(value: int, times: int) -> int:
        while times > 0:
            value = value * 3 + (times >> 1) if value & 1 else value // 2
            times -= 1
        return value

    def kernel(first: int, second: int) -> int:
        total = 0
        for index in range(first):
            if index % 5 == second:
                continue
            total += mixed(index, second) ** 2
        return total

    module, entry = numba_target.module_of(kernel, WORD(WORD, WORD))
    _keep_only(module, entry, "entry")
    machine = target_machine()
    return bytes(machine.emit_object(optimised(module, machine)))


def test_passes_make_what_numbas_own_make_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _code()
    passes = [untyped_passes.TranslateByteCode, untyped_passes.FixupArgs, untyped_passes.IRProcessing]
    passes += [untyped_passes.RewriteSemanticConstants, untyped_passes.DeadBranchPrune, untyped_passes.GenericRewrites]
    passes += [untyped_passes.ReconstructSSA, untyped_passes.DeadBranchPrune, typed_passes.NopythonTypeInference]
    passes += [typed_passes.PreLowerStripPhis, typed_passes.NativeLowering, typed_passes.NoPythonBackend]
    monkeypatch.setattr(numba_target, "_PASSES", tuple(map(numba_target._of, passes)))
    assert _code() == ours


def signature(context: Any, function: object, arguments: tuple[Any, ...]) -> Any:
    """The signature of an operator; None where there is none."""
    try:
        return context.resolve_function_type(function, arguments, {})
    except TypingError:
        return None


@pytest.mark.parametrize("function", OPERATORS, ids=lambda function: function.__name__)
def test_operators_have_the_types_that_numba_gives_them(function: object) -> None:
    ours, numba = numba_target.function(_kernel).typingctx, cpu_target.typing_context
    numba.refresh()
    with target_override(numba_target.NAME):
        ours.refresh()
    for arguments in itertools.product((*NUMBERS, types.literal(7)), repeat=2):
        wanted = signature(numba, function, arguments)
        with target_override(numba_target.NAME):
            # The second comes from memory.
            assert [signature(ours, function, arguments) for _ in range(2)] == [wanted] * 2


def test_an_operator_has_a_meaning_that_comes_after_its_first_use() -> None:
    """As modules of kernels give operators on lanes one, while others have been compiled."""
    context, late = numba_target.function(_kernel).typingctx, types.Opaque("late")
    with target_override(numba_target.NAME):
        context.refresh()
        known = context.resolve_value_type(operator.xor)
        assert signature(context, known, (late, late)) is None
        overload(operator.xor)(lambda a, b: (lambda a, b: b) if (a, b) == (late, late) else None)
        context.refresh()
        found = signature(context, context.resolve_value_type(operator.xor), (late, late))
    assert found is not None and found.return_type == late


def test_types_are_kept_until_a_function_gets_another() -> None:
    known, asked = KnownTypes(), []

    def resolve(*given: Any) -> int:
        asked.append(given)
        return len(asked)

    numbers, arrays = (types.int64, types.float32), (types.Array(types.int64, 1, "C"), types.int64)
    assert [known.of_value(resolve, operator.add) for _ in range(2)] == [1, 1]
    assert [known.of_value(resolve, 3) for _ in range(2)] == [2, 3]
    known.forget(operator.add)
    known.forget(operator.sub)
    assert known.of_value(resolve, operator.add) == 4
    assert [known.of_call(resolve, operator.add, numbers, {}) for _ in range(2)] == [5, 5]
    assert known.of_call(resolve, operator.add, numbers[::-1], {}) == 6
    assert [known.of_call(resolve, operator.add, arrays, {}) for _ in range(2)] == [7, 8]
    assert [known.of_call(resolve, operator.add, numbers, {"named": types.int64}) for _ in range(2)] == [9, 10]


@pytest.mark.parametrize("count", range(1, 9))
def test_processes_that_compile_share_all_kernels_and_meet(count: int) -> None:
    names = [f"{module}.{function}" for module in "abcde" for function in "vwxyz"[: 1 + ord(module) % 5]]
    shares = shares_of(names, count)
    assert len(shares) == count and all(sorted(share) == sorted(names) for share in shares)
    for share in shares:
        modules = [name[0] for name in share]
        changes = sum(one != other for one, other in zip(modules, modules[1:], strict=False))
        # A module is parted at most where a share begins.
        assert changes <= len(set(modules))
    done: set[str] = set()
    for place in range(len(names)):
        done |= {share[place] for share in shares}
        if len(done) == len(names):
            break
    assert place + 1 <= -(-len(names) // count) + 1, "none compiles what another has compiled before all are compiled"
