"""Run CUDA kernels lane by lane without a GPU: the sources themselves, on Python counterparts of their instructions.

A kernel's source is rewritten so that a lane stops wherever lanes meet (a shuffle, a product of tiles or a barrier);
the lanes of a block then go on in turn. Memory is bytes at made-up addresses, so a read past an allocation, a
misaligned access or an address of the host fails at once.
"""

import ast
import bisect
import functools
import inspect
import textwrap
from array import array
from collections.abc import Callable, Generator, Sequence
from operator import itemgetter
from types import CodeType, FunctionType, GeneratorType
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda import jit
from tests.kernels.cuda.instructions import ELEMENTS, PLACE_BITS, Place, Places, instructions, to_float32
from tests.kernels.cuda.warps import TOGETHER

_FIRST_ADDRESS = 1 << 44
_GAP = 1 << PLACE_BITS
_MEETINGS = (*TOGETHER, "syncthreads")
_WARP = 32
_LANE = "own_lane"
"""Parameter of every emulated function: a lane's number, the three of its block, and its shared arrays so far."""
_PLACES = {"thread": 0, "block_x": 1, "block_y": 2, "block_z": 3}
_NUMBERS = {numba.float32: to_float32, numba.float64: np.float64, numba.uint32: np.uint32, numba.int64: int}
_Lane = Generator[tuple[Any, ...], Any, None]
_resume: Callable[[_Lane, Any], tuple[Any, ...]] = GeneratorType.send


class EmulatedMemory:
    """Allocations at addresses that mean nothing to the host."""

    def __init__(self, first_address: int = _FIRST_ADDRESS) -> None:
        self._first_address = first_address
        self._starts: list[int] = []
        self._buffers: list[NDArray[np.uint8]] = []
        self.places = {kind: Places() for kind in ELEMENTS}

    def allocate(self, num_bytes: int) -> int:
        """Reserve memory filled with 255, which is NaN wherever it is read as floats."""
        start = self._first_address if not self._starts else self._starts[-1] + len(self._buffers[-1]) + _GAP
        start = -(-start // 256) * 256
        buffer = np.full(num_bytes, 255, np.uint8)
        self._starts.append(start)
        self._buffers.append(buffer)
        for kind, (size, elements_of) in ELEMENTS.items():
            place: Place = (start, num_bytes - size, elements_of(buffer[: num_bytes // size * size]))
            first, last = start >> PLACE_BITS, (start + num_bytes) >> PLACE_BITS
            self.places[kind].update(dict.fromkeys(range(first, last + 1), place))
        return start

    def view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """The bytes at an address, all of one allocation."""
        index = bisect.bisect_right(self._starts, address) - 1
        is_inside = index >= 0 and address - self._starts[index] + num_bytes <= len(self._buffers[index])
        assert is_inside, f"{num_bytes} bytes at {address:#x} are outside of every allocation"
        offset = address - self._starts[index]
        return self._buffers[index][offset : offset + num_bytes]


class Emulator:
    """Launches kernels on an `EmulatedMemory`."""

    def __init__(self, memory: EmulatedMemory) -> None:
        self.memory = memory
        self.num_launches = 0
        self._kernels: dict[tuple[str, tuple[int, ...]], tuple[Callable[..., _Lane], list[tuple[str, bool]]]] = {}
        # With the piece itself, whose number another would get after it.
        self._pieces: dict[int, tuple[Any, Callable[..., Any]]] = {}
        self._shared: dict[int, Any] = {}
        self._instructions = {f"ptx_{name}": run for name, run in instructions(memory).items()}

    def launch(
        self, name: str, constants: Sequence[int], grid: tuple[int, int, int], threads: int, values: Sequence[float]
    ) -> None:
        """Run every lane of every block of a kernel."""
        kernel, groups = self._kernel(name, tuple(constants))
        parameters = "".join(kinds for kinds, _ in groups)
        assert len(parameters) == len(values), f"{name} takes {len(parameters)} values, found {len(values)}"
        for kind, value in zip(parameters, values, strict=True):
            assert kind == "f" or isinstance(value, int), f"{name} takes whole numbers, found {value!r}"
        flat = iter([int(v) if kind == "q" else np.float32(v) for kind, v in zip(parameters, values, strict=True)])
        arguments = [tuple(next(flat) for _ in kinds) if is_tuple else next(flat) for kinds, is_tuple in groups]
        self.num_launches += 1
        with np.errstate(all="ignore"):
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in range(grid[0]):
                        self._shared.clear()
                        _run_block([kernel([lane, x, y, z, 0], *arguments) for lane in range(threads)])

    def _kernel(self, name: str, constants: tuple[int, ...]) -> tuple[Callable[..., _Lane], list[tuple[str, bool]]]:
        key = (name, constants)
        if key not in self._kernels:
            template = jit.find_template(name)
            made = template.make(*constants)
            parameters = zip(template.parameters_of(made), template.is_tuple(made), strict=True)
            self._kernels[key] = (self._emulated(made, is_kernel=True), list(parameters))
        return self._kernels[key]

    def _emulated(self, function: Any, *, is_kernel: bool = False) -> Callable[..., Any]:
        """A function of a lane and its arguments; a generator that yields wherever lanes meet, if they do."""
        scope = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            scope[name] = cell.cell_contents
        pieces, numbers = {}, set()
        for name in {*function.__code__.co_names, *function.__code__.co_freevars} & set(scope):
            value = scope[name]
            if isinstance(value, jit.DeviceFunction):
                scope[name] = self._piece(value)
                pieces[name] = inspect.isgeneratorfunction(scope[name])
            elif isinstance(value, numba.types.Type):
                scope[name] = _NUMBERS[value]
                numbers.add(name)
        code, constants = _rewritten(function.__code__, frozenset(pieces.items()), frozenset(numbers), is_kernel)
        scope.update(self._instructions, shared_array=self._shared_array, maker_of=_maker_of)
        for name, expression in constants.items():
            scope[name] = eval(expression, scope)
        exec(code, scope)
        made = scope[function.__name__]
        assert isinstance(made, FunctionType)
        return made

    def _piece(self, piece: Any) -> Callable[..., Any]:
        if id(piece) not in self._pieces:
            self._pieces[id(piece)] = (piece, self._emulated(piece.py_func))
        return self._pieces[id(piece)][1]

    def _shared_array(self, lane: list[int], size: int, kind: Any) -> Any:
        lane[4] += 1
        if lane[4] not in self._shared:
            self._shared[lane[4]] = _array(size, kind, 255)
        return self._shared[lane[4]]


@functools.cache
def _rewritten(
    function: CodeType, pieces: frozenset[tuple[str, bool]], numbers: frozenset[str], is_kernel: bool
) -> tuple[CodeType, dict[str, CodeType]]:
    """A function rewritten for the emulator, and the expressions of what it names besides; see `_Rewriting`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    ast.increment_lineno(tree, function.co_firstlineno - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.args.args.insert(0, ast.arg(_LANE))
    rewriting = _Rewriting(dict(pieces), numbers, set(function.co_varnames))
    rewriting.visit(definition)
    if is_kernel:
        definition.body.insert(0, ast.parse("if False: yield").body[0])
    code = compile(ast.fix_missing_locations(tree), function.co_filename, "exec")
    return code, {name: compile(text, function.co_filename, "eval") for name, text in rewriting.constants.items()}


class _Rewriting(ast.NodeTransformer):
    """Turn calls at which lanes meet into yields, and name instructions, places of lanes and constants directly.

    pieces: functions by name, and if lanes meet in them. numbers: names of types. variables: names that change.
    """

    def __init__(self, pieces: dict[str, bool], numbers: frozenset[str], variables: set[str]) -> None:
        self._pieces, self._numbers, self._variables = pieces, numbers, variables
        self.constants: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        lane = ast.Name(_LANE, ast.Load())
        match node.func:
            case ast.Name(id=name) if name in self._pieces:
                node.args.insert(0, lane)
                return ast.YieldFrom(node) if self._pieces[name] else node
            case ast.Name(id=name) if name in self._numbers and not self._varies(node.args[0]):
                return self._constant(ast.unparse(node))
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="cuda"), attr="shared"), attr="array"):
                return ast.Call(ast.Name("shared_array", ast.Load()), [lane, *node.args], [])
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="cuda"), attr="local"), attr="array"):
                return ast.Call(self._constant(f"maker_of({', '.join(map(ast.unparse, node.args))})"), [], [])
            case ast.Attribute(value=ast.Name(id="ptx"), attr=name) if name in _PLACES:
                return ast.Subscript(lane, ast.Constant(_PLACES[name]), ast.Load())
            case ast.Attribute(value=ast.Name(id="ptx"), attr=name) if name in _MEETINGS:
                return ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load()))
            case ast.Attribute(value=ast.Name(id="ptx"), attr=name):
                node.func = ast.Name(f"ptx_{name}", ast.Load())
        return node

    def _varies(self, node: ast.AST) -> bool:
        parts = list(ast.walk(node))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        return bool(names & self._variables) or any(isinstance(part, ast.Call | ast.Subscript) for part in parts)

    def _constant(self, text: str) -> ast.Name:
        """What is made once."""
        self.constants[f"constant {text}"] = text
        return ast.Name(f"constant {text}", ast.Load())


def _run_block(lanes: list[_Lane]) -> None:
    warps = [lanes[first : first + _WARP] for first in range(0, len(lanes), _WARP)]
    while warps:
        # Warps that wait for the others stay where they are until all of the block does.
        warps = [waiting for warp in warps if (waiting := _run_warp(warp))]


def _run_warp(warp: list[_Lane]) -> list[_Lane]:
    """Run lanes until all of them wait for the block or have ended; the lanes that wait."""
    answers: list[Any] = [None] * len(warp)
    while True:
        requests, warp = _resumed(warp, answers)
        names = set(map(itemgetter(0), requests))
        assert len(names) <= 1, f"lanes of a warp are in {' and in '.join(sorted(names))}"
        if not names or names == {"syncthreads"}:
            return warp
        assert len(requests) == _WARP, f"{len(requests)} lanes of a warp are in {requests[0][0]}"
        answers = TOGETHER[requests[0][0]](requests)


def _resumed(lanes: list[_Lane], answers: list[Any]) -> tuple[list[tuple[Any, ...]], list[_Lane]]:
    """What lanes wait for after an answer to each, and those lanes, without the ones that ended."""
    requests: list[tuple[Any, ...]] = []
    waiting: list[_Lane] = []
    while lanes:
        # A lane that ends also ends the list, in its place.
        found = list(map(_resume, lanes, answers))
        requests += found
        waiting += lanes[: len(found)]
        lanes, answers = lanes[len(found) + 1 :], answers[len(found) + 1 :]
    return requests, waiting


def _array(size: int, kind: Any, fill: int = 0) -> Any:
    """An array of Python's whole numbers, which takes no others, or of NumPy's floats."""
    if kind in (int, np.uint32):
        whole = array("q" if kind is int else "I")
        whole.frombytes(bytes([fill]) * (size * whole.itemsize))
        return whole
    numbers = np.zeros(size, np.float32 if kind is to_float32 else np.float64)
    numbers.view(np.uint8)[:] = fill
    return numbers


def _maker_of(size: int, kind: Any) -> Callable[[], Any]:
    """What makes an array of a lane."""
    first = _array(size, kind)
    return first.copy if isinstance(first, np.ndarray) else first.__copy__
