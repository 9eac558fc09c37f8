"""Several completions of one prompt, read in turn, and the best of them."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from localinfer.arguments import check_number, owned
from localinfer.generation.completion import Completion
from localinfer.generation.options import GenerationOptions
from localinfer.generation.stream import TextStream

MAX_COMPLETIONS = 128


def complete_many(
    open_stream: Callable[[GenerationOptions], TextStream], options: GenerationOptions, *, n: int, best_of: int | None
) -> list[Completion]:
    """Return `n` completions; of `best_of` made, those of the largest mean log probability per token, best first.

    open_stream: begins one with these options. The i-th that is made, from 0, has the seed of the options, or else the
    one drawn for the first, + i, so that each can be made again alone.
    Raises: RequestError naming n or best_of; else as the streams do, and then all of them are closed.
    """
    check_number("n", n, 1, MAX_COMPLETIONS)
    check_number("best_of", best_of, n, MAX_COMPLETIONS, none="for n")
    is_ranked = best_of is not None and best_of > n
    wanted_logprobs = options.get("logprobs")
    if is_ranked and wanted_logprobs is None:
        options = {**options, "logprobs": 0}
    # The later ones begin after steps of the first, and are to have the same options.
    options = cast(GenerationOptions, {name: owned(value) for name, value in options.items()})
    completions = _read_alternately(open_stream, options, n if best_of is None else best_of)
    if not is_ranked:
        return completions
    best = sorted(completions, key=_mean_logprob, reverse=True)[:n]
    if wanted_logprobs is None:
        return [replace(completion, logprobs=None) for completion in best]
    return best


def _read_alternately(
    open_stream: Callable[[GenerationOptions], TextStream], options: GenerationOptions, count: int
) -> list[Completion]:
    streams: list[TextStream] = []
    running: list[TextStream] = []
    try:
        for index in range(count):
            seed = (streams[0].stats.seed + index) % 2**64 if streams else options.get("seed")
            # What was begun is not given up for what follows.
            objective = None if streams else options.get("ttft_objective")
            stream = open_stream({**options, "seed": seed, "ttft_objective": objective})
            streams.append(stream)
            # The first token of one comes before the next one begins, which so finds the prompt in the cache.
            running += [stream for _ in itertools.islice(stream, 1)]
        while running:
            running = [stream for stream in running if next(stream, None) is not None]
        return [stream.result() for stream in streams]
    finally:
        for stream in streams:
            stream.close()


def _mean_logprob(completion: Completion) -> float:
    logprobs = completion.logprobs or []
    return sum(token.logprob for token in logprobs) / len(logprobs) if logprobs else 0.0
