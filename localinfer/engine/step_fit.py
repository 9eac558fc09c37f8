"""What a step costs, as a line fitted to the latest ones: so much by itself, and by rows of streams and of prompts."""

import numpy as np

_MEMORY = 0.97
"""Weight of what was known after one more step: some thirty steps count."""
_SCALES = (1.0, 8.0, 64.0)
"""Of the step, its rows of streams and its rows of prompts: what is usual of each, so that none is lost in rounding."""
_RIDGE = 1e-3
_LARGEST_CHANGE = 4.0
_STEPS_PER_LINE = 16
"""Fitting anew takes as long as a small step; who predicts has the line of all steps so far."""


class StepFit:
    """Least squares over the latest steps, each weighed less as others come."""

    def __init__(self) -> None:
        self._moments = [0.0] * 6
        self._seconds = [0.0] * 3
        self._num_steps = self._solved_at = 0
        self._coefficients: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether any step was observed."""
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
            seconds = min(max(seconds, known / _LARGEST_CHANGE), known * _LARGEST_CHANGE)
        decode, chunk = decode_rows / _SCALES[1], chunk_rows / _SCALES[2]
        moments = (1.0, decode, chunk, decode * decode, decode * chunk, chunk * chunk)
        self._moments = [_MEMORY * old + new for old, new in zip(self._moments, moments, strict=True)]
        found = (seconds, decode * seconds, chunk * seconds)
        self._seconds = [_MEMORY * old + new for old, new in zip(self._seconds, found, strict=True)]

    def seconds(self, decode_rows: float, chunk_rows: float) -> float:
        """What a step of so many rows takes; 0 before any was observed."""
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
