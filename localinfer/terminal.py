"""The standard streams: model text made harmless for a terminal, prompts checked on the way in."""

import io
import os
import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.stream import Stats

DIM = "\x1b[2m"
RESET = "\x1b[0m"

_BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def _control_table() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t\r"}
    table[0x0D] = ""
    table[0x7F] = "\u2421"
    table.update(dict.fromkeys(range(0x80, 0xA0), "\ufffd"))
    table.update(dict.fromkeys(map(ord, _BIDI_CONTROLS), "\ufffd"))
    return table


_CONTROLS = _control_table()


def neutralise_controls(text: str) -> str:
    """Replace what could move the cursor, rewrite the screen or reorder text; newlines and tabs stay.

    Works character by character, so a control sequence split over two pieces of a stream is caught as well.
    """
    return text.translate(_CONTROLS)


class TextSink(Protocol):
    """The two methods of a text stream that printing needs."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class ModelOutput:
    """Writes model text as it streams: untouched into a pipe or file, with controls neutralised on a terminal."""

    def __init__(self, stream: TextSink, *, is_terminal: bool) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._last = "\n"

    def write(self, text: str) -> None:
        """Print one piece of text at once."""
        if not text:
            return
        if self._is_terminal:
            text = neutralise_controls(text)
        self._stream.write(text)
        self._stream.flush()
        self._last = text[-1:] or self._last

    def end_line(self) -> None:
        """Start a new line unless one was just started."""
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()
            self._last = "\n"


def has_colour(stream: TextIO) -> bool:
    """Whether styled text may be written: a terminal that is not dumb, and `NO_COLOR` empty or unset."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """`text` in a fainter style where the stream allows styles."""
    return f"{DIM}{text}{RESET}" if has_colour(stream) else text


def prepare_streams() -> None:
    """Make the standard streams carry any text: UTF-8 through pipes, and never an encoding error.

    Bytes of standard input that are not UTF-8 arrive as lone surrogates, which `check_text` refuses by name.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.isatty():
                stream.reconfigure(errors="replace")
            else:
                stream.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def check_text(text: str, what: str) -> str:
    """Return `text` if it can be encoded; lone surrogates (undecodable bytes of the command line) cannot.

    Raises: RequestError naming `what` and the first bad character.
    """
    for position, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            raise RequestError(
                f"{what} holds U+{ord(character):04X} at character {position}, half of a character or a byte that is "
                "not UTF-8; pass valid UTF-8 text"
            )
    return text


def _describe_drafts(stats: "Stats") -> str:
    places = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    shares = " ".join(f"{100 * accepted / drafted:.0f}" for accepted, drafted in places if drafted)
    return (
        f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted, by place {shares} %, "
        f"{stats.tokens_per_pass:.2f} tokens per pass, {stats.speculation_speedup:.2f} x plain speed"
    )


def describe_stats(stats: "Stats") -> str:
    """The numbers of one generation on one line."""
    parts = [
        f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens} of them cached",
        f"first token after {stats.time_to_first_token_seconds:.3f} s",
        f"completion {stats.completion_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s",
        f"seed {stats.seed}",
    ]
    if stats.drafted_tokens:
        parts.insert(3, _describe_drafts(stats))
    if stats.dropped_tokens:
        parts.append(f"{stats.dropped_tokens} tokens dropped at the end of the context")
    if stats.cache_miss is not None:
        parts.append(f"cache: {neutralise_controls(stats.cache_miss)}")
    parts += [f"notice: {neutralise_controls(notice)}" for notice in stats.notices]
    return "; ".join(parts)
