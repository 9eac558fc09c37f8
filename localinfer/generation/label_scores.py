"""Log probabilities of labels behind prompts that begin alike: what they share is computed once, and then forked.

A label is one token or several. The labels of a prompt form a trie, of which every inner node is one row of the model;
all prompts advance by one level together, in batches between the steps of generations. Nothing is sampled. On the CPU
a result does not depend on the other prompts, their order, the batches, threads or what was cached.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import common_length
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.engine import Engine
from localinfer.engine.media import MediaRun, PlacedMedia
from localinfer.engine.sampling.filters import log_total
from localinfer.engine.sampling.sampler import not_finite_error
from localinfer.kernels.program import Program
from localinfer.types import TokenIds

Label = tuple[int, ...]


class LabelPrompt(NamedTuple):
    """A prompt, and labels of which one stands behind it."""

    token_ids: TokenIds
    """int32[T]."""
    labels: tuple[Label, ...]
    """Ids of each label; none is the beginning of another."""


@dataclass(frozen=True)
class LabelScores:
    """Log probabilities of labels, and the cost of computing them."""

    logprobs: list[NDArray[np.float64]]
    """float64[labels] of each prompt: natural logarithms of the probability that the model gives to the whole label."""
    cached_tokens: int
    """Tokens of the first prompt that came from the cache."""
    computed_tokens: int
    """Rows that were computed."""


def score_labels(
    engine: Engine, prompts: Sequence[LabelPrompt], hints: CacheHints, media: Sequence[MediaRun] = ()
) -> LabelScores:
    """Compute the log probability of every label of every prompt.

    hints: how the cache keeps the prompts; a prompt that comes alone is kept whole, several as far as they begin alike.
    media: pictures and sounds, which all prompts have where they begin alike.
    Raises: RequestError, ContextLengthError, OutOfMemoryError, ClosedError, ModelFileError for logits that are not
        finite.
    """
    engine.check_generates()
    room = max(0, max((len(label) for prompt in prompts for label in prompt.labels), default=0) - 1)
    for prompt in prompts:
        engine.check_prompt(prompt.token_ids, media=media, needs_tokens=True, room=room)
    if not prompts:
        return LabelScores([], 0, 0)
    hints = engine.typed(hints, prompts[0].token_ids)
    placed = engine.place_media(prompts[0].token_ids, media, hints.salt)
    texts = [prompt.token_ids for prompt in prompts]
    scoring = _Scoring(engine, engine.program, texts, hints, placed, prompts=prompts)
    try:
        scoring.run()
    finally:
        scoring.close()
    return LabelScores(scoring.logprobs, scoring.cached_tokens, scoring.computed_tokens)


@dataclass(eq=False)
class _Node:
    """A prompt with the first tokens of some of its labels, and the ids that are not computed yet."""

    index: int
    label: Label
    sequence: SequenceCache
    pending: TokenIds


@dataclass(eq=False)
class PromptForks:
    """Prompts on their way through a program: what all begin with is computed once, and then forked."""

    engine: Engine
    program: Program
    """Computes their rows."""
    texts: Sequence[TokenIds]
    """The ids of each, at least one."""
    hints: CacheHints
    media: PlacedMedia | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    open: set[SequenceCache] = field(default_factory=set)

    def close(self) -> None:
        """Release the pages of all sequences."""
        with self.engine.scheduler.exclusive():
            while self.open:
                self.open.pop().close()

    def admit(self, length: int) -> SequenceCache:
        """A sequence with the first `length` ids, as far as they are cached."""
        with self.engine.exclusive_cache() as cache:
            admission = cache.admit(self.texts[0][: length + 1], self.hints, media=self.media)
            self.open.add(admission.sequence)
        self.cached_tokens = admission.cached_tokens
        return admission.sequence

    def compute_until(self, sequence: SequenceCache, token_ids: TokenIds, length: int) -> None:
        """Compute a sequence up to a length, without results, and have its pages in the cache."""
        room = self.program.max_batch_rows
        while sequence.length < length:
            with self.engine.exclusive_cache() as cache:
                end = min(length, sequence.length + room)
                if self.media is not None and (parted := self.media.whole_run_at(end)) is not None:
                    end = parted[0] if parted[0] > sequence.length else parted[1]
                self.forward([sequence], [token_ids[sequence.length : end]], np.empty(0, np.int32))
                cache.publish(sequence, token_ids, self.hints)

    def waves(self, length: int) -> Iterator[list[int]]:
        """Prompts whose last rows, behind the first `length`, fill a batch together, in order."""
        wave: list[int] = []
        rows = 0
        for index, token_ids in enumerate(self.texts):
            count = min(token_ids.size - length, self.program.max_batch_rows)
            if wave and (rows + count > self.program.max_batch_rows or len(wave) == self.program.max_output_rows):
                yield wave
                wave, rows = [], 0
            wave.append(index)
            rows += count
        yield wave

    def fork(self, sequence: SequenceCache) -> SequenceCache:
        """A twin of a sequence."""
        twin = sequence.fork()
        self.open.add(twin)
        return twin

    def forward(
        self, sequences: Sequence[SequenceCache], pending: Sequence[TokenIds], rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Compute ids that follow sequences, and return the program's results for some of these rows."""
        self.computed_tokens += sum(ids.size for ids in pending)
        return forward(self.program.run, sequences, pending, rows)


@dataclass(eq=False)
class _Scoring(PromptForks):
    """One call in progress."""

    prompts: Sequence[LabelPrompt] = ()
    logprobs: list[NDArray[np.float64]] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs = [np.zeros(len(prompt.labels), np.float64) for prompt in self.prompts]

    def run(self) -> None:
        """Compute all."""
        stem, length = self._stem()
        for wave in self.waves(length):
            nodes = self._prompts(wave, stem, length)
            while nodes:
                self._score(nodes)
                nodes = self._next_level(nodes)

    def _stem(self) -> tuple[SequenceCache, int]:
        """A sequence with what the prompts share, and how many tokens that is."""
        length = shared_length(self.texts)
        stem = self.admit(length)
        # Of a prompt that comes alone, up to where its last batch begins.
        last = max(stem.length, self.texts[0].size - self.program.max_batch_rows)
        self.compute_until(stem, self.texts[0], length if len(self.texts) > 1 else last)
        return stem, length

    def _prompts(self, wave: Sequence[int], stem: SequenceCache, length: int) -> list[_Node]:
        """The prompts of a wave, computed up to the rows of its batch."""
        nodes = []
        for index in wave:
            token_ids = self.prompts[index].token_ids
            sequence = stem
            if len(self.prompts) > 1:
                with self.engine.exclusive_cache():
                    sequence = self.fork(stem)
                start = token_ids.size - min(token_ids.size - length, self.program.max_batch_rows)
                self.compute_until(sequence, token_ids, start)
            nodes.append(_Node(index, (), sequence, token_ids[sequence.length :]))
        return nodes

    def _score(self, nodes: Sequence[_Node]) -> None:
        """Compute the pending rows of nodes, and add what labels get at them."""
        room = self.program.max_batch_rows
        for batch in _filled(nodes, min(room, self.program.max_output_rows), room):
            with self.engine.exclusive_cache() as cache:
                pending = [node.pending for node in batch]
                ends = np.cumsum([ids.size for ids in pending], dtype=np.int32) - np.int32(1)
                logits = self.forward([node.sequence for node in batch], pending, ends)
                for node, row in zip(batch, logits, strict=True):
                    self._add(node, row)
                if len(self.prompts) == 1 and not batch[0].label:
                    cache.publish(batch[0].sequence, self.prompts[0].token_ids, self.hints)

    def _add(self, node: _Node, row: NDArray[np.float32]) -> None:
        if not math.isfinite(float(row.max())):
            raise not_finite_error(self.prompts[node.index].token_ids.size + len(node.label))
        total, depth = log_total(row), len(node.label)
        for number, label in enumerate(self.prompts[node.index].labels):
            if label[:depth] == node.label and len(label) > depth:
                self.logprobs[node.index][number] += float(row[label[depth]]) - total

    def _next_level(self, nodes: Sequence[_Node]) -> list[_Node]:
        """The inner nodes one token below these, which are given up."""
        following = []
        with self.engine.exclusive_cache():
            for node in nodes:
                depth = len(node.label) + 1
                labels = self.prompts[node.index].labels
                inner = {one[:depth] for one in labels if one[: depth - 1] == node.label and len(one) > depth}
                for label in sorted(inner):
                    following.append(_Node(node.index, label, self.fork(node.sequence), np.array(label[-1:], np.int32)))
                self.open.discard(node.sequence)
                node.sequence.close()
        return following


def _filled(nodes: Sequence[_Node], width: int, room: int) -> Iterator[list[_Node]]:
    """Nodes in batches of at most `width` results and `room` rows."""
    batch: list[_Node] = []
    rows = 0
    for node in nodes:
        if batch and (len(batch) == width or rows + node.pending.size > room):
            yield batch
            batch, rows = [], 0
        batch.append(node)
        rows += node.pending.size
    yield batch


def shared_length(texts: Iterable[TokenIds]) -> int:
    """Number of leading ids that texts share, at most all but the last of each."""
    first, *others = texts
    return min((common_length(first[:-1], other[:-1]) for other in others), default=first.size - 1)
