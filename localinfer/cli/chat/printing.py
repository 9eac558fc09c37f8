"""How replies, reasoning and notices are printed: appended, never redrawn."""

from typing import TextIO

from localinfer.terminal import ModelOutput, dim, neutralise_controls


class ReplyPrinter:
    """Prints replies to `output` and everything else to `notices`; control sequences of a model do nothing there.

    Of a reply: `begin`, then `write` and `show_reasoning` with its deltas, and `end` however it ended.
    """

    def __init__(self, output: TextIO, notices: TextIO) -> None:
        self._output = output
        self._notices = notices
        self._model_output = ModelOutput(output, is_terminal=output.isatty())
        self._is_reasoning = False

    def begin(self) -> None:
        """Get ready for a reply."""
        self._model_output = ModelOutput(self._output, is_terminal=self._output.isatty())

    def write(self, text: str) -> None:
        """Print a delta of the reply."""
        if text:
            self._end_reasoning()
        self._model_output.write(text)

    def show_reasoning(self, text: str) -> None:
        """Print a delta of reasoning, dimmed, on a terminal; a pipe gets the answer only."""
        if self._notices.isatty():
            self._is_reasoning = True
            self._notices.write(dim(neutralise_controls(text), self._notices))
            self._notices.flush()

    def end(self) -> None:
        """Start a new line behind a reply, unless it ended with one."""
        self._end_reasoning()
        self._model_output.end_line()

    def notice(self, text: str) -> None:
        """Print a line that is not of the model."""
        self._notices.write(f"{dim(neutralise_controls(text), self._notices)}\n")
        self._notices.flush()

    def send_to_terminal(self, sequence: str) -> bool:
        """Write a control sequence of ours; False where the output is no terminal."""
        if not self._output.isatty():
            return False
        self._output.write(sequence)
        self._output.flush()
        return True

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            self._notices.write("\n\n")
            self._notices.flush()
