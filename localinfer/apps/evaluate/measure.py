"""Perplexity of a model on a text, KL divergence of another model from it, and questions with known answers.

The conventions are those of llama.cpp's perplexity tool: the text is cut into chunks of 512 tokens that do not overlap,
the first token of each becomes the beginning-of-text token if the model uses one, and only the second half of a chunk
is scored. Divergences are exact; that tool rounds logits to save disk space.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ContextLengthError, RequestError
from localinfer.llm import LLM
from localinfer.types import ProgressCallback

CONTEXT_LENGTH = 512
_ROWS_AT_ONCE = 16
PICTURE_QUESTION = "Describe this picture in detail."
PICTURE_TOKENS = 128
"""Of an answer about a picture."""


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood of `num_tokens` tokens, with the standard error of the estimate."""

    perplexity: float
    standard_error: float
    num_tokens: int


@dataclass(frozen=True)
class Comparison:
    """Differences of a candidate's predictions from a base's, at the scored positions of one text."""

    divergences: NDArray[np.float64]
    """KL(base || candidate) in nats, [positions]."""
    same_top: float
    """Share of positions whose likeliest token is the same."""
    probability_change: float
    """Root mean square change of the true token's probability."""
    base: Perplexity
    candidate: Perplexity

    @property
    def num_tokens(self) -> int:
        return self.divergences.size

    @property
    def mean(self) -> float:
        return float(self.divergences.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean divergence."""
        return _standard_error(self.divergences)

    @property
    def same_top_standard_error(self) -> float:
        return float(np.sqrt(self.same_top * (1 - self.same_top) / max(1, self.num_tokens - 1)))

    def quantile(self, share: float) -> float:
        """The divergence that a share of positions does not exceed; 1: the largest."""
        return float(np.quantile(self.divergences, share))


def measure_perplexity(
    llm: LLM,
    text: str,
    *,
    context_length: int = CONTEXT_LENGTH,
    max_chunks: int | None = None,
    progress: ProgressCallback = lambda *_: None,
) -> Perplexity:
    """Measure the perplexity of a text.

    Raises: RequestError if the text is shorter than one chunk, ContextLengthError if a chunk exceeds the context.
    """
    chunks = _cut(llm, text, context_length, max_chunks)
    losses = []
    for index, chunk in enumerate(chunks):
        progress("measuring", index, len(chunks))
        losses += [-_log_probabilities(block)[np.arange(len(true)), true] for block, true in _scored(llm, chunk)]
    return _perplexity(np.concatenate(losses))


def compare(
    base: LLM,
    candidate: LLM,
    text: str,
    *,
    context_length: int = CONTEXT_LENGTH,
    max_chunks: int | None = None,
    progress: ProgressCallback = lambda *_: None,
) -> Comparison:
    """Measure the KL divergence of a candidate from a base.

    Raises: as `measure_perplexity`; RequestError if the models split the text into different tokens.
    """
    chunks, others = (_cut(llm, text, context_length, max_chunks) for llm in (base, candidate))
    is_same = len(chunks) == len(others) and all(map(np.array_equal, chunks, others))
    if not is_same or base.vocab_size != candidate.vocab_size:
        raise RequestError(
            "the two models split the text into different tokens; wanted models with the same vocabulary, such as one "
            "model before and after quantization"
        )
    rows: list[NDArray[np.float64]] = []
    for index, chunk in enumerate(chunks):
        progress("comparing", index, len(chunks))
        for (first, true), (second, _) in zip(_scored(base, chunk), _scored(candidate, chunk), strict=True):
            rows.append(_compare_rows(first, second, true))
    return _comparison(rows)


def compare_pictures(
    base: LLM,
    candidate: LLM,
    pictures: Sequence[Path],
    *,
    question: str = PICTURE_QUESTION,
    max_tokens: int = PICTURE_TOKENS,
    progress: ProgressCallback = lambda *_: None,
) -> Comparison:
    """Measure the divergence of a candidate from a base, each with its own encoders, on answers about pictures.

    The text that both predict is the base's likeliest answer, of `max_tokens` tokens at most, to a question about each
    picture. Raises: RequestError if the models read a picture or the question as other tokens, or the base answers
    nothing; as `LLM.chat`.
    """
    rows: list[NDArray[np.float64]] = []
    for index, picture in enumerate(pictures):
        progress("comparing", index, len(pictures))
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        first, second = (llm.encode_chat([{"role": "user", "content": parts}]) for llm in (base, candidate))
        ids, others = np.asarray(first.token_ids), np.asarray(second.token_ids)
        # Rows of pictures are named by their encoder, too.
        if not np.array_equal(np.maximum(ids, -1), np.maximum(others, -1)) or base.vocab_size != candidate.vocab_size:
            raise RequestError(
                f"the two models read {picture.name} as {ids.size} and {others.size} tokens, which are not the same; "
                "wanted one model, and one kind of encoders, before and after quantization"
            )
        answer = np.array(base.complete(first, temperature=0, max_tokens=max_tokens).token_ids, np.int32)
        if not answer.size:
            continue
        logits = [
            llm.logits(replace(one, token_ids=np.concatenate((one.token_ids, answer[:-1]))), first=ids.size - 1)
            for llm, one in ((base, first), (candidate, second))
        ]
        rows.append(_compare_rows(logits[0], logits[1], answer))
    if not rows:
        raise RequestError("the base model answers nothing about these pictures; wanted a model that describes them")
    return _comparison(rows)


def _comparison(rows: Sequence[NDArray[np.float64]]) -> Comparison:
    """The comparison of all scored positions, parts of which are `_compare_rows`'."""
    divergences, base_losses, losses, is_same_top = np.concatenate(rows, axis=1)
    change = np.exp(-losses) - np.exp(-base_losses)
    return Comparison(
        divergences=divergences,
        same_top=float(is_same_top.mean()),
        probability_change=float(np.sqrt((change**2).mean())),
        base=_perplexity(base_losses),
        candidate=_perplexity(losses),
    )


def _compare_rows(
    base: NDArray[np.float32], candidate: NDArray[np.float32], true: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Divergence, both losses and whether the likeliest token is the same: float64[4, rows]."""
    first, second, rows = _log_probabilities(base), _log_probabilities(candidate), np.arange(len(true))
    # Rounding may make the sum negative.
    divergences = np.maximum((np.exp(first) * (first - second)).sum(axis=1), 0)
    is_same_top = base.argmax(axis=1) == candidate.argmax(axis=1)
    return np.stack([divergences, -first[rows, true], -second[rows, true], is_same_top.astype(np.float64)])


def _cut(llm: LLM, text: str, context_length: int, max_chunks: int | None) -> list[NDArray[np.int32]]:
    if context_length > llm.context_length:
        raise ContextLengthError(
            f"chunks of {context_length} tokens exceed the model's context of {llm.context_length}; "
            "use a shorter context"
        )
    token_ids = np.array(llm.tokenizer.encode(text), np.int32)
    count = token_ids.size // context_length
    if count < 1:
        raise RequestError(
            f"the text has {token_ids.size} tokens, but one chunk takes {context_length}; use a longer text or a "
            "shorter context"
        )
    return [
        token_ids[index * context_length : (index + 1) * context_length]
        for index in range(count if max_chunks is None else min(count, max_chunks))
    ]


def _scored(llm: LLM, chunk: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Logits and the true next tokens of the scored positions, a few rows at a time."""
    given = chunk.copy()
    if llm.tokenizer.adds_bos and llm.tokenizer.bos_token_id is not None:
        given[0] = llm.tokenizer.bos_token_id
    logits = llm.logits(given)
    for start in range(chunk.size // 2, chunk.size - 1, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, chunk.size - 1)
        yield logits[start:stop], chunk[start + 1 : stop + 1]


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _perplexity(losses: NDArray[np.float64]) -> Perplexity:
    perplexity = float(np.exp(losses.mean()))
    return Perplexity(perplexity, perplexity * _standard_error(losses), losses.size)


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std() / np.sqrt(max(1, values.size - 1)))


LONGEST_ANSWER = 96


@dataclass(frozen=True)
class Question:
    """A question, and words of which a right answer contains one."""

    text: str
    answers: tuple[str, ...]


QUESTIONS = (
    Question("What is the capital of Japan?", ("tokyo",)),
    Question("How many days does a leap year have?", ("366",)),
    Question("What is 17 plus 25?", ("42",)),
    Question("Which planet is closest to the sun?", ("mercury",)),
    Question("At how many degrees Celsius does water boil at sea level?", ("100", "hundred")),
    Question("Who wrote the play Romeo and Juliet?", ("shakespeare",)),
    Question("What is the opposite of 'hot'?", ("cold",)),
    Question("Which gas do plants take from the air to grow?", ("carbon dioxide", "co2", "co₂")),
    Question("What is the largest ocean on Earth?", ("pacific",)),
    Question("How many legs does a spider have?", ("8", "eight")),
)


@dataclass(frozen=True)
class SanityAnswer:
    """A model's answer to a question."""

    question: Question
    text: str

    @property
    def is_right(self) -> bool:
        return any(wanted in self.text.lower() for wanted in self.question.answers)


def ask(llm: LLM, *, progress: ProgressCallback = lambda *_: None) -> list[SanityAnswer]:
    """Ask all questions, each in its own conversation, with greedy decoding.

    progress: called with a stage's name, the questions answered and the total.
    Raises: RequestError if the model cannot chat, TemplateError if its template refuses a question.
    """
    answers = []
    for index, question in enumerate(QUESTIONS):
        progress("asking", index, len(QUESTIONS))
        completion = llm.chat(
            [{"role": "user", "content": f"{question.text} Answer in one short sentence."}],
            temperature=0.0,
            max_tokens=LONGEST_ANSWER,
        )
        answers.append(SanityAnswer(question, completion.text.strip()))
    return answers
