"""Text into the clipboard."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from localinfer.errors import RequestError

_PROGRAM_SECONDS = 5
_MOST_SEQUENCE_BYTES = 74_994
"""Many terminals ignore longer ones."""


def copy_to_clipboard(text: str, send_to_terminal: Callable[[str], bool]) -> str:
    """Copy text by a program of the system or, over a network or without one, by the terminal; say by which.

    send_to_terminal: writes a control sequence; False where there is no terminal. Whether a terminal takes it, it does
    not tell. Source: xterm's "Control Sequences", OSC 52. Raises: RequestError where neither can be had.
    """
    program = _clipboard_program()
    is_remote = "SSH_CONNECTION" in os.environ
    if program is not None and not is_remote:
        encoding = "utf-16-le" if program[0] == "clip" else "utf-8"
        try:
            subprocess.run(
                program,
                input=text.encode(encoding, "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PROGRAM_SECONDS,
                check=True,
            )
            return program[0]
        except (OSError, subprocess.SubprocessError):
            pass
    sequence = f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode()}\x07"
    if len(sequence) > _MOST_SEQUENCE_BYTES:
        raise RequestError(
            f"the text has {len(text)} characters, more than a terminal takes into its clipboard, and no clipboard "
            "program works here (wl-copy, xclip, xsel); /copy code takes less"
        )
    if not send_to_terminal(sequence):
        raise RequestError("there is no terminal, and no clipboard program works here (wl-copy, xclip, xsel)")
    return "the terminal"


def _clipboard_program() -> list[str] | None:
    if sys.platform == "darwin":
        found = [["pbcopy"]]
    elif sys.platform == "win32":
        found = [["clip"]]
    else:
        found = [["wl-copy"]] if os.environ.get("WAYLAND_DISPLAY") else []
        found += [["xclip", "-selection", "clipboard"], ["xsel", "-b", "-i"]] if os.environ.get("DISPLAY") else []
    return next((program for program in found if shutil.which(program[0]) is not None), None)
