"""The instructions of one lane, for the emulator: a Python function of each of `kernels.cuda.compiled.ptx`.

Whole numbers are Python's and float32 NumPy's. Numbers change their type in cells of a few bytes, which takes a third
of the time of NumPy's constructors.
"""

import math
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PLACE_BITS = 20
"""An allocation is found by its address without so many bits; allocations lie so far apart."""

Place = tuple[int, int, Any]
"""An allocation: its first address, the last offset at which an element begins, and its elements."""

_HALVES = list(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))
"""The number of every float16, by its bits."""
_WORD, _SIGNED, _UNSIGNED = struct.Struct("<I"), struct.Struct("<4b"), struct.Struct("<4B")
_MASK = 0xFFFFFFFF

_float = np.zeros(1, np.float32)
_float_bits = memoryview(_float).cast("B").cast("I")
_halves = np.zeros(2, np.float16)
_half_bits = memoryview(_halves.view(np.uint16))
_half_pair = memoryview(_halves.view(np.uint32))


class Places(dict[int, Place]):
    """Allocations of the memory, by the first bits of an address; none holds what is anywhere else."""

    def __missing__(self, bits: int) -> Place:
        return 0, -1, ()


class Memory(Protocol):
    """Where an address is, for each kind of `ELEMENTS`."""

    places: dict[str, Places]

    def view(self, address: int, num_bytes: int) -> NDArray[np.uint8]: ...


def _whole(kind: str) -> tuple[int, Callable[[NDArray[np.uint8]], Any]]:
    return struct.calcsize(kind), lambda buffer: memoryview(buffer).cast(kind)


ELEMENTS: dict[str, tuple[int, Callable[[NDArray[np.uint8]], Any]]] = {
    **{kind: _whole(kind) for kind in "BHIq"},
    "f": (4, lambda buffer: buffer.view(np.float32)),
    "d": (8, lambda buffer: buffer.view(np.float64)),
    "2I": (8, memoryview),
    "4I": (16, memoryview),
}
"""Bytes of an element of each kind, and how elements are made of bytes: one at a time, or several words from bytes."""


def to_float32(value: Any) -> Any:
    """The nearest float32 of a number."""
    if type(value) is np.float32:
        return value
    _float[0] = value
    return _float[0]


def instructions(memory: Memory) -> dict[str, Callable[..., Any]]:
    """By its name in `kernels.cuda.compiled.ptx`, what an instruction does; without those of several lanes."""

    def loader(kind: str) -> Callable[[int], Any]:
        size, places = ELEMENTS[kind][0], memory.places[kind]
        within = size - 1

        def load(address: int) -> Any:
            start, last, elements = places[address >> PLACE_BITS]
            offset = address - start
            if not 0 <= offset <= last or offset & within:
                raise _wrong_access(address, size)
            return elements[offset // size]

        return load

    def words_loader(kind: str) -> Callable[[int], tuple[int, ...]]:
        size, places, read = ELEMENTS[kind][0], memory.places[kind], struct.Struct(f"<{kind}").unpack_from
        within = size - 1

        def load(address: int) -> tuple[int, ...]:
            start, last, view = places[address >> PLACE_BITS]
            offset = address - start
            if not 0 <= offset <= last or offset & within:
                raise _wrong_access(address, size)
            return read(view, offset)

        return load

    def storer(kind: str, convert: Callable[[Any], Any]) -> Callable[[int, Any], None]:
        size, places = ELEMENTS[kind][0], memory.places[kind]
        within = size - 1

        def store(address: int, value: Any) -> None:
            start, last, elements = places[address >> PLACE_BITS]
            offset = address - start
            if not 0 <= offset <= last or offset & within:
                raise _wrong_access(address, size)
            elements[offset // size] = convert(value)

        return store

    def whole(mask: int) -> Callable[[Any], int]:
        return lambda value: value & mask

    load_u32, store_u32 = loader("I"), storer("I", whole(_MASK))

    def add_u32(address: int, value: int) -> Any:
        before = load_u32(address)
        store_u32(address, before + value)
        return before

    return {
        "load_stream": words_loader("4I"),
        "load_v4": words_loader("4I"),
        "load_v2": words_loader("2I"),
        "load_i64": loader("q"),
        "load_u32": load_u32,
        "load_u16": loader("H"),
        "load_u8": loader("B"),
        "load_f32": loader("f"),
        "load_f64": loader("d"),
        "store_i64": storer("q", int),
        "store_u32": store_u32,
        "store_u16": storer("H", whole(0xFFFF)),
        "store_u8": storer("B", whole(0xFF)),
        "store_f32": storer("f", _only_float32),
        "add_u32": add_u32,
        "add_ordered": add_u32,
        "wait_for_previous": lambda: None,
        "prefetch": lambda address: memory.view(address, 1).size,
        "round_f64": np.rint,
        "ceil_f64": np.ceil,
        "to_f64": lambda value: np.float64(int(value)),
        "narrow": to_float32,
        "widen": np.float64,
        "to_i64": lambda value: int(np.rint(value)),
        "divide_f64": lambda a, b: np.float64(a) / np.float64(b),
        "multiply_f64": lambda a, b: np.float64(a) * np.float64(b),
        "f64_bits": lambda value: int(np.float64(value).view(np.int64)),
        "bits_f64": lambda bits: np.uint64(int(bits) & (1 << 64) - 1).view(np.float64),
        "dot_signed": _dot_of(_SIGNED),
        "dot_unsigned": _dot_of(_UNSIGNED),
        "half_to_float": _HALVES.__getitem__,
        "float_to_half": _float_to_half,
        "pack_halves": _pack_halves,
        "to_float": lambda value: to_float32(int(value)),
        "to_int": lambda value: round(float(value)) if math.isfinite(value) else 0,
        "float_bits": _bits_of,
        "bits_float": _float_of,
        "divide": lambda a, b: _only_float32(a) / _only_float32(b),
        "square_root": lambda value: np.sqrt(_only_float32(value)),
        "exp2": _exp2,
        "log2": lambda value: np.log2(_only_float32(value)),
        "maximum": _maximum,
        "minimum": lambda a, b: -_maximum(-a, -b),
    }


def _wrong_access(address: int, size: int) -> AssertionError:
    where = "are not aligned" if address % size else "are outside of every allocation"
    return AssertionError(f"{size} bytes at {address:#x} {where}")


def _only_float32(value: Any) -> Any:
    assert type(value) is np.float32, f"{type(value)} is used as float32"
    return value


def _bits_of(value: Any) -> int:
    _float[0] = value
    return _float_bits[0]


def _float_of(bits: int) -> Any:
    _float_bits[0] = bits & _MASK
    return _float[0]


def _float_to_half(value: Any) -> int:
    _halves[0] = value
    return _half_bits[0]


def _pack_halves(low: Any, high: Any) -> int:
    _halves[0] = low
    _halves[1] = high
    return _half_pair[0]


def _exp2(value: Any) -> Any:
    _float[0] = math.exp2(value) if value < 128.0 else value * math.inf
    return _float[0]


def _maximum(a: Any, b: Any) -> Any:
    """The larger of two numbers, or the one that is a number."""
    return _only_float32(a if a >= b or b != b else b)


def _dot_of(kind: struct.Struct) -> Callable[[int, int, int], int]:
    """The sum of a number and of the products of four bytes of a kind with four signed ones."""
    read, read_signed, write = kind.unpack, _SIGNED.unpack, _WORD.pack

    def dot(a: int, b: int, c: int) -> int:
        a0, a1, a2, a3 = read(write(a & _MASK))
        b0, b1, b2, b3 = read_signed(write(b & _MASK))
        return c + a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3

    return dot
