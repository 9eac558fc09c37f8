"""The oracle: what a model says to a text that nothing was cached of, with ample memory, alone and without drafts.

Nothing of the scheduler, the prefix tree or rollbacks has part in it: a sequence of its own, one row after the other.
Answers are kept, since simulated callers ask the same again and again.
"""

import sys
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.sampling.sampler import Sampler, SamplingPlan, TokenLogprobs
from tests.proof.simulation.models import CONTEXT, TinyModel, valid_bytes, valid_state_bytes
from tests.proof.simulation.pictures import shortened
from tests.proof.simulation.universe import SAMPLING, TokenIds

_MOST_OPEN = 64
"""Answers whose keys and values are kept, to go on from."""
_MOST_ANSWERS = 20_000
_MOST_DIGESTS = 200_000


class ColdAnswer:
    """The tokens of one prompt and one set of options, computed as far as they are asked for.

    head: ids of its present context. rows: bytes of each token's logits. logprobs: what was reported with each, None
    where nothing is.
    """

    def __init__(self, oracle: "Oracle", prompt: TokenIds, sampling: int, shift_system: int | None) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.rows: list[bytes] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self._oracle = oracle
        self._plan = SamplingPlan(SAMPLING[sampling], oracle.tiny.vocab_size)
        self._shift_system = shift_system
        self.head = prompt if prompt.size <= CONTEXT else self._shortened(prompt)
        self._base = 0
        self._sequence: SequenceCache | None = None

    def token(self, index: int) -> int:
        """The token after so many others."""
        if len(self.tokens) <= index:
            # Ctrl-C is for the engine, which may be in a step now.
            trace = sys.gettrace()
            sys.settrace(None)
            try:
                while len(self.tokens) <= index:
                    self._extend()
            finally:
                sys.settrace(trace)
        return self.tokens[index]

    def row(self, index: int) -> bytes:
        """The logits that it was chosen from."""
        self.token(index)
        return self.rows[index]

    def release(self) -> None:
        """Give up its memory; what is known stays."""
        if self._sequence is not None:
            self._sequence.close()
            self._sequence = None

    def _extend(self) -> None:
        text = np.concatenate((self.head, np.array(self.tokens[self._base :], np.int32)))
        if self._sequence is None:
            self._sequence = self._oracle.open(text)
            self._oracle.note_open(self)
        pending = text[self._sequence.length :]
        logits = forward(
            self._oracle.tiny.cold.run, (self._sequence,), (pending,), np.array([pending.size - 1], np.int32)
        )
        row = logits[0].copy()
        history = np.concatenate((self.prompt, np.array([*self.tokens, 0], np.int32)))
        position = history.size - 1
        token = self._oracle.sampler.choose(row, self._plan, position, history)
        self.rows.append(row.tobytes())
        self.logprobs.append(self._plan.logprobs.pop(position, None))
        self.tokens.append(token)
        if self._sequence.length == CONTEXT and self._shift_system is not None:
            self.head = self._shortened(np.append(text, np.int32(token)))
            self._base = len(self.tokens)
            self.release()

    def _shortened(self, text: TokenIds) -> TokenIds:
        """The system tokens, at most half of a context, and the last half of what is left beside them."""
        assert self._shift_system is not None, "it may be shifted"
        system = min(self._shift_system, CONTEXT // 2)
        return shortened(self._oracle.tiny.gallery, text, system, (CONTEXT - system) // 2)


class Oracle:
    """Cold answers, texts and states of one model, computed once."""

    def __init__(self, tiny: TinyModel) -> None:
        self.tiny = tiny
        self.sampler = Sampler(tiny.vocab_size)
        self.pool = PagePool(tiny.layout, max_bytes=None)
        self.num_computed = self.num_known = 0
        self._answers: OrderedDict[tuple[bytes, int, int | None], ColdAnswer] = OrderedDict()
        self._open: OrderedDict[ColdAnswer, None] = OrderedDict()
        self._pages: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._states: OrderedDict[bytes, int] = OrderedDict()
        self._logits: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._results: OrderedDict[object, object] = OrderedDict()
        self._masks: dict[tuple[int, bool], NDArray[np.uint8]] = {}
        self._state_mask = valid_state_bytes(tiny.layout)

    def open(self, token_ids: TokenIds) -> SequenceCache:
        """A sequence for a text, or the beginning of one, that keeps everything."""
        sequence = SequenceCache(self.pool, max_length=CONTEXT, keeps_unseen=True)
        sequence.media = self.tiny.gallery.placed(token_ids)
        return sequence

    def answer(self, prompt: TokenIds, sampling: int, shift_system: int | None) -> ColdAnswer:
        """The answer to a prompt; sampling: which of SAMPLING; shift_system: system tokens, where contexts shift."""
        key = (prompt.tobytes(), sampling, shift_system)
        found = self._answers.get(key)
        if found is None:
            self.num_computed += 1
            found = self._answers[key] = ColdAnswer(self, prompt, sampling, shift_system)
            if len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)[1].release()
        else:
            self.num_known += 1
        return found

    def note_open(self, answer: ColdAnswer) -> None:
        """Let an answer keep its memory while it is one of the last."""
        self._open[answer] = None
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[0].release()

    def pages(self, token_ids: TokenIds) -> list[tuple[int, int]]:
        """Digests of what is kept of a text: of each page as far as the text goes, and of its sliding-window block."""
        page_tokens = self.pool.page_tokens
        ends = [*range(page_tokens, token_ids.size, page_tokens), token_ids.size]
        keys = [token_ids[:end].tobytes() for end in ends]
        known = [self._pages.get(key) for key in keys]
        if None in known:
            sequence = self._forward(token_ids)
            for key, end, page in zip(keys, ends, sequence.pages.tolist(), strict=False):
                count = end - (end - 1) // page_tokens * page_tokens
                windowed = self.windowed_digest(self.pool, page, count) if self.pool.windowed_bytes else 0
                self._pages[key] = self.page_digest(self.pool, page, count), windowed
            sequence.close()
            while len(self._pages) > _MOST_DIGESTS:
                self._pages.popitem(last=False)
        return [self._pages[key] for key in keys]

    def state(self, token_ids: TokenIds) -> int:
        """Digest of the recurrent states after a text."""
        key = token_ids.tobytes()
        known = self._states.get(key)
        if known is None:
            sequence = self._forward(token_ids)
            known = self._states[key] = self.state_digest(self.pool, sequence._state.now.slot)
            sequence.close()
            if len(self._states) > _MOST_DIGESTS:
                self._states.popitem(last=False)
        return known

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        """float32[T, vocab_size]: what follows each position."""
        key = token_ids.tobytes()
        known = self._logits.get(key)
        if known is None:
            sequence = self.open(token_ids)
            rows = np.arange(token_ids.size, dtype=np.int32)
            known = forward(self.tiny.cold.run, (sequence,), (token_ids,), rows).copy()
            self._logits[key] = known
            sequence.close()
            if len(self._logits) > 500:
                self._logits.popitem(last=False)
        return known

    def remember(self, key: object, result: object) -> object:
        """The first result of a computation, to compare every later one with."""
        if len(self._results) > 2000:
            self._results.popitem(last=False)
        return self._results.setdefault(key, result)

    def known(self, key: object) -> object | None:
        """What was remembered."""
        return self._results.get(key)

    def page_digest(self, pool: PagePool, page: int, count: int) -> int:
        """Of the first `count` positions of a page, where they are keys and values of layers that see everything."""
        return hash((pool.view(page) & self._mask(count, False)).tobytes())

    def windowed_digest(self, pool: PagePool, page: int, count: int) -> int:
        """The same of its sliding-window block."""
        return hash((pool.windowed_view(page) & self._mask(count, True)).tobytes())

    def state_digest(self, pool: PagePool, slot: int) -> int:
        """Of the recurrent states in a slot."""
        return hash((pool.state_view(slot) & self._state_mask).tobytes())

    def _mask(self, count: int, is_windowed: bool) -> NDArray[np.uint8]:
        mask = self._masks.get((count, is_windowed))
        if mask is None:
            mask = self._masks[count, is_windowed] = valid_bytes(self.tiny.layout, count, is_windowed=is_windowed)
        return mask

    def _forward(self, token_ids: TokenIds) -> SequenceCache:
        sequence = self.open(token_ids)
        if sequence.media is not None and sequence.media.whole_run_at(token_ids.size) is not None:
            # Its rows see each other, so that those before a place are computed with those behind it.
            token_ids = self.tiny.gallery.completed(token_ids)
        forward(self.tiny.cold.run, (sequence,), (token_ids,), np.empty(0, np.int32))
        return sequence
