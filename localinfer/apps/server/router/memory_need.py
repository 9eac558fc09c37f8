"""What a model takes in memory, read from its file before it is loaded."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localinfer.errors import OutOfMemoryError

if TYPE_CHECKING:
    from localinfer.models.load.model_changes import ModelChanges

_LEAST_CONTEXT = 512
"""A model with room for fewer tokens than this is not worth loading."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes: its weights with all that comes with them, and its cache per token of context.

    context_length: tokens that it will have room for. capabilities: what it can be asked for. file_bytes: on disk.
    trained_context_length: as its file says.
    """

    fixed_bytes: int
    bytes_per_token: int
    context_length: int
    capabilities: tuple[str, ...] = ("completion", "chat", "embeddings")
    file_bytes: int = 0
    trained_context_length: int | None = None

    def largest_context(self, available_bytes: int) -> int:
        """How many tokens of context fit beside the weights, 0 if not even the weights do."""
        return min(self.context_length, max(0, available_bytes - self.fixed_bytes) // max(1, self.bytes_per_token))

    def bytes_for(self, wanted_context: int | None) -> int:
        """Bytes that must be free to load it: for so many tokens, or, for None, for enough to be of use."""
        return self.fixed_bytes + self._least(wanted_context) * self.bytes_per_token

    def check(self, name: str, available_bytes: int, *, wanted_context: int | None) -> None:
        """Raise OutOfMemoryError, with the numbers, if the model would not fit.

        wanted_context: tokens that must fit; None asks for enough to be of use, as the cache grows when it is needed.
        """
        least = self._least(wanted_context)
        fits = self.largest_context(available_bytes)
        if fits >= least:
            return
        needed = self.bytes_for(wanted_context)
        is_usable = fits >= _LEAST_CONTEXT
        way_out = f"load it with a context of at most {fits} tokens" if is_usable else "use a smaller model"
        raise OutOfMemoryError(
            f"{name} needs {needed:,} bytes ({self.fixed_bytes:,} for weights, {self.bytes_per_token:,} for each of "
            f"{least} tokens), and {max(0, available_bytes):,} are available; close something, or {way_out}"
        )

    def _least(self, wanted_context: int | None) -> int:
        return min(self.context_length, _LEAST_CONTEXT if wanted_context is None else wanted_context)


def measure_need(
    path: str | os.PathLike[str],
    kv_type: str,
    changes: "ModelChanges | None" = None,
    context_length: int | None = None,
    *,
    draft: str | os.PathLike[str] | None = None,
) -> MemoryNeed:
    """Read from a model's file what it will take.

    changes: settings in place of those of the file. context_length: the one it will be loaded with, None for its own.
    draft: path of a draft model that is loaded with it.
    Raises: ModelFileError and below; RequestError for changes without meaning.
    """
    from localinfer.loading.memory.plan import plan_file, plan_memory
    from localinfer.models.load.assistant import is_assistant
    from localinfer.models.load.loader import capabilities, open_model_file

    file = open_model_file(path, changes, context_length)
    try:
        assistant = draft if draft is not None and is_assistant(draft) else None
        plan = plan_memory(file, kv_type=kv_type, draft_layers=draft is None, assistant=assistant, changes=changes)
        if draft is not None and assistant is None:
            plan = replace(plan, beside=plan_file(draft, kv_type=kv_type))
        longest = max(plan.config.context_length, context_length or 0)
        layouts = [one.kv_layout(longest) for one in (plan, plan.beside) if one is not None]
        per_token = sum(-(-layout.page_bytes // layout.page_tokens) for layout in layouts)
        pages = sum(-(-longest // layout.page_tokens) * layout.page_bytes for layout in layouts)
        # Sliding windows and recurrent states do not grow with the text.
        fixed = plan.total_bytes(longest) - pages
        trained = file.metadata.get(f"{plan.config.architecture}.context_length")
        return MemoryNeed(
            fixed,
            per_token,
            longest,
            capabilities(plan.config, file.metadata),
            file.num_bytes,
            trained if isinstance(trained, int) else None,
        )
    finally:
        file.close()
