"""numba-cuda's front end for kernels: from a function to LLVM's IR, by the passes that kernels need.

numba-cuda itself looks at every function for closures, generators, exceptions and whole arrays, notes the lifetimes of
its variables before and after that, copies it for an annotation, and prints every function again for each that calls
it. Names that begin with `_` of its classes are those of the release that pyproject.toml asks for.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from numba import types
from numba.cuda import codegen, compiler, lowering, utils
from numba.cuda.core import compiler as core_compiler, compiler_machinery, ir, typed_passes, untyped_passes
from numba.cuda.core.callconv import CUDACallConv
from numba.cuda.core.ir_utils import build_definitions
from numba.cuda.core.rewrites import static_getitem
from numba.cuda.core.ssa import reconstruct_ssa
from numba.cuda.core.transforms import canonicalize_cfg
from numba.cuda.descriptor import cuda_target
from numba.cuda.flags import CUDAFlags

from localinfer.kernels.jit.operators import lower_operator


class FunctionLibrary(codegen.CUDACodeLibrary):  # type: ignore[misc]
    """The IR of one function, and the libraries of the functions that it calls, in the order of calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._linking_libraries: dict[FunctionLibrary, None] = {}

    def add_linking_library(self, library: "FunctionLibrary") -> None:
        """Note a function that this one calls."""
        self._linking_libraries[library] = None

    def finalize(self) -> None:
        """Leave the linkage of functions to `jit`."""
        self._finalized = True

    @functools.cached_property
    def text(self) -> str:
        """LLVM's IR of the function itself, whose loops are to be unrolled."""
        return _unroll(_convergent(_without_used(str(self._module))))

    def reached(self) -> Iterator["FunctionLibrary"]:
        """This library and all that it needs, each once."""
        found = {self: None}
        waiting = [self]
        while waiting:
            library = waiting.pop(0)
            yield library
            new = [one for one in library._linking_libraries if one not in found]
            found |= dict.fromkeys(new)
            waiting += new


class _Lower(lowering.CUDALower):  # type: ignore[misc]
    def lower_binop(self, result: Any, expression: Any, operator: Any) -> Any:
        """An operator on two values."""
        if (expression.static_lhs, expression.static_rhs) != (ir.UNDEFINED, ir.UNDEFINED):
            return super().lower_binop(result, expression, operator)
        return lower_operator(self, result, expression, operator)


class _Lowering(compiler.CUDANativeLowering):  # type: ignore[misc]
    lowering_class = _Lower


def _canonicalize(state: Any) -> None:
    state.func_ir.blocks = canonicalize_cfg(state.func_ir.blocks)
    state.func_ir.generator_info = None


def _keep_constant_indices(state: Any) -> None:
    blocks = state.func_ir.blocks
    for kind in (static_getitem.RewriteConstGetitems, static_getitem.RewriteConstSetitems):
        for label, block in blocks.items():
            rewrite = kind()
            if rewrite.match(state.func_ir, block, None, None):
                blocks[label] = rewrite.apply()


def _reconstruct_ssa(state: Any) -> None:
    state.func_ir = reconstruct_ssa(state.func_ir)
    state.func_ir._definitions = build_definitions(state.func_ir.blocks)
    _canonicalize(state)


def _strip_phis(state: Any) -> None:
    state.func_ir = _instance(typed_passes.PreLowerStripPhis)._strip_phi_nodes(state.func_ir)
    _canonicalize(state)


def _create_library(state: Any) -> None:
    state.library = FunctionLibrary(state.targetctx.codegen(), state.func_id.func_qualname)


def _instance(kind: Any) -> Any:
    made = compiler_machinery._pass_registry.get(kind).pass_inst
    made.analysis = {kind: None}
    return made


_PASSES: tuple[Callable[[Any], Any], ...] = (
    _instance(compiler.CUDATranslateBytecode).run_pass,
    _instance(untyped_passes.FixupArgs).run_pass,
    _canonicalize,
    _instance(untyped_passes.DeadBranchPrune).run_pass,
    _keep_constant_indices,
    _reconstruct_ssa,
    _instance(untyped_passes.DeadBranchPrune).run_pass,
    _instance(typed_passes.NopythonTypeInference).run_pass,
    _strip_phis,
    # Variables end, so that LLVM knows where a value is not needed.
    _instance(typed_passes.IRLegalization).run_pass,
    _create_library,
    _Lowering().run_pass,
    _instance(compiler.CUDABackend).run_pass,
)


class _Passes:
    pipeline_name = "kernel"

    def __init__(self) -> None:
        self.exec_times: dict[str, Any] = {}

    def run(self, state: Any) -> None:
        """Take a function from its bytecode to LLVM's IR."""
        for one in _PASSES:
            one(state)


class _Compiler(core_compiler.CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[_Passes]:
        return [_Passes()]


_IR_TARGET = (10, 0)
"""From this architecture on the front end writes opaque pointers, which LLVM needs; nothing else in the IR depends on
it."""


def compiled(function: Callable[..., Any], result: Any, arguments: tuple[Any, ...]) -> Any:
    """numba-cuda's result of compiling a function for types of arguments; `result` is None if it is to be inferred."""
    flags = CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.compute_capability = _IR_TARGET
    target = cuda_target.target_context
    with utils.numba_target_override():
        found = compiler.compile_extra(
            cuda_target.typing_context,
            target,
            function,
            arguments,
            result,
            flags,
            {},
            pipeline_class=_Compiler,
            call_conv=CUDACallConv(target),
        )
    found.library.finalize()
    return found


def kernel_library(function: Callable[..., None], arguments: list[Any]) -> FunctionLibrary:
    """The library of a kernel with these types of arguments, whose entry is marked as one."""
    made = compiled(function, types.void, tuple(arguments))
    compiler.kernel_fixup(made.library.get_function(made.fndesc.llvm_func_name), debug=False)
    library: FunctionLibrary = made.library
    return library


def _without_used(text: str) -> str:
    """Drop `llvm.used`, which keeps inlined functions, and host-side records."""
    return re.sub(r'(?m)^@"?llvm\.used"?\s*=.*$', "", text)


def _convergent(text: str) -> str:
    """Mark every function convergent, because it may have a barrier: calls must not be duplicated into branches."""
    return re.sub(r"(?m)^((?:define|declare) .*\))", r"\1 convergent", text)


_LABEL = re.compile(r'^"?([^\s":]+)"?:')
_TARGET = re.compile(r'label %"?([^\s",]+)"?')


def _unroll(text: str) -> str:
    """Make LLVM unroll every `for` loop fully, so that arrays indexed in them are in registers.

    Loops with a count unknown at compile time are written with `while`. Those end in a branch back if a condition
    holds; marked, LLVM would warn of most. A `for` branches back unconditionally, or at the end of an inner `for`.
    Branches to blocks that are written before theirs are marked besides: without them a few loops stay.
    """
    lines: list[str] = []
    loops: list[str] = []
    for function in re.split(r"(?m)^(?=define )", text):
        backwards, seen, block = _back_edges(function), set[str](), ""
        for line in function.splitlines():
            label = _LABEL.match(line)
            if label:
                block = label[1]
                seen.add(block)
            targets = _TARGET.findall(line) if line.startswith("  br ") else []
            is_while = bool(targets) and len(targets) == 2 and (block, targets[0]) in backwards
            if targets and targets[-1] in seen and not is_while and "!llvm.loop" not in line:
                number = 900000 + len(loops)
                loops.append(f"!{number} = distinct !{{ !{number}, !899999 }}")
                line = f"{line}, !llvm.loop !{number}"
            lines.append(line)
    return "\n".join([*lines, '!899999 = !{ !"llvm.loop.unroll.full" }', *loops])


def _back_edges(function: str) -> set[tuple[str, str]]:
    """Branches of a function's LLVM IR, as pairs of block and target, from within a loop to its first block."""
    targets: dict[str, list[str]] = {}
    for line in function.splitlines():
        label = _LABEL.match(line)
        if label:
            targets[block := label[1]] = []
        elif targets:
            targets[block] += _TARGET.findall(line)
    found: set[tuple[str, str]] = set()
    path, seen = list(targets)[:1], set(list(targets)[:1])
    while path:
        block = path[-1]
        if not targets[block]:
            path.pop()
        elif (target := targets[block].pop()) in path:
            found.add((block, target))
        elif target not in seen:
            seen.add(target)
            path.append(target)
    return found
