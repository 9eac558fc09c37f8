"""Slots as llama.cpp's server numbers them, and totals of what was computed.

A text needs no slot to be computed: all texts share one cache. A slot only names a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localinfer.apps.server.transport.http import ApiError

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats
    from localinfer.generation.stream import TextStream
    from localinfer.types import TokenIds


@dataclass
class ComputedWork:
    """Tokens of prompts that were computed, and tokens that were generated after the first of each text, in time."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    later_tokens: int = 0
    later_seconds: float = 0.0

    def add(self, other: "ComputedWork") -> None:
        """Count more work."""
        self.prompt_tokens += other.prompt_tokens
        self.prompt_seconds += other.prompt_seconds
        self.later_tokens += other.later_tokens
        self.later_seconds += other.later_seconds


@dataclass
class ReplyTotals:
    """Sums over the texts that have ended; used on the event loop."""

    work: ComputedWork = field(default_factory=ComputedWork)
    """All work since the start."""
    recent: ComputedWork = field(default_factory=ComputedWork)
    """Work since `take_recent`."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_texts: int = 0
    num_running: int = 0
    """Texts that ran when one ended, summed up."""
    num_passes: int = 0
    """Passes of the model, as if each text had run alone."""
    longest_tokens: int = 0
    num_drafts: int = 0
    """Drafts with at least one token."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    """Accepted tokens by their position in the draft."""

    def count_text(self, stats: "Stats", num_running: int) -> None:
        """Count a text that was generated. num_running: texts that ran just before it ended."""
        computed = max(0, stats.prompt_tokens - stats.cached_tokens)
        later, rate = max(0, stats.completion_tokens - 1), stats.decode_tokens_per_second
        prompt_seconds = max(0.0, stats.time_to_first_token_seconds - stats.waited_seconds)
        self._count(ComputedWork(computed, prompt_seconds, later, later / rate if rate > 0 else 0.0))
        self.cached_tokens += stats.cached_tokens
        self.completion_tokens += stats.completion_tokens
        self.num_texts += 1
        self.num_running += num_running
        self.num_passes += 1 + round(later / max(1.0, stats.tokens_per_pass))
        self.longest_tokens = max(self.longest_tokens, stats.prompt_tokens + stats.completion_tokens)
        self.num_drafts += stats.drafted_by_position[0] if stats.drafted_by_position else 0
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self._count_positions(stats.accepted_by_position)

    def count_prompts(self, num_tokens: int, seconds: float) -> None:
        """Count texts that were read for their vectors or scores."""
        self._count(ComputedWork(prompt_tokens=num_tokens, prompt_seconds=seconds))
        self.num_passes += 1

    def take_recent(self) -> ComputedWork:
        """The work since the last call."""
        recent, self.recent = self.recent, ComputedWork()
        return recent

    def _count(self, work: ComputedWork) -> None:
        self.work.add(work)
        self.recent.add(work)

    def _count_positions(self, counts: Sequence[int]) -> None:
        missing = len(counts) - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(0, missing)
        for position, count in enumerate(counts):
            self.accepted_by_position[position] += count


NO_SLOT = -1
"""Stands for any slot in a request, and for none in an answer: of a text that found every slot taken."""


@dataclass(eq=False)
class SlotText:
    """A text in a slot, or the last one that was there."""

    slot_id: int
    model_id: str
    reply_id: str | None = None
    """None for a text that was restored from a file."""
    token_ids: "Sequence[int] | TokenIds" = ()
    """Known once it has ended."""
    has_ended: bool = False
    tenant: str = ""
    """The owner, where clients are kept apart."""
    cache_salt: str | None = None
    """The option with which it was generated."""
    _stream: "TextStream | None" = field(default=None, repr=False)

    def opening(self, open_stream: "Callable[[], TextStream]") -> "Callable[[], TextStream]":
        """A call that opens this text's stream; any thread may make it."""

        def opened() -> "TextStream":
            stream = self._stream = open_stream()
            return stream

        return opened

    def end(self) -> None:
        """Keep what the text was, and let go of all else: a model that is unloaded must not live on here."""
        if self._stream is not None:
            self.token_ids = self._stream.token_ids
        self._stream, self.has_ended = None, True


class SlotTable:
    """The slots of a server, used on its event loop."""

    def __init__(self, count: int) -> None:
        self._texts: dict[int, SlotText | None] = dict.fromkeys(range(count))

    def texts(self) -> list[SlotText | None]:
        """Texts of all slots, by their numbers."""
        return [self._texts[slot_id] for slot_id in range(len(self._texts))]

    def text(self, slot_id: int) -> SlotText | None:
        """The text of a slot. Raises: ApiError if there is no such slot."""
        if slot_id not in self._texts:
            last = len(self._texts) - 1
            reason = f"there is no slot {slot_id}; give one from 0 to {last}, or start the server with --parallel"
            raise ApiError(400, reason, param="id_slot")
        return self._texts[slot_id]

    def check_idle(self, slot_id: int) -> None:
        """Raise ApiError if there is no such slot, or a text runs in it."""
        text = self.text(slot_id)
        if text is not None and not text.has_ended:
            raise ApiError(409, f"slot {slot_id} is generating; try again when it has ended", code="slot_busy")

    def take(
        self, model_id: str, reply_id: str, wanted: int | None, tenant: str = "", cache_salt: str | None = None
    ) -> SlotText | None:
        """Put a text into the slot that is wanted, or that was used least recently; None if that is taken.

        Raises: ApiError for a slot that does not exist.
        """
        if wanted is None or wanted == NO_SLOT:
            # Rows come in the order of their last use.
            wanted = next((slot_id for slot_id, text in self._texts.items() if text is None or text.has_ended), NO_SLOT)
            if wanted == NO_SLOT:
                return None
        former = self.text(wanted)
        if former is not None and not former.has_ended:
            return None
        return self._put(SlotText(wanted, model_id, reply_id, tenant=tenant, cache_salt=cache_salt))

    def hold(
        self, slot_id: int, model_id: str, token_ids: Sequence[int], tenant: str = "", cache_salt: str | None = None
    ) -> None:
        """Put a text into a slot that does not run. Raises: ApiError if one runs there."""
        self.check_idle(slot_id)
        self._put(SlotText(slot_id, model_id, None, token_ids, has_ended=True, tenant=tenant, cache_salt=cache_salt))

    def erase(self, slot_id: int) -> None:
        """Forget what a slot held."""
        self._texts[slot_id] = None

    def _put(self, text: SlotText) -> SlotText:
        del self._texts[text.slot_id]
        self._texts[text.slot_id] = text
        return text
