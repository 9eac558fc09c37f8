"""The registers of AMX in NumPy, and an emitter that calls them in place of its instructions.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG, TILELOADD, TDPBSSD.
"""

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from localinfer.kernels.cpu.compiled.emit import I64, Emitter, Value

_REGISTERS = 8


class Registers:
    """The registers of one thread. What would be an exception of the processor is noted in `faults`."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.is_configured = False
        self.num_products = 0
        self._rows: list[int] = []
        self._row_bytes: list[int] = []
        self._tiles: list[NDArray[np.uint8]] = []
        instructions = {
            name: (function, ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(self._checked(function)))
            for name, function, count in (
                ("configure", self._configure, 1),
                ("release", self._release, 0),
                ("zero", self._zero, 1),
                ("load", self._load, 3),
                ("store", self._store, 3),
                ("dot", self._dot, 3),
            )
        }
        self._kept = instructions
        self.addresses = {
            name: int(ctypes.cast(call, ctypes.c_void_p).value or 0) for name, (_, call) in instructions.items()
        }

    def _checked(self, function: Any) -> Any:
        def checked(*operands: int) -> None:
            try:
                function(*operands)
            except Exception as error:
                self.faults.append(f"{function.__name__}{operands}: {error}")

        return checked

    def _configure(self, address: int) -> None:
        content = np.frombuffer(ctypes.string_at(address, 64), np.uint8)
        assert content[0] == 1 and not content[1:16].any(), "palette 1 from row 0 on"
        row_bytes, rows = content[16:48].view(np.uint16), content[48:]
        assert not row_bytes[_REGISTERS:].any() and not rows[_REGISTERS:].any(), "palette 1 has eight registers"
        assert (row_bytes <= 64).all() and (rows <= 16).all(), "sixteen rows of 64 bytes at most"
        assert ((row_bytes == 0) == (rows == 0)).all(), "rows and bytes, or neither"
        self._rows, self._row_bytes = rows.tolist(), row_bytes.tolist()
        self._tiles = [np.zeros((16, 64), np.uint8) for _ in range(_REGISTERS)]
        self.is_configured = True

    def _release(self) -> None:
        self.is_configured = False

    def _shape(self, register: int) -> tuple[int, int]:
        assert self.is_configured, "registers are not configured"
        assert self._rows[register], f"register {register} is not configured"
        return self._rows[register], self._row_bytes[register]

    def _zero(self, register: int) -> None:
        self._shape(register)
        self._tiles[register][:] = 0

    def _load(self, register: int, address: int, stride: int) -> None:
        rows, row_bytes = self._shape(register)
        tile = self._tiles[register]
        tile[:] = 0
        for row in range(rows):
            tile[row, :row_bytes] = np.frombuffer(ctypes.string_at(address + row * stride, row_bytes), np.uint8)

    def _store(self, register: int, address: int, stride: int) -> None:
        rows, row_bytes = self._shape(register)
        for row in range(rows):
            ctypes.memmove(address + row * stride, self._tiles[register][row, :row_bytes].tobytes(), row_bytes)

    def _dot(self, total: int, left: int, right: int) -> None:
        (rows, width), (left_rows, left_width), (depth, right_width) = map(self._shape, (total, left, right))
        assert len({total, left, right}) == 3, "three registers"
        assert width % 4 == left_width % 4 == 0 and left_rows == rows and right_width == width, "sizes fit"
        assert left_width // 4 == depth, "as many columns as rows"
        sums = self._tiles[total].view(np.int32)[:rows, : width // 4]
        a, b = (self._tiles[register].view(np.int8).astype(np.int64) for register in (left, right))
        for k in range(depth):
            for c in range(4):
                sums += np.outer(a[:rows, 4 * k + c], b[k, c:width:4]).astype(np.int32)
        self.num_products += 1


def emulate(registers: Registers) -> type[Emitter]:
    """An `Emitter` for any x86-64 target that has matrices besides."""

    class EmulatingEmitter(Emitter):
        def __init__(self, context: Any, builder: Any) -> None:
            super().__init__(context, builder)
            self.has_matrices = True

        def _run(self, name: str, *operands: Value) -> None:
            kind = ir.FunctionType(ir.VoidType(), [I64] * len(operands))
            function = self.builder.inttoptr(self.i64(registers.addresses[name]), kind.as_pointer())
            self.builder.call(function, operands)

        def matrix_configure(self, address: Value) -> None:
            self._run("configure", address)

        def matrix_release(self) -> None:
            self._run("release")

        def matrix_zero(self, register: int) -> None:
            self._run("zero", self.i64(register))

        def matrix_load(self, register: int, address: Value, stride: Value) -> None:
            self._run("load", self.i64(register), address, stride)

        def matrix_store(self, register: int, address: Value, stride: Value) -> None:
            self._run("store", self.i64(register), address, stride)

        def matrix_dot(self, total: int, rows: int, columns: int) -> None:
            self._run("dot", *map(self.i64, (total, rows, columns)))

    return EmulatingEmitter
