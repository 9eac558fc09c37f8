"""What one process of a simulation does; nothing of the product is imported before a bug is planted in it."""

import importlib
import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.proof.simulation.campaign import Report

_TOLD_SECONDS = 20.0


def work(part: "tuple[list[tuple[str, int, int]], bool, bool, str | None]") -> "Report":
    """Do runs until one fails.

    part: model, seed and steps of each; whether a failure is shrunk; whether progress goes to standard error; the bug
    that is planted first, if one is.
    """
    runs, shrinks, is_telling, plant = part
    if plant is not None:
        importlib.import_module("tests.proof.simulation.planting").plant(plant)
    from tests.proof.simulation.campaign import Report, run_seed

    logging.disable(logging.CRITICAL)
    report = Report()
    told = time.monotonic()
    for number, (model, seed, steps) in enumerate(runs):
        run_seed(model, seed, steps, report, shrinks=shrinks)
        if report.failure is not None:
            break
        if is_telling and time.monotonic() - told > _TOLD_SECONDS:
            told = time.monotonic()
            rate = report.steps / report.seconds
            print(
                f"run {number + 1} of {len(runs)}, seed {seed}: {rate:,.0f} steps a second", file=sys.stderr, flush=True
            )
    return report
