"""Texts that another process began (`ResumedText`), and their generation here.

The tokens that exist already come as events first. The bits of a position depend on the ids before it only, so they
are what this engine would choose too: they are read with the prompt. Log probabilities, and the state of mirostat, are
made of the logits of each position; there every token is chosen again, several in a step, and compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.engine import Engine, check_max_tokens
from localinfer.engine.request import NO_TOKEN, TokenEvent
from localinfer.engine.sampling.mask import Allowed, GuidingMask
from localinfer.engine.sampling.sampler import SamplingPlan, TokenMask
from localinfer.engine.scheduler import Generation
from localinfer.errors import SessionMismatchError
from localinfer.types import FinishReason, TokenIds


@dataclass(frozen=True)
class ResumedText:
    """Progress of another process, with the same model and options, with a text."""

    prompt_ids: TokenIds
    """int32, ids of its prompt there; conversations may be cut into other ids here."""
    seed: int
    """The seed that was drawn there."""
    token_ids: Sequence[int] = ()
    """Ids that were generated there."""
    cached_tokens: int | None = None
    """Cached tokens of the prompt there; None if unknown."""


class ReplayMask:
    """A `GuidingMask` that drafts the tokens of a resumed text, over another mask or none.

    start: length of the prompt.
    """

    def __init__(self, token_ids: NDArray[np.int32], start: int, vocab_size: int, mask: TokenMask | None) -> None:
        self._token_ids = token_ids
        self._start = start
        self._everything = np.ones(vocab_size, np.bool_)
        self._mask = mask
        self._guide = mask if isinstance(mask, GuidingMask) else None

    def __call__(self, history: TokenIds) -> Allowed:
        return self._everything if self._mask is None else self._mask(history)

    def forced(self, history: TokenIds, most: int) -> list[int]:
        rest: list[int] = self._token_ids[history.size - self._start :][:most].tolist()
        return rest if rest or self._guide is None else self._guide.forced(history, most)

    def prepare(self, history: TokenIds, position: int) -> None:
        if self._guide is not None:
            self._guide.prepare(history, position)

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        return len(draft) if self._guide is None else self._guide.count_allowed(history, draft)


def resume(
    engine: Engine,
    prompt_ids: NDArray[np.int32],
    plan: SamplingPlan,
    token_ids: Sequence[int],
    *,
    max_tokens: int | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    context_shift: bool = False,
    **options: Any,
) -> tuple[Generation, Iterator[TokenEvent]]:
    """Continue a prompt after these tokens of its completion; return the generation, and its events from the first on.

    What follows a token that ends the text is dropped. options: see `Engine.generate`.
    Raises: as `Engine.generate`; while iterating SessionMismatchError for tokens that are not chosen again.
    """
    given = engine.check_prompt(token_ids, shifts_context=True)
    options |= {"stop_token_ids": stop_token_ids, "context_shift": context_shift}
    if plan.params.logprobs is not None or plan.mirostat is not None:
        plan.mask = ReplayMask(given, prompt_ids.size, engine.vocab_size, plan.mask)
        generation = engine.generate(prompt_ids, plan, max_tokens=max_tokens, **options)
        return generation, _compared(generation, given)
    limit = check_max_tokens(max_tokens)
    most = limit if context_shift else min(limit, engine.context_length - prompt_ids.size)
    ending: FinishReason | None = None
    for index, token_id in enumerate(given[:most].tolist()):
        if token_id in stop_token_ids or index + 1 == most:
            ending = "stop" if token_id in stop_token_ids else "length"
            given = given[: index + 1]
            break
    if ending is not None or not most:
        generation = engine.generate(prompt_ids, plan, max_tokens=0, **options)
        return generation, _preceded(generation, given[:most], prompt_ids.size, ending)
    whole = np.concatenate((prompt_ids, given))
    rest = None if max_tokens is None else limit - given.size
    generation = engine.generate(whole, plan, max_tokens=rest, completion_tokens=given.size, **options)
    return generation, _preceded(generation, given, prompt_ids.size, None)


def _preceded(
    generation: Generation, given: NDArray[np.int32], start: int, ending: FinishReason | None
) -> Iterator[TokenEvent]:
    """Events of the given tokens, whose last one may end the text, and those of a generation after them."""
    last = start + given.size - 1
    for position, token_id in enumerate(given.tolist(), start):
        if generation.request.is_cancelled:
            break
        yield TokenEvent(token_id, position, ending if position == last else None)
    yield from generation


def _compared(generation: Generation, given: NDArray[np.int32]) -> Iterator[TokenEvent]:
    """Events of a generation that has to begin with the given tokens."""
    wanted = given.tolist()
    for index, event in enumerate(generation):
        if index < len(wanted) and event.token_id not in (wanted[index], NO_TOKEN):
            raise SessionMismatchError(
                f"the text that another process began continues differently here, from position {event.position} on: "
                "its model, version or settings are other ones; serve the same file with the same options everywhere"
            )
        yield event
