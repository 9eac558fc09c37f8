"""What Python and the compiled handler of crashes agree on: its tables, its phrases, and where signals say things."""

from localinfer.kernels.cpu.parameters import Block

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
"""former: address of what the system did about it before, as `sigaction` takes it."""
POOL = Block("control lines")
"""A thread pool: its control block, and for how many threads that has lines."""
TAPE = Block("first end pieces")
"""Entries of ops and where they end; pieces: address of a PIECE for each op, what it is."""
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
"""Places in PHRASES; SYSTEM stands for versions, instruction set and system, LINE_END for what became of a report."""
