"""Run CUDA kernels lane by lane without a GPU: the sources themselves, on Python counterparts of their instructions.

A kernel's source is rewritten so that a lane stops wherever lanes meet (a shuffle, a product of tiles or a barrier);
the lanes of a block then go on in turn. Memory is bytes at made-up addresses, so a read past an allocation, a
misaligned access or an address of the host fails at once.
"""

import ast
import bisect
import inspect
import struct
import textwrap
from collections.abc import Callable, Generator, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda import jit
from localinfer.kernels.cuda.compiled import ptx
from tests.kernels.cuda.warps import TOGETHER

_FIRST_ADDRESS = 1 << 44
_GAP = 1 << 20
_MEETINGS = (*TOGETHER, "syncthreads")
_WARP = 32
_WORD, _SIGNED, _UNSIGNED = struct.Struct("<I"), struct.Struct("<4b"), struct.Struct("<4B")
_HALVES = list(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))
"""The number of every float16, by its bits."""
_Lane = Generator[tuple[Any, ...], Any, None]


class EmulatedMemory:
    """Allocations at addresses that mean nothing to the host."""

    def __init__(self, first_address: int = _FIRST_ADDRESS) -> None:
        self._first_address = first_address
        self._starts: list[int] = []
        self._buffers: list[NDArray[np.uint8]] = []
        self._views: list[memoryview] = []

    def allocate(self, num_bytes: int) -> int:
        """Reserve memory filled with 255, which is NaN wherever it is read as floats."""
        start = self._first_address if not self._starts else self._starts[-1] + len(self._buffers[-1]) + _GAP
        start = -(-start // 256) * 256
        self._starts.append(start)
        self._buffers.append(np.full(num_bytes, 255, np.uint8))
        self._views.append(memoryview(self._buffers[-1]))
        return start

    def view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """The bytes at an address, all of one allocation."""
        index = self._allocation(address, num_bytes)
        offset = address - self._starts[index]
        return self._buffers[index][offset : offset + num_bytes]

    def locate(self, address: int, num_bytes: int) -> tuple[int, int, memoryview]:
        """The first and the last address of so many bytes in the allocation of an address, and its memory."""
        assert address % num_bytes == 0, f"{num_bytes} bytes at {address:#x} are not aligned"
        index = self._allocation(address, num_bytes)
        return self._starts[index], self._starts[index] + len(self._views[index]) - num_bytes, self._views[index]

    def _allocation(self, address: int, num_bytes: int) -> int:
        index = bisect.bisect_right(self._starts, address) - 1
        is_inside = index >= 0 and address - self._starts[index] + num_bytes <= len(self._views[index])
        assert is_inside, f"{num_bytes} bytes at {address:#x}"
        return index


class Emulator:
    """Launches kernels on an `EmulatedMemory`."""

    def __init__(self, memory: EmulatedMemory) -> None:
        self.memory = memory
        self.num_launches = 0
        self._kernels: dict[tuple[str, tuple[int, ...]], tuple[Callable[..., _Lane], list[tuple[str, bool]]]] = {}
        # With the piece itself, whose number another would get after it.
        self._pieces: dict[int, tuple[Any, Callable[..., Any]]] = {}
        self._lane = 0
        self._block = (0, 0, 0)
        self._shared: dict[int, NDArray[Any]] = {}
        self._counts: list[int] = []
        self._ptx = SimpleNamespace(**self._instructions())
        array = SimpleNamespace(array=lambda size, type: np.zeros(size, _dtype(type)))
        shared = SimpleNamespace(array=self._shared_array)
        self._cuda = SimpleNamespace(local=array, shared=shared)

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
                        self._block = (x, y, z)
                        self._run_block(kernel, threads, arguments)

    def _run_block(self, kernel: Callable[..., _Lane], threads: int, arguments: list[Any]) -> None:
        self._shared.clear()
        self._counts = [0] * threads
        lanes = [kernel(*arguments).send for _ in range(threads)]
        warps = [list(range(first, min(first + _WARP, threads))) for first in range(0, threads, _WARP)]
        while warps:
            # Warps that wait for the others stay where they are until all of the block does.
            warps = [waiting for warp in warps if (waiting := self._run_warp(lanes, warp))]

    def _run_warp(self, lanes: list[Callable[[Any], tuple[Any, ...]]], warp: list[int]) -> list[int]:
        """Run lanes until all of them wait for the block or have ended; the lanes that wait."""
        answers: list[Any] = [None] * len(warp)
        while True:
            requests = []
            alive = []
            for index, answer in zip(warp, answers, strict=True):
                self._lane = index
                try:
                    request = lanes[index](answer)
                except StopIteration:
                    continue
                requests.append(request)
                alive.append(index)
            name = requests[0][0] if requests else "syncthreads"
            for request in requests:
                assert request[0] == name, f"lanes of a warp are in {name} and in {request[0]}"
            if name == "syncthreads":
                return alive
            assert len(requests) == _WARP, f"{len(requests)} lanes of a warp are in {name}"
            answers = TOGETHER[name](requests)
            warp = alive

    def _kernel(self, name: str, constants: tuple[int, ...]) -> tuple[Callable[..., _Lane], list[tuple[str, bool]]]:
        key = (name, constants)
        if key not in self._kernels:
            template = jit.find_template(name)
            made = template.make(*constants)
            parameters = zip(template.parameters_of(made), template.is_tuple(made), strict=True)
            self._kernels[key] = (self._emulated(made), list(parameters))
        return self._kernels[key]

    def _emulated(self, function: Any) -> Callable[..., Any]:
        """A function as a generator that yields wherever lanes meet."""
        scope = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            scope[name] = cell.cell_contents
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        for name in {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)} & set(scope):
            value = scope[name]
            if isinstance(value, jit.DeviceFunction):
                scope[name] = self._piece(value)
            elif value is ptx:
                scope[name] = self._ptx
            elif value is numba.cuda:
                scope[name] = self._cuda
            elif value is numba.float32:
                scope[name] = np.float32
            elif value is numba.float64:
                scope[name] = np.float64
            elif value is numba.uint32:
                scope[name] = np.uint32
            elif value is numba.int64:
                scope[name] = int
        _Meetings(scope).visit(definition)
        definition.body.insert(0, ast.parse("if False: yield").body[0])
        exec(compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec"), scope)
        made = scope[definition.name]
        assert isinstance(made, FunctionType)
        return made

    def _piece(self, piece: Any) -> Callable[..., Any]:
        if id(piece) not in self._pieces:
            self._pieces[id(piece)] = (piece, self._emulated(piece.py_func))
        return self._pieces[id(piece)][1]

    def _shared_array(self, size: int, type: Any) -> NDArray[Any]:
        self._counts[self._lane] += 1
        count = self._counts[self._lane]
        if count not in self._shared:
            array = np.zeros(size, _dtype(type))
            array.view(np.uint8)[:] = 255
            self._shared[count] = array
        return self._shared[count]

    def _instructions(self) -> dict[str, Callable[..., Any]]:
        memory = self.memory

        def loader(kinds: str) -> Callable[[int], Any]:
            layout = struct.Struct(kinds)
            size, read = layout.size, layout.unpack_from
            number = {"f": np.float32, "d": np.float64}.get(kinds[-1], lambda value: value)
            is_one = size == struct.calcsize(kinds[-1])
            # Most accesses are to the allocation of the one before, so they need no search.
            start, last, view = 1, 0, memoryview(b"")

            def load(address: int) -> Any:
                nonlocal start, last, view
                if not start <= address <= last or address % size:
                    start, last, view = memory.locate(int(address), size)
                values = read(view, int(address) - start)
                return number(values[0]) if is_one else values

            return load

        def storer(kind: str, convert: Callable[[Any], Any]) -> Callable[[int, Any], None]:
            layout = struct.Struct(kind)
            size, write = layout.size, layout.pack_into
            start, last, view = 1, 0, memoryview(b"")

            def store(address: int, value: Any) -> None:
                nonlocal start, last, view
                if not start <= address <= last or address % size:
                    start, last, view = memory.locate(int(address), size)
                write(view, int(address) - start, convert(value))

            return store

        def whole(mask: int) -> Callable[[Any], int]:
            return lambda value: int(value) & mask

        def float32(value: Any) -> Any:
            assert isinstance(value, np.float32), f"{type(value)} is stored as float32"
            return value

        load_u32, store_u32 = loader("<I"), storer("<I", whole(0xFFFFFFFF))

        def add_u32(address: int, value: Any) -> int:
            before = load_u32(address)
            store_u32(address, before + int(value))
            return int(before)

        return {
            "load_stream": loader("<4I"),
            "load_v4": loader("<4I"),
            "load_v2": loader("<2I"),
            "load_i64": loader("<q"),
            "load_u32": load_u32,
            "load_u16": loader("<H"),
            "load_u8": loader("<B"),
            "load_f64": loader("<d"),
            "round_f64": np.rint,
            "to_f64": lambda value: np.float64(int(value)),
            "narrow": np.float32,
            "widen": np.float64,
            "to_i64": lambda value: int(np.rint(value)),
            "ceil_f64": np.ceil,
            "divide_f64": lambda a, b: np.float64(a) / np.float64(b),
            "multiply_f64": lambda a, b: np.float64(a) * np.float64(b),
            "f64_bits": lambda value: int(np.float64(value).view(np.int64)),
            "bits_f64": lambda bits: np.uint64(int(bits) & (1 << 64) - 1).view(np.float64),
            "add_u32": add_u32,
            "add_ordered": add_u32,
            "wait_for_previous": lambda: None,
            "prefetch": lambda address: memory.view(int(address), 1).size,
            "load_f32": loader("<f"),
            "store_i64": storer("<q", int),
            "store_u32": store_u32,
            "store_u16": storer("<H", whole(0xFFFF)),
            "store_u8": storer("<B", whole(0xFF)),
            "store_f32": storer("<f", float32),
            "dot_signed": lambda a, b, c: int(c) + _dot(_SIGNED, a, b),
            "dot_unsigned": lambda a, b, c: int(c) + _dot(_UNSIGNED, a, b),
            "half_to_float": lambda bits: _HALVES[bits],
            "float_to_half": lambda value: int(np.float16(value).view(np.uint16)),
            "pack_halves": _pack_halves,
            "to_float": lambda value: np.float32(int(value)),
            "to_int": lambda value: int(np.rint(value)) if np.isfinite(value) else 0,
            "float_bits": lambda value: int(np.float32(value).view(np.uint32)),
            "bits_float": lambda bits: np.uint32(int(bits) & 0xFFFFFFFF).view(np.float32),
            "divide": lambda a, b: np.float32(a) / np.float32(b),
            "square_root": lambda value: np.sqrt(np.float32(value)),
            "exp2": lambda value: np.exp2(np.float32(value)),
            "log2": lambda value: np.log2(np.float32(value)),
            "maximum": lambda a, b: np.fmax(np.float32(a), np.float32(b)),
            "minimum": lambda a, b: np.fmin(np.float32(a), np.float32(b)),
            "thread": lambda: self._lane,
            "block_x": lambda: self._block[0],
            "block_y": lambda: self._block[1],
            "block_z": lambda: self._block[2],
        }


class _Meetings(ast.NodeTransformer):
    """Turn calls at which lanes meet into yields, and calls of pieces into `yield from`."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self._scope = scope

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Name(id=name) if inspect.isgeneratorfunction(self._scope.get(name)):
                return ast.YieldFrom(node)
            case ast.Attribute(value=ast.Name(id="ptx"), attr=name) if name in _MEETINGS:
                return ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load()))
        return node


def _dtype(type: Any) -> Any:
    return np.int64 if type is int else type


def _pack_halves(low: Any, high: Any) -> int:
    return int(np.array([low, high], np.float32).astype(np.float16).view(np.uint32)[0])


def _dot(kind: struct.Struct, a: int, b: int) -> int:
    """The sum of the products of four bytes of a kind with four signed ones."""
    assert int(a) == a and int(b) == b, f"{a!r} and {b!r} are not whole"
    left, right = kind.unpack(_WORD.pack(int(a) & 0xFFFFFFFF)), _SIGNED.unpack(_WORD.pack(int(b) & 0xFFFFFFFF))
    return int(sum(x * y for x, y in zip(left, right, strict=True)))
