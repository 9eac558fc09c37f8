"""The decorators of CUDA kernel sources, and their compilation to PTX.

Besides the sources, only this module and `front_end` import numba.cuda. Its front end makes LLVM IR, and llvmlite's
LLVM compiles it to PTX: the code is the same on every machine, and compiling needs neither a GPU nor the CUDA toolkit.
"""

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llvmlite import binding as llvm
from numba import types
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher

from localinfer.kernels.cuda import front_end
from localinfer.kernels.cuda.device import OVERLAP_CAPABILITY
from localinfer.kernels.cuda.kernel_cache import entry_name
from localinfer.kernels.jit.operators import KnownTypes, collector_paused

_KINDS = {"q": types.int64, "f": types.float32}

_LEAST_CAPABILITY = (7, 5)

_WAIT = "griddepcontrol.wait;"
_ASM = '  call void asm sideeffect "{}", "~{{memory}}"()\n'

_PTX_FEATURE = "+ptx78"
"""The oldest PTX version with every instruction used; supported by drivers since CUDA 11.8."""

_NEW_TARGETS = {(10, 0): "+ptx86", (12, 0): "+ptx87"}
"""Architectures that need a later PTX version, in order."""


Members = dict[str, str]
"""Names of the members of each parameter that is a tuple, separated by spaces."""


@dataclass(frozen=True)
class KernelTemplate:
    """A function of integer constants that returns a kernel, and the types of that kernel's parameters."""

    make: Callable[..., Callable[..., None]]
    floats: frozenset[str] = frozenset()
    """Parameters, or members of tuples, that are float32; the others are int64 or addresses."""
    tuples: Members = field(default_factory=dict)
    """Parameters that are tuples."""
    bounds: Callable[..., tuple[int, int] | None] | None = None
    """From the constants, threads of a block at most, and blocks that a multiprocessor should hold, which limits
    registers; None leaves both to the assembler."""

    def parameters_of(self, kernel: Callable[..., None]) -> list[str]:
        """The kinds of a kernel's parameters in order, q for int64 and f for float32; a tuple has several."""
        names = list(inspect.signature(kernel).parameters)
        members = [self.tuples.get(name, name).split() for name in names]
        unknown = {*self.floats, *self.tuples} - {*names, *(one for several in members for one in several)}
        assert not unknown, f"no parameter is called {', '.join(sorted(unknown))}"
        return ["".join("f" if one in self.floats else "q" for one in several) for several in members]

    def is_tuple(self, kernel: Callable[..., None]) -> list[bool]:
        """Parameters of a kernel that are tuples."""
        return [name in self.tuples for name in inspect.signature(kernel).parameters]


def template(
    *, floats: str = "", tuples: Members | None = None, bounds: Callable[..., tuple[int, int] | None] | None = None
) -> Callable[[Callable[..., Callable[..., None]]], KernelTemplate]:
    """Decorate a function that returns kernels; see `KernelTemplate`."""
    return lambda make: KernelTemplate(make, frozenset(floats.split()), tuples or {}, bounds)


def kernel(*, floats: str = "") -> Callable[[Callable[..., None]], KernelTemplate]:
    """Decorate a kernel without constants; see `KernelTemplate`."""
    return lambda function: KernelTemplate(lambda: function, frozenset(floats.split()))


class DeviceFunction(CUDADispatcher):  # type: ignore[misc]
    """A device function that compiles without a driver."""

    def compile_device(self, args: tuple[Any, ...], return_type: Any = None) -> Any:
        if args not in self.overloads:
            result = front_end.compiled(self.py_func, return_type, args)
            self.overloads[args] = result
            result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return self.overloads[args]


def inline(function: Callable[..., Any]) -> Any:
    """Decorate a function that kernels call, inlined by LLVM. Python can call only its `py_func`."""
    return DeviceFunction(function, targetoptions={"device": True, "opt": True, "fastmath": False})


def compile_ptx(name: str, constants: tuple[int, ...], capability: tuple[int, int]) -> str:
    """Compile "module.function" of `kernels.cuda.compiled` for some constants and a compute capability to PTX.

    Its one entry is named `kernel_cache.entry_name`.
    """
    ptx = to_ptx(kernel_ir(name, constants), entry_name((name, constants)), capability)
    assert ".extern" not in ptx, f"{name} calls what is not in it, which no GPU's driver links"
    bounds = find_template(name).bounds
    limits = None if bounds is None else bounds(*constants)
    return ptx if limits is None else _bounded(ptx, *limits)


def kernel_ir(name: str, constants: tuple[int, ...]) -> str:
    """Optimised LLVM IR of a kernel, the same for every GPU."""
    source = find_template(name)
    made = source.make(*constants)
    with global_compiler_lock, _typed_once(), collector_paused():
        library = front_end.kernel_library(made, [*map(_type_of, source.parameters_of(made), source.is_tuple(made))])
    own, *others = [one.text for one in library.reached()]
    entries = re.findall(r'@"([^"]+)", !"kernel"', own)
    assert len(entries) == 1, f"{name} has {len(entries)} entries"
    entry = entry_name((name, constants))
    return _optimised([own.replace(f'@"{entries[0]}"', f"@{entry}"), *others], entry)


_known_types = KnownTypes()


@contextlib.contextmanager
def _typed_once() -> Iterator[None]:
    """Type a function, and its call on the same kinds of numbers, as before."""
    context = cuda_target.typing_context
    resolve_call, resolve_value = context.resolve_function_type, context.resolve_value_type
    insert = context._insert_global

    def inserted(value: Any, kind: Any) -> None:
        _known_types.forget(value)
        insert(value, kind)

    context.resolve_function_type = partial(_known_types.of_call, resolve_call)
    context.resolve_value_type = partial(_known_types.of_value, resolve_value)
    context._insert_global = inserted
    try:
        yield
    finally:
        del context.resolve_function_type, context.resolve_value_type, context._insert_global


def _type_of(kinds: str, is_tuple: bool) -> Any:
    return types.Tuple([_KINDS[kind] for kind in kinds]) if is_tuple else _KINDS[kinds]


def find_template(name: str) -> KernelTemplate:
    """The template "module.function" of `kernels.cuda.compiled`."""
    module_name, function_name = name.split(".")
    source = getattr(importlib.import_module(f"localinfer.kernels.cuda.compiled.{module_name}"), function_name)
    assert isinstance(source, KernelTemplate), f"{name} is decorated with template"
    return source


def _optimised(texts: Sequence[str], entry: str) -> str:
    """Modules linked, inlined into the kernel `entry` and optimised."""
    machine = _machine(_LEAST_CAPABILITY)
    module = llvm.parse_assembly(texts[0])
    for text in texts[1:]:
        module.link_in(llvm.parse_assembly(text))
    for value in [*module.functions, *module.global_variables]:
        if value.name != entry and not value.is_declaration:
            value.linkage = "internal"
            if value.is_function:
                value.add_function_attribute("alwaysinline")
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return str(module)


def to_ptx(text: str, entry: str, capability: tuple[int, int]) -> str:
    """PTX of the result of `kernel_ir`, whose kernel is named `entry`, for a compute capability."""
    text = _overlapping(text, entry) if capability >= OVERLAP_CAPABILITY else re.sub(rf"(?m)^.*{_WAIT}.*$", "", text)
    return str(_machine(capability).emit_assembly(llvm.parse_assembly(text)))


def _bounded(ptx: str, threads: int, blocks: int) -> str:
    """A kernel with limits for the assembler, which otherwise saves registers at the cost of waiting for loads in turn.

    Source: PTX ISA 7.8, section 11.4 (performance-tuning directives).
    """
    limits = f".maxntid {threads}\n.minnctapersm {blocks}\n"
    bounded, count = re.subn(r"(\.entry \w+\([^)]*\)\n)", rf"\g<1>{limits}", ptx)
    assert count == 1, "a kernel has one entry"
    return bounded


def _overlapping(text: str, entry: str) -> str:
    """Insert griddepcontrol instructions: allow the next kernel to start, and wait for the previous one.

    They have no effect in a plain launch. Source: PTX ISA 7.8, section 9.7.12.13.
    """
    first = _ASM.format("griddepcontrol.launch_dependents;")
    if _WAIT not in text:
        first += _ASM.format(_WAIT)
    whole, count = re.subn(rf"(?m)^(define .*@{entry}\(.*\{{\n(?:[^ \n].*:.*\n)?)", rf"\g<1>{first}", text)
    assert count == 1, "a kernel has one entry"
    return whole


def _machine(capability: tuple[int, int]) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    newer = [feature for least, feature in _NEW_TARGETS.items() if capability >= least]
    return llvm.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(
        cpu=f"sm_{capability[0]}{capability[1]}", features=newer[-1] if newer else _PTX_FEATURE, opt=3
    )
