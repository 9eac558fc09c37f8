"""KV eviction: which pages a sequence of bounded memory keeps: attention sinks, recent pages and heavy hitters.

The first page holds the attention sinks (StreamingLLM, arXiv 2309.17453); of the pages between it and the recent half,
those stay that got most attention so far (heavy hitters as in H2O, arXiv 2306.14048, for all heads and layers together
and by whole pages). What stays keeps its positions, so nothing is rotated again, and the context's end is unchanged.

This is an approximation: what is computed after a page was dropped is not what the model says to the whole text.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.load.loader import Model

LEAST_TOKENS = 128
"""Below this there is no page between the first and the recent ones."""


@dataclass(frozen=True)
class KVEviction:
    """How many positions a sequence holds between two batches: at most `tokens`, in whole pages."""

    tokens: int
    page_tokens: int
    batch_tokens: int
    """The most that one batch adds, so that `max_tokens` is what a sequence ever holds."""
    sink_pages: int = 1
    """Pages kept at the beginning."""
    recent_share: float = 0.5
    """Share of all pages that are kept at the end; the others are for heavy hitters."""

    def __post_init__(self) -> None:
        if self.tokens < LEAST_TOKENS:
            raise RequestError(
                f"kv_window is {self.tokens} tokens; it must be at least {LEAST_TOKENS}: a page at the start, recent "
                "ones, and one between"
            )

    @property
    def num_pages(self) -> int:
        """Pages kept between two batches."""
        return self.tokens // self.page_tokens

    @property
    def recent_pages(self) -> int:
        """Pages at the end that are always kept."""
        return min(math.ceil(self.recent_share * self.num_pages), self.num_pages - self.sink_pages)

    @property
    def max_tokens(self) -> int:
        """Positions that a sequence ever holds memory for."""
        return (self.num_pages + 1) * self.page_tokens + self.batch_tokens

    @property
    def most_tokens(self) -> int:
        """Positions that memory is held for while a text runs: its own, and at most as many of its beginning, which the
        prefix cache keeps."""
        return 2 * self.max_tokens

    def surplus(self, mass: NDArray[np.float32]) -> NDArray[np.int64]:
        """Indices, in order, of the pages to drop of a sequence whose pages got this much attention, float32[n]."""
        count = mass.size - self.num_pages
        if count <= 0:
            return np.zeros(0, np.int64)
        between = mass[self.sink_pages : mass.size - self.recent_pages]
        # Of pages without attention, the oldest goes first.
        lightest = np.argsort(between, kind="stable")[:count]
        return np.sort(lightest) + self.sink_pages


def window_of(model: "Model", tokens: int) -> KVEviction:
    """The window of a model that was loaded for it. Raises: as `planned_window`."""
    return planned_window(model.config, tokens, model.kv_layout.page_tokens, model.program.max_batch_rows)


def planned_window(config: "ModelConfig", tokens: int, page_tokens: int, batch_tokens: int) -> KVEviction:
    """The window of a model with these settings; tokens: `kv_window` of `load`.

    Raises: RequestError where the model's own local attention would then meet positions that are not its.
    """
    from localinfer.models.decoder.architectures import find_architecture

    window = KVEviction(tokens, page_tokens, batch_tokens)
    architecture = find_architecture(config)
    if any(architecture.chunks):
        raise RequestError(
            f"kv_window cannot be used with {config.architecture}, some of whose layers see chunks of fixed "
            "positions; use a smaller kv_type to save memory"
        )
    widest = max(architecture.windows, default=0)
    # The last of the recent pages may have just begun.
    if widest > (window.recent_pages - 1) * window.page_tokens:
        needed = 2 * (widest + window.page_tokens)
        raise RequestError(
            f"kv_window is {tokens} tokens, but layers of this model see the last {widest} of them; give it at least "
            f"{needed}, or a smaller kv_type to save memory"
        )
    return window
