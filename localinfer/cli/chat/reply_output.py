"""How a reply is printed: appended as it comes, never redrawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from localinfer.terminal import ModelOutput, dim, neutralise_controls


class ReplyOutput:
    """Prints one reply after the other: text to `output`, reasoning to `notices` where that is a terminal.

    Control sequences of a model do nothing on a terminal.
    """

    def __init__(self, output: TextIO, notices: TextIO) -> None:
        self._output = output
        self._notices = notices
        self._text = ModelOutput(output, is_terminal=output.isatty())
        self._is_reasoning = False

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Print one reply, until the block ends, however it does."""
        self._text = ModelOutput(self._output, is_terminal=self._output.isatty())
        try:
            yield
        finally:
            self.end()

    def write(self, text: str) -> None:
        """Print one delta of the reply."""
        if text:
            self._end_reasoning()
        self._text.write(text)

    def write_reasoning(self, text: str) -> None:
        """Print one delta of reasoning, dimmed, on a terminal; a pipe gets the answer only."""
        if self._notices.isatty():
            self._is_reasoning = True
            self._notices.write(dim(neutralise_controls(text), self._notices))
            self._notices.flush()

    def end(self) -> None:
        """Start a new line unless the output is at the start of one; may be called again."""
        self._end_reasoning()
        self._text.end_line()

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            self._notices.write("\n\n")
            self._notices.flush()
