"""Simulated callers: each asks for something of an engine, takes it step by step, and knows what it must be."""

import random
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from localinfer.engine.admission import Owner
from localinfer.engine.cache.block_hashes import NO_SALT, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.request import NO_TOKEN, TokenEvent
from localinfer.engine.sampling.sampler import SamplingPlan
from localinfer.engine.scheduler import Generation
from localinfer.errors import ClosedError, ContextLengthError, OutOfMemoryError, OverloadedError
from localinfer.types import FloatArray
from tests.proof.simulation.checks import require
from tests.proof.simulation.cold import ColdAnswer
from tests.proof.simulation.faults import SimulatedError
from tests.proof.simulation.models import CONTEXT
from tests.proof.simulation.universe import SAMPLING, TokenIds, draw_max_tokens, draw_sampling

if TYPE_CHECKING:
    from tests.proof.simulation.world import World

_OWNERS: tuple[Hashable, ...] = ("a", "b", Owner("c", 1), None, None)
_PRIORITIES = (0, 0, 0, 0, 0, -1, 2, 2, 7)
_SALTS = (*(NO_SALT,) * 8, salt_of("a"), salt_of("b"))


@dataclass(frozen=True)
class Wish:
    """What a caller asks for. sampling: which of SAMPLING."""

    prompt: TokenIds
    sampling: int
    max_tokens: int | None
    stops: frozenset[int]
    hints: CacheHints
    context_shift: bool
    prediction: TokenIds
    owner: Hashable
    priority: int

    @property
    def limit(self) -> int:
        """Most tokens there may be."""
        most = sys.maxsize if self.max_tokens is None else self.max_tokens
        return most if self.context_shift else min(most, CONTEXT - self.prompt.size)


def draw_wish(world: "World", chooser: random.Random, prompt: TokenIds, system: int) -> Wish:
    """Options for a prompt, most of them usual."""
    sampling = draw_sampling(chooser)
    kind = chooser.random()
    max_tokens: int | None = draw_max_tokens(chooser)
    context_shift = False
    if kind < 0.04:
        # Up to the very end of the context, or beyond it.
        filler = np.resize(world.universe.turns[-1], CONTEXT)
        size = CONTEXT - chooser.choice((0, 0, 1, 2, 9))
        prompt = np.concatenate((prompt, filler))[:size]
        max_tokens = chooser.choice((None, 1, 12))
    elif kind < 0.05:
        prompt = np.concatenate((prompt, np.resize(world.universe.turns[-1], CONTEXT)))
    elif kind < 0.08:
        context_shift = True
        prompt = np.concatenate((prompt, np.resize(world.universe.turns[-1], CONTEXT)))
        prompt = prompt[: CONTEXT + chooser.choice((-12, -3, 0, 5))]
        max_tokens = chooser.choice((6, 20, 130))
    elif prompt.size > CONTEXT - 8:
        prompt = prompt[: CONTEXT - 8]
    prompt = world.tiny.gallery.mended(prompt)
    prompt = prompt if prompt.size else np.array([5], np.int32)
    stops = frozenset(chooser.sample(range(world.tiny.vocab_size), 3)) if chooser.random() < 0.3 else frozenset()
    hints = CacheHints(
        system_tokens=system if chooser.random() < 0.7 else 0,
        branch_tokens=(prompt.size - 3,) if chooser.random() < 0.2 and prompt.size > 3 else (),
        is_pinned=chooser.random() < 0.05,
        history=prompt[: prompt.size // 2] if chooser.random() < 0.1 else None,
        salt=chooser.choice(_SALTS),
    )
    prediction = np.zeros(0, np.int32)
    if chooser.random() < 0.1:
        prediction = world.universe.turn(chooser)
        prediction = prediction[prediction >= 0]
    owner, priority = chooser.choice(_OWNERS), chooser.choice(_PRIORITIES)
    return Wish(prompt, sampling, max_tokens, stops, hints, context_shift, prediction, owner, priority)


class Caller:
    """Reads one generation. is_over: nothing more comes, or is asked for. is_slow: it is seldom asked to read.

    may_lack_memory: what nobody can help but who planned for it took memory meanwhile.
    """

    def __init__(self, world: "World", wish: Wish, *, is_slow: bool) -> None:
        self.wish = wish
        self.is_slow = is_slow
        self.is_over = False
        self.is_finished = wish.limit <= 0
        self.is_cancelled = self.may_lack_memory = False
        self.count = self.num_chosen = 0
        self.generation: Generation | None = None
        self.answer: ColdAnswer | None = None
        self.plan = SamplingPlan(SAMPLING[wish.sampling], world.tiny.vocab_size)
        self._world = world

    def begin(self) -> bool:
        """Ask; return whether it was taken on. What cannot be is refused for the right reason."""
        world, wish = self._world, self.wish
        is_too_long = wish.prompt.size > CONTEXT and not wish.context_shift
        pool, engine = world.engine.pool, world.engine
        held = pool.peak_bytes(min(wish.prompt.size, CONTEXT), world.batch_rows)
        if wish.context_shift and wish.prompt.size > CONTEXT:
            head = world.oracle.answer(wish.prompt, wish.sampling, wish.hints.system_tokens).head
            held = pool.peak_bytes(head.size, world.batch_rows)
        is_too_large = pool.max_bytes is not None and held > pool.max_bytes
        requests = len(engine.scheduler.requests())
        try:
            self.generation = engine.generate(
                wish.prompt,
                self.plan,
                max_tokens=wish.max_tokens,
                stop_token_ids=wish.stops,
                context_shift=wish.context_shift,
                cache_hints=wish.hints,
                prediction=wish.prediction,
                owner=wish.owner,
                priority=wish.priority,
                media=world.tiny.gallery.given(wish.prompt, world.tell_encoding),
                # Predicted, and never too late.
                ttft_objective=1e9 if wish.priority else None,
            )
        except ContextLengthError:
            require(is_too_long, f"a prompt of {wish.prompt.size} tokens does not fit a context of {CONTEXT}")
            return False
        except OutOfMemoryError:
            require(is_too_large, f"a prompt of {wish.prompt.size} tokens was refused, which would have had room")
            return False
        except OverloadedError:
            limits = world.limits
            require(
                limits.max_queued is not None and requests >= limits.max_running + limits.max_queued,
                f"a request was refused beside {requests} others",
            )
            return False
        require(not is_too_long and not is_too_large, f"a prompt of {wish.prompt.size} tokens was not refused")
        shift = wish.hints.system_tokens if wish.context_shift else None
        self.answer = world.oracle.answer(wish.prompt, wish.sampling, shift)
        return True

    def read(self) -> None:
        """Take one event, and compare it."""
        assert self.generation is not None, "it was taken on"
        world = self._world
        try:
            event = next(self.generation)
        except StopIteration:
            require(self.is_finished or self.is_over, f"a text ended after {self.count} tokens without an event")
            self.is_over = True
            return
        except OutOfMemoryError as error:
            require(self.count == 0, f"memory ended after {self.count} tokens, which is no event: {error}")
            require(self.lacks_memory(), f"memory ended for a request that has enough of it: {error}")
            self.end()
            return
        except (ClosedError, SimulatedError) as error:
            _check_failure(world, error)
            self.end()
            return
        self._check(event)

    def note_row(self, row: FloatArray, position: int) -> None:
        """Compare the logits that a token is chosen from."""
        index = position - self.wish.prompt.size
        assert self.answer is not None, "it was taken on"
        require(index >= 0, "a token is chosen before the prompt ends")
        if row.tobytes() != self.answer.row(index):
            raise_difference(row, np.frombuffer(self.answer.row(index), np.float32), index)

    @property
    def num_drafted(self) -> int:
        """Drafted tokens that it was given."""
        generation = self.generation
        record = None if generation is None else generation.record.speculation
        return 0 if record is None else sum(record.accepted)

    def cancel(self) -> None:
        """End it, and expect one more event."""
        assert self.generation is not None, "it was taken on"
        self.generation.cancel()
        self.is_cancelled = True

    def end(self) -> None:
        """Stop reading."""
        self.is_over = True
        generation, self.generation = self.generation, None
        if generation is not None:
            generation.close()

    def lacks_memory(self) -> bool:
        """Whether memory may have ended for it: it is too long, a fault was met, or not only requests hold some."""
        pool, length = self._world.engine.pool, min(CONTEXT, self.wish.prompt.size + self.count)
        is_too_long = pool.max_bytes is not None and pool.peak_bytes(length, self._world.batch_rows) > pool.max_bytes
        return is_too_long or self.may_lack_memory or self._world.faults.took_memory

    def text(self) -> TokenIds:
        """Prompt and what was read."""
        tokens = [] if self.answer is None else self.answer.tokens[: self.count]
        return np.concatenate((self.wish.prompt, np.array(tokens, np.int32)))

    def _check(self, event: TokenEvent) -> None:
        assert self.answer is not None, "it was taken on"
        wish, index = self.wish, self.count
        cached = 0 if self.generation is None else self.generation.record.cached_tokens
        require(0 <= cached < wish.prompt.size, f"{cached} tokens of a prompt of {wish.prompt.size} were cached")
        require(not self.is_finished, "an event came after the last")
        if event.token_id == NO_TOKEN:
            self.is_finished = True
            if event.finish_reason == "cancelled":
                require(self.is_cancelled, "a text was cancelled that nobody cancelled")
            else:
                require(event.finish_reason == "length", f"a text ends for {event.finish_reason} without a token")
                require(self.lacks_memory(), "memory ended for a text that has enough of it")
            return
        require(event.position == wish.prompt.size + index, f"token {index} has position {event.position}")
        require(index < wish.limit, "a text is longer than was asked for")
        token = self.answer.token(index)
        require(event.token_id == token, f"token {index} is {event.token_id}, and {token} in a cold run")
        if self.answer.logprobs[index] is not None:
            found = self.plan.logprobs.pop(event.position, None)
            require(found == self.answer.logprobs[index], f"log probabilities of token {index} are not the cold ones")
        self.count += 1
        reason = "stop" if token in wish.stops else "length" if self.count == wish.limit else None
        require(event.finish_reason == reason, f"token {index} ends for {event.finish_reason}, not {reason}")
        self.is_finished = reason is not None


class Scores:
    """Reads the logits of every position of a text, some rows at a time between others' steps."""

    is_slow = False
    may_lack_memory = False

    def __init__(self, world: "World", token_ids: TokenIds) -> None:
        self.is_over = False
        self._world = world
        self._token_ids = token_ids
        self._rows: Iterator[tuple[int, FloatArray]] = world.engine.outputs(
            world.engine.program, token_ids, media=world.tiny.gallery.placed(token_ids)
        )

    def read(self) -> None:
        """Take some rows, and compare them."""
        world = self._world
        try:
            start, rows = next(self._rows)
        except StopIteration:
            self.is_over = True
            return
        except OutOfMemoryError:
            # Pages of running texts are not taken from them for it.
            self.end()
            return
        except (ClosedError, SimulatedError) as error:
            _check_failure(world, error)
            self.end()
            return
        wanted = world.oracle.logits(self._token_ids)[start : start + len(rows)]
        if rows.tobytes() != wanted.tobytes():
            raise_difference(rows, wanted, start)

    def cancel(self) -> None:
        """Stop reading."""
        self.end()

    def end(self) -> None:
        """Stop reading."""
        self.is_over = True
        self._rows.close()  # type: ignore[attr-defined]


def raise_difference(found: FloatArray, wanted: FloatArray, position: int) -> None:
    """Say by how much logits differ."""
    by = float(np.abs(found.astype(np.float64) - wanted.reshape(found.shape)).max())
    require(False, f"logits at {position} are not those of a cold run: they differ by up to {by:.3g}")


def _check_failure(world: "World", error: ClosedError | SimulatedError) -> None:
    """A read fails for what was done to the engine, and for nothing else."""
    if isinstance(error, ClosedError):
        require(world.is_closed, "the engine says that it was closed, and it was not")
    else:
        require(world.faults.num_fired > 0, "a pass failed that nothing was wrong with")
