"""What a model computes for every position of a prompt: scores of its tokens, and its embedding."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_number
from localinfer.engine.engine import Engine
from localinfer.kernels.program import Program
from localinfer.models.decoder.pooling import Pooling
from localinfer.sampling.filters import TokenLogprobs, token_logprobs


def score_tokens(
    engine: Engine, program: Program, token_ids: Sequence[int] | NDArray[np.integer], top: int
) -> list[TokenLogprobs | None]:
    """The log probability of each token after those before it, and of the `top` likeliest; None for the first.

    Raises: as `Engine.check_prompt`; RequestError for no tokens; OutOfMemoryError, ClosedError.
    """
    tokens = engine.check_prompt(token_ids, needs_tokens=True)
    top = check_number("top", top, 0, engine.vocab_size)
    scores: list[TokenLogprobs | None] = [None]
    for start, logits in engine.outputs(program, tokens):
        for row, token_id in enumerate(tokens[start + 1 : start + 1 + len(logits)]):
            scores.append(token_logprobs(logits[row], int(token_id), top))
    return scores


def embed_tokens(
    engine: Engine, program: Program, token_ids: Sequence[int] | NDArray[np.integer], pooling: Pooling
) -> NDArray[np.float32]:
    """One vector for a text: its hidden states pooled, float32[hidden_size], of length 1.

    program: ends at the hidden states. Raises: as `score_tokens`.
    """
    tokens = engine.check_prompt(token_ids, needs_tokens=True)
    pooled: NDArray[np.float64] | None = None
    for start, hidden in engine.outputs(program, tokens):
        match pooling:
            case Pooling.MEAN:
                total = hidden.sum(axis=0, dtype=np.float64)
                pooled = total if pooled is None else pooled + total
            case Pooling.FIRST if start == 0:
                pooled = hidden[0].astype(np.float64)
            case Pooling.LAST:
                pooled = hidden[-1].astype(np.float64)
    assert pooled is not None, "a prompt has tokens"
    length = float(np.sqrt(pooled @ pooled))
    return (pooled / length if length > 0 else pooled).astype(np.float32)
