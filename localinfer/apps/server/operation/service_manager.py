"""Service managers: sockets that systemd has bound, the state that it is told, and SIGHUP.

The protocols are those of sd_listen_fds(3) and sd_notify(3): a few variables of the environment and datagrams."""

import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import RequestError
from localinfer.types import Closing

_TERMINAL = "/dev/tty"
"""The controlling terminal of whoever opens it; without one that fails."""


class HangupHandler(Closing):
    """Answers SIGHUP until it is closed: `end` where the terminal that this process was started in is gone, else
    `reload`.

    What was started to outlive its terminal (nohup) only reloads. Nothing happens on systems without the signal, and in
    threads that cannot take signals. Both are called in the signal's handler.
    """

    def __init__(self, reload: Callable[[], object], end: Callable[[], object]) -> None:
        self._reload = reload
        self._end = end
        self._is_closed = not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread()
        if not self._is_closed:
            self._has_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            self._former = signal.signal(signal.SIGHUP, self._handle)

    def close(self) -> None:
        """Let the signal have its former effect; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            signal.signal(signal.SIGHUP, self._former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._has_terminal and not _has_terminal():
            self._end()
        else:
            self._reload()


def _has_terminal() -> bool:
    try:
        os.close(os.open(_TERMINAL, os.O_RDONLY | getattr(os, "O_NOCTTY", 0)))
    except OSError:
        return False
    return True


_FIRST_DESCRIPTOR = 3


def given_sockets() -> list[socket.socket]:
    """The listening sockets that this process was started with, in order; empty if it was started without.

    Taken once: the variables that name them are removed, so that processes started from here do not take them too.
    Raises: RequestError for one that is no listening socket of TCP or Unix, or that others may connect to.
    """
    named = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if sys.platform == "win32" or named["LISTEN_PID"] != str(os.getpid()) or not named["LISTEN_FDS"].isdecimal():
        return []
    found: list[socket.socket] = []
    try:
        for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(named["LISTEN_FDS"])):
            os.set_inheritable(descriptor, False)
            found.append(_listener(descriptor))
    except BaseException:
        for listener in found:
            listener.close()
        raise
    return found


def settings_of_sockets(settings: ServerSettings, given: Sequence[socket.socket]) -> ServerSettings:
    """The settings with the places of given sockets for their own, if there are any.

    Raises: RequestError for one that other machines can reach, where no token is asked for.
    """
    if not given:
        return settings
    settings = replace(settings, host="127.0.0.1", socket_path=None)
    for listener in reversed(given):
        if listener.family != getattr(socket, "AF_UNIX", None):
            host, port = listener.getsockname()[:2]
            settings = replace(settings, host=host, port=port)
    return settings


def tell_manager(*lines: str) -> None:
    """Tell the service manager, if there is one, such as `READY=1`; one that does not listen is no error."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    place = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            teller.connect(place)
            teller.send("\n".join(lines).encode())
    except OSError:
        # The service runs all the same.
        return


def tell_reloading() -> None:
    """Tell that the configuration is being read again; `READY=1` ends it."""
    tell_manager("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def _listener(descriptor: int) -> socket.socket:
    try:
        given = socket.socket(fileno=descriptor)
    except OSError:
        raise RequestError(f"descriptor {descriptor}, given by the service manager, is no socket") from None
    try:
        is_listening = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        if given.type != socket.SOCK_STREAM or not is_listening:
            raise RequestError(
                f"socket {descriptor} of the service manager does not listen for streams; use ListenStream="
            )
        if given.family == socket.AF_UNIX:
            _check_private(given.getsockname())
        elif given.family not in (socket.AF_INET, socket.AF_INET6):
            raise RequestError(f"socket {descriptor} of the service manager is neither TCP nor a Unix socket")
        if given.family != socket.AF_UNIX:
            # With its protocol named: asyncio switches Nagle's algorithm off only then.
            given = socket.socket(given.family, given.type, socket.IPPROTO_TCP, fileno=given.detach())
        given.setblocking(False)
        return given
    except BaseException:
        given.close()
        raise


def _check_private(path: str | bytes) -> None:
    """Refuse a Unix socket that others can open: no token is asked for there."""
    if not path or not isinstance(path, str) or path.startswith("\0"):
        raise RequestError("a Unix socket of the service manager has no path, so anybody may open it; give it one")
    mode = os.stat(path).st_mode
    if not stat.S_ISSOCK(mode) or mode & 0o077:
        raise RequestError(f"others may open {path}, and no token is asked for there; set SocketMode=0600 in its unit")
