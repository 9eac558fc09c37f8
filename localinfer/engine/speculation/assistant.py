"""Drafts of a model that attends to its target's keys and values, such as Gemma 4's (`models.load.assistant`).

Like layers for next-token prediction it begins with the hidden states that the target's last step left with the
sequence. It keeps nothing: every token of a draft is asked for at the first position that the target has not computed,
from the token before it and the state that came with that.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.speculation.mtp import DraftHead, MTPDrafter


class AssistantDrafter(MTPDrafter):
    """A draft model over its target's cache; one thread at a time, between the target's own steps."""

    name = "assistant"

    def draft_token(
        self, sequence: SequenceCache, index: int, token_id: int, hidden: NDArray[np.float32] | None, head: DraftHead
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """As `MTPDrafter.draft_token`, at the first position that the target has not computed, which is never 0."""
        return super().draft_token(sequence, 0 if sequence.length else 1, token_id, hidden, head)
