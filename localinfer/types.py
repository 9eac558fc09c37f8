"""Types that many packages use; those of arrays import NumPy where they are asked for."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    TokenIds = NDArray[np.int32]
    FloatArray = NDArray[np.float32]

PAGE_TOKENS = 32
"""Of keys and values: half a page is wasted per sequence on average, and one page is copied when a prefix forks."""

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, the units done and the total, 0 if unknown."""

Told = Callable[[int, int], None]
"""The same without a stage; what it raises ends the work."""

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: an end token or a stop string; length: max_tokens, or the end of the context or of memory; cancelled: by
`cancel`."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of a token's probability and of the likeliest ones' at its position.

    top: (token id, log probability) of as many as were asked for, likeliest first, the lowest id on ties. -inf stands
    for a token that the model rules out.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Beam:
    """A finished text.

    token_ids: what follows the prompt, a stop token included. logprob: the sum of their log probabilities. score:
    logprob / length ^ length_penalty, by which beams are compared. finish_reason: "stop" after a stop token, else
    "length".
    """

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document's place among those given, its score for the query, and the tokens that both took together."""

    index: int
    score: float
    num_tokens: int


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can be; an integer of JSON or of Python may be larger, a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Make the types of arrays when they are first asked for: NumPy takes a tenth of a second."""
        if name not in ("TokenIds", "FloatArray"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import numpy as np
        from numpy.typing import NDArray

        globals().update(TokenIds=NDArray[np.int32], FloatArray=NDArray[np.float32])
        return globals()[name]
