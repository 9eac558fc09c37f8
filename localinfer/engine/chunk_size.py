"""How many rows of prompts a step computes beside streams that run: as many as take a bounded time, and no more.

The time that a chunk adds to a step is what its rows take: it grows with the place in the prompt, for each row looks
back at all before it, and with whatever else is busy on the machine. So it is measured with each step, and the next
chunk follows: at once where rows take longer, and bit by bit where they take less, so that one step that was
interrupted costs some small chunks and an error is made on the side of the streams. What a row takes deeper in a prompt
than any before is taken for as much more as it is deeper, the most that it can be, and on a machine where plain steps
have come to take longer for as much more as these.
"""

from localinfer.engine.step_fit import StepFit

_INTERVALS = 2.0
"""Intervals between two tokens of a running stream that a prompt's chunk beside it may take, when nothing else is busy
on the machine."""
_LEAST_SECONDS = 0.03
"""What such a chunk may take where intervals are short: it is not noticed, and small chunks waste work."""
_FIRST_ROWS = 8
"""Of a chunk beside streams before anything is known."""
_SEVERAL_SECONDS = 0.15
"""What chunks of several prompts may take while nothing decodes: as long a new request waits to join."""
_LEAST_ROWS_OF_SEVERAL = 64
_ALONE_SECONDS = 1.0
_LEAST_ROWS_ALONE = 256
"""A lone prompt wastes nothing: 512 rows at once make 614 tokens per second of the 0.5B shape in Q4_0, 256 make 608
and 64 make 565. Such a chunk is aborted when it is cancelled, or another request arrives."""
_TILE = 16
"""Rows that kernels compute side by side; a longer chunk is a multiple of it."""
_SHALLOW = 512
"""Positions before a row up to which they hardly matter for what it takes."""
_STEPS_BESIDE = 16
"""Steps with a chunk after which one without shows what streams take by themselves now."""

_MEMORY = 0.7
_LARGEST_CHANGE = 2.0
_LARGEST_LOSS, _LARGEST_GAIN = 4.0, 1.5
"""How much longer, and how much less long, rows are taken to be by one step."""
_CALM_MEMORY_SECONDS = 60.0
"""Of plain steps, in which the interval that a calm machine has is taken to be twice as long, if they are."""


class StepCosts:
    """What rows of prompts and what plain steps take: they decide how long a prompt's chunk is.

    fit: the same as a line, by which times are predicted.
    """

    def __init__(self) -> None:
        self.fit = StepFit()
        self._decode_seconds: float | None = None
        self._calm_seconds = 0.0
        self._row_seconds: float | None = None
        self._row_depth = float(_SHALLOW)
        self._row_decode_seconds: float | None = None
        self._num_beside = 0

    @property
    def wants_plain_step(self) -> bool:
        """Whether it is time for a step without a chunk, where streams run."""
        return self._num_beside >= _STEPS_BESIDE

    @property
    def bound_seconds(self) -> float:
        """What a chunk may add to a step beside streams."""
        return max(_LEAST_SECONDS, _INTERVALS * self._calm_seconds)

    def observe(self, decode_rows: int, chunk_rows: int, seconds: float, depth: float = 0.0) -> None:
        """Follow a step that computed rows of running streams, and of prompts, or of one of these kinds.

        depth: positions before a row of the prompts, in the mean.
        """
        if seconds <= 0.0:
            return
        self.fit.observe(decode_rows, chunk_rows, seconds)
        if not chunk_rows:
            self._observe_plain(seconds)
            return
        if decode_rows:
            # A plain step that took longer than one with a chunk was taken on a machine that was busier.
            is_outdated = seconds < (self._decode_seconds or 0.0)
            self._num_beside = _STEPS_BESIDE if is_outdated else self._num_beside + 1
            seconds = max(seconds - (self._decode_seconds or 0.0), seconds / 4)
        depth = max(depth, _SHALLOW)
        known = self._seconds_at(depth)
        # The few rows that end a prompt say more of the step than of themselves.
        if chunk_rows >= _FIRST_ROWS or (known is not None and (chunk_rows + 1) * known > self.bound_seconds):
            self._observe_rows(seconds / chunk_rows, known, depth)

    def chunk_rows(self, *, num_streams: int, num_prompts: int, most: int, depth: float = 0.0) -> int:
        """How many rows of prompts the next step is to compute beside streams that run, at most `most`.

        depth: positions before the first of them, of the deepest prompt.
        """
        if num_streams:
            least, seconds = 1, self.bound_seconds
        elif num_prompts > 1:
            least, seconds = _LEAST_ROWS_OF_SEVERAL, _SEVERAL_SECONDS
        else:
            least, seconds = _LEAST_ROWS_ALONE, _ALONE_SECONDS
        known = self._seconds_at(max(depth, _SHALLOW))
        rows = max(least, _FIRST_ROWS) if known is None else int(seconds / known)
        return min(most, max(least, rows - rows % _TILE if rows > _TILE else rows))

    def _observe_plain(self, seconds: float) -> None:
        self._num_beside = 0
        risen = self._calm_seconds * (1.0 + seconds / _CALM_MEMORY_SECONDS)
        self._calm_seconds = min(seconds, risen or seconds)
        known = self._decode_seconds
        if known is not None and seconds > known:
            # A step that was interrupted says little about the next.
            seconds = _MEMORY * known + (1.0 - _MEMORY) * min(seconds, known * _LARGEST_CHANGE)
        self._decode_seconds = seconds

    def _observe_rows(self, seconds: float, known: float | None, depth: float) -> None:
        if known is not None and seconds > known:
            seconds = min(seconds, _LARGEST_LOSS * known)
        elif known is not None:
            seconds = max(_MEMORY * known + (1.0 - _MEMORY) * seconds, known / _LARGEST_GAIN)
        self._row_seconds, self._row_depth, self._row_decode_seconds = seconds, depth, self._decode_seconds

    def _seconds_at(self, depth: float) -> float | None:
        """What a row is expected to take after so many positions; None before any was computed."""
        if self._row_seconds is None:
            return None
        slower = (self._decode_seconds or 0.0) / (self._row_decode_seconds or self._decode_seconds or 1.0)
        return self._row_seconds * max(1.0, depth / self._row_depth) * max(1.0, slower)
