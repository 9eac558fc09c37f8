"""Prompts all of whose rows see each other in both directions, pictures and words: PaliGemma's (arXiv 2407.07726).

No sliding window parts them; generated tokens are causal, and see what their window holds. Such a prompt is one run of
rows to the engine, named by all of its content, so that none of it is taken from a prompt that only begins alike. The
embeddings of its words are looked up here, beside those of its pictures.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.media import Check, MediaRun, media_ids
from localinfer.generation.chat.media_parts import Segments, cut_segments, is_marker, split_at_markers
from localinfer.types import FloatArray


@dataclass(frozen=True)
class WholeSight:
    """Properties of a model whose prompts with pictures see themselves."""

    beginning: str
    """Special token behind the last picture, where the words begin."""
    end: str
    """Text behind the words."""
    embed_words: Callable[[NDArray[np.int32]], FloatArray]
    """Looks up the embeddings of words, as they enter the first layer."""


def has_markers(text: str) -> bool:
    """True for a text with pictures."""
    return any(map(is_marker, split_at_markers(text)))


def framed(segments: Segments, sight: WholeSight) -> Segments:
    """The segments of a prompt with what its family puts behind the pictures and behind the words."""
    pieces = split_at_markers("".join(text for text, _ in segments))
    last = max(index for index, piece in enumerate(pieces) if is_marker(piece))
    place, end = (sum(map(len, some)) for some in (pieces[: last + 1], pieces))
    words = cut_segments(segments, place, end)
    return [*cut_segments(segments, 0, place), (sight.beginning, True), *words, (sight.end, False)]


def whole_run(token_ids: Sequence[int], runs: Sequence[MediaRun], sight: WholeSight, identity: bytes) -> MediaRun:
    """A prompt as one run. token_ids: with those of its pictures, whose `runs` these are. identity: of the encoders."""
    ids = np.array(token_ids, np.int32)
    digest = hashlib.sha256(b"whole prompt" + ids.tobytes()).digest()

    def embed(check: Check) -> FloatArray:
        are_words = ids >= 0
        words = sight.embed_words(ids[are_words])
        rows = np.empty((ids.size, words.shape[1]), np.float32)
        rows[are_words] = words
        rows[~are_words] = np.concatenate([run.embed(check) for run in runs])
        return rows

    found = media_ids(identity, digest, ids.size)
    return MediaRun(found, embed, None, ids.size, sees_itself=True, passes_windows=True)
