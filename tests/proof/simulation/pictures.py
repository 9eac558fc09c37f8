"""Pictures and sounds of simulated texts: a few, told by their ids, so that a text is still its ids alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.media import Check, EmbeddingStore, MediaRun, PlacedMedia, media_content, media_ids
from localinfer.models.decoder.config import ModelConfig
from localinfer.types import FloatArray

_SIZES = ((2, 3), (3, 4), (1, 9), (3, 3))
"""Rows and columns of pictures: all fit the smallest batch."""
_SOUND_ROWS, _SHORT_ROWS = 7, 3
"""The last are so few that their ids alone do not tell them from others."""

TokenIds = NDArray[np.int32]


@dataclass(frozen=True)
class Gallery:
    """All runs that texts of a model may have."""

    runs: tuple[MediaRun, ...]

    def media(self, token_ids: TokenIds) -> list[MediaRun]:
        """The runs of a text, in order; the last may be cut short."""
        by_first = {int(run.ids[0]): run for run in self.runs}
        found, position = [], 0
        negative = np.flatnonzero(token_ids < 0)
        while (index := int(np.searchsorted(negative, position))) < negative.size:
            run = by_first[int(token_ids[negative[index]])]
            found.append(run)
            position = int(negative[index]) + run.ids.size
        return found

    def mended(self, token_ids: TokenIds) -> TokenIds:
        """A text without the rows of runs that are not whole."""
        kept, position = [np.zeros(0, np.int32)], 0
        by_first = {int(run.ids[0]): run for run in self.runs}
        while position < token_ids.size:
            first = int(token_ids[position])
            run = by_first.get(first)
            size = 1 if run is None else run.ids.size
            part = token_ids[position : position + size]
            is_whole = first >= 0 if run is None else np.array_equal(part, run.ids)
            if is_whole:
                kept.append(part)
            position += size if is_whole else 1
        return np.concatenate(kept).astype(np.int32)

    def completed(self, token_ids: TokenIds) -> TokenIds:
        """The beginning of a text up to the end of the run that it ends in, if it ends in one."""
        runs = self.media(token_ids)
        if not runs or token_ids[-1] >= 0:
            return token_ids
        last = runs[-1].ids
        start = int(np.flatnonzero(token_ids == last[0])[-1])
        return np.concatenate((token_ids[:start], last))

    def placed(self, token_ids: TokenIds) -> PlacedMedia | None:
        """The runs of a text, or of the beginning of one, where they stand."""
        whole = self.completed(token_ids)
        return PlacedMedia.locate(whole, self.media(whole), EmbeddingStore(0))

    def given(self, token_ids: TokenIds, told: Callable[[], None]) -> list[MediaRun]:
        """The runs of a text, whose encoders tell when they run."""
        return [replace(run, embed=_telling(run.embed, told)) for run in self.media(token_ids)]


def _telling(embed: Callable[[Check], FloatArray], told: Callable[[], None]) -> Callable[[Check], FloatArray]:
    def tell_and_embed(check: Check) -> FloatArray:
        told()
        return embed(check)

    return tell_and_embed


def gallery_of(config: ModelConfig) -> Gallery:
    """Pictures that see themselves where the model's family has such, and have rows and columns where it rotates so."""
    width = config.hidden_size * (1 + config.num_deepstack_layers)
    return _gallery(width, config.architecture.startswith("gemma"), bool(config.rope.sections))


@cache
def _gallery(width: int, sees_itself: bool, has_axes: bool) -> Gallery:
    runs = []
    for index, (rows, columns) in enumerate(_SIZES):
        grid, taken = ((rows, columns), max(rows, columns)) if has_axes else (None, rows * columns)
        runs.append(_run(index, rows * columns, width, grid, taken, sees_itself=sees_itself))
    for rows in (_SOUND_ROWS, _SHORT_ROWS):
        runs.append(_run(len(runs), rows, width, None, rows, sees_itself=False))
    return Gallery(tuple(runs))


def _run(index: int, rows: int, width: int, grid: tuple[int, int] | None, taken: int, *, sees_itself: bool) -> MediaRun:
    embeddings = np.random.default_rng(index).standard_normal((rows, width), np.float32)
    named = b"simulated", bytes([index])
    ids, content = media_ids(*named, rows), media_content(*named)
    return MediaRun(ids, lambda check: embeddings, grid, taken, sees_itself, f"picture {index}", content=content)


def shortened(gallery: Gallery, token_ids: TokenIds, system: int, recent: int) -> TokenIds:
    """The first `system` ids and the `recent` last ones, without pictures that are cut."""
    return np.concatenate([gallery.mended(part) for part in (token_ids[:system], token_ids[token_ids.size - recent :])])
