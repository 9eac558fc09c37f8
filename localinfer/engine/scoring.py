"""What a model computes for every position of a prompt: scores of its tokens, and its embedding."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_number
from localinfer.engine.engine import Engine
from localinfer.errors import ClosedError, RequestError
from localinfer.kernels.program import Batch, Program, Segment
from localinfer.models.decoder.pooling import Pooling
from localinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from localinfer.sampling.sampler import not_finite_error


def score_tokens(
    engine: Engine, program: Program, token_ids: Sequence[int] | NDArray[np.integer], top: int
) -> list[TokenLogprobs | None]:
    """The log probability of each token after those before it, and of the `top` likeliest; None for the first.

    Raises: as `Engine.check_prompt`; RequestError for no tokens; OutOfMemoryError, ClosedError.
    """
    tokens = engine.check_prompt(token_ids)
    top = check_number("top", top, 0, engine.vocab_size)
    scores: list[TokenLogprobs | None] = [None]
    for start, logits in _outputs(engine, program, tokens):
        for row, token_id in enumerate(tokens[start + 1 : start + 1 + len(logits)]):
            scores.append(token_logprobs(logits[row], int(token_id), top))
    return scores


def embed_tokens(
    engine: Engine, program: Program, token_ids: Sequence[int] | NDArray[np.integer], pooling: Pooling
) -> NDArray[np.float32]:
    """One vector for a text: its hidden states pooled, float32[hidden_size], of length 1.

    program: ends at the hidden states. Raises: as `score_tokens`.
    """
    tokens = engine.check_prompt(token_ids)
    pooled: NDArray[np.float64] | None = None
    for start, hidden in _outputs(engine, program, tokens):
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


def _outputs(engine: Engine, program: Program, tokens: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """What a program returns for each position, some positions at a time; in between, others may take steps.

    Yields the first position and float32[n, width]. Nothing of it stays in the cache.
    """
    if not tokens.size:
        raise RequestError("the prompt has no tokens; give at least one, such as the beginning-of-text token")
    chunk = min(program.max_batch_rows, program.max_output_rows)
    rows = np.arange(chunk, dtype=np.int32)
    with engine.exclusive_cache() as cache:
        cache.check_fits(tokens.size)
        sequence = cache.open()
    try:
        for start in range(0, tokens.size, chunk):
            stop = min(start + chunk, tokens.size)
            with engine.exclusive_cache():
                sequence.reserve(stop)
                addresses = sequence.page_addresses
                segment = Segment(start, stop - start, addresses, windowed_addresses=sequence.windowed_addresses)
                found = program.run(Batch(tokens[start:stop], (segment,), rows[: stop - start])).copy()
                sequence.commit(stop)
            if not np.isfinite(found).all():
                raise not_finite_error(start + int(np.argmin(np.isfinite(found).all(axis=1))))
            yield start, found
    finally:
        # A closed engine has given back all its pages.
        with suppress(ClosedError), engine.exclusive_cache():
            sequence.close()
