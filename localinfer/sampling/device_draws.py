"""Tokens chosen where the logits are: what a program is asked for when nobody needs the logits themselves."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from localinfer.kernels.cuda.sampling import UNDECIDED, Draw, DrawingProgram
from localinfer.kernels.program import Batch, Program
from localinfer.sampling.sampler import SamplingPlan

WantedRows = Sequence[tuple[SamplingPlan, int]]
"""Of each output row, how its token is chosen and for which position."""

Results = NDArray[Any] | list[NDArray[Any]]
"""Of each output row, float32[vocab_size], or a single int32."""


class RowResults:
    """Runs a program for what `Sampler.choose` is to be given of each output row: its token, or its logits."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._drawing = program if isinstance(program, DrawingProgram) else None

    def run(self, batch: Batch, wanted: WantedRows) -> Results:
        """Compute a batch; what it gives is valid until the next call.

        wanted: empty if the logits of every row are.
        """
        program = self._drawing
        if program is None or not wanted or not all(plan.is_drawable for plan, _ in wanted):
            return self._program.run(batch)
        if all(plan.takes_largest for plan, _ in wanted):
            return program.run_greedy(batch)
        tokens = program.run_drawn(batch, [_draw(plan, position) for plan, position in wanted])
        if not (tokens == UNDECIDED).any():
            return tokens
        return [program.logits_of(row) if token == UNDECIDED else token for row, token in enumerate(tokens)]


def _draw(plan: SamplingPlan, position: int) -> Draw:
    return Draw(plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.seed, position)
