"""Types that many packages use; those of arrays import NumPy where they are asked for."""

import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from pathlib import Path
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, Self, SupportsIndex, TypeGuard

from localinfer.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    TokenIds = NDArray[np.int32]
    FloatArray = NDArray[np.float32]

PAGE_TOKENS = 32
"""Of keys and values: half a page is wasted per sequence on average, and one page is copied when a prefix forks."""

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, the units done and the total, 0 if unknown."""

UnitsCallback = Callable[[int, int], None]
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


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Base class of frozen dataclasses that inherit every method but `__init__`.

    `dataclass` writes and compiles six methods for each class, which took a fifth of a start. A record that is made at
    every step is a `dataclass`, since fields are set in Python here.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        super().__init_subclass__()
        dataclass(eq=False, repr=False, kw_only=kw_only)(cls)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _compared(self) -> tuple[object, ...]:
        return tuple([getattr(self, one.name) for one in fields(self) if one.compare])

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared())

    @recursive_repr()
    def __repr__(self) -> str:
        shown = ", ".join([f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr])
        return f"{type(self).__qualname__}({shown})"


class Beam(Record):
    """A finished text of a beam search."""

    token_ids: tuple[int, ...]
    """Tokens after the prompt, a stop token included."""
    logprob: float
    """The sum of their log probabilities."""
    score: float
    """`logprob` / length ^ length_penalty, by which beams are compared."""
    finish_reason: FinishReason
    """"stop" after a stop token, else "length"."""


class BeamCompletion(NamedTuple):
    """Result of a beam search: its text without an end token, and its ids and scores."""

    text: str
    beam: Beam


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document's index among those given, its score for the query, and the tokens that both took together."""

    index: int
    score: float
    num_tokens: int


class ModelInfo(Record, kw_only=True):
    """Facts of a loaded model."""

    name: str
    """Name that the file says, or else the file's own."""
    path: Path
    """Path of the file or folder."""
    architecture: str
    """GGUF's name of the architecture."""
    capabilities: tuple[str, ...]
    """Kinds of requests: "completion", "chat", "embeddings", "rerank"; "decisions" where it does nothing else."""
    parameters: int
    """Number of weights."""
    quantization: str
    """Type of most weights, as GGUF names it, or how a folder stores them."""
    bits_per_weight: float
    """Bits per weight on disk."""
    file_bytes: int
    """Bytes on disk, all parts."""
    num_layers: int
    """Blocks of the decoder."""
    num_experts: int
    """Experts in each block; 0 for a model without."""
    vocab_size: int
    """Number of token ids."""
    context_length: int
    """Tokens of prompt and completion together, as loaded."""
    trained_context_length: int
    """Tokens that the model was trained for, as the file says."""
    device: str
    """"cpu" or "cuda"."""
    threads: int
    """Maximum threads that compute on the CPU."""
    kv_type: str
    """Type of keys and values."""
    memory_bytes: int
    """Memory of weights, buffers, and keys and values of a text as long as the context; of a draft model none. On a GPU
    about as much of its memory."""
    chat_template: str | None
    """Jinja source, None without one, where `chat` takes a general form."""
    supports_tools: bool
    """The template describes tools to the model, or writes its calls; with others `chat` does, for a model that
    may never have seen any."""
    supports_thinking: bool
    """The template has reasoning, so that `thinking` may be given."""
    sampling: Mapping[str, float | int]
    """Options that the file recommends, by name; empty without. `llm.set_defaults(**llm.info.sampling)` obeys."""
    warnings: tuple[str, ...] = ()
    """Likely faults of the file that the checks of a load found, a line each; see `verify` of `load`."""


class Closing:
    """Base class of closeable objects: a context manager that leaves its block by `close`, whatever ended it."""

    __slots__ = ()

    _instead = "make another where it is wanted"
    """Advice for a caller that tried to copy it."""

    def close(self) -> None:
        """Release what is held; may be called again."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied. Raises: RequestError."""
        raise RequestError(
            f"this {type(self).__name__} cannot be pickled or copied: it holds memory, threads or files of this "
            f"process; {self._instead}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_finite_number(value: object) -> TypeGuard[float]:
    """True for a number within the range of a float; an integer of JSON or of Python may be larger, a bool is none."""
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
