"""The line at the bottom of a chat: model, context, speed, and what the cache and drafts saved.

Every field has the width of the largest value it can have, so that none moves another; which fields there are depends
on the terminal's width alone.
"""

import time
from typing import TYPE_CHECKING

from localinfer.apps.terminal.display_width import cut_to_width, most_columns
from localinfer.terminal import SILENT_SECONDS, Pace, neutralise_controls

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, TextStream

REFRESH_SECONDS = 0.1
_SEPARATOR = " │ "
_MODEL_COLUMNS = 24
_UNKNOWN = "-"


class StatusLine:
    """Follows replies, and says in one line what they are and cost.

    `begin` and `refresh` are called by the thread that reads the reply, `text` and `waiting` by any.
    """

    def __init__(self, model_name: str, context_length: int) -> None:
        self.model_name = model_name
        self._context_length = context_length
        self._context_used: int | None = None
        self._stream: TextStream | None = None
        self._stats: Stats | None = None
        self._has_drafts = False
        self._began = self._next_refresh = 0.0
        self._pace = Pace()

    @property
    def completion_tokens(self) -> int:
        """Of the reply so far, as of the last refresh."""
        return 0 if self._stats is None else self._stats.completion_tokens

    def begin(self, stream: "TextStream") -> None:
        """Follow another reply, from its prompt on."""
        self._began, self._pace = time.monotonic(), Pace()
        self._stream, self._next_refresh, self._context_used = stream, 0.0, None
        self.refresh()

    def refresh(self, *, is_last: bool = False) -> None:
        """Take the reply's numbers, unless they are recent; those of its first token and its end always."""
        now = time.monotonic()
        if self._stream is not None and (is_last or now >= self._next_refresh or not self.completion_tokens):
            self._stats, self._next_refresh = self._stream.stats, now + REFRESH_SECONDS
            self._has_drafts = self._has_drafts or self._stats.drafted_tokens > 0
        if is_last:
            self._stream = None

    def rest(self, context_used: int, context_length: int) -> None:
        """Say how full the context is until the next reply; the other numbers remain those of the last one."""
        self._context_used, self._context_length = context_used, context_length

    def waiting(self) -> str:
        """The computed part of a prompt, once that takes long; "" otherwise."""
        stream, stats = self._stream, self._stats
        now = time.monotonic()
        if stream is None or stats is None or stats.completion_tokens or now - self._began < SILENT_SECONDS:
            return ""
        computed, total = stream.computed_tokens, stats.prompt_tokens
        if not 0 < computed < total:
            return "reading the prompt ..."
        left = self._pace.time_left(computed, total)
        return f"reading the prompt: {computed:,} of {total:,} tokens ({100 * computed // total} %){left} ..."

    def text(self, width: int) -> str:
        """The line, of less than `width` columns, with the most important fields of those that have room."""
        shown: set[int] = set()
        fields = self._fields()
        for place, _ in sorted(enumerate(fields), key=lambda numbered: numbered[1][0]):
            if _joined_width(fields, shown | {place}) < width:
                shown.add(place)
        return _SEPARATOR.join(field for place, (_, field) in enumerate(fields) if place in shown)

    def _fields(self) -> list[tuple[int, str]]:
        """Rank and text of each field, in the order they are shown; the lowest ranks are shown first."""
        stats = self._stats
        length, used = self._context_length, self._context_used
        if used is None:
            used = 0 if stats is None else stats.prompt_tokens - stats.dropped_tokens + stats.completion_tokens
        used, most = min(max(0, used), length), f"{length:,}"
        left = 100 * (length - used) // max(1, length)
        rate = seconds = cached = accepted = _UNKNOWN
        if stats is not None:
            rate = f"{stats.decode_tokens_per_second:.1f}" if stats.decode_tokens_per_second else _UNKNOWN
            seconds = _short_seconds(stats.time_to_first_token_seconds)
            cached = f"{100 * stats.cached_tokens // max(1, stats.prompt_tokens)} %"
            if stats.drafted_tokens:
                accepted = f"{100 * stats.accepted_tokens // stats.drafted_tokens} %"
        model = cut_to_width(neutralise_controls(self.model_name), _MODEL_COLUMNS)
        fields = [
            (2, model),
            (0, f"{used:>{len(most)},}/{most}"),
            (3, f"{left:>3} % left"),
            (1, f"{rate:>6} t/s"),
            (4, f"first {seconds:>6}"),
            (5, f"cached {cached:>5}"),
        ]
        if self._has_drafts:
            # The last one: where it comes later, no other moves.
            fields.append((6, f"drafts {accepted:>5}"))
        return fields if model else fields[1:]


def _joined_width(fields: list[tuple[int, str]], places: set[int]) -> int:
    return sum(most_columns(fields[place][1]) for place in places) + len(_SEPARATOR) * (len(places) - 1)


def _short_seconds(seconds: float) -> str:
    """In at most six columns."""
    if not seconds:
        return _UNKNOWN
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 6000 else f"{seconds / 3600:.0f} h"
