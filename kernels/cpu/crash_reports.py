"""Reports of native crashes: tables of thread pools, tapes and kernels, for a compiled handler of signals to read.

Pools and tapes are always listed, which costs a dictionary entry. The tables and the handler (`compiled/crash.py`)
exist once a program asked for reports with `system.crash_files`: `localinfer`'s commands do, a host program that does
not keeps its own handlers. It handles SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT on Linux and macOS (untested on the
latter): it writes what is known to stderr and to a private file, puts back what was done about the signal before, which
may be `faulthandler`, and returns, so that the fault recurs and is answered by that. A report names ops, tensors,
shapes and versions, and nothing that a user wrote: no text, no token.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import guard
from localinfer.kernels.cpu.memory import address
from localinfer.kernels.cpu.parameters import Block
from localinfer.kernels.jit import isa, object_cache
from localinfer.kernels.jit.object_cache import Function
from localinfer.kernels.versions import installed_version
from localinfer.system import crash_files

INSTALL = -1
"""Instead of a signal: remember the address of the CRASH_AREA that comes as the second argument."""

CRASH_AREA = Block(
    "is_busy put create close restore raise_signal thread_id phrases text room path fault_offset "
    "instruction_offset signals num_signals pools num_pools tapes num_tapes kernels num_kernels"
)
"""put to thread_id: addresses of functions of the C library. phrases: address of a PIECE for each of PHRASES. text:
where a report is written, room bytes. path: of the file it is kept in, ending with a zero byte; 0 for none.
fault_offset, instruction_offset: where the two addresses lie in what comes with a signal, -1 if unknown. The others are
tables of the blocks below."""

PIECE = Block("address size")
"""A piece of text."""
SIGNAL = Block("number name size former")
"""former: address of the former action, as `sigaction` takes it."""
POOL = Block("control lines")
"""A thread pool: its control block, and for how many threads that has lines."""
TAPE = Block("first end pieces")
"""Entries of ops and where they end; pieces: address of a PIECE for each op, its description."""
KERNEL = Block("first end name size")
"""The machine code of a kernel, and its name."""

PIECE_BYTES, SIGNAL_BYTES, POOL_BYTES, TAPE_BYTES, KERNEL_BYTES = (
    block.num_bytes for block in (PIECE, SIGNAL, POOL, TAPE, KERNEL)
)

CODE_OFFSET = 8
"""In the system's description of a signal: why it was sent, int32, positive for a fault."""
SENT_BY_PROGRAM = 0x80000000
"""From here on these codes are negative; 0 is one of a program, too."""
WITHOUT_ADDRESS = 0x7F
"""Codes above this one come from the system itself, which does not know the address."""
FILE_MODE = 0o600
ERROR_DESCRIPTOR = 2

PHRASES = (
    *("localinfer crashed: ", " at address 0x", "\n  in op ", " of ", ": ", "\n  thread ", ", rows: "),
    *(", with output: ", ", sequences: ", "\n  the instruction is in kernel ", "\n  last runs, the newest first:"),
    *("\n    ops: ", ", threads: ", "\n  not inside a kernel of localinfer", "", "\n  in kernel ", "\n"),
)
CRASHED, AT_ADDRESS, IN_OP, OF, COLON, THREAD, ROWS = range(7)
OUTPUT_ROWS, SEQUENCES, INSTRUCTION_IN, LAST_RUNS_ARE = range(7, 11)
OPS_ARE, THREADS_ARE, OUTSIDE, SYSTEM, IN_KERNEL, LINE_END = range(11, 17)
"""Indices into PHRASES; SYSTEM stands for versions, instruction set and system, LINE_END for the end of a report."""


HANDLER = Function("crash.handle", "q", "qqq")

_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
_TEXT_BYTES = 16 << 10
_MOST_KERNELS = 4096
_ACTION_BYTES = 256
"""More than any system's `struct sigaction` takes."""
_FUNCTIONS = {
    "put": "write", "create": "creat", "close": "close", "restore": "sigaction", "raise_signal": "raise",
    "thread_id": "pthread_self",
}  # fmt: skip


class _System:
    """Offsets in a system's structures that a handler needs, from its headers.

    flags: of `struct sigaction`, their offset, and SA_SIGINFO with SA_ONSTACK. fault, instruction: offsets of the
    address in `siginfo_t` and `ucontext_t`, -1 if unknown.
    """

    def __init__(self, flags_offset: int, flags: int, fault: int, instruction: int) -> None:
        self.flags_offset, self.flags, self.fault, self.instruction = flags_offset, flags, fault, instruction


def _system() -> _System | None:
    """This system; None where crashes are not reported."""
    machine = platform.machine().lower()
    if sys.platform.startswith("linux") and machine in ("x86_64", "aarch64") and sys.maxsize > 2**32:
        return _System(136, 0x08000004, 16, {"x86_64": 168, "aarch64": 440}[machine])
    if sys.platform == "darwin":
        return _System(12, 0x0041, 24, -1)
    return None


class _Pieces(NamedTuple):
    """A PIECE for each of some texts, as int64[texts, 2], and their bytes, which these point into."""

    table: NDArray[np.int64]
    joined: NDArray[np.uint8]


class CrashReports:
    """The tables of one process, and whether its signals are handled."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pools: dict[int, int] = {}
        self._tapes: dict[int, tuple[int, Sequence[str]]] = {}
        self._pieces: dict[int, _Pieces] = {}
        self._area: NDArray[np.int64] | None = None
        self._kept: list[Any] = []
        self._tables: dict[str, list[tuple[NDArray[np.int64], list[_Pieces]]]] = {"pools": [], "tapes": []}
        self._kernels = np.zeros((0, len(KERNEL.fields)), np.int64)

    @property
    def is_installed(self) -> bool:
        """Signals are handled."""
        return self._area is not None

    def add_pool(self, control: NDArray[np.int64], num_lines: int) -> None:
        """List a thread pool by its control block, which has lines for so many threads."""
        with self._lock:
            self._pools[address(control)] = num_lines
            self._list_pools()

    def remove_pool(self, control_address: int) -> None:
        """Strike a pool out, before its control block goes."""
        with self._lock:
            self._pools.pop(control_address, None)
            self._list_pools()

    def add_tape(self, entries: NDArray[np.int64], descriptions: Sequence[str]) -> None:
        """List a tape by its entries int64[ops, 2], with what each op is."""
        assert len(entries) == len(descriptions), "one for every op"
        with self._lock:
            if len(entries):
                self._tapes[address(entries)] = len(entries), descriptions
                self._list_tapes()

    def remove_tape(self, entries_address: int) -> None:
        """Strike a tape out, before its entries go."""
        with self._lock:
            if self._tapes.pop(entries_address, None) is not None:
                self._pieces.pop(entries_address, None)
                self._list_tapes()

    def install(self) -> bool:
        """Handle signals from now on, for good; return whether this system allows it."""
        system = _system()
        with self._lock:
            if system is None or self.is_installed:
                return self.is_installed
            # Compiled or linked before anything is changed.
            handler = HANDLER.address
            self._area = self._made_area(system)
            self._list_pools()
            self._list_tapes()
            for kernel in object_cache.linked():
                self._list_kernel(*kernel)
            object_cache.when_linked.append(self._list_kernel)
            HANDLER(INSTALL, address(self._area), 0)
            library = ctypes.CDLL(None)
            for row in self._signals:
                action = np.zeros(_ACTION_BYTES, np.uint8)
                action[:8].view(np.int64)[0] = handler
                action[system.flags_offset :][:4].view(np.int32)[0] = system.flags
                number, former = int(row[0]), ctypes.c_void_p(int(row[SIGNAL.fields.index("former")]))
                library.sigaction(number, ctypes.c_void_p(action.ctypes.data), former)
            return True

    def _made_area(self, system: _System) -> NDArray[np.int64]:
        library = ctypes.CDLL(None)
        functions = {
            word: int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
            for word, name in _FUNCTIONS.items()
        }
        path = crash_files.asked().new_path()
        phrases = list(PHRASES)
        phrases[SYSTEM] = f"\n  {_versions()}"
        if path is not None:
            phrases[LINE_END] = f"\n  kept in {path} and sent nowhere; localinfer doctor shows it\n"
        else:
            phrases[LINE_END] = "\n  sent nowhere\n"
        numbers = [getattr(signal, name, None) for name in _SIGNALS]
        known = [(int(number), name) for number, name in zip(numbers, _SIGNALS, strict=True) if number is not None]
        names = _pieces([name for _, name in known])
        told = _pieces(phrases)
        formers = np.zeros((len(known), _ACTION_BYTES), np.uint8)
        self._signals = np.array(
            [[number, *names.table[index], formers[index].ctypes.data] for index, (number, _) in enumerate(known)],
            np.int64,
        )
        self._kernels = np.zeros((_MOST_KERNELS, len(KERNEL.fields)), np.int64)
        text = np.zeros(_TEXT_BYTES, np.uint8)
        place = self._piece(os.fsencode(path) + b"\0") if path is not None else (0, 0)
        self._kept += [names, told, formers, text]
        return CRASH_AREA.pack(
            **functions, is_busy=0, phrases=address(told.table), text=address(text),
            room=_TEXT_BYTES, path=place[0], fault_offset=system.fault, instruction_offset=system.instruction,
            signals=address(self._signals), num_signals=len(known), pools=0, num_pools=0, tapes=0, num_tapes=0,
            kernels=address(self._kernels), num_kernels=0,
        )  # fmt: skip

    def _list_pools(self) -> None:
        self._set_table("pools", np.array(list(self._pools.items()), np.int64).reshape(-1, len(POOL.fields)), [])

    def _list_tapes(self) -> None:
        if self._area is None:
            return
        rows = []
        for first, (count, descriptions) in self._tapes.items():
            if first not in self._pieces:
                self._pieces[first] = _pieces(descriptions)
            rows.append([first, first + 16 * count, address(self._pieces[first].table)])
        self._set_table("tapes", np.array(rows, np.int64).reshape(-1, len(TAPE.fields)), list(self._pieces.values()))

    def _list_kernel(self, name: str, entry: int, code: bytes) -> None:
        with self._lock:
            assert self._area is not None, "told once there is an area"
            count = CRASH_AREA.fields.index("num_kernels")
            number = int(self._area[count])
            if number < len(self._kernels):
                before, behind = code_around(code, object_cache.symbol(name))
                self._kernels[number] = entry - before, entry + behind, *self._piece(name.encode())
                self._area[count] = number + 1

    def _set_table(self, name: str, rows: NDArray[np.int64], pieces: list[_Pieces]) -> None:
        """Replace a table at once; the former one stays with its pieces, for a handler may be reading it."""
        if self._area is None:
            return
        fields = CRASH_AREA.fields
        self._area[fields.index(f"num_{name}")] = 0
        self._area[fields.index(name)] = address(rows)
        self._area[fields.index(f"num_{name}")] = len(rows)
        self._tables[name] = [*self._tables[name][-1:], (rows, pieces)]

    def _piece(self, data: bytes) -> tuple[int, int]:
        kept = np.frombuffer(data, np.uint8)
        self._kept.append(kept)
        return address(kept), kept.size


def _pieces(texts: Sequence[str]) -> _Pieces:
    data = [text.encode("ascii", "replace") for text in texts]
    joined = np.frombuffer(b"".join(data) + b"\0", np.uint8)
    ends = np.cumsum([len(one) for one in data])
    table = np.array([[address(joined) + end - len(one), len(one)] for end, one in zip(ends, data, strict=True)])
    return _Pieces(table.astype(np.int64).reshape(-1, len(PIECE.fields)), joined)


REPORTS = CrashReports()
"""Of this process, as signal handlers are."""


def install_if_asked() -> None:
    """Handle signals once a program asked for reports of crashes."""
    if crash_files.is_asked() and not REPORTS.is_installed:
        REPORTS.install()


def _versions() -> str:
    mode = f", {guard.VARIABLE}={guard.MODE.value}" if guard.IS_ON else ""
    packages = ", ".join(f"{name} {installed_version(name)}" for name in ("numpy", "numba", "llvmlite"))
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return f"localinfer {installed_version('localinfer')}, kernels for {isa.SELECTED.value}{mode}, {system}, {packages}"


crash_files.when_asked.append(install_if_asked)


_ELF = b"\x7fELF\x02\x01"
"""The beginning of a file of 64 bits, little-endian."""
_SYMBOL_TABLE = 2
_SECTIONS_OFFSET, _SECTIONS_COUNT = 0x28, 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


def code_around(code: bytes, symbol: str) -> tuple[int, int]:
    """Bytes of its section before a function, and from its beginning to the section's end.

    Of other formats than ELF, 0 and the size of the file, which is more.
    """
    if not code.startswith(_ELF):
        return 0, len(code)
    wanted = symbol.encode() + b"\0"
    (start,) = struct.unpack_from("<Q", code, _SECTIONS_OFFSET)
    size, count = struct.unpack_from("<HH", code, _SECTIONS_COUNT)
    sections = [_SECTION.unpack_from(code, start + size * index) for index in range(count)]
    for _, kind, _, _, offset, num_bytes, link, _, _, _ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        names = sections[link][4]
        for name, _, _, section, value, _ in _SYMBOL.iter_unpack(code[offset : offset + num_bytes]):
            if code.startswith(wanted, names + name):
                return value, sections[section][5] - value
    return 0, len(code)
