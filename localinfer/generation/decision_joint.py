"""Models whose head decides about all questions of a prompt at once: Clef's format of llama.cpp.

The prompt holds the state and every question with its options. The head reads the states behind the last norm of the
whole prompt, of which it makes a memory; options read the memory, questions read their options, each other and the
memory, and each option is compared with its question. So an answer depends on the other questions and their order, but
not on the order of a choice's options, which are sorted, nor on other prompts, batches, threads or caches: all sums are
in float64, each in one order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.engine import Engine
from localinfer.errors import CorruptFileError, RequestError, UnsupportedFormatError
from localinfer.generation.decision_heads import head_info, head_tensor, positive
from localinfer.generation.decision_readouts import Prompt, TrainedDecisionModel, rendered_pieces, sorted_keys
from localinfer.generation.pooling import PooledText, TextPooler
from localinfer.generation.questions import Decisions, Question, checked_question
from localinfer.models.decoder.block_config import Pooling
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import row_bytes
from localinfer.types import TokenIds

if TYPE_CHECKING:
    from localinfer.models.load.loader import Model
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.tokenizer import Tokenizer

_MARK = "<<clef:"
_QUESTION, _OPTION = (f"{_MARK}{name}>>" for name in ("question", "option"))
"""Given to the template: what it writes between pieces, and before those that are a question or an option."""
_TYPES = ("noul", "choice", "score")
"""Types of questions in the order of their vectors."""
_BLOCK_ROWS = 32
_LEAST_LENGTH = 1e-12

Matrix = NDArray[np.float64]


class Span(NamedTuple):
    """Tokens of a question or an option in a prompt."""

    start: int
    stop: int


class JointPrompt(NamedTuple):
    """A prompt with its questions."""

    token_ids: TokenIds
    """int32[T]."""
    kinds: tuple[int, ...]
    """Index of each question's type in the head's order."""
    questions: tuple[Span, ...]
    """Of each question its instructions."""
    options: tuple[tuple[Span, ...], ...]
    """Of each question its options."""


class JointHead:
    """The head of one loaded model; threads may share it."""

    def __init__(self, engine: Engine, model: "Model") -> None:
        """Read a model's head. Raises: CorruptFileError, UnsupportedFormatError for a file without it."""
        self._engine, self._model, self._pooler, self._lock = engine, model, TextPooler(engine, model), Lock()
        metadata, prefix = model.file.metadata, f"{model.config.architecture}.decision"
        self._num_routing, self._num_joint, self._num_heads = (
            positive(metadata, f"{prefix}.{name}", 1 << 10)
            for name in ("routing_block_count", "block_count", "head_count")
        )
        self._epsilon = model.config.layer_norm_epsilon
        if not self._epsilon:
            raise UnsupportedFormatError(
                f"{model.config.architecture}.attention.layer_norm_epsilon is not in the file; wanted that of the "
                "head's norms. Convert the model again with a current converter."
            )
        columns, width = model.config.hidden_size, _rows(model, "decision.proj_memory.weight")
        if width % self._num_heads:
            raise CorruptFileError(
                f"decision.proj_memory.weight has {width} rows; wanted a multiple of the {self._num_heads} heads that "
                f"{prefix}.head_count says. Convert the model again."
            )
        inner = _rows(model, "dec.blk.0.ffn_up.weight")
        self._output = "output.weight" if "output.weight" in model.file.tensors else "token_embd.weight"
        self._tensors = {
            name: head_tensor(model, name, *shapes).astype(np.float64)
            for name, shapes in _shapes(self._num_routing, self._num_joint, columns, width, inner)
        }

    def score(self, prompt: JointPrompt) -> list[Matrix]:
        """Scores of the options of each question, float64[options]; a softmax makes probabilities of them."""
        token_ids = self._engine.check_prompt(prompt.token_ids, needs_tokens=True)
        # Of two threads one waits for the other's batches: a program grows while it is unused.
        with self._lock:
            (states,) = self._pooler.pool([PooledText(token_ids)], Pooling.NONE)
        hidden = self._norm(states.astype(np.float64), "decision.hidden_norm")
        memory = self._product(hidden, "decision.proj_memory")
        questions = np.stack([_mean(hidden, span) for span in prompt.questions])
        spans = [span for options in prompt.options for span in options]
        owners = np.repeat(np.arange(len(prompt.questions)), [len(options) for options in prompt.options])
        lexical = np.stack(
            [_mean(self._output_rows(token_ids[start:stop]), Span(0, stop - start)) for start, stop in spans]
        )
        options = self._product(np.stack([_mean(hidden, span) for span in spans]), "decision.proj_option_context")
        options = options + self._product(lexical, "decision.proj_option_lexical")
        options = options + self._product(questions, "decision.proj_option_question")[owners]
        for layer in range(self._num_routing):
            block = f"dec.blk.{layer}"
            read = self._norm(memory, f"{block}.cross_attn_norm_kv")
            options = options + self._attend(
                self._norm(options, f"{block}.cross_attn_norm"), read, f"{block}.cross_attn"
            )
            options = options + self._feed_forward(options, block)
        last = hidden[-1:]
        fields = self._fields(prompt, questions, options, owners, last)
        for layer in range(self._num_routing, self._num_routing + self._num_joint):
            block = f"dec.blk.{layer}"
            normed = self._norm(fields, f"{block}.attn_norm")
            fields = fields + self._attend(normed, normed, f"{block}.attn")
            fields = fields + self._attend(
                self._norm(fields, f"{block}.cross_attn_norm"), memory, f"{block}.cross_attn"
            )
            fields = fields + self._feed_forward(fields, block)
        fields = self._norm(fields, "decision.field_norm")[owners]
        anchors = _unit(questions + last)[owners]
        prior = (_unit(lexical) * anchors).sum(axis=1)
        options = self._norm(options, "decision.option_norm")
        cosine = (_unit(fields) * _unit(options)).sum(axis=1)
        features = np.concatenate([fields, options, fields * options, np.abs(fields - options)], axis=1)
        residual = self._product(_gelu(self._product(features, "decision.scorer")), "decision.scorer_out")[:, 0]
        of_prior, of_joint, gate = self._tensors["decision.scales"]
        scores = of_prior * prior + gate * (of_joint * cosine + residual)
        return np.split(scores, np.flatnonzero(np.diff(owners)) + 1)

    def close(self) -> None:
        """Give up programs, once the engine is closed."""
        with self._lock:
            self._pooler.close()

    def _fields(
        self, prompt: JointPrompt, questions: Matrix, options: Matrix, owners: NDArray[np.intp], last: Matrix
    ) -> Matrix:
        """A vector of each question: of its text, a summary of its options, the prompt's end and its type."""
        fields = self._product(questions, "decision.proj_question")
        weights = _products(fields, options) / math.sqrt(fields.shape[1])
        weights = _softmax(np.where(np.arange(len(fields))[:, None] == owners, weights, -np.inf))
        fields = fields + self._norm(_products(weights, options.T), "decision.option_summary_norm")
        fields = fields + self._product(last, "decision.proj_global")
        return np.asarray(fields + self._tensors["token_types.weight"][list(prompt.kinds)])

    def _attend(self, x: Matrix, read: Matrix, name: str) -> Matrix:
        """Attention of x over all rows of `read`."""
        tensors, (count, width) = self._tensors, x.shape
        size = width // self._num_heads
        queries = self._product(x, f"{name}_q").reshape(count, self._num_heads, size)
        keys, values = (tensors[f"{name}_{one}.weight"].reshape(self._num_heads, size, width) for one in "kv")
        biases = tensors[f"{name}_v.bias"].reshape(self._num_heads, size)
        found = np.empty_like(queries)
        for head in range(self._num_heads):
            # A query goes through the keys' matrix once, and a mean of rows through that of values, in place of every
            # row; a bias of keys adds the same to all scores.
            pointers = _products(queries[:, head], keys[head].T)
            weights = _softmax(_products(pointers, read) / math.sqrt(size))
            found[:, head] = _products(_products(weights, read.T), values[head]) + biases[head]
        return self._product(found.reshape(count, width), f"{name}_o")

    def _feed_forward(self, x: Matrix, block: str) -> Matrix:
        inner = self._product(self._norm(x, f"{block}.ffn_norm"), f"{block}.ffn_up")
        return self._product(_gelu(inner), f"{block}.ffn_down")

    def _product(self, x: Matrix, name: str) -> Matrix:
        found = _products(x, self._tensors[f"{name}.weight"])
        bias = self._tensors.get(f"{name}.bias")
        return found if bias is None else found + bias

    def _norm(self, x: Matrix, name: str) -> Matrix:
        centred = x - x.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + self._epsilon)
        return np.asarray(scaled * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"])

    def _output_rows(self, token_ids: TokenIds) -> Matrix:
        """Rows of the output matrix, or of the embedding in its place."""
        info = head_info(self._model, self._output)
        size = row_bytes(info.type, info.shape[1])
        raw = self._model.file.tensor_bytes(self._output).reshape(info.shape[0], size)[token_ids]
        return dequantize(raw, info.type, (len(token_ids), info.shape[1])).astype(np.float64)


def _shapes(
    num_routing: int, num_joint: int, columns: int, width: int, inner: int
) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Names of a head's tensors, and the shapes that each may have; columns: of the model, width: of the head."""
    found: dict[str, tuple[tuple[int, ...], ...]] = {}

    def matrix(name: str, rows: int, columns: int, *, has_bias: bool = True) -> None:
        # One row may be written as a vector.
        found[f"{name}.weight"] = ((rows, columns), *([(columns,)] if rows == 1 else []))
        if has_bias:
            found[f"{name}.bias"] = ((rows,),)

    def norm(name: str, size: int) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = ((size,),)

    for layer in range(num_routing + num_joint):
        block = f"dec.blk.{layer}"
        kinds = ("cross_attn",) if layer < num_routing else ("attn", "cross_attn")
        norm(f"{block}.{'cross_attn_norm_kv' if layer < num_routing else 'attn_norm'}", width)
        norm(f"{block}.cross_attn_norm", width)
        norm(f"{block}.ffn_norm", width)
        for kind in kinds:
            for one in "qkvo":
                matrix(f"{block}.{kind}_{one}", width, width)
        matrix(f"{block}.ffn_up", inner, width)
        matrix(f"{block}.ffn_down", width, inner)
    norm("decision.hidden_norm", columns)
    for name in ("option_summary", "field", "option"):
        norm(f"decision.{name}_norm", width)
    for name in ("memory", "question", "option_question", "global", "option_context", "option_lexical"):
        matrix(f"decision.proj_{name}", width, columns, has_bias=False)
    found["decision.scales"] = ((3,),)
    matrix("token_types", len(_TYPES), width, has_bias=False)
    matrix("decision.scorer", width, 4 * width)
    matrix("decision.scorer_out", 1, width)
    return list(found.items())


def _rows(model: "Model", name: str) -> int:
    shape = head_info(model, name).shape
    if len(shape) != 2:
        raise CorruptFileError(f"{name} has shape {shape}; wanted a matrix. Convert the model again.")
    return shape[0]


def _products(x: Matrix, weight: Matrix) -> Matrix:
    """Products of rows with rows, float64[N, M] of float64[N, K] and float64[M, K], each summed from first to last."""
    found, columns = np.zeros((len(x), len(weight))), np.ascontiguousarray(weight.T)
    for start in range(0, len(x), _BLOCK_ROWS):
        total, rows = found[start : start + _BLOCK_ROWS], x[start : start + _BLOCK_ROWS]
        step = np.empty_like(total)
        for column, one in zip(columns, rows.T, strict=True):
            np.multiply(one[:, None], column, out=step)
            total += step
    return found


def _mean(x: Matrix, span: Span) -> Matrix:
    return np.asarray(x[span.start : span.stop].sum(axis=0) / (span.stop - span.start))


def _unit(x: Matrix) -> Matrix:
    return np.asarray(x / np.maximum(np.sqrt((x * x).sum(axis=1, keepdims=True)), _LEAST_LENGTH))


def _softmax(x: Matrix) -> Matrix:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _gelu(x: Matrix) -> Matrix:
    flat = [0.5 * one * (1.0 + math.erf(one / math.sqrt(2.0))) for one in x.ravel().tolist()]
    return np.array(flat).reshape(x.shape)


class JointDecisionModel(TrainedDecisionModel):
    """Answers all questions of a request at once; threads may share it. Raises: UnsupportedFormatError."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer",
        template: "ChatTemplate",
        metadata: Mapping[str, object],
        joint: JointHead,
    ) -> None:
        super().__init__(engine, tokenizer, template, metadata)
        self._joint = joint

    def close(self) -> None:
        """Give up memory, once the engine is closed."""
        self._joint.close()

    def _decide(
        self, about: Any, questions: Mapping[str, Question], salt: bytes, on_encoded: Callable[[int], object]
    ) -> Decisions:
        """See `TrainedDecisionModel`; nothing is cached: the head reads every row."""
        asked = [self._asked(name, checked_question(question)) for name, question in questions.items()]
        prompt = self._lay_out(about, asked)
        on_encoded(prompt.token_ids.size)
        answers = {}
        for (name, question), scores in zip(questions.items(), self._joint.score(prompt), strict=True):
            one = Prompt(prompt.token_ids, (), None, None, scores.size, self._temperature(question, scores.size))
            answers[name] = self._answer(question, [one], iter([scores]))
        size = prompt.token_ids.size
        return Decisions(
            answers=answers,
            state_tokens=prompt.questions[0].start,
            prompt_tokens=size,
            cached_tokens=0,
            computed_tokens=size,
        )

    def _lay_out(self, state: Any, asked: Sequence[Mapping[str, Any]]) -> JointPrompt:
        """The prompt of all questions. Raises: RequestError for an empty one; UnsupportedFormatError for a template
        that writes another form."""
        values = sorted_keys({"state": state, "questions": asked})
        pieces = rendered_pieces(self._template, self._tokenizer, values, _MARK, ("question", "option"))
        ids: list[int] = []
        questions: list[Span] = []
        options: list[list[Span]] = []
        # Trained with each piece encoded by itself.
        for mark, piece in pieces:
            found = self._tokenizer.encode_segments(piece, max_tokens=self._engine.context_length)
            span = Span(len(ids), len(ids) + len(found))
            ids += found
            if mark and not found:
                raise RequestError("instructions and options must not be empty; write them", field="instructions")
            if mark == _QUESTION:
                questions.append(span)
                options.append([])
            elif mark:
                (options or [[]])[-1].append(span)
        wanted = [len(one["options"]) for one in asked]
        if [len(one) for one in options] != wanted:
            raise UnsupportedFormatError(
                f"the prompt of questions with {wanted} options marks {[len(one) for one in options]}; wanted a mark "
                "before each question, and before each of its options behind it. Convert the model again with a "
                "current converter."
            )
        kinds = tuple(_TYPES.index(one["type"]) for one in asked)
        return JointPrompt(np.array(ids, np.int32), kinds, tuple(questions), tuple(map(tuple, options)))
