"""Costs of steps, and the number of prompt rows that a step computes beside running streams (chunked prefill).

Times are fitted as a line over the latest steps (`StepFit`): a constant, and rows of streams and of prompts.

The time that a chunk adds to a step is that of its rows: it grows with the position in the prompt, for each row looks
back at all before it, and with whatever else is busy on the machine. So it is measured with each step, and the next
chunk follows: at once where rows take longer, and bit by bit where they take less, so that one step that was
interrupted costs some small chunks and an error is made on the side of the streams. A row deeper in a prompt than any
before is expected to take longer in proportion to its depth, the most that it can, and on a machine whose plain steps
have become slower, in proportion to those.
"""

import numpy as np

_FIT_MEMORY = 0.97
"""Weight of what was known after one more step: some thirty steps count."""
_SCALES = (1.0, 8.0, 64.0)
"""Usual sizes of a step, its rows of streams and its rows of prompts, so that none is lost in rounding."""
_RIDGE = 1e-3
_LARGEST_FIT_CHANGE = 4.0
_STEPS_PER_LINE = 16
"""Fitting anew takes as long as a small step; a prediction has the line of all steps so far."""


class StepFit:
    """Least squares over the latest steps, each weighed less as others come."""

    def __init__(self) -> None:
        self._moments = [0.0] * 6
        self._seconds = [0.0] * 3
        self._num_steps = self._solved_at = 0
        self._coefficients: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """True if any step was observed."""
        return self._moments[0] > 0.0

    def observe(self, decode_rows: int, chunk_rows: int, seconds: float) -> None:
        """Follow a step. Called for every step that is shared, so it is no NumPy."""
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LINE == 0:
            self._coefficients = self._solve()
        if self._coefficients is not None:
            # A step that was interrupted says little about the next.
            base, by_stream, by_row = self._coefficients
            known = base + by_stream * decode_rows + by_row * chunk_rows
            seconds = min(max(seconds, known / _LARGEST_FIT_CHANGE), known * _LARGEST_FIT_CHANGE)
        decode, chunk = decode_rows / _SCALES[1], chunk_rows / _SCALES[2]
        moments = (1.0, decode, chunk, decode * decode, decode * chunk, chunk * chunk)
        self._moments = [_FIT_MEMORY * old + new for old, new in zip(self._moments, moments, strict=True)]
        found = (seconds, decode * seconds, chunk * seconds)
        self._seconds = [_FIT_MEMORY * old + new for old, new in zip(self._seconds, found, strict=True)]

    def seconds(self, decode_rows: float, chunk_rows: float) -> float:
        """Seconds of a step of so many rows; 0 before any was observed."""
        if self._solved_at != self._num_steps:
            self._coefficients, self._solved_at = self._solve(), self._num_steps
        base, by_stream, by_row = self._coefficients or (0.0, 0.0, 0.0)
        return base + by_stream * decode_rows + by_row * chunk_rows

    def _solve(self) -> tuple[float, float, float]:
        """The line, none of whose parts is negative: what would be is left out, and the others fitted again."""
        one, decode, chunk, decode_2, both, chunk_2 = self._moments
        matrix = np.array([[one, decode, chunk], [decode, decode_2, both], [chunk, both, chunk_2]])
        target = np.array(self._seconds)
        kept = [index for index in range(3) if matrix[index, index] > 0.0]
        found = np.zeros(3)
        while kept:
            part = matrix[np.ix_(kept, kept)] + _RIDGE * one * np.eye(len(kept))
            solved = np.linalg.solve(part, target[kept])
            if (solved >= 0.0).all():
                found[kept] = solved
                break
            kept = [index for index, value in zip(kept, solved, strict=True) if value >= 0.0]
        scaled = found / _SCALES
        return float(scaled[0]), float(scaled[1]), float(scaled[2])


_INTERVALS = 2.0
"""Intervals between two tokens of a running stream that a prompt's chunk beside it may take, when nothing else is busy
on the machine."""
_LEAST_SECONDS = 0.03
"""Seconds of such a chunk where intervals are short: it is not noticed, and small chunks waste work."""
_FIRST_ROWS = 8
"""Rows of a chunk beside streams before anything is known."""
_SEVERAL_SECONDS = 0.15
"""Seconds of the chunks of several prompts while nothing decodes: as long a new request waits to join."""
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
"""Largest factors by which one step makes rows appear longer, and shorter."""
_CALM_MEMORY_SECONDS = 60.0
"""Seconds of longer plain steps after which the interval of a calm machine counts as twice as long."""


class StepCosts:
    """Times of rows of prompts and of plain steps: they decide how long a prompt's chunk is.

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
        """True if it is time for a step without a chunk, where streams run."""
        return self._num_beside >= _STEPS_BESIDE

    @property
    def bound_seconds(self) -> float:
        """Seconds that a chunk may add to a step beside streams."""
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
        """Number of rows of prompts that the next step computes beside running streams, at most `most`.

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
        """Expected seconds of a row after so many positions; None before any was computed."""
        if self._row_seconds is None:
            return None
        slower = (self._decode_seconds or 0.0) / (self._row_decode_seconds or self._decode_seconds or 1.0)
        return self._row_seconds * max(1.0, depth / self._row_depth) * max(1.0, slower)
