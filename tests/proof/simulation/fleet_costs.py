"""What steps of one replica cost, read from a file of measured figures (`tests/bench/bench_step_costs.py`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

FORMAT = 1
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps.

    chunk: by the number of rows of one prompt from its start, attention to each other included; decode: by the number
    of streams, without context. Of each a line through measured points. chunk_context, decode_context: more for each
    token that a row, or a stream, has before it. request: between a client and the engine, for each request;
    step, token: of each step, and each token in it, beside the model: scheduling and sampling, and where there is a
    server, texts and HTTP.
    kv_bytes: keys and values of a token. max_rows: of a step.
    """

    name: str
    chunk: tuple[tuple[float, float], ...]
    decode: tuple[tuple[float, float], ...]
    chunk_context: float
    decode_context: float
    request: float
    step: float
    token: float
    kv_bytes: int
    max_rows: int
    page_tokens: int = 32

    def decode_seconds(self, streams: int, context: float) -> float:
        """A step in which streams get a token each. context: tokens before them, of all together."""
        if not streams:
            return 0.0
        return self._decode_by_streams[streams] + self.decode_context * context

    def step_seconds(self, streams: int, context: float, rows: int, rows_context: float) -> float:
        """A step with a token for each stream and rows of prompts, which share the matrix products.

        rows_context: tokens before the rows, of all together.
        """
        if not rows:
            return self.decode_seconds(streams, context)
        together = self._chunk_by_rows[rows + streams] + self.chunk_context * rows_context
        return together + self._more_of_streams[streams] + self.decode_context * context

    def prefill_seconds(self, tokens: int, context: int = 0) -> float:
        """A prompt alone, from a cached beginning."""
        total = 0.0
        while tokens > 0:
            rows = min(tokens, self.max_rows)
            total += self.step_seconds(0, 0, rows, rows * context)
            tokens, context = tokens - rows, context + rows
        return total

    @cached_property
    def _decode_by_streams(self) -> list[float]:
        streams = range(self.max_rows + 1)
        return [_line(self.decode, count) + self.step + self.token * count if count else 0.0 for count in streams]

    @cached_property
    def _chunk_by_rows(self) -> list[float]:
        return [_line(self.chunk, rows) + self.step for rows in range(2 * self.max_rows + 1)]

    @cached_property
    def _more_of_streams(self) -> list[float]:
        """What so many streams beside rows take more than as many rows."""
        lines = ((_line(self.decode, count) - _line(self.chunk, count), count) for count in range(self.max_rows + 1))
        return [max(0.0, more) + self.token * count if count else 0.0 for more, count in lines]

    @cached_property
    def prompt_token_seconds(self) -> float:
        """Of one token in a large chunk."""
        rows, seconds = self.chunk[-1]
        return seconds / rows

    @classmethod
    def read(cls, path: str | Path, *, beside: str = "server") -> "StepCosts":
        """Read a measured file; a bare name is one of this folder, `fleet_costs_NAME.json`.

        beside: what steps of the model come with, "engine" or "server"; nothing where that was not measured.
        """
        file = Path(path)
        if not file.suffix:
            file = FOLDER / f"fleet_costs_{path}.json"
        record = json.loads(file.read_text())
        if record.get("format") != FORMAT:
            raise ValueError(f"{file} has format {record.get('format')}, not {FORMAT}; measure again")
        return cls.from_record(record, beside=beside)

    @classmethod
    def from_record(cls, record: dict[str, Any], *, beside: str = "server") -> "StepCosts":
        """Fit measured samples: lines without context, and one slope each for what stands before."""
        chunk, chunk_context = _fit(record["chunk"], "rows")
        decode, decode_context = _fit(record["decode"], "streams")
        return cls(
            name=record["model"],
            chunk=chunk,
            decode=decode,
            chunk_context=chunk_context,
            decode_context=decode_context,
            **{name: record.get(beside, {}).get(f"{name}_seconds", 0.0) for name in ("request", "step", "token")},
            kv_bytes=record["kv_bytes_per_token"],
            max_rows=record["max_rows"],
            page_tokens=record["page_tokens"],
        )


def _fit(samples: Sequence[dict[str, float]], size: str) -> tuple[tuple[tuple[float, float], ...], float]:
    """Seconds by size without context, never falling; and seconds per size and token of context, least squares."""
    least = min(sample["context"] for sample in samples)
    bases = {int(sample[size]): sample["seconds"] for sample in samples if sample["context"] == least}
    products = squares = 0.0
    for sample in samples:
        weight = sample[size] * (sample["context"] - least)
        products += weight * (sample["seconds"] - bases[int(sample[size])])
        squares += weight * weight
    slope = max(0.0, products / squares) if squares else 0.0
    line: list[tuple[float, float]] = []
    for number, seconds in sorted(bases.items()):
        seconds -= slope * number * least
        line.append((float(number), max(seconds, line[-1][1] if line else 0.0)))
    return tuple(line), slope


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between measured points straight, outside as the first or the last two go on, never below zero."""
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(points) if x <= pair[1][0]), points[-2:])
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
