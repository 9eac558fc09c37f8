"""Ctrl-C of a command: raised in the main thread, and again wherever some code has swallowed it.

Python raises KeyboardInterrupt between any two lines of the main thread, so also where it is lost: in an import
whose `except:` tries something else, in a finalizer, in a callback of C code, in a lookup that C code takes for a miss.
The exception raised here notices that: one that is no longer referenced, and was not taken by `take`, was swallowed.

Only the process of a command calls `begin`; a program that uses the library keeps its own handlers. Imports little:
until the command answers Ctrl-C, what is interrupted is said line by line.
"""

import signal
import sys
import time
from _thread import get_ident, start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from sys import UnraisableHookArgs
    from types import FrameType, TracebackType

    Handler = Callable[[int, FrameType | None], object] | signal.Handlers

EXIT_INTERRUPTED = 130

_AGAIN_SECONDS = 0.01
"""Time for the code that swallowed it to continue, before it is raised again."""


class _Interruption(KeyboardInterrupt):
    """One Ctrl-C, which says when it is gone."""

    def __init__(self, state: "_State") -> None:
        super().__init__()
        self._state = state

    def __del__(self) -> None:
        if self._state.is_pending:
            self._state.repeat(unless_taken=True)


class _State:
    """State of the process. is_pending: Ctrl-C came and was not taken. is_over: the command has its exit code."""

    def __init__(self) -> None:
        self.is_pending = self.is_over = False
        self._is_repeating = False
        self.main_thread = get_ident()

    def handle(self, _number: int, _frame: "FrameType | None") -> None:
        """Answer the signal, in the main thread."""
        if self.is_over:
            end_by_signal()
        self.is_pending = True
        raise _Interruption(self)

    def repeat(self, *, unless_taken: bool) -> None:
        """Have the signal come again; called in the midst of anything, so not here and now.

        No lock is taken on the way: the code that is interrupted may hold it.
        """
        try:
            if not self._is_repeating:
                self._is_repeating = True
                start_new_thread(self._send, (unless_taken,))
        except BaseException as error:
            self._is_repeating = False
            # Where no thread can be started now, the stages of the command still ask `is_pending`.
            if not isinstance(error, RuntimeError):
                raise

    def _send(self, unless_taken: bool) -> None:
        time.sleep(_AGAIN_SECONDS)
        self._is_repeating = False
        if self.is_over or (unless_taken and not self.is_pending):
            return
        if not hasattr(signal, "pthread_kill"):
            signal.raise_signal(signal.SIGINT)
            return
        # To the main thread, which is to notice whatever it waits for.
        signal.pthread_kill(self.main_thread, signal.SIGINT)


_state = _State()


def begin() -> None:
    """Answer Ctrl-C from now on; main thread only."""
    _state.main_thread = get_ident()
    sys.unraisablehook = _tell_unraisable
    replace_handler(_state.handle)


def raises_interrupts() -> bool:
    """True if Ctrl-C raises KeyboardInterrupt now, by Python's handler or this one, so that no other handles it."""
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _state.handle)


def take() -> None:
    """Say that Ctrl-C was answered, so that it is not raised again.

    Called by code that catches KeyboardInterrupt and continues, or ends otherwise than by the exception.
    """
    _state.is_pending = False


def is_pending() -> bool:
    """True if Ctrl-C came and was not taken: its exception is on its way, or was swallowed."""
    return _state.is_pending


class Interrupting:
    """A context in which whatever comes after Ctrl-C ends in KeyboardInterrupt: some code makes another error of it."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        if _state.is_pending and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error


def end() -> None:
    """From now on Ctrl-C ends the process by the signal itself: there is nothing left but the interpreter's end."""
    _state.is_over = True
    replace_handler(signal.SIG_DFL)


def end_by_signal() -> None:
    """End the process as one that does not answer the signal."""
    if sys.platform == "win32":
        # Not tested. What the system ends with by itself would look like a crash.
        import os

        os._exit(EXIT_INTERRUPTED)
    end()
    signal.raise_signal(signal.SIGINT)


def replace_handler(handler: "Handler") -> None:
    """Answer SIGINT by another handler, with no moment between the two in which a signal is lost.

    Python drops one that came before its handler was taken away and that was not looked at until then.
    """
    if not hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, handler)
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # It is blocked before the handler of one that came is run, which may raise.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        signal.signal(signal.SIGINT, handler)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _tell_unraisable(unraisable: "UnraisableHookArgs") -> None:
    """Tell of exceptions that go nowhere, but not of Ctrl-C, which comes again."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
    elif not issubclass(unraisable.exc_type, _Interruption):
        # Of another handler, such as that of a reply in a chat.
        _state.repeat(unless_taken=False)
