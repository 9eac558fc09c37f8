"""Streamed Markdown on a real pseudo-terminal: what its screen shows, narrow and after a change of its size."""

import os
import re
import struct
import subprocess
import sys

import pytest

pty = pytest.importorskip("pty", reason="needs the terminals of Unix")
pyte = pytest.importorskip("pyte", reason="reads screens with pyte")

PROGRAM = """
import os, sys
from localinfer.apps.terminal.markdown import MarkdownStream
stream = MarkdownStream(lambda: os.get_terminal_size(1).columns, styles=True)
for part in sys.argv[1:]:
    for place in range(0, len(part), 3):
        os.write(1, stream.feed(part[place : place + 3]).encode())
    sys.stdin.readline()
os.write(1, stream.end().encode())
"""
ANSWER = """# Sorting
Use **sorted** for a copy of what is iterated:
1. `sorted(x)` gives a new list
   - the old one stays

```python
names = sorted(people, key=by_age)
```
| Call | Result |
|---|---|
| sorted(x) | a list of its own |
"""


def set_columns(terminal: int, columns: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))


def printed(parts: list[str], columns: list[int]) -> bytes:
    """What a child prints; before it goes on with each part, the terminal gets the next number of columns."""
    master, slave = pty.openpty()
    set_columns(slave, columns[0])
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *parts], stdin=subprocess.PIPE, stdout=slave, env={**os.environ, "LC_ALL": "C"}
    )
    assert child.stdin is not None
    received = b""
    for size in [*columns[1:], columns[-1]]:
        # The last word of a part, which ends with a space, shows that the part was read.
        word = parts[0].split()[-1].encode() if len(parts) > 1 else b""
        while word and word not in received:
            received += os.read(master, 1 << 16)
        set_columns(slave, size)
        child.stdin.write(b"\n")
        child.stdin.flush()
    child.stdin.close()
    os.close(slave)
    while True:
        try:
            chunk = os.read(master, 1 << 16)
        except OSError:  # how Linux says that the child has closed the terminal
            chunk = b""
        if not chunk:
            break
        received += chunk
    assert child.wait() == 0
    os.close(master)
    return received


def screen_of(output: bytes, columns: int) -> list[str]:
    screen = pyte.Screen(columns, 50)
    pyte.ByteStream(screen).feed(output)
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


@pytest.mark.parametrize("columns", [25, 80])
def test_the_screen_shows_the_answer_and_the_cursor_never_moves_back(columns):
    output = printed([ANSWER], [columns])
    assert set(re.findall(rb"\x1b\[[0-9;]*(.)", output)) == {b"m"}
    assert not re.search(rb"\x08|\r(?!\n)", output)
    lines = screen_of(output, columns)
    narrow = columns == 25
    code = ["names = sorted(people, ke", "y=by_age)"] if narrow else ["names = sorted(people, key=by_age)"]
    assert lines == [
        "Sorting",
        "═══════",
        *(
            ["Use sorted for a copy of", "what is iterated:"]
            if narrow
            else ["Use sorted for a copy of what is iterated:"]
        ),
        *(["1. sorted(x) gives a new", "   list"] if narrow else ["1. sorted(x) gives a new list"]),
        "   • the old one stays",
        "",
        f"── python {'─' * (columns - 10)}",
        *code,
        "─" * columns,
        "",
        "Call      │ Result",
        "──────────┼──────────────" if narrow else "──────────┼──────────────────",
        *(["sorted(x) │ a list of its", "          │ own"] if narrow else ["sorted(x) │ a list of its own"]),
    ]


def test_a_resize_applies_from_the_next_line():
    parts = ["- one two three four ", "five six seven eight nine"]
    assert screen_of(printed(parts, [40, 20]), 60) == ["• one two three four five six seven", "  eight nine"]
