"""Markdown that arrives in deltas, for a terminal: what was printed is never changed, and no cursor moves."""

from collections.abc import Callable, Sequence

from localinfer.apps.terminal.code_fences import CodeColours, Fence
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
    Container,
    Item,
    Kind,
    LineStart,
    Quote,
    mathematics_closer,
    read_start,
)
from localinfer.apps.terminal.markdown_inline import InlineStream
from localinfer.apps.terminal.markdown_tables import draw_table, is_delimiter_row
from localinfer.terminal import neutralise_controls

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
