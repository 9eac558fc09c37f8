"""Numba's front end, and behind it a target of our own: LLVM sees a kernel once, whole, and makes code of it once.

Numba itself optimises and compiles every function as it is made, those that are only ever inlined too, and again
everything that calls it. Here the functions that a kernel calls stay LLVM IR until they are linked into it. Kernels
raise nothing, own no memory and are not called by Python, so functions return values, not errors, and nothing counts
references. The names that begin with `_` of Numba's classes are those of the release that pyproject.toml asks for.
"""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm, ir
from numba import jit
from numba.core import (
    bytecode,
    callconv,
    codegen,
    compiler,
    compiler_machinery,
    cpu,
    dispatcher,
    externals,
    inline_closurecall,
    ir as numba_ir,
    ir_utils,
    lowering,
    registry,
    ssa,
    transforms,
    typed_passes,
    types,
    typing,
    untyped_passes,
    utils,
)
from numba.core.runtime.context import NRTContext
from numba.core.target_extension import CPU, dispatcher_registry, jit_registry, target_override, target_registry
from numba.core.typing import mathdecl, npydecl, templates

from localinfer.kernels.jit import host
from localinfer.kernels.jit.operators import KnownTypes, collector_paused, lower_operator

NAME = "localinfer"

_OPTIONS = {"nopython": True, "error_model": "numpy", "boundscheck": False, "no_cpython_wrapper": True}


class Library(codegen.CPUCodeLibrary):  # type: ignore[misc]
    """The IR of one function, and the libraries of the functions that it calls."""

    def __init__(self, owner: Any, name: str) -> None:
        codegen.CodeLibrary.__init__(self, owner, name)
        self._linking_libraries: list[Library] = []
        self._modules: list[Any] = []
        self.outlined: str | None = None
        """The function, if LLVM must not inline it."""

    def add_ir_module(self, ir_module: Any) -> None:
        """Keep a module as it is."""
        self._modules.append(llvm.parse_assembly(str(ir_module)))

    def add_linking_library(self, library: "Library") -> None:
        """Note a function that this one calls."""
        self._linking_libraries.append(library)

    def finalize(self) -> None:
        """Nothing is left to be done before a kernel is linked."""
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """For functions that Numba itself compiles, as tests have some: kernels are linked by `linked`."""
        return self.linked()

    def linked(self) -> Any:
        """One module of all that this function reaches."""
        found: dict[Library, None] = {}
        waiting = [self]
        while waiting:
            library = waiting.pop()
            if library not in found:
                found[library] = None
                waiting += library._linking_libraries
        whole = llvm.parse_assembly(str(self._codegen._create_empty_module(self.name)))
        for library in found:
            for module in library._modules:
                whole.link_in(module, preserve=True)
            if library.outlined is not None:
                whole.get_function(library.outlined).add_function_attribute("noinline")
        return whole


class _Codegen(codegen.JITCPUCodegen):  # type: ignore[misc]
    _library_class = Library

    @functools.cache  # noqa: B019 - there is one, for as long as the process lives
    def magic_tuple(self) -> Any:
        return super().magic_tuple()

    def _get_host_cpu_name(self) -> str:
        return host.target_cpu()

    def _get_host_cpu_features(self) -> str:
        return host.target_features()


class _NoReferences(NRTContext):  # type: ignore[misc]
    def _call_incref_decref(self, *arguments: Any) -> None:
        pass


class _ReturnsValues(callconv.CPUCallConv):  # type: ignore[misc]
    """A function of the arguments that returns the result; where Numba would raise an exception the process ends."""

    def get_function_type(self, result: Any, arguments: Any) -> Any:
        return ir.FunctionType(self._result_type(result), list(self._get_arg_packer(arguments).argument_types))

    def _result_type(self, result: Any) -> Any:
        return self.context.data_model_manager[result].get_return_type()

    def decorate_function(self, function: Any, names: Any, arguments: Any, noalias: bool = False) -> None:
        self._get_arg_packer(arguments).assign_names(function.args, ["arg." + name for name in names])

    def get_arguments(self, function: Any) -> Any:
        return function.args

    def return_value(self, builder: Any, value: Any) -> None:
        builder.ret(value)

    def return_native_none(self, builder: Any) -> None:
        builder.ret(ir.Constant(builder.function.ftype.return_type, None))

    def return_user_exc(self, builder: Any, *arguments: Any, **options: Any) -> None:
        self._return_errcode_raw(builder, None)

    return_dynamic_user_exc = return_user_exc

    def _return_errcode_raw(self, builder: Any, code: Any) -> None:
        builder.call(builder.module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
        builder.unreachable()

    def call_function(
        self, builder: Any, callee: Any, result: Any, kinds: Any, arguments: Any, attrs: Any = None
    ) -> tuple[Any, Any]:
        values = self._get_arg_packer(kinds).as_arguments(builder, arguments)
        found = builder.call(callee, values)
        return None, self.context.get_returned_value(builder, result, found)


class _Context(cpu.CPUContext):  # type: ignore[misc]
    _is_loaded = False

    def init(self) -> None:
        self.is32bit = utils.MACHINE_BITS == 32
        self._internal_codegen = _Codegen(NAME)
        externals.c_math_functions.install(self)

    def load_additional_registries(self) -> None:
        """Import what Numba implements once, not before every function; intrinsics are added to it."""
        if not self._is_loaded:
            super().load_additional_registries()
            self._is_loaded = True
        for known in list(self._registries):
            self.install_registry(known)

    @property
    def call_conv(self) -> _ReturnsValues:
        return _ReturnsValues(self)

    @functools.cached_property
    def nrt(self) -> _NoReferences:
        return _NoReferences(self, self.enable_nrt)

    def post_lowering(self, module: Any, library: Library) -> None:
        """Link nothing of Numba's runtime."""

    def call_internal(self, builder: Any, function: Any, signature: Any, arguments: Any) -> Any:
        """Call a function, which does not fail."""
        return self.call_internal_no_propagate(builder, function, signature, arguments)[1]

    def insert_user_function(self, name: Any, function: Any, libraries: Any = ()) -> None:
        """Let other functions call this one."""

        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return context.call_internal(builder, function, signature, arguments)

        call.signature, call.libs = function.argtypes, tuple(libraries)  # type: ignore[attr-defined]
        self._defns[name].append(call, call.signature)  # type: ignore[attr-defined]

    def create_cfunc_wrapper(self, library: Library, function: Any, environment: Any, helper: Any) -> None:
        """Make a function of the C calling convention."""
        module = self.create_module("entry")
        kind = self.call_conv.get_function_type(function.restype, function.argtypes)
        callee = ir.Function(module, kind, function.llvm_func_name)
        kinds = [self.get_value_type(one) for one in function.argtypes]
        kind = ir.FunctionType(self.get_value_type(function.restype), kinds)
        entry = ir.Function(module, kind, function.llvm_cfunc_wrapper_name)
        builder = ir.IRBuilder(entry.append_basic_block("entry"))
        _, result = self.call_conv.call_function(builder, callee, function.restype, function.argtypes, entry.args)
        builder.ret(result)
        library.add_ir_module(module)

    def get_executable(self, library: Library, function: Any, environment: Any) -> str:
        """Return the name of a function; Python never calls it."""
        return str(function.unique_name)


class _Typing(typing.Context):  # type: ignore[misc]
    """Types of numbers, tuples and views of memory."""

    _is_loaded = False

    def __init__(self) -> None:
        self._known = KnownTypes()
        super().__init__()

    def load_additional_registries(self) -> None:
        """Leave out operators of whole arrays, which would be tried for every sum of two integers."""
        if not self._is_loaded:
            self.install_registry(mathdecl.registry)
            scalars = templates.Registry()
            scalars.functions += npydecl.registry.functions
            scalars.attributes += npydecl.registry.attributes
            scalars.globals += [one for one in npydecl.registry.globals if not _is_of_arrays(one[1])]
            self.install_registry(scalars)
            self._is_loaded = True

    def resolve_function_type(self, function: Any, arguments: Any, named: Any) -> Any:
        """The signature of a call."""
        return self._known.of_call(super().resolve_function_type, function, arguments, named)

    def resolve_value_type(self, value: Any) -> Any:
        """The type of a value."""
        return self._known.of_value(super().resolve_value_type, value)

    def _insert_global(self, value: Any, kind: Any) -> None:
        self._known.forget(value)
        super()._insert_global(value, kind)


def _is_of_arrays(kind: Any) -> bool:
    return isinstance(kind, types.Function) and any(
        issubclass(template, npydecl.NumpyRulesArrayOperator) for template in kind.templates
    )


class _Target(CPU):  # type: ignore[misc]
    """The CPU, for kernels."""


class _Descriptor(registry.CPUTarget):  # type: ignore[misc]
    @functools.cached_property
    def _toplevel_typing_context(self) -> Any:
        return _Typing()

    @functools.cached_property
    def _toplevel_target_context(self) -> Any:
        return _Context(self.typing_context, NAME)


class _Lower(lowering.Lower):  # type: ignore[misc]
    def lower_binop(self, result: Any, expression: Any, operator: Any) -> Any:
        """An operator on two values."""
        if (expression.static_lhs, expression.static_rhs) != (numba_ir.UNDEFINED, numba_ir.UNDEFINED):
            return super().lower_binop(result, expression, operator)
        return lower_operator(self, result, expression, operator)


class _Lowering(typed_passes.NativeLowering):  # type: ignore[misc]
    lowering_class = _Lower


def _of(kind: Any) -> Callable[[Any], Any]:
    """The work of one of Numba's passes."""
    made = compiler_machinery._pass_registry.get(kind).pass_inst
    made.analysis = {kind: None}
    run: Callable[[Any], Any] = made.run_pass
    return run


def _canonicalize(state: Any) -> None:
    """Give loops one way back each, without the lifetimes of variables, which Numba notes as well."""
    state.func_ir.blocks = transforms.canonicalize_cfg(state.func_ir.blocks)


def _reconstruct_ssa(state: Any) -> None:
    state.func_ir = ssa.reconstruct_ssa(state.func_ir)
    state.func_ir._definitions = ir_utils.build_definitions(state.func_ir.blocks)
    _canonicalize(state)


def _strip_phis(state: Any) -> None:
    strip = compiler_machinery._pass_registry.get(typed_passes.PreLowerStripPhis).pass_inst
    state.func_ir = strip._strip_phi_nodes(state.func_ir)
    _canonicalize(state)


_READING = (_of(untyped_passes.TranslateByteCode), _of(untyped_passes.FixupArgs), _canonicalize)


class _Inliner(inline_closurecall.InlineWorker):  # type: ignore[misc]
    """Puts composed functions in the place of their calls.

    Numba's own inlines what such a function calls first, copies it twice, and does so again for every call.
    """

    def run_untyped_passes(self, func: Callable[..., Any], enable_ssa: bool = False) -> Any:
        """A function's statements as they were written; calls in them are inlined after it."""
        state = compiler.StateDict()
        state.func_id = bytecode.FunctionIdentity.from_function(func)
        state.flags = self.flags
        untyped_passes.ExtractByteCode().run_pass(state)
        state.args = len(state.func_id.pysig.parameters) * (types.pyobject,)
        for one in _READING:
            one(state)
        for block in state.func_ir.blocks.values():
            # Nobody else has them.
            block.__deepcopy__ = functools.partial(_itself, block)
        return state.func_ir


def _itself(block: Any, _memo: Any) -> Any:
    return block


def _inline_composed(state: Any) -> None:
    """Inline calls of composed functions, and those that come with them."""
    found = state.func_ir
    inliner = _Inliner(state.typingctx, state.targetctx, state.locals, state.pipeline, state.flags)
    waiting, is_changed = list(found.blocks.values()), False
    while waiting:
        block = waiting.pop()
        for index, statement in enumerate(block.body):
            function = _composed(found, statement)
            if function is not None:
                *_, blocks = inliner.inline_function(found, block, index, function)
                waiting += [made for _, made in blocks]
                is_changed = True
                break
    if is_changed:
        _canonicalize(state)
        found.blocks = ir_utils.simplify_CFG(found.blocks)


def _composed(found: Any, statement: Any) -> Callable[..., Any] | None:
    """The function that a statement calls, if it is to be inlined there."""
    call = statement.value if isinstance(statement, numba_ir.Assign) else None
    if not isinstance(call, numba_ir.Expr) or call.op != "call":
        return None
    called = getattr(ir_utils.guard(found.get_definition, call.func), "value", None)
    if not isinstance(called, _Dispatcher) or called.targetoptions.get("inline") != "always":
        return None
    function: Callable[..., Any] = called.py_func
    return function


_PASSES = (
    *_READING,
    _inline_composed,
    _of(untyped_passes.DeadBranchPrune),
    _reconstruct_ssa,
    _of(untyped_passes.DeadBranchPrune),
    _of(untyped_passes.LiteralPropagationSubPipelinePass),
    _of(typed_passes.NopythonTypeInference),
    _strip_phis,
    _Lowering().run_pass,
    _of(typed_passes.NoPythonBackend),
)


class _Passes:
    """The passes that kernels need, without those for closures, generators, exceptions and whole arrays.

    Numba's own manager checks the function after each of them, and notes how long it took.
    """

    pipeline_name = "kernel"

    def __init__(self) -> None:
        self.exec_times: dict[str, Any] = {}

    def run(self, state: Any) -> None:
        """Take a function from its bytecode to LLVM's IR."""
        for one in _PASSES:
            one(state)


class _Compiler(compiler.CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[_Passes]:
        return [_Passes()]


class _Dispatcher(dispatcher.Dispatcher):
    targetdescr = _Descriptor(NAME)
    is_outlined = False

    def add_overload(self, compiled: Any) -> None:
        """Keep what was compiled for other functions, not for calls from Python."""
        if self.is_outlined:
            compiled.library.outlined = compiled.fndesc.llvm_func_name
        self.overloads[tuple(compiled.signature.args)] = compiled


target_registry[NAME] = _Target
dispatcher_registry[_Target] = _Dispatcher
jit_registry[_Target] = functools.partial(jit, _target=NAME)


def function(source: Callable[..., Any], *, is_outlined: bool = False, **options: Any) -> Any:
    """Make a function that kernels call, compiled for the types that it is called with; LLVM may inline it or not."""
    targetoptions = _OPTIONS | {"no_cfunc_wrapper": True} | options
    made = _Dispatcher(source, targetoptions=targetoptions, pipeline_class=_Compiler)
    made.is_outlined = is_outlined
    return made


def module_of(source: Callable[..., Any], signature: Any) -> tuple[Any, str]:
    """LLVM's module of a kernel, with all that it calls, not optimised; and the name of the kernel in it."""
    with target_override(NAME), collector_paused():
        kernel = _Dispatcher(source, targetoptions=_OPTIONS, pipeline_class=_Compiler)
        compiled = kernel.get_compile_result(signature)
    return compiled.library.linked(), str(compiled.fndesc.llvm_cfunc_wrapper_name)
