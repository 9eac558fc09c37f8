"""Rules of Windows: names that files cannot have, paths that need a prefix, launchers, and consoles' escape sequences.

The rules of names, paths and launchers are functions of text, which are the same wherever they run. What asks the
system is written from its documentation and has not been run there.
"""

import os
import re
import sys

_MOST_CHARACTERS = 247
"""Of a path without a prefix: a folder's may have no more, a file's 12 more."""
_PREFIX = "\\\\?\\"
"""Says that a path is not to be interpreted, and may have 32,767 characters."""
_NOT_FILES = ("\\\\?\\", "\\\\.\\")
_REFUSED = re.compile(r'[\x00-\x1f<>:"|?*]')
_DEVICE = re.compile(
    r"(?:CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³]) *(?:[.:].*)?", re.IGNORECASE | re.DOTALL
)
_ENABLE_VIRTUAL_TERMINAL_PROCESSING = 0x4


def refused_name(name: str) -> str | None:
    """Reason why a file of Windows cannot have a name, which is one part of a path; None if it can.

    A colon is among them: what follows it would name a hidden stream of another file.
    """
    if _DEVICE.fullmatch(name):
        return f"the name {name} is a device's on Windows"
    if (found := _REFUSED.search(name)) is not None:
        return f"names have no {found.group()!r} on Windows"
    if name not in (".", "..") and name.endswith((".", " ")):
        return "names do not end in a dot or a space on Windows"
    return None


def extended_path(path: str | os.PathLike[str], room: int = 0) -> str:
    """A path as Windows takes it at any length: a long one whole, behind the prefix that allows it.

    room: characters of what may follow it.
    """
    # On Windows this is `os.path`; elsewhere nothing but a test needs it.
    import ntpath

    text = os.fspath(path)
    whole = ntpath.abspath(text)
    if len(whole) + room <= _MOST_CHARACTERS or whole.startswith(_NOT_FILES):
        return text
    return f"{_PREFIX}UNC{whole[1:]}" if whole.startswith("\\\\") else f"{_PREFIX}{whole}"


def is_launcher(path: str, *, executable: str, image: str, script: str) -> bool:
    """True if the program at a path does nothing but start this process, and wait for it.

    The python.exe of a virtual environment starts the one that the environment was made with: this process then runs
    another file (image) than `sys.executable`. A command such as localinfer.exe, of pip or uv, starts a python.exe with
    its own path as the script (`sys.argv[0]`, from which the command has cut the ending). py.exe starts the Python that
    is the newest.
    """
    import ntpath

    def plain(name: str) -> str:
        return ntpath.normcase(ntpath.abspath(name))

    if plain(path) == plain(executable) != plain(image):
        return True
    command = re.sub(r"(?:-script\.pyw?|\.exe)?$", ".exe", script, count=1, flags=re.IGNORECASE)
    return plain(path) == plain(command) or ntpath.basename(plain(path)) in ("py.exe", "pyw.exe")


def starting_process() -> int:
    """Number of the process that had this one started, above all launchers; 0 if it has ended.

    A launcher outlives the application that started it, so that watching it would tell nothing.
    """
    import psutil

    process = psutil.Process()
    image = process.exe()
    while (above := process.parent()) is not None:
        try:
            path = above.exe()
        except psutil.Error:
            return int(above.pid)
        if not is_launcher(path, executable=sys.executable, image=image, script=sys.argv[0]):
            return int(above.pid)
        process = above
    return 0


def shows_escape_sequences(descriptor: int) -> bool:
    """True if the terminal of a descriptor obeys escape sequences; a console of Windows is asked to.

    Those before Windows 10 of 2016 cannot, and print them.
    """
    if sys.platform == "win32":
        import ctypes
        import msvcrt
        from ctypes import wintypes

        kernel = ctypes.WinDLL("kernel32")
        try:
            handle = wintypes.HANDLE(msvcrt.get_osfhandle(descriptor))
        except OSError:
            return False
        mode = wintypes.DWORD()
        if not kernel.GetConsoleMode(handle, ctypes.byref(mode)):
            return False
        wanted = mode.value | _ENABLE_VIRTUAL_TERMINAL_PROCESSING
        return mode.value == wanted or bool(kernel.SetConsoleMode(handle, wintypes.DWORD(wanted)))
    return True
