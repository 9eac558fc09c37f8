"""The decorators of kernel sources, and their compilation to object files.

Only this module imports Numba for kernels; `object_cache` calls it for kernels that are not cached.
"""

import importlib.util
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import binding as llvm
from numba import types

from localinfer.errors import MissingPackageError
from localinfer.kernels.jit import isa, numba_target
from localinfer.kernels.jit.host import is_arm64
from localinfer.kernels.jit.object_cache import symbol as symbol_of, target_machine

_KINDS = {"q": types.int64, "d": types.float64}


@dataclass(frozen=True)
class Source:
    """A kernel's Python function and its C signature; `result` is None for nothing."""

    function: Callable[..., Any]
    result: str | None
    arguments: str


def inline(function: Callable[..., Any]) -> Any:
    """A function for other kernels, inlined by LLVM. Python cannot call it."""
    return numba_target.function(function)


def outline(function: Callable[..., Any]) -> Any:
    """A function for other kernels that they call: LLVM compiles it once, however often it is called."""
    return numba_target.function(function, is_outlined=True)


def compose(function: Callable[..., Any]) -> Any:
    """A function for other kernels, inlined before typing, so that literal arguments stay literal."""
    return numba_target.function(function, inline="always")


def op(function: Callable[..., Any]) -> Source:
    """Make a function of (parameters, batch, thread, num_threads) a tape op."""
    return Source(function, None, "qqqq")


def stamp(body: Callable[..., None], constant: int) -> Source:
    """Make a tape op of body(constant, parameters, batch, thread, num_threads), specialised for the constant."""

    @op
    def stamped(parameters: int, batch: int, thread: int, num_threads: int) -> None:
        body(constant, parameters, batch, thread, num_threads)

    return stamped


def entry(result: str, arguments: str) -> Callable[[Callable[..., Any]], Source]:
    """Make a function callable from Python; kinds as in `object_cache.Function`."""
    return lambda function: Source(function, result, arguments)


_KERNELS = "localinfer.kernels.cpu.compiled"


def source_of(name: str) -> Source:
    """Return the source of kernel "module.function", which is in the module or in its table KERNELS.

    Raises: MissingPackageError if an application was frozen without the module.
    """
    module_name, function_name = name.split(".")
    if importlib.util.find_spec(f"{_KERNELS}.{module_name}") is None:
        raise MissingPackageError(
            f"the kernels of {module_name} are not in this application; have what froze it include localinfer.kernels "
            "and localinfer.models (PyInstaller does by localinfer's hooks; cx_Freeze and py2app: packages = "
            "['localinfer', 'numba', 'llvmlite'])",
            extra="",
        )
    module = importlib.import_module(f"{_KERNELS}.{module_name}")
    source = getattr(module, "KERNELS", {}).get(function_name) or getattr(module, function_name)
    assert isinstance(source, Source), f"{name} is decorated with op or entry"
    return source


def all_kernels() -> list[str]:
    """Names of all kernels, in order of their modules, which are imported."""
    names = []
    for _, module_name, _ in pkgutil.iter_modules(importlib.import_module(_KERNELS).__path__):
        module = importlib.import_module(f"{_KERNELS}.{module_name}")
        own = [name for name, one in vars(module).items() if isinstance(one, Source)]
        names += [f"{module_name}.{name}" for name in dict.fromkeys([*getattr(module, "KERNELS", {}), *own])]
    return names


def compile_kernel(name: str) -> bytes:
    """Compile a kernel to a relocatable object file for this machine."""
    return compile_with_symbols(name)[0]


def compile_with_symbols(name: str) -> tuple[bytes, list[str]]:
    """The same, and the symbols of the process that it calls."""
    source = source_of(name)
    result = types.void if source.result is None else _KINDS[source.result]
    module, entry = numba_target.module_of(source.function, result(*[_KINDS[kind] for kind in source.arguments]))
    _keep_only(module, entry, symbol_of(name))
    machine = target_machine()
    module = optimised(module, machine)
    symbols = _outer_symbols(module, name)
    return bytes(machine.emit_object(module)), symbols


def optimised(module: Any, machine: Any) -> Any:
    """A module of LLVM after the passes of kernels; what it was made of may be changed."""
    if isa.SELECTED in isa.NEON and is_arm64(machine.triple):
        module = llvm.parse_assembly(_tuned(str(module)))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return module


def _tuned(text: str) -> str:
    """LLVM's text of a module whose instructions are ordered as for a Neoverse V2.

    The order has no bearing on a processor that orders them itself, but on the number of registers: for other
    processors LLVM loads so early that a product of four rows has ten times as many spills (bench_assembly.py).
    """
    return re.sub(r"^(define .*\))", r'\1 "tune-cpu"="neoverse-v2"', text, flags=re.MULTILINE)


def _keep_only(module: Any, function_name: str, exported_name: str) -> None:
    """Export one function under its symbol and hide the rest, so that object files do not clash."""
    for value in [*module.functions, *module.global_variables]:
        if value.name == function_name:
            value.name = exported_name
        elif not value.is_declaration:
            value.linkage = "internal"


def _outer_symbols(module: Any, name: str) -> list[str]:
    """Symbols that a kernel needs. The linker aborts the process on one it does not find, so each must be known.

    Numba's symbols exist in this process, but not in one that only loads the object.
    """
    found = [
        value.name
        for value in [*module.functions, *module.global_variables]
        if value.is_declaration and not value.name.startswith("llvm.")
    ]
    for symbol in found:
        is_known = not symbol.startswith(("NRT_", "numba_")) and llvm.address_of_symbol(symbol) is not None
        assert is_known, f"{name} calls {symbol}, which a process without Numba does not have"
    return found
