"""Markdown that arrives in deltas, for a terminal: what was printed is never changed, and no cursor moves.

A table is drawn when it is whole, to fit the width: columns shrink and cells wrap, and at last rows become lists.
"""

import re
from collections.abc import Callable, Sequence

from localinfer.apps.terminal.display_width import text_width
from localinfer.apps.terminal.line_writer import (
    EMPHASIS,
    FAINT,
    MARKER,
    PLAIN,
    STRONG,
    TITLE,
    Piece,
    WrappedWriter,
    fitting,
    piece_width,
)
from localinfer.apps.terminal.markdown_blocks import (
    Around,
    CodeColours,
    Container,
    Fence,
    Item,
    Kind,
    LineStart,
    Quote,
    mathematics_closer,
    read_start,
)
from localinfer.apps.terminal.markdown_inline import InlineStream
from localinfer.terminal import neutralise_controls

_DELIMITERS = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*")
_CELL_END = re.compile(r"(?<!\\)\|")
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
    return [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(line)]


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


_TAB = 4
_BULLETS = "•◦▪"
_LONGEST_RULE = 80
_NO_TERMINAL_COLUMNS = 80
_AIRY = (Kind.HEADING, Kind.FENCE)
"""Blocks with a blank line before them; tables have one too."""
_BAR = ("│ ", FAINT)
_TITLES = {1: TITLE, 2: TITLE, 3: STRONG, 4: STRONG | EMPHASIS, 5: EMPHASIS, 6: EMPHASIS}
_UNDERLINES = {1: "═", 2: "─"}


def code_blocks(markdown: str) -> list[str]:
    """The code blocks of a text, the last one also where the text ends inside it; as `MarkdownStream.code_blocks`."""
    stream = MarkdownStream(lambda: _NO_TERMINAL_COLUMNS, styles=False)
    stream.feed(markdown)
    stream.end()
    return stream.code_blocks


class MarkdownStream:
    """Renders Markdown as it is generated: a word when it is complete, a line of code, a whole table.

    width: columns of the terminal, asked at the start of every line.
    styles: whether to print colours; the layout is the same without.

    What is printed does not depend on how the text is cut into deltas. Line ends of the text are kept, prose is wrapped
    at words; lines of code are printed as they are, from the first column, so that a copy of them is the code.
    """

    def __init__(self, width: Callable[[], int], *, styles: bool) -> None:
        self.code_blocks: list[str] = []
        """Finished blocks of code as the model wrote them, without the last line end and the indent of a list."""
        self._styles = styles
        self._writer = WrappedWriter(width, styles=styles)
        self._inline = InlineStream(self._writer.write)
        self._around = Around()
        self._line = ""
        """The held part of a line that is undecided, or is read as a whole."""
        self._is_in_text = False
        self._reads_whole = False
        self._title_level = 0
        self._fence: Fence | None = None
        self._indented: list[str] = []
        """Lines of a block of code without a fence."""
        self._closer = ""
        """The end mark of the displayed mathematics that the line is in."""
        self._table: list[str] = []
        """Lines of a table, or one that may be its heads."""
        self._first: Sequence[Piece] = ()
        self._hanging: Sequence[Piece] = ()
        """The beginning of the block's first line, and of its other lines."""
        self._blanks = 0
        self._blank_start: Sequence[Piece] = ()
        self._is_at_top = True
        self._follows_blank = True
        self._wants_blank = False
        """True if a blank line comes before the next block though the text has none."""

    def feed(self, text: str) -> str:
        """Read a delta; returns what to print for it."""
        place = 0
        while place < len(text):
            if not (self._is_in_text or self._reads_whole) and text[place] != "\n":
                self._read_start(text[place])
                place += 1
                continue
            end = text.find("\n", place)
            part = text[place:] if end < 0 else text[place:end]
            if self._is_in_text:
                self._inline.feed(_as_prose(part))
            else:
                self._line += part
            if end < 0:
                break
            self._end_line()
            place = end + 1
        return self._writer.take()

    def end(self) -> str:
        """Read the end of the text; returns what was held back. The cursor is then at the start of a line."""
        if self._is_in_text or self._line:
            self._end_line()
        self._leave_table()
        self._leave_indented()
        if self._fence is not None:
            self._leave_fence(self._fence)
        return self._writer.take()

    def _read_start(self, character: str) -> None:
        if character == "\t":
            self._line += " " * (_TAB - len(self._line) % _TAB)
        else:
            self._line += neutralise_controls(character)
        start = read_start(self._line, self._around, is_whole=False) if self._line else None
        if start is None:
            return
        if start.kind in (Kind.TEXT, Kind.HEADING):
            self._line = ""
            self._begin_block(start)
        else:
            self._reads_whole = True

    def _end_line(self) -> None:
        line, self._line = self._line, ""
        if self._is_in_text:
            self._end_text()
        elif self._fence is not None:
            self._code_line(self._fence, line)
        elif self._closer:
            self._mathematics_line(_as_prose(line))
        else:
            self._whole_line(line)
        self._reads_whole = self._fence is not None or bool(self._closer)

    def _whole_line(self, line: str) -> None:
        start = read_start(line.rstrip("\r"), self._around, is_whole=True)
        assert start is not None
        self._begin_block(start)
        if self._is_in_text:
            self._end_text()

    # Blocks.

    def _begin_block(self, start: LineStart) -> None:
        if self._table and self._goes_on_with_table(start):
            return
        if start.kind is Kind.BLANK:
            self._blank(start.kept)
            return
        if start.kind is not Kind.CODE:
            self._leave_indented()
        containers = [*self._around.containers[: start.kept], *start.opened]
        self._around = Around(containers, in_paragraph=start.kind in (Kind.TEXT, Kind.TABLE) and bool(start.text))
        self._first, self._hanging = _line_starts(containers, len(start.opened))
        self._print_blanks(start)
        if start.kind in (Kind.TEXT, Kind.HEADING):
            self._begin_text(start.text, start.level)
        elif start.kind is Kind.FENCE:
            self._begin_fence(start)
        elif start.kind is Kind.CODE:
            self._indented.append(start.text)
            self._writer.raw_line(neutralise_controls(start.text))
        elif start.kind is Kind.TABLE:
            self._table = [_as_prose(start.text)]
        elif start.kind is Kind.MATHEMATICS:
            self._closer = mathematics_closer(start.text)
            self._writer.pieces_line([*self._first, (_as_prose(start.text), PLAIN)])
        elif start.kind is Kind.UNDERLINE:
            self._underline("═")
        else:
            self._rule(self._first, "─")

    def _begin_text(self, text: str, level: int = 0) -> None:
        if not text:
            self._writer.pieces_line(self._first)
            return
        self._writer.begin(self._first, self._hanging)
        self._inline.begin(_TITLES[level] if level else PLAIN)
        self._inline.feed(_as_prose(text))
        self._title_level = level
        self._is_in_text = True

    def _end_text(self) -> None:
        self._inline.end()
        self._writer.end()
        self._is_in_text = False
        if self._title_level in _UNDERLINES and self._writer.widest:
            self._underline(_UNDERLINES[self._title_level])

    def _underline(self, mark: str) -> None:
        before = fitting(self._hanging, self._writer.width)
        self._writer.pieces_line([*before, (mark * self._writer.widest, FAINT)])

    def _blank(self, kept: int) -> None:
        containers = self._around.containers[:kept]
        self._around = Around(containers)
        self._blanks += 1
        self._blank_start = _bars(containers)

    def _print_blanks(self, start: LineStart) -> None:
        count = min(self._blanks, 1)
        if start.kind is Kind.CODE and self._indented:
            count = self._blanks
            self._indented += [""] * count
        elif not count and (self._wants_blank or (start.kind in _AIRY and not start.opened)):
            count, self._blank_start = 1, _bars(self._around.containers)
        self._blanks, self._wants_blank = 0, False
        if self._is_at_top:
            count = 0
        for _ in range(count):
            self._writer.pieces_line(self._blank_start)
        self._follows_blank = count > 0 or self._is_at_top
        self._is_at_top = False

    def _rule(self, before: Sequence[Piece], mark: str, label: str = "") -> None:
        width = self._writer.width
        before = fitting(before, width)
        title = f"{mark * 2} {label} " if label else ""
        missing = min(width - piece_width(before), _LONGEST_RULE) - text_width(title)
        if missing >= 0:
            self._writer.pieces_line([*before, (title + mark * missing, FAINT)])
            return
        self._writer.begin(before)
        self._writer.write(title, FAINT)
        self._writer.end()

    # Code.

    def _begin_fence(self, start: LineStart) -> None:
        quotes = sum(isinstance(container, Quote) for container in self._around.containers)
        language = start.text.split()[0].strip("{}.").lower() if start.text else ""
        colours = CodeColours(language) if self._styles else None
        self._fence = Fence(start.fence, quotes=quotes, indent=start.strip, colours=colours)
        begins_item = any(isinstance(container, Item) for container in start.opened)
        self._rule(self._first if begins_item else (), "─", _as_prose(start.text))

    def _code_line(self, fence: Fence, line: str) -> None:
        code = fence.code_of(line)
        if code is None or fence.is_closed_by(code):
            self._leave_fence(fence)
        if code is None:
            # The first line that is outside the quote.
            self._whole_line(_as_prose(line))
        elif self._fence is not None:
            fence.add(code)
            shown = neutralise_controls(code)
            self._writer.raw_line(fence.colours.line(shown) if fence.colours else shown)

    def _leave_fence(self, fence: Fence) -> None:
        self.code_blocks.append(fence.text)
        self._fence = None
        self._rule((), "─")
        self._wants_blank = True

    def _leave_indented(self) -> None:
        if self._indented:
            self.code_blocks.append("\n".join(line[_TAB:] for line in self._indented))
            self._indented = []

    # Mathematics and tables.

    def _mathematics_line(self, line: str) -> None:
        if not line.strip():
            self._closer = ""
            self._blank(len(self._around.containers))
            return
        if self._closer in line:
            self._closer = ""
        self._writer.pieces_line([*self._hanging, (line.strip(), PLAIN)])

    def _goes_on_with_table(self, start: LineStart) -> bool:
        is_inside = start.kept == len(self._around.containers) and not start.opened
        row = _as_prose(start.text)
        if not is_inside or start.kind is not Kind.TABLE:
            self._leave_table()
            return False
        if len(self._table) > 1 or is_delimiter_row(row):
            self._table.append(row)
            self._around = Around(self._around.containers)
        else:
            # The line before was text, and this one may be the heads.
            self._leave_table()
            self._table = [row]
        return True

    def _leave_table(self) -> None:
        lines, self._table = self._table, []
        if len(lines) == 1:
            self._begin_text(lines[0])
            self._end_text()
            self._first, self._follows_blank = self._hanging, False
        elif lines:
            if not self._follows_blank and self._first == self._hanging:
                self._writer.pieces_line(_bars(self._around.containers))
            width = self._writer.width
            first, hanging = fitting(self._first, width), fitting(self._hanging, width)
            for line in draw_table(lines, width - piece_width(hanging), styles=self._styles):
                self._writer.pieces_line([*first, (line, PLAIN)])
                first = hanging
            self._wants_blank = True


def _as_prose(text: str) -> str:
    return neutralise_controls(text).replace("\t", " ")


def _bars(containers: Sequence[Container]) -> list[Piece]:
    return [_BAR for container in containers if isinstance(container, Quote)]


def _line_starts(containers: Sequence[Container], opened: int) -> tuple[list[Piece], list[Piece]]:
    """The beginning of a line, `opened` of whose containers begin on it, and of the lines that it is wrapped to."""
    first: list[Piece] = []
    hanging: list[Piece] = []
    depth = 0
    for place, container in enumerate(containers):
        if isinstance(container, Quote):
            first.append(_BAR)
            hanging.append(_BAR)
            continue
        if container.marker in "-*+":
            marker = f"{_BULLETS[min(depth, len(_BULLETS) - 1)]} "
            depth += 1
        else:
            marker = f"{container.marker} "
        indent = (" " * len(marker), PLAIN)
        hanging.append(indent)
        first.append((marker, MARKER) if place >= len(containers) - opened else indent)
    return first, hanging
