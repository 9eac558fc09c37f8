"""Heads of models made for decisions: scores of options from hidden states, in place of probabilities of labels.

A head reads the states behind the last norm at places of the prompt, and computes a few products in float64, each sum
in one fixed order, so that a score is the same number on every machine. On the CPU it does not depend on other prompts,
batches, threads or what was cached either.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import shown
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import not_finite_error
from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.generation.label_scores import PromptForks, shared_length
from localinfer.generation.pooling import PooledText, TextPooler
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.text.vocabulary import PREFIX
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord
from localinfer.types import FloatArray, TokenIds

if TYPE_CHECKING:
    from localinfer.kernels.program import Program
    from localinfer.models.load.loader import Model

_OPTION_END = "<|box_end|>"
KINDS = ("choice", "score", "noul")
"""Types of questions, in the order in which heads have their vectors."""

_OPTION_TOKENS = 48
_LEAST_OPTION_TOKENS = 4
_LEAST_QUESTION_TOKENS = 8
_SPARED_TOKENS = 16
"""Of a prompt that is cut: tokens of an option behind its mask at most, with it at least, of a question at least, and
those that options leave to it."""


class HeadPrompt(NamedTuple):
    """A prompt, and where its options are read."""

    token_ids: TokenIds
    """int32[T]."""
    places: tuple[int, ...]
    """Position of each option, rising."""
    kind: int = 0
    """Index of the question's type in `KINDS`."""
    num_options: int = 0
    """Options, for heads that read no places of them."""


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

    marker: str
    """Text that stands for a place to read at, and must not be in what is asked; empty for none."""

    def lay_out(self, token_ids: Sequence[int], num_options: int, kind: str) -> HeadPrompt:
        """Find the options of a prompt, and cut what was cut in training.

        kind: one of `KINDS`. Raises: UnsupportedFormatError for a prompt of another form.
        """
        ...

    def score(self, prompts: Sequence[HeadPrompt], hints: CacheHints) -> HeadScores:
        """Score the options of prompts; hints: how the cache keeps what they begin with."""
        ...

    def close(self) -> None:
        """Give up programs, once the engine is closed."""
        ...


class PointerHead:
    """Kev's: the product of a query, of the prompt's last row, with a key, of the row that ends an option."""

    marker = ""

    def __init__(self, engine: Engine, model: "Model") -> None:
        """Read a model's head. Raises: CorruptFileError, UnsupportedFormatError for a file without it."""
        assert model.tokenizer is not None, "a model that decides has one"
        self._begin(engine, model)
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

    def _begin(self, engine: Engine, model: "Model") -> None:
        self._engine, self._model, self._lock = engine, model, Lock()
        self._program: Program | None = None

    def lay_out(self, token_ids: Sequence[int], num_options: int, kind: str) -> HeadPrompt:
        """See `DecisionHead`."""
        ids = np.array(token_ids, np.int32)
        places = np.flatnonzero(ids == self._end)
        if places.size != num_options or places[0] == 0:
            raise UnsupportedFormatError(
                f"the prompt of {num_options} options has {places.size} {_OPTION_END}; wanted one behind each. Convert "
                "the model again with a current converter."
            )
        return HeadPrompt(ids, tuple(map(int, places)), KINDS.index(kind))

    def score(self, prompts: Sequence[HeadPrompt], hints: CacheHints) -> HeadScores:
        """See `DecisionHead`."""
        for prompt in prompts:
            self._engine.check_prompt(prompt.token_ids, needs_tokens=True)
        reading = _Reading(self._engine, self._text_program(), [prompt.token_ids for prompt in prompts], hints)
        try:
            states = reading.run([(*prompt.places, prompt.token_ids.size - 1) for prompt in prompts])
        finally:
            reading.close()
        return HeadScores(list(map(self._products, states, prompts)), reading.cached_tokens, reading.computed_tokens)

    def close(self) -> None:
        """See `DecisionHead`."""
        with self._lock:
            self._program = None

    def _products(self, states: FloatArray, prompt: HeadPrompt) -> NDArray[np.float64]:
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


class LayersHead:
    """Of an encoder with layers behind it, whose classifier scores the row of the mask that belongs to each option.

    The layers and the classifier are parts of the model's graph; see `Architecture.first_decision_layer`.
    """

    marker = ""

    def __init__(self, engine: Engine, model: "Model") -> None:
        """Read a model's settings. Raises: CorruptFileError, UnsupportedFormatError for a file without them."""
        assert model.tokenizer is not None, "a model that decides has one"
        self._engine, self._pooler, self._lock = engine, TextPooler(engine, model), Lock()
        if not model.config.num_decision_layers:
            raise UnsupportedFormatError(
                f"{model.config.architecture}.decision.block_count is not in the file, or is not read for this "
                "architecture; wanted the number of the head's layers, as a current converter of llama.cpp writes it"
            )
        self._size = model.tokenizer.vocab_size
        self._mask = positive(model.file.metadata, f"{PREFIX}mask_token_id", self._size)
        width = model.config.hidden_size
        for name in ("cls.weight", "cls.bias", "cls.norm.weight", "cls.norm.bias", "cls.output.bias"):
            head_info(model, name)
        shaped: dict[str, tuple[tuple[int, ...], ...]] = {
            "token_types.weight": ((len(KINDS), width),),
            # One row may be written as a vector.
            "cls.output.weight": ((1, width), (width,)),
        }
        for name, shapes in shaped.items():
            if (shape := head_info(model, name).shape) not in shapes:
                raise CorruptFileError(f"{name} has shape {shape}; wanted {shapes[0]}. Convert the model again.")

    def lay_out(self, token_ids: Sequence[int], num_options: int, kind: str) -> HeadPrompt:
        """See `DecisionHead`."""
        ids = np.array(token_ids, np.int32)
        places = np.flatnonzero(ids == self._mask)
        if places.size != num_options:
            raise UnsupportedFormatError(
                f"the prompt of {num_options} options has {places.size} masks; wanted one of each. Convert the model "
                "again with a current converter."
            )
        return HeadPrompt(ids, tuple(map(int, places)), KINDS.index(kind))

    def score(self, prompts: Sequence[HeadPrompt], hints: CacheHints) -> HeadScores:
        """See `DecisionHead`; an encoder computes each prompt whole."""
        texts = [
            PooledText(
                self._engine.check_prompt(one.token_ids, needs_tokens=True), row_type=one.kind, places=one.places
            )
            for one in prompts
        ]
        # Of two threads one waits for the other's batches: a program grows while it is unused.
        with self._lock:
            found = self._pooler.pool(texts, Pooling.RANK)
        scores = [rows.reshape(-1).astype(np.float64) for rows in found]
        return HeadScores(scores, 0, sum(one.token_ids.size for one in prompts))

    def close(self) -> None:
        """See `DecisionHead`."""
        with self._lock:
            self._pooler.close()


class MaskHead(LayersHead):
    """Laya's, whose prompts are cut as in training."""

    def __init__(self, engine: Engine, model: "Model") -> None:
        """See `LayersHead`."""
        super().__init__(engine, model)
        assert model.tokenizer is not None, "a model that decides has one"
        self._most = positive(model.file.metadata, f"{model.config.architecture}.decision.max_head_tokens")
        self._separator = positive(model.file.metadata, f"{PREFIX}seperator_token_id", self._size)
        self.marker = model.tokenizer.token_text(self._mask)

    def lay_out(self, token_ids: Sequence[int], num_options: int, kind: str) -> HeadPrompt:
        """See `DecisionHead`; the prompt is [cls] question [sep] ([mask] option)* [sep] state [sep]."""
        ids = list(token_ids)
        masks = [place for place, token_id in enumerate(ids) if token_id == self._mask]
        stop = ids.index(self._separator, masks[-1]) if masks and self._separator in ids[masks[-1] :] else len(ids)
        is_right = len(masks) == num_options and masks[0] >= 2 and ids[masks[0] - 1] == self._separator
        if not is_right or stop + 1 >= len(ids) or ids[-1] != self._separator:
            raise UnsupportedFormatError(
                f"the prompt of {num_options} options has {len(masks)} masks, or separators elsewhere; wanted the "
                "start, the question, a mask before each option, and the state, with separators behind. Convert the "
                "model again with a current converter."
            )
        question = ids[1 : masks[0] - 1]
        options = [ids[start:end] for start, end in zip(masks, [*masks[1:], stop], strict=True)]
        options = [one[: 1 + _OPTION_TOKENS] for one in options]
        if sum(map(len, options)) + _SPARED_TOKENS > self._most:
            share = max(0, self._most - _SPARED_TOKENS) // num_options
            options = [one[: max(_LEAST_OPTION_TOKENS, share)] for one in options]
        room = max(_LEAST_QUESTION_TOKENS, self._most - sum(map(len, options)))
        head = [ids[0], *question[:room], self._separator]
        ends = np.cumsum([len(head), *map(len, options)])
        whole = np.array([*head, *chain.from_iterable(options), *ids[stop:]], np.int32)
        return HeadPrompt(whole, tuple(map(int, ends[:-1])), KINDS.index(kind))


def positive(metadata: Mapping[str, object], key: str, limit: int = 1 << 30) -> int:
    """A setting of a head. Raises: UnsupportedFormatError if it is not a number above 0."""
    found = metadata.get(key)
    if not isinstance(found, Integral) or isinstance(found, bool) or not 0 < int(found) < limit:
        raise UnsupportedFormatError(
            f"{key} is {shown(found)}; wanted a number above 0, which the head of this decision model needs"
        )
    return int(found)


def head_info(model: "Model", name: str) -> TensorRecord:
    """A tensor's description. Raises: CorruptFileError if it is missing."""
    info = model.file.tensors.get(name)
    if info is None:
        raise CorruptFileError(
            f"{name} is not in the file; wanted it for the head of this decision model. Convert the model again or "
            "download another copy."
        )
    return info


def head_tensor(model: "Model", name: str, *shapes: tuple[int, ...]) -> FloatArray:
    """A tensor of a head as float32, in the first of these shapes.

    Raises: CorruptFileError if it is missing, or has none of them.
    """
    info = head_info(model, name)
    if shapes and info.shape not in shapes:
        raise CorruptFileError(f"{name} has shape {info.shape}; wanted {shapes[0]}. Convert the model again.")
    found = np.array(dequantize(model.file.tensor_bytes(name), info.type, info.shape))
    return found.reshape(shapes[0]) if shapes else found


def decision_head(kind: str, engine: Engine, model: "Model") -> DecisionHead | None:
    """The head of a model of this type; None for one that is read by labels. Raises: CorruptFileError,
    UnsupportedFormatError."""
    makers: dict[str, Callable[[Engine, Model], DecisionHead]] = {
        "kev": PointerHead,
        "laya": MaskHead,
        "lfm2-d1-omni": LayersHead,
    }
    return makers[kind](engine, model) if kind in makers else None
