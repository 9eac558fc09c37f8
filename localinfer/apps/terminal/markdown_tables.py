"""Tables of Markdown, drawn to fit a width: columns shrink and cells wrap, and at last rows become lists."""

import re
from collections.abc import Callable, Sequence

from localinfer.apps.terminal.display_width import text_width
from localinfer.apps.terminal.line_writer import FAINT, PLAIN, STRONG, WrappedWriter
from localinfer.apps.terminal.markdown_inline import InlineStream

_DELIMITERS = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*")
_BAR = re.compile(r"(?<!\\)\|")
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")
_BETWEEN = 3
"""Columns between two cells: a bar between spaces."""
_NARROWEST = 6
"""No column gets narrower than this, or its longest cell; a table that needs more room becomes a list."""
_ENDLESS = 1_000_000


def is_delimiter_row(line: str) -> bool:
    """True for the line of dashes under the heads of a table."""
    return "-" in line and _DELIMITERS.fullmatch(line.strip()) is not None


def split_row(line: str) -> list[str]:
    """The cells of a line, with `\\|` as a bar."""
    line = line.strip().removeprefix("|")
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    return [cell.strip().replace("\\|", "|") for cell in _BAR.split(line)]


def draw_table(lines: Sequence[str], width: int, *, styles: bool) -> list[str]:
    """The lines of a drawn table.

    lines: heads, the row of dashes with the alignment, and the rows; a row may have more or fewer cells than heads.
    width: columns that the lines may take.
    """
    heads, *rows = [split_row(line) for line in (lines[0], *lines[2:])]
    count = max(map(len, [heads, *rows]))
    heads, rows = _filled(heads, count), [_filled(row, count) for row in rows]
    columns = list(zip(heads, *rows, strict=True))
    natural = [max(_natural_width(cell) for cell in column) for column in columns]
    widths = _fit(natural, [_longest_word(column) for column in columns], width - _BETWEEN * (count - 1))
    if widths is None:
        return _as_list(heads, rows, width, styles=styles)
    align = [_alignment(cell) for cell in _filled(split_row(lines[1]), count)]
    painter = WrappedWriter(lambda: _ENDLESS, styles=styles)
    drawn = [[_cell(cell, column, styles, STRONG) for cell, column in zip(heads, widths, strict=True)]]
    drawn += [[_cell(cell, column, styles) for cell, column in zip(row, widths, strict=True)] for row in rows]
    is_airy = any(len(cell) > 1 for row in drawn[1:] for cell in row)
    result: list[str] = []
    for number, row in enumerate(drawn):
        if number == 1:
            result.append(painter.styled("─┼─".join("─" * column for column in widths), FAINT))
        elif number > 1 and is_airy:
            result.append(painter.styled("┄┼┄".join("┄" * column for column in widths), FAINT))
        for line in range(max(map(len, row))):
            cells = [cell[line] if line < len(cell) else "" for cell in row]
            padded = map(_pad, cells, widths, align)
            result.append(f" {painter.styled('│', FAINT)} ".join(padded).rstrip(" "))
    return result


def _filled(row: list[str], count: int) -> list[str]:
    return row + [""] * (count - len(row))


def _alignment(cell: str) -> str:
    if cell.endswith(":"):
        return "centre" if cell.startswith(":") else "right"
    return "left"


def _render(write: Callable[[WrappedWriter], None], width: int, styles: bool) -> list[str]:
    writer = WrappedWriter(lambda: width, styles=styles, breaks_addresses=True, smallest_width=1)
    write(writer)
    return writer.take().removesuffix("\n").split("\n")


def _write_inline(writer: WrappedWriter, text: str, style: int) -> None:
    inline = InlineStream(writer.write)
    inline.begin(style)
    inline.feed(text)
    inline.end()


def _cell(text: str, width: int, styles: bool, style: int = PLAIN) -> list[str]:
    def write(writer: WrappedWriter) -> None:
        for part in _BREAK.split(text):
            writer.begin()
            _write_inline(writer, part.strip(), style)
            writer.end()

    return _render(write, width, styles)


def _plain(cell: str) -> list[str]:
    return _cell(cell, _ENDLESS, styles=False)


def _natural_width(cell: str) -> int:
    return max(map(text_width, _plain(cell)))


def _longest_word(column: Sequence[str]) -> int:
    return max((text_width(word) for cell in column for line in _plain(cell) for word in line.split(" ")), default=0)


def _fit(natural: list[int], words: list[int], room: int) -> list[int] | None:
    """Widths of columns that take no more than `room`; None where they would be too narrow to read."""
    if sum(natural) <= room:
        return natural
    for share in (1, 2):
        # Whole words where there is room for them, then words of half a table are broken.
        least = [
            min(width, max(_NARROWEST, word if share == 1 else min(word, room // (2 * len(natural)))))
            for width, word in zip(natural, words, strict=True)
        ]
        if sum(least) > room:
            continue
        widths = list(natural)
        while sum(widths) > room:
            widest = max(
                (place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__
            )
            widths[widest] -= 1
        return widths
    return None


def _pad(cell: str, width: int, align: str) -> str:
    missing = width - text_width(_SEQUENCE.sub("", cell))
    left = missing if align == "right" else missing // 2 if align == "centre" else 0
    return f"{' ' * left}{cell}{' ' * (missing - left)}"


def _as_list(heads: list[str], rows: list[list[str]], width: int, *, styles: bool) -> list[str]:
    def write(writer: WrappedWriter) -> None:
        for number, row in enumerate(rows or [[""] * len(heads)]):
            if number:
                writer.pieces_line([("┄" * width, FAINT)])
            for head, cell in zip(heads, row, strict=True):
                if not head and not cell:
                    continue
                writer.begin(hanging=[("  ", PLAIN)])
                if head:
                    _write_inline(writer, f"{head}:", STRONG)
                    writer.write(" ", PLAIN)
                _write_inline(writer, _BREAK.sub(" ", cell), PLAIN)
                writer.end()

    return _render(write, width, styles)
