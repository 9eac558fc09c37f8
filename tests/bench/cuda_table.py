"""What the CUDA path has to reach on an H200, what was predicted, and what a file of `bench_cuda` found.

usage: python3 -m tests.bench.cuda_table BENCH.json [--dry-run]
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
_RATE = "decode_tokens_per_second"


@dataclass(frozen=True)
class Row:
    """A figure: what is wanted first and in the end, what was predicted, how it is computed and written."""

    what: str
    first: str
    goal: str
    predicted: str
    figure: Callable[[Figures], float]
    form: str


def _of_model(key: str, name: str = "8B Q4_0", factor: float = 1.0) -> Callable[[Figures], float]:
    return lambda figures: factor * float(figures[f"model {name}"][key])


def _share_of_read(figures: Figures) -> float:
    product = figures["product Q4_0 28672 x 4096"]
    return 100 * float(product["scalar_bytes_per_second_1"]) / float(figures["read_bytes_per_second"])


def _torch_over_ours(figures: Figures) -> float:
    ours = figures["product INT4_128 28672 x 4096"]["scalar_seconds_1"]
    return float(figures["torch int4 28672 x 4096 g128"]["seconds_1"]) / float(ours)


ROWS = (
    Row("Q4_0 28672 x 4096, one row: of read", "75", "90", "88", _share_of_read, "{:.0f} %"),
    Row("decode 8B Q4_0 at 512", "450", "700", "530", _of_model(_RATE, "8B Q4_0"), "{:.0f} tok/s"),
    Row("the same, launches overlapped", "", "", "600", _of_model(_RATE, "8B Q4_0, overlapped"), "{:.0f} tok/s"),
    Row("decode 3B", "800", "1,400", "830", _of_model(_RATE, "3B Q4_0"), "{:.0f} tok/s"),
    Row("decode 1B", "1,400", "2,600", "1,660", _of_model(_RATE, "1B Q4_0"), "{:.0f} tok/s"),
    Row("verifying 4 over 1", "1.25", "1.08", "1.3", _of_model("verify_4_over_1"), "{:.2f}"),
    Row("verifying 8 over 1", "1.6", "1.2", "1.30", _of_model("verify_8_over_1"), "{:.2f}"),
    Row("prefill 8B", "15", "30", "18", _of_model("prefill_tokens_per_second", factor=1e-3), "{:.1f}k tok/s"),
    Row("host time of a token", "60", "25", "40", _of_model("host_seconds_1", factor=1e6), "{:.0f} us"),
    Row("torch's int4 over ours", "1.0", "1.3", "1.2", _torch_over_ours, "{:.2f}"),
    Row("an empty kernel in a graph", "", "", "1", lambda f: 1e6 * float(f["boundary_seconds"]), "{:.2f} us"),
)


def render(figures: Figures, *, is_dry: bool = False) -> str:
    """The table as Markdown; figures that are missing or failed are a dash, those of a dry run say so."""
    lines = ["| | first | goal | predicted | found |", "|---|---|---|---|---|"]
    for row in ROWS:
        try:
            found = row.form.format(row.figure(figures))
        except (KeyError, TypeError, ZeroDivisionError):
            found = "-"
        if is_dry and found != "-":
            found = "made up"
        lines.append(f"| {row.what} | {row.first} | {row.goal} | {row.predicted} | {found} |")
    return "\n".join(lines)


def main() -> None:
    print(render(json.loads(Path(sys.argv[1]).read_text()), is_dry="--dry-run" in sys.argv))


if __name__ == "__main__":
    main()
