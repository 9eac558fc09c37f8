"""Offline mode: nothing but this machine is reached, by any code of this process or of those that it starts.

Python announces every connection before it is made (PEP 578), whatever library asks for it. A hook refuses those that
lead elsewhere, and names of hosts that would have to be looked up, and says which module asked. Code that makes system
calls of its own is not seen by it: none of localinfer's, but a native library may. A hook stays for the life of its
process, and the variable hands it to children.
"""

import ipaddress
import os
import socket
import sys
from types import FrameType
from typing import Any

from localinfer.errors import OfflineError

VARIABLE = "LOCALINFER_OFFLINE"
_OTHERS = {"HF_HUB_OFFLINE": "1"}
"""Variables that say the same to libraries, which then say so in their own words."""
_LOCAL_FAMILIES = tuple(getattr(socket, name) for name in ("AF_UNIX", "AF_NETLINK") if hasattr(socket, name))
_CARRIERS = {"anyio", "h11", "h2", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3", "websockets"}
"""Packages that connect for others."""


def is_asked() -> bool:
    """True if the environment asks for it."""
    return os.environ.get(VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")


def begin() -> None:
    """Let nothing but this machine be reached from now on; may be called again."""
    os.environ[VARIABLE] = "1"
    for name, value in _OTHERS.items():
        os.environ.setdefault(name, value)
    if not _hooks:
        _hooks.append(_refuse)
        sys.addaudithook(_refuse)


_hooks: list[object] = []
"""The hook, once it was added: the interpreter tells nobody, and keeps it for good."""


def is_on() -> bool:
    """Return whether this process reaches nothing but this machine."""
    return bool(_hooks)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith("socket.") and (wanted := leads_to(event, arguments)) is not None:
        raise OfflineError(
            f"{asking_module(sys._getframe(1))} wanted to reach {wanted}, and only this machine may be reached "
            f"(--offline, {VARIABLE}); leave that out to allow it"
        )


def leads_to(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The name, or address and port, of another machine that an event of sockets is about; None if there is none."""
    match event.removeprefix("socket."), arguments:
        case "connect" | "sendto" | "sendmsg", (sock, address):
            return None if address is None or leads_here(sock.family, address) else _shown(address)
        case "getaddrinfo" | "gethostbyname" | "gethostbyaddr" | "getnameinfo", (host, *_):
            return None if needs_no_search(host) else _shown(host)
    return None


def leads_here(family: int, address: Any) -> bool:
    """Return whether a socket's address is of this machine."""
    if family in _LOCAL_FAMILIES:
        return True
    host = address[0] if isinstance(address, tuple) and address else None
    return isinstance(host, str) and (_is_local_name(host) or _is_local_address(host))


def needs_no_search(host: Any) -> bool:
    """Return whether a host's address is found without asking others: it is one, or a name of this machine."""
    if isinstance(host, tuple):
        host = host[0] if host else None
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host is None or host == "" or _is_local_name(host):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_local_name(host: str) -> bool:
    name = host.rstrip(".").lower()
    return name == "localhost" or name.endswith(".localhost")


def _is_local_address(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    # A connection to no address in particular is one to this machine.
    return address.is_loopback or address.is_unspecified


def asking_module(frame: FrameType | None) -> str:
    """The module that asked: the innermost that is neither Python's own nor a carrier."""
    first = "a library"
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")) or "a library"
        package = name.partition(".")[0]
        if not name.startswith("localinfer.system.") and package not in sys.stdlib_module_names:
            if package not in _CARRIERS:
                return name
            first = name if first == "a library" else first
        frame = frame.f_back
    return first


def _shown(wanted: Any) -> str:
    if isinstance(wanted, tuple):
        return ":".join(map(str, wanted[:2]))
    return wanted.decode("ascii", "replace") if isinstance(wanted, bytes) else f"{wanted!s:.200}"
