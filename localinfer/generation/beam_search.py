"""Beam search: the likeliest texts that a search of fixed width finds, instead of sampling one.

Beams share the pages of their common prefix: a beam that continues in two ways is forked, and no position is computed
twice (Freitag and Al-Onaizan, Beam Search Strategies for Neural Machine Translation, arXiv 1702.01806).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_number
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.engine import Engine, check_max_tokens
from localinfer.engine.media import MediaRun, PlacedMedia
from localinfer.engine.sampling.filters import likeliest, log_total
from localinfer.engine.sampling.sampler import not_finite_error
from localinfer.types import Beam, FinishReason

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

MAX_BEAMS = 64


class _Live(NamedTuple):
    """A text that may continue, whose last token is not computed yet."""

    sequence: SequenceCache
    token_ids: tuple[int, ...]
    logprob: float


class _Candidate(NamedTuple):
    logprob: float
    parent: int
    token_id: int


def search_beams(
    engine: Engine,
    prompt_ids: Sequence[int] | NDArray[np.integer],
    *,
    num_beams: int,
    max_tokens: int | None = None,
    length_penalty: float = 1.0,
    stop_token_ids: Collection[int] = (),
    media: Sequence[MediaRun] = (),
) -> list[Beam]:
    """Return the `num_beams` best texts that the search finds, best first; fewer if there are no more.

    In each step every live beam is extended by each token, and the `num_beams` likeliest results stay live; one that
    ends with a stop token is finished, if it is among them. The search ends when no live beam can become better than
    the finished ones. The result depends on the model and these arguments only.

    media: pictures and sounds of the prompt, as of `Engine.generate`.
    length_penalty: 0 compares sums, which favours short texts; 1 means per token; more favours long ones.
    Raises: RequestError, ContextLengthError, OutOfMemoryError, ClosedError, ModelFileError for logits that are not
        finite.
    """
    engine.check_generates()
    check_number("num_beams", num_beams, 1, MAX_BEAMS)
    most = check_max_tokens(max_tokens)
    hint = "1 compares means per token"
    check_number("length_penalty", length_penalty, 0, 10, kind=float, hint=hint)
    prompt = engine.check_prompt(prompt_ids, media=media, needs_tokens=True)
    hints = engine.typed(CacheHints(), prompt)
    placed = engine.place_media(prompt, media, hints.salt)
    most = min(most, engine.context_length - prompt.size)
    if most == 0:
        return []
    search = _Search(engine, prompt, placed, hints, num_beams, most, length_penalty, frozenset(stop_token_ids))
    try:
        search.run()
    finally:
        search.close()
    return search.finished


def beam_text(tokenizer: "Tokenizer | None", prompt_ids: Sequence[int] | NDArray[np.integer], beam: Beam) -> str:
    """The text of a beam, without an end token; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    token_ids = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
    previous = int(prompt_ids[-1])
    return tokenizer.decode(
        (token_id for token_id in token_ids if token_id < tokenizer.vocab_size),
        previous_token_id=previous if 0 <= previous < tokenizer.vocab_size else None,
    )


@dataclass
class _Search:
    """One search in progress."""

    engine: Engine
    prompt: NDArray[np.int32]
    media: PlacedMedia | None
    hints: CacheHints
    num_beams: int
    most: int
    length_penalty: float
    stops: frozenset[int]
    live: list[_Live] = field(default_factory=list)
    finished: list[Beam] = field(default_factory=list)

    def run(self) -> None:
        """Search to the end."""
        candidates = self._begin()
        for length in range(1, self.most + 1):
            with self.engine.exclusive_cache():
                self._select(candidates, length)
            if length == self.most or not self.live or self._is_decided():
                break
            candidates = self._extend()
        for live in self.live if not self._is_decided() else ():
            self._finish(live.token_ids, live.logprob, "length")

    def close(self) -> None:
        """Release the pages of all beams."""
        if self.live:
            with self.engine.exclusive_cache():
                for live in self.live:
                    live.sequence.close()
            self.live = []

    def _begin(self) -> list[_Candidate]:
        """Compute what is not cached of the prompt; return its continuations."""
        with self.engine.exclusive_cache() as cache:
            sequence = cache.admit(self.prompt, self.hints, media=self.media).sequence
            self.live = [_Live(sequence, (), 0.0)]
        chunk = self.engine.program.max_batch_rows
        while True:
            with self.engine.exclusive_cache() as cache:
                pending = self.prompt[sequence.length :]
                if pending.size <= chunk:
                    candidates = self._compute([pending], 0)
                    cache.publish(sequence, self.prompt, self.hints)
                    return candidates
                end = sequence.length + chunk
                if self.media is not None and (parted := self.media.whole_run_at(end)) is not None:
                    end = parted[0] if parted[0] > sequence.length else parted[1]
                part = self.prompt[sequence.length : end]
                forward(self.engine.program.run, (sequence,), (part,), np.empty(0, np.int32))
                cache.publish(sequence, self.prompt, self.hints)

    def _extend(self) -> list[_Candidate]:
        """Compute the last token of every live beam; return their continuations."""
        program = self.engine.program
        width = min(program.max_batch_rows, program.max_output_rows)
        candidates: list[_Candidate] = []
        for first in range(0, len(self.live), width):
            with self.engine.exclusive_cache():
                lasts = [np.array(live.token_ids[-1:], np.int32) for live in self.live[first : first + width]]
                candidates += self._compute(lasts, first)
        return candidates

    def _compute(self, pending: list[NDArray[np.int32]], first: int) -> list[_Candidate]:
        """Compute pending ids of some live beams, from `first` on; return the likeliest continuations of each."""
        live = self.live[first : first + len(pending)]
        ends = np.cumsum([ids.size for ids in pending], dtype=np.int32) - np.int32(1)
        logits = forward(self.engine.program.run, [beam.sequence for beam in live], pending, ends)
        candidates: list[_Candidate] = []
        for index, beam in enumerate(live):
            row = logits[index]
            if not math.isfinite(float(row.max())):
                raise not_finite_error(self.prompt.size + len(beam.token_ids))
            total = log_total(row)
            # Enough of them stay live, even if each stop token is among them.
            for token_id in likeliest(row, self.num_beams + len(self.stops)).tolist():
                logprob = beam.logprob + (float(row[token_id]) - total)
                if logprob > -math.inf:
                    candidates.append(_Candidate(logprob, first + index, token_id))
        return candidates

    def _select(self, candidates: list[_Candidate], length: int) -> None:
        """Finish what ends, and keep the best of the rest live."""
        candidates = sorted(candidates, key=lambda one: (-one.logprob, one.parent, one.token_id))
        former = self.live
        following: list[_Live] = []
        self.live = []
        try:
            for rank, (logprob, parent, token_id) in enumerate(candidates):
                token_ids = (*former[parent].token_ids, token_id)
                if token_id in self.stops:
                    if rank < self.num_beams:
                        self._finish(token_ids, logprob, "stop")
                elif len(following) < self.num_beams:
                    following.append(_Live(former[parent].sequence.fork(), token_ids, logprob))
        finally:
            for live in former:
                live.sequence.close()
            self.live = following

    def _finish(self, token_ids: tuple[int, ...], logprob: float, reason: FinishReason) -> None:
        beam = Beam(token_ids, logprob, self._score(logprob, len(token_ids)), reason)
        self.finished.append(beam)
        self.finished.sort(key=lambda beam: (-beam.score, beam.token_ids))
        del self.finished[self.num_beams :]

    def _is_decided(self) -> bool:
        """True if as many texts as are wanted are finished, and no live beam can become better than one of them."""
        if len(self.finished) < self.num_beams:
            return False
        # Probabilities only fall, but a longer text may gain by its length.
        best = max((live.logprob for live in self.live), default=-math.inf)
        length = self.most if self.length_penalty > 0.0 else 1
        return self.finished[-1].score >= self._score(best, length)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self.length_penalty)
