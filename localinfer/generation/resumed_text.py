"""What a generation needs to go on with a text that another process began, and names that both give alike."""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import numpy as np

from localinfer.types import TokenIds

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""As Mistral's templates demand."""


@dataclass(frozen=True)
class ResumedText:
    """How far another process, with the same model and options, came with a text.

    prompt_ids: of its prompt there, int32; conversations may be cut into other ids here. seed: that was drawn there.
    token_ids: what it generated. cached_tokens: of the prompt, as it told, None if it did not.
    """

    prompt_ids: TokenIds
    seed: int
    token_ids: Sequence[int] = ()
    cached_tokens: int | None = None


def call_ids(prompt_ids: TokenIds, seed: int) -> Callable[[], str]:
    """Names for the tool calls of one reply: the same where the same reply is generated again, and else other ones."""
    numbers = count()

    def next_id() -> str:
        text = blake2b(np.ascontiguousarray(prompt_ids, np.int32).tobytes(), digest_size=16)
        text.update(seed.to_bytes(16, "little"))
        text.update(next(numbers).to_bytes(8, "little"))
        number = int.from_bytes(text.digest(), "little")
        letters = []
        for _ in range(_ID_LENGTH):
            number, index = divmod(number, len(_ID_LETTERS))
            letters.append(_ID_LETTERS[index])
        return "".join(letters)

    return next_id
