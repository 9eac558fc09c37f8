"""How much memory a model will take, asked of its file before anything of it is loaded."""

import os
from dataclasses import dataclass, replace

from localinfer.cache.block_pool import SlidingWindow
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.models.load.model_changes import ModelChanges

SCRATCH_BYTES = 128 << 20
"""Buffers of a batch, compiled kernels, the tokenizer: what every loaded model takes beside weights and cache."""
_LEAST_CONTEXT = 512
"""A model with room for fewer tokens than this is not worth loading."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes: its weights with all that comes with them, and its cache per token of context."""

    fixed_bytes: int
    bytes_per_token: int
    context_length: int

    def largest_context(self, available_bytes: int) -> int:
        """How many tokens of context fit beside the weights, 0 if not even the weights do."""
        left = available_bytes - self.fixed_bytes
        return 0 if left <= 0 else min(self.context_length, left // max(1, self.bytes_per_token))

    def check(self, name: str, available_bytes: int, *, wanted_context: int | None) -> None:
        """Raise OutOfMemoryError, with the numbers, if the model would not fit.

        wanted_context: tokens that must fit; None asks for enough to be of use, as the cache grows when it is needed.
        """
        least = min(self.context_length, _LEAST_CONTEXT if wanted_context is None else wanted_context)
        fits = self.largest_context(available_bytes)
        if fits >= least:
            return
        needed = self.fixed_bytes + least * self.bytes_per_token
        way_out = (
            f"load it with a context of at most {fits} tokens" if fits >= _LEAST_CONTEXT else "use a smaller model"
        )
        raise OutOfMemoryError(
            f"{name} needs {needed:,} bytes ({self.fixed_bytes:,} for weights, {self.bytes_per_token:,} for each of "
            f"{least} tokens), and {max(0, available_bytes):,} are available; close something, or {way_out}"
        )


def measure_need(
    path: str | os.PathLike[str],
    kv_type: str,
    changes: ModelChanges | None = None,
    context_length: int | None = None,
) -> MemoryNeed:
    """Read from a model's file what it will take.

    changes: settings in place of those of the file. context_length: the one it will be loaded with, None for its own.
    Raises: ModelFileError and below; RequestError for changes without meaning.
    """
    file = open_model_file(path, changes, context_length)
    try:
        config = read_config(file)
        config = replace(config, context_length=max(config.context_length, context_length or 0))
        layout = KVLayout(kv_type, kv_layer_shapes(config, parts_windows=True))
        per_token = -(-layout.page_bytes // layout.page_tokens)
        sliding = SlidingWindow(layout.window, layout.page_tokens)
        windowed = sliding.most_pages(config.context_length, MAX_BATCH_ROWS) * layout.windowed_bytes
        return MemoryNeed(file.num_bytes + SCRATCH_BYTES + windowed, per_token, config.context_length)
    finally:
        file.close()
