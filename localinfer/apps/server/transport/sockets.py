"""Sockets that a server listens on, and service managers: systemd's sockets and state, and SIGHUP.

Sockets are bound here so that their permissions are ours from the first moment. The protocols of systemd are those of
sd_listen_fds(3) and sd_notify(3): a few variables of the environment and datagrams."""

import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.system.folders import make_private, runtime_folder, temporary_folder
from localinfer.types import Closing

if TYPE_CHECKING:
    from localinfer.apps.server.transport.settings import ServerSettings

MAX_SOCKET_PATH_BYTES = 100
"""Some systems keep 104 bytes for the path of a Unix socket, its end included."""
_LONGEST_NAME_BYTES = 17
"""Of a socket in this user's folder: that of a server for one program has twelve digits and ".sock"."""
BACKLOG = 512
_PROBE_SECONDS = 1.0
_OTHER_DESCRIPTORS = 160
"""Files that a server holds open beside its connections, those that it is just closing among them, and those above the
limit (`places`)."""
_LEAST_CONNECTIONS = 8


def has_unix_sockets() -> bool:
    """Return whether Python can serve Unix sockets on this system."""
    return hasattr(socket, "AF_UNIX") and sys.platform != "win32"


def default_socket_path() -> Path | None:
    """Default path of the Unix socket: in this user's runtime folder, or in the temporary one where that has a path too
    long for sockets, as macOS's may; None where there are no Unix sockets.
    """
    for folder in (runtime_folder, temporary_folder) if has_unix_sockets() else ():
        place = folder()
        if place is not None and len(os.fsencode(place)) + 1 + _LONGEST_NAME_BYTES <= MAX_SOCKET_PATH_BYTES:
            return place / "server.sock"
    return None


def affordable_connections(wanted: int) -> int:
    """Number of connections that the system's limit of open files leaves room for, at most `wanted`."""
    if sys.platform == "win32":
        return wanted
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(_LEAST_CONNECTIONS, soft - _OTHER_DESCRIPTORS))


def bind_tcp(host: str, port: int) -> socket.socket:
    """Listen by TCP. Raises: RequestError if the address is not ours or the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named: asyncio switches Nagle's algorithm off only then, and else tokens wait for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"cannot listen on {host}, port {port}: {reason}; type `localinfer serve --port 0` for any free port, or "
            "give another --port or --host"
        ) from None
    return listener


class SocketTakenError(RequestError):
    """A program listens on the Unix socket already."""


class UnixListener(Closing):
    """A listening Unix socket of mode 0600 in a folder of mode 0700, and the lock that makes it the only one there.

    A socket file without a server is removed first; anything else at its path is left alone and refused.
    Leaving the context closes the socket and removes its file and the lock's.
    Raises: RequestError, SocketTakenError; BackendUnavailableError where the system has no Unix sockets.
    """

    def __init__(self, path: Path) -> None:
        if not has_unix_sockets():
            raise BackendUnavailableError("this system has no Unix sockets for Python; use TCP")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise RequestError(
                f"the socket's path has {len(os.fsencode(path))} bytes; systems allow about {MAX_SOCKET_PATH_BYTES}, "
                "so choose a shorter one with --socket"
            )
        problem = _too_open(path.parent) or make_private(path.parent)
        if problem is not None:
            raise RequestError(f"the socket's folder is not safe: {problem}; choose another place with --socket")
        self.path = path
        self._lock = _lock(path)
        try:
            _remove_stale(path)
            self.socket = _listen(path)
        except BaseException:
            self._unlock()
            raise
        self._identity = _identity(path)

    def close(self) -> None:
        """Stop listening and remove the file, if it is still ours; may be called again."""
        self.socket.close()
        if not self._lock.closed:
            self.remove_file()
            self._unlock()

    def remove_file(self) -> None:
        """Remove the file, if it is still ours, so that no client finds the socket any more."""
        if _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)

    def remove_files(self) -> None:
        """Remove the lock's file too, before the process is ended: then no other server holds it yet."""
        self.remove_file()
        self._remove_lock()

    def _unlock(self) -> None:
        # First the file, while it is locked: a server that opens it later finds another, or none.
        self._remove_lock()
        self._lock.close()

    def _remove_lock(self) -> None:
        place = _lock_place(self.path)
        with suppress(OSError):
            if not self._lock.closed and _is_at(place, self._lock.fileno()):
                place.unlink(missing_ok=True)


def _too_open(folder: Path) -> str | None:
    """A folder that was there before and others can enter stays as it is: closing it is not ours to decide."""
    try:
        mode = folder.lstat().st_mode
    except OSError:
        return None
    is_open = stat.S_ISDIR(mode) and mode & 0o077 and folder.name != "localinfer"
    return f"others can enter {folder}, which must have mode 0700" if is_open else None


def _lock_place(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _lock(path: Path) -> IO[bytes]:
    """Hold a lock beside the socket; the system gives it up when the process ends, however it ends."""
    while (lock := _try_lock(path)) is None:
        pass
    return lock


def _try_lock(path: Path) -> IO[bytes] | None:
    """The lock; None if its file was removed, by a server that ended, before it was locked."""
    import fcntl

    place = _lock_place(path)
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RequestError(f"{place} cannot be opened: {error.strerror}; choose another place with --socket") from None
    lock = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise SocketTakenError(
            f"another server listens on {path}; use that one, stop it, or choose another place with --socket"
        ) from None
    if _is_at(place, descriptor):
        return lock
    lock.close()
    return None


def _remove_stale(path: Path) -> None:
    """Remove a socket file that no server answers on."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RequestError(f"{path} cannot be looked at: {error.strerror}") from None
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise RequestError(f"{path} is there and is not a socket of yours; move it, or choose another with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise RequestError(f"{path} does not say whether it is in use: {error}; choose another place") from None
    raise SocketTakenError(f"another program listens on {path}; stop it, or choose another place with --socket")


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The folder is closed to others already; the mode is set before a client can connect.
        listener.bind(os.fspath(path))
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise RequestError(f"cannot listen on {path}: {error.strerror or error}; choose another --socket") from None
    return listener


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is the one at a path."""
    status = os.fstat(descriptor)
    return _identity(path) == (status.st_dev, status.st_ino)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_TERMINAL = "/dev/tty"
"""The controlling terminal of the process that opens it; without one that fails."""


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


def settings_of_sockets(settings: "ServerSettings", given: Sequence[socket.socket]) -> "ServerSettings":
    """The settings with the addresses of given sockets for their own, if there are any.

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
