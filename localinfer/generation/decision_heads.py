"""Heads of models made for decisions: scores of options from hidden states, in place of probabilities of labels.

A head reads the states behind the last norm at places of the prompt, and computes a few products in float64, each sum
in one fixed order, so that a score is the same number on every machine. On the CPU it does not depend on other prompts,
batches, threads or what was cached either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import not_finite_error
from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.generation.label_scores import PromptForks, shared_length
from localinfer.models.decoder.block_config import Pooling
from localinfer.quant.formats.dequantize import dequantize
from localinfer.types import FloatArray, TokenIds

if TYPE_CHECKING:
    from localinfer.kernels.program import Program
    from localinfer.models.load.loader import Model

_OPTION_END = "<|box_end|>"


class HeadPrompt(NamedTuple):
    """A prompt, and where its options are read."""

    token_ids: TokenIds
    """int32[T]."""
    places: tuple[int, ...]
    """Position of each option, rising."""


@dataclass(frozen=True)
class HeadScores:
    """Scores of options, and the cost of computing them."""

    scores: list[NDArray[np.float64]]
    """float64[options] of each prompt; a softmax makes probabilities of them."""
    cached_tokens: int
    """Tokens of the first prompt that came from the cache."""
    computed_tokens: int
    """Rows that were computed."""


class DecisionHead(Protocol):
    """A head of one loaded model; threads may share it."""

    def lay_out(self, token_ids: Sequence[int], num_options: int) -> HeadPrompt:
        """Find the options of a prompt. Raises: UnsupportedFormatError for a prompt of another form."""
        ...

    def score(self, prompts: Sequence[HeadPrompt], hints: CacheHints) -> HeadScores:
        """Score the options of prompts; hints: how the cache keeps what they begin with."""
        ...


class PointerHead:
    """Kev's: the product of a query, of the prompt's last row, with a key, of the row that ends an option."""

    def __init__(self, engine: Engine, model: "Model") -> None:
        """Read a model's head. Raises: CorruptFileError, UnsupportedFormatError for a file without it."""
        assert model.tokenizer is not None, "a model that decides has one"
        self._engine, self._model = engine, model
        found = model.tokenizer.encode(_OPTION_END, add_special=False, parse_special=True)
        if len(found) != 1:
            raise UnsupportedFormatError(
                f"{_OPTION_END} is {len(found)} tokens of this vocabulary; wanted one, at which this model's head "
                "reads an option. Use another model."
            )
        self._end = found[0]
        width = model.config.hidden_size
        weight = head_tensor(model, "cls.output.weight")
        if weight.ndim != 2 or weight.shape[1] != width or len(weight) < 2 or len(weight) % 2:
            raise CorruptFileError(
                f"cls.output.weight has shape {weight.shape}; wanted an even number of rows of {width}, those of "
                "queries and of keys. Convert the model again or download another copy."
            )
        self._size = len(weight) // 2
        bias = head_tensor(model, "cls.output.bias", (len(weight),)).astype(np.float64)
        self._weights = weight[: self._size], weight[self._size :]
        self._biases = bias[: self._size], bias[self._size :]
        self._program: Program | None = None
        self._lock = Lock()

    def lay_out(self, token_ids: Sequence[int], num_options: int) -> HeadPrompt:
        """See `DecisionHead`."""
        ids = np.array(token_ids, np.int32)
        places = np.flatnonzero(ids == self._end)
        if places.size != num_options or places[0] == 0:
            raise UnsupportedFormatError(
                f"the prompt of {num_options} options has {places.size} {_OPTION_END}; wanted one behind each. Convert "
                "the model again with a current converter."
            )
        return HeadPrompt(ids, tuple(map(int, places)))

    def score(self, prompts: Sequence[HeadPrompt], hints: CacheHints) -> HeadScores:
        """See `DecisionHead`."""
        for prompt in prompts:
            self._engine.check_prompt(prompt.token_ids, needs_tokens=True)
        reading = _Reading(self._engine, self._text_program(), [prompt.token_ids for prompt in prompts], hints)
        try:
            states = reading.run([(*prompt.places, prompt.token_ids.size - 1) for prompt in prompts])
        finally:
            reading.close()
        return HeadScores(list(map(self._products, states)), reading.cached_tokens, reading.computed_tokens)

    def _products(self, states: FloatArray) -> NDArray[np.float64]:
        """The scores of options, from their rows and the last one's, float32[options + 1, width]."""
        *_, last = rows = states.astype(np.float64)
        (query_weight, key_weight), (query_bias, key_bias) = self._weights, self._biases
        query = (query_weight * last).sum(axis=1) + query_bias
        # The query goes through the keys' matrix once, in place of every option's row.
        pointer = (key_weight * query[:, None]).sum(axis=0)
        products = (rows[:-1] * pointer).sum(axis=1) + (query * key_bias).sum()
        return np.asarray(products / math.sqrt(self._size))

    def _text_program(self) -> "Program":
        """The program that gives hidden states, written on first use."""
        with self._lock:
            if self._program is None:
                self._engine.check_usable()
                with self._engine.exclusive_cache():
                    self._program = self._model.text_program(Pooling.NONE)
            return self._program


class _Reading(PromptForks):
    """Reads hidden states of prompts that begin alike."""

    def run(self, places: Sequence[Sequence[int]]) -> list[FloatArray]:
        """The states at rising positions of each prompt, float32[positions, width]."""
        # What is computed without results, or comes from the cache, ends before the first of them.
        length = min(shared_length(self.texts), *(one[0] for one in places))
        stem, found = self.admit(length), [[] for _ in places]  # type: tuple[SequenceCache, list[list[FloatArray]]]
        self.compute_until(stem, self.texts[0], length)
        for wave in self.waves(length):
            sequences = [stem if len(self.texts) == 1 else self._twin(stem) for _ in wave]
            while any(one.length < self.texts[index].size for one, index in zip(sequences, wave, strict=True)):
                self._step(sequences, wave, places, found)
            with self.engine.scheduler.exclusive():
                for one in sequences:
                    self.open.discard(one)
                    one.close()
        return [np.concatenate(parts) for parts in found]

    def _twin(self, stem: SequenceCache) -> SequenceCache:
        with self.engine.exclusive_cache():
            return self.fork(stem)

    def _step(
        self,
        sequences: Sequence[SequenceCache],
        wave: Sequence[int],
        places: Sequence[Sequence[int]],
        found: list[list[FloatArray]],
    ) -> None:
        """Compute the next rows of a wave: all of them, or as many of a long prompt as a batch holds."""
        starts = [one.length for one in sequences]
        room = self.program.max_batch_rows
        pending = [self.texts[index][start : start + room] for index, start in zip(wave, starts, strict=True)]
        first, rows, counts = 0, [], []
        for index, start, ids in zip(wave, starts, pending, strict=True):
            wanted = [first + place - start for place in places[index] if start <= place < start + ids.size]
            first += ids.size
            rows += wanted
            counts.append(len(wanted))
        with self.engine.exclusive_cache() as cache:
            states = self.forward(sequences, pending, np.array(rows, np.int32)).copy()
            if len(self.texts) == 1:
                cache.publish(sequences[0], self.texts[0], self.hints)
        if not np.isfinite(states).all():
            raise not_finite_error(starts[0] + 1)
        for index, part in zip(wave, np.split(states, np.cumsum(counts)[:-1]), strict=True):
            found[index].append(part)


def head_tensor(model: "Model", name: str, shape: tuple[int, ...] | None = None) -> FloatArray:
    """A tensor of a head as float32. Raises: CorruptFileError if it is missing, or has another shape than this one."""
    info = model.file.tensors.get(name)
    if info is None:
        raise CorruptFileError(
            f"{name} is not in the file; wanted it for the head of this decision model. Convert the model again or "
            "download another copy."
        )
    if shape is not None and info.shape != shape:
        raise CorruptFileError(f"{name} has shape {info.shape}; wanted {shape}. Convert the model again.")
    return np.array(dequantize(model.file.tensor_bytes(name), info.type, info.shape))


def decision_head(kind: str, engine: Engine, model: "Model") -> DecisionHead | None:
    """The head of a model of this type; None for one that is read by labels. Raises: CorruptFileError,
    UnsupportedFormatError."""
    makers = {"kev": PointerHead}
    return makers[kind](engine, model) if kind in makers else None
