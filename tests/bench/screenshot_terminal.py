"""A picture of a command on a terminal, as it looks after some keys: for the README, and to judge by eye.

    python -m tests.bench.screenshot_terminal chat.png --columns 90 --lines 24 \\
        --step 'until:>' --step 'type:Tell me a story.\\r' --step wait:0.5 --step 'type:And then' --step wait:0.2 \\
        --command 'chat --no-disk-cache'

Runs a command of `localinfer` on a pseudo-terminal; `--python FILE` runs a program of Python instead. Steps:
`type:KEYS` with Python's escapes, `wait:SECONDS`, and `until:TEXT` for text at the start of a line of the screen.
Needs Pillow and pyte, and the DejaVu Sans Mono fonts.
"""

import argparse
import fcntl
import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from pyte.screens import Char
from wcwidth import wcwidth

from tests.apps.cli.terminal_screen import TerminalScreen

_FONT_PIXELS = 22
_MARGIN = 18
_TITLE_PIXELS = 40
_BACKGROUND, _FOREGROUND, _DIM_FOREGROUND, _FRAME = "#11151c", "#d8dee9", "#7a8699", "#1b212b"
_BUTTONS = ("#ff5f57", "#febc2e", "#28c840")
_COLOURS = {
    "black": "#3b4252",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": "#d8dee9",
}
_BRIGHT = {f"bright{name}": colour for name, colour in _COLOURS.items()}
_DIM_MARK = "7a8699"
_GIVING_UP_SECONDS = 60.0


class ColourScreen(TerminalScreen):
    """A screen that also knows dimmed text, as a colour."""

    def select_graphic_rendition(self, *attributes: int, **more: Any) -> None:
        """Take `2` as a colour, and `22` as the end of it and of bold."""
        super().select_graphic_rendition(*attributes, **more)
        if attributes in ((2,), (1, 2), (0, 2)) and self.cursor.attrs.fg == "default":
            self.cursor.attrs = self.cursor.attrs._replace(fg=_DIM_MARK)
        elif 22 in attributes and self.cursor.attrs.fg == _DIM_MARK:
            self.cursor.attrs = self.cursor.attrs._replace(fg="default")


def run(arguments: argparse.Namespace) -> ColourScreen:
    """The screen after the steps."""
    screen = ColourScreen(arguments.columns, arguments.lines)
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", arguments.lines, arguments.columns, 0, 0))
    program = ["-m", "localinfer", *shlex.split(arguments.command)] if arguments.python is None else [arguments.python]
    process = subprocess.Popen(
        [sys.executable, *program],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )
    os.close(slave)

    def read(limit: float) -> None:
        if not select.select([master], [], [], limit)[0]:
            return
        try:
            os.write(master, screen.show(os.read(master, 1 << 16)))
        except OSError:
            raise SystemExit(f"the program ended; the screen was:\n{screen.text}") from None

    try:
        for step in arguments.step:
            kind, _, what = step.partition(":")
            if kind == "type":
                os.write(master, what.encode().decode("unicode_escape").encode("latin-1"))
            elif kind == "wait":
                ends = time.monotonic() + float(what)
                while (left := ends - time.monotonic()) > 0:
                    read(left)
            elif kind == "until":
                ends = time.monotonic() + _GIVING_UP_SECONDS
                while not any(line.startswith(what) for line in screen.shown_lines):
                    if time.monotonic() > ends:
                        raise SystemExit(f"no line began with {what!r}:\n{screen.text}")
                    read(0.1)
            else:
                raise SystemExit(f"a step is {step!r}; give type:KEYS, wait:SECONDS or until:TEXT")
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return screen


def draw(screen: ColourScreen, title: str) -> Image.Image:
    """The screen as a window of a terminal."""
    fonts = {
        (is_bold, is_italic): ImageFont.truetype(f"DejaVuSansMono{name}.ttf", _FONT_PIXELS)
        for (is_bold, is_italic), name in {
            (False, False): "",
            (True, False): "-Bold",
            (False, True): "-Oblique",
            (True, True): "-BoldOblique",
        }.items()
    }
    width, height = round(fonts[False, False].getlength("M")), round(_FONT_PIXELS * 1.3)
    size = screen.columns * width + 2 * _MARGIN, screen.lines * height + _TITLE_PIXELS + _MARGIN + _MARGIN // 2
    image = Image.new("RGB", size, _BACKGROUND)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, size[0], _TITLE_PIXELS), fill=_FRAME)
    for place, colour in enumerate(_BUTTONS):
        pen.ellipse((18 + 26 * place, 13, 32 + 26 * place, 27), fill=colour)
    pen.text((size[0] // 2, _TITLE_PIXELS // 2), title, fill=_DIM_FOREGROUND, font=fonts[False, False], anchor="mm")
    for y in range(screen.lines):
        for x in range(screen.columns):
            char = screen.buffer[y][x]
            left, top = _MARGIN + x * width, _TITLE_PIXELS + _MARGIN // 2 + y * height
            is_cursor = (x, y) == (screen.cursor.x, screen.cursor.y) and not screen.cursor.hidden
            front, back = _colours(char, is_reversed=char.reverse != is_cursor)
            cells = max(1, wcwidth(char.data[:1] or " "))
            if back != _BACKGROUND:
                pen.rectangle((left, top, left + cells * width - 1, top + height - 1), fill=back)
            pen.text((left, top + 2), char.data, fill=front, font=fonts[char.bold, char.italics])
            if char.underscore:
                pen.line((left, top + height - 3, left + cells * width - 1, top + height - 3), fill=front)
            if char.strikethrough:
                pen.line((left, top + height // 2, left + cells * width - 1, top + height // 2), fill=front)
    return image


def _colours(char: Char, *, is_reversed: bool) -> tuple[str, str]:
    front, back = _colour(char.fg, _FOREGROUND), _colour(char.bg, _BACKGROUND)
    return (back, front) if is_reversed else (front, back)


def _colour(name: str, default: str) -> str:
    if name == "default":
        return default
    return _COLOURS.get(name) or _BRIGHT.get(name) or f"#{name}"


def main() -> None:
    """Run the steps, and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--command", default="chat", help="words after localinfer")
    parser.add_argument("--python", help="a program to run instead")
    parser.add_argument("--columns", type=int, default=90)
    parser.add_argument("--lines", type=int, default=24)
    parser.add_argument("--step", action="append", default=[])
    parser.add_argument("--title", default="localinfer chat")
    arguments = parser.parse_args()
    draw(run(arguments), arguments.title).save(arguments.output)


if __name__ == "__main__":
    main()
