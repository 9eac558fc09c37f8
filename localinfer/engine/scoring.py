"""How likely each token of a prompt was."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_number
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.filters import token_logprobs
from localinfer.kernels.program import Program
from localinfer.types import TokenLogprobs


def score_tokens(
    engine: Engine, program: Program, token_ids: Sequence[int] | NDArray[np.integer], top: int
) -> list[TokenLogprobs | None]:
    """The log probability of each token after those before it, and of the `top` likeliest; None for the first.

    Raises: as `Engine.check_prompt`; RequestError for no tokens; OutOfMemoryError, ClosedError.
    """
    engine.check_generates()
    tokens = engine.check_prompt(token_ids, needs_tokens=True)
    top = check_number("top", top, 0, engine.vocab_size)
    scores: list[TokenLogprobs | None] = [None]
    for start, logits in engine.outputs(program, tokens):
        for row, token_id in enumerate(tokens[start + 1 : start + 1 + len(logits)]):
            scores.append(token_logprobs(logits[row], int(token_id), top))
    return scores
