"""A worker process: runs one input after another and says of each what came of it.

`python -m tests.proof.fuzz.worker NAME FOLDER`. Requests come on the standard input and answers leave on the standard
output, each after four bytes of its length. A request is a byte that says whether lines are watched, then the input; an
answer is a `Report` as JSON. What is printed meanwhile goes to the standard error.
"""

import faulthandler
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from localinfer.errors import LocalinferError
from tests.proof.fuzz.line_coverage import LineCoverage, own_folders
from tests.proof.fuzz.peak_memory import PeakMemory, limit_address_space
from tests.proof.fuzz.target import Target, find_target

COLLECTED_EVERY = 16


@dataclass
class Report:
    """What came of one input.

    outcome: in a few words, with a detail after a newline. kind: of a finding ("TypeError"), or "". place: where it was
    raised, a line of ours. text: for people. peak: bytes. lines: of ours, run for the first time in this worker.
    """

    outcome: str = ""
    kind: str = ""
    place: str = ""
    text: str = ""
    peak: int = 0
    lines: list[str] = field(default_factory=list)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message, or None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    content = stream.read(size)
    return content if len(content) == size else None


def write_frame(stream: BinaryIO, content: bytes) -> None:
    """Send a message."""
    stream.write(len(content).to_bytes(4, "little") + content)
    stream.flush()


def place_of(error: BaseException) -> str:
    """The last line of ours that an exception, or what caused it, went through, as `package/file.py:12`.

    Without one, the last line of all, as `file.py:12`.
    """
    folders = own_folders()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folder = next((folder for folder in folders if frame.filename.startswith(folder)), None)
        if folder is not None:
            return f"{Path(folder).name}/{frame.filename[len(folder) :]}:{frame.lineno}"
    if error.__cause__ is not None:
        return place_of(error.__cause__)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last)


def run_case(target: Target, data: bytes, folder: Path, memory: PeakMemory) -> Report:
    """Run one input, whatever it raises."""
    memory.start()
    report = Report()
    try:
        report.outcome = target.run(data, folder)
    except BaseException as error:
        report.kind, report.place = type(error).__name__, place_of(error)
        report.text = "".join(traceback.format_exception(error))[-6000:]
        if isinstance(error, LocalinferError):
            report.text += "\nThis error is of localinfer's tree, but the target does not expect it here.\n"
    report.peak = memory.growth()
    most = target.limits.memory(target.file_bytes(data))
    if not report.kind and report.peak > most:
        report.kind, report.place = "memory", report.outcome.partition("\n")[0]
        report.text = f"it held {report.peak >> 20} MiB more than before; wanted at most {most >> 20} MiB"
    return report


def main(name: str, folder: str) -> None:
    """Serve until the standard input ends."""
    warnings.simplefilter("error", RuntimeWarning)
    answers = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        # The campaign asks for it when a case takes too long.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.disable(logging.CRITICAL)
    target = find_target(name)
    if target.prepare is not None:
        target.prepare()
    coverage, memory = LineCoverage(), PeakMemory()
    gc.collect()
    gc.freeze()
    limit_address_space(target.limits.address_space)
    write_frame(answers, b"ready")
    count = 0
    while (request := read_frame(requests)) is not None:
        case_folder = Path(tempfile.mkdtemp(dir=folder))
        with coverage.watching(request[:1] == b"1"):
            report = run_case(target, request[1:], case_folder, memory)
        report.lines = coverage.take_new()
        shutil.rmtree(case_folder, ignore_errors=True)
        count += 1
        if count % COLLECTED_EVERY == 0:
            gc.collect()
        write_frame(answers, json.dumps(asdict(report)).encode())
    # Threads that a case left behind are no reason to stay.
    sys.stderr.flush()
    time.sleep(0)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
