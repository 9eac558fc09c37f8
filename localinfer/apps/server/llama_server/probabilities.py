"""Probabilities of tokens under llama-server's names, as the model gave them or as they were drawn from."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from localinfer.apps.server.transport.http import unsupported
from localinfer.engine.sampling.filters import keep_candidates, scaled
from localinfer.engine.sampling.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.types import TokenLogprobs

_LEAST = -3.4028234663852886e38
"""What stands for minus infinity, which JSON has not: the least float32."""


class ShownProbabilities:
    """What is told of each token of a text.

    count: so many of the likeliest. after_sampling: as they were drawn from, after all filters, instead of as the model
    gave them.
    """

    def __init__(self, tokenizer: "Tokenizer", count: int, params: SamplingParams, *, after_sampling: bool) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._params = params
        self._after_sampling = after_sampling

    def entry(self, token_id: int, found: "TokenLogprobs") -> dict[str, Any]:
        """A member of `completion_probabilities`."""
        if not self._after_sampling:
            top = [self._token(other, "logprob", _finite(logprob)) for other, logprob in found.top[: self._count]]
            return {**self._token(token_id, "logprob", _finite(found.logprob)), "top_logprobs": top}
        drawn = _drawn_from(found.top, self._params)
        likeliest = [self._token(other, "prob", prob) for other, prob in drawn.items()][: self._count]
        return {**self._token(token_id, "prob", drawn.get(token_id, 0.0)), "top_probs": likeliest}

    def _token(self, token_id: int, name: str, value: float) -> dict[str, Any]:
        # A model may have more logits than its vocabulary has tokens.
        spelled = self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""
        return {"id": token_id, "token": spelled.decode("utf-8", "ignore"), "bytes": list(spelled), name: value}


def needed_logprobs(count: int, params: SamplingParams, *, after_sampling: bool, is_constrained: bool) -> int:
    """How many log probabilities the engine has to report.

    Raises: ApiError where the probabilities after sampling cannot be told from those.
    """
    if not after_sampling:
        return count
    if params.temperature > 0.0 and not 0 < params.top_k <= MAX_LOGPROBS:
        raise unsupported(
            f"post_sampling_probs is given with top_k {params.top_k}; send a top_k from 1 to {MAX_LOGPROBS}", "top_k"
        )
    if is_constrained or params.has_penalties or params.has_dry_penalty or params.has_rare_steps or params.logit_bias:
        raise unsupported(
            "post_sampling_probs is given, but is told after temperature, top_k, top_p and min_p only; leave out other "
            "filters, penalties, logit_bias and the form, or ask for n_probs alone",
            "post_sampling_probs",
        )
    return max(count, params.top_k if params.temperature > 0.0 else 1)


def _drawn_from(top: Sequence[tuple[int, float]], params: SamplingParams) -> dict[int, float]:
    """The tokens that the sampler drew from, likeliest first, and their probabilities."""
    if params.temperature == 0.0:
        return {top[0][0]: 1.0}
    logits = np.array([logprob for _, logprob in top], np.float64)
    kept = keep_candidates(logits, params, params.temperature, 1.0)
    weights = np.exp(scaled(logits[kept], params.temperature))
    probabilities = (weights / weights.sum()).tolist()
    return {top[place][0]: prob for place, prob in zip(kept.tolist(), probabilities, strict=True)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
