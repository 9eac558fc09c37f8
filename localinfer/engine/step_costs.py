"""How much of a prompt one step computes, so that who streams meanwhile waits little: from what steps have taken."""

_INTERVALS = 2.0
"""Intervals between two tokens of a running stream that a chunk beside it may take."""
_LEAST_SECONDS = 0.03
"""What such a chunk may take where intervals are short: nobody sees it, and small chunks waste work."""
_LEAST_ROWS = 8
_SEVERAL_SECONDS = 0.15
"""What chunks of several prompts may take while nobody streams: as long a new request waits to join."""
_LEAST_ROWS_OF_SEVERAL = 64
_ALONE_SECONDS = 1.0
_LEAST_ROWS_ALONE = 256
"""A prompt that is alone wastes nothing: 512 rows at once make 614 tokens per second of the 0.5B shape in Q4_0, 256
make 608 and 64 make 565. Such a chunk is left undone when it is cancelled, or somebody comes."""
_TILE = 16
"""Rows that kernels compute side by side; a longer chunk is a multiple of it."""
_MEMORY = 0.7
_LARGEST_CHANGE = 2.0


class StepCosts:
    """What rows of prompts and what plain steps take on this machine, followed as steps are timed."""

    def __init__(self) -> None:
        self._decode_seconds: float | None = None
        self._row_seconds: float | None = None

    def observe(self, decode_rows: int, chunk_rows: int, seconds: float) -> None:
        """Follow a step that computed rows of running streams, and of prompts, or of one of these kinds."""
        if seconds <= 0.0:
            return
        if not chunk_rows:
            self._decode_seconds = _followed(self._decode_seconds, seconds)
            return
        if chunk_rows < _LEAST_ROWS:
            return
        if decode_rows:
            seconds = max(seconds - (self._decode_seconds or 0.0), seconds / 4)
        self._row_seconds = _followed(self._row_seconds, seconds / chunk_rows)

    def chunk_rows(self, *, num_streams: int, num_prompts: int, most: int) -> int:
        """How many rows of prompts the next step is to compute beside streams that run, at most `most`."""
        if num_streams:
            least, seconds = _LEAST_ROWS, max(_LEAST_SECONDS, _INTERVALS * (self._decode_seconds or 0.0))
        elif num_prompts > 1:
            least, seconds = _LEAST_ROWS_OF_SEVERAL, _SEVERAL_SECONDS
        else:
            least, seconds = _LEAST_ROWS_ALONE, _ALONE_SECONDS
        rows = least if self._row_seconds is None else int(seconds / self._row_seconds)
        return min(most, max(least, rows - rows % _TILE if rows > _TILE else rows))


def _followed(known: float | None, seconds: float) -> float:
    if known is None:
        return seconds
    # A step that was interrupted says little about the next.
    seconds = min(max(seconds, known / _LARGEST_CHANGE), known * _LARGEST_CHANGE)
    return _MEMORY * known + (1.0 - _MEMORY) * seconds
