"""Lines of localinfer that ran: with `sys.monitoring` at next to no cost, before Python 3.12 with a trace function.

Each line is told once by a process, the first time it runs while lines are watched.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HAS_MONITORING = hasattr(sys, "monitoring")
MOST_CALLS = 12
"""Of one function that a trace function follows while lines are watched once; most lines run in the first."""
_PACKAGES = ("localinfer", "localinfer.kernels", "localinfer.models", "localinfer.quant")


def own_folders() -> tuple[str, ...]:
    """Where the packages lie: in a clone some are beside the others."""
    import importlib

    return tuple(f"{Path(str(importlib.import_module(name).__file__)).parent}/" for name in _PACKAGES)


class LineCoverage:
    """Watches lines of this process, in all threads that begin while they are watched."""

    def __init__(self) -> None:
        self._folders = own_folders()
        self._names: dict[str, str | None] = {}
        self._seen: dict[CodeType, set[int]] = {}
        self._whole: set[CodeType] = set()
        self._calls: dict[CodeType, int] = {}
        self._new: list[str] = []
        if HAS_MONITORING:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
            monitoring.use_tool_id(monitoring.COVERAGE_ID, "localinfer fuzzing")
            monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._on_line)

    @contextmanager
    def watching(self, is_wanted: bool) -> Iterator[None]:
        """Watch lines in the block, if that is wanted."""
        if not is_wanted:
            yield
            return
        self._start()
        try:
            yield
        finally:
            self._stop()

    def take_new(self) -> list[str]:
        """Lines that ran for the first time since the last call, as `package/file.py:12`."""
        found, self._new = self._new, []
        return found

    def _start(self) -> None:
        if HAS_MONITORING:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
            monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
        else:
            self._calls.clear()
            threading.settrace(self._on_call)
            sys.settrace(self._on_call)

    def _stop(self) -> None:
        if HAS_MONITORING:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
            monitoring.set_events(monitoring.COVERAGE_ID, 0)
        else:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type, unused-ignore]

    def _name(self, path: str) -> str | None:
        """A file's name in the packages; None for the files of others."""
        if path not in self._names:
            folder = next((folder for folder in self._folders if path.startswith(folder)), None)
            self._names[path] = None if folder is None else f"{Path(folder).name}/{path[len(folder) :]}"
        return self._names[path]

    def _note(self, code: CodeType, line: int) -> None:
        lines = self._seen.setdefault(code, set())
        if line not in lines:
            lines.add(line)
            self._new.append(f"{self._name(code.co_filename)}:{line}")
            if len(lines) >= len({number for *_, number in code.co_lines() if number is not None}):
                self._whole.add(code)

    def _on_line(self, code: CodeType, line: int) -> Any:
        """An event of `sys.monitoring`, which is not wanted twice."""
        if self._name(code.co_filename) is not None:
            self._note(code, line)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined, unused-ignore]

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """A call: its lines are followed unless all are known."""
        code = frame.f_code
        num_calls = self._calls[code] = self._calls.get(code, 0) + 1
        if num_calls > MOST_CALLS or code in self._whole or self._name(code.co_filename) is None:
            return None
        self._note(code, frame.f_lineno)
        return self._on_trace

    def _on_trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._note(frame.f_code, frame.f_lineno)
        return self._on_trace
