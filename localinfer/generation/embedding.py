"""Texts and pictures to vectors and rankings: batches, dimensions and lengths."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from localinfer.arguments import check_flag, check_number, shown
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import not_finite_error
from localinfer.errors import RequestError
from localinfer.generation.embedding_inputs import EmbeddingInput, InputReader
from localinfer.generation.pooling import PooledText, TextPooler
from localinfer.models.decoder.block_config import Pooling
from localinfer.types import FloatArray, RankedDocument

if TYPE_CHECKING:
    from localinfer.generation.media import MediaModel, MediaReader
    from localinfer.models.load.loader import Model
    from localinfer.models.media.records import EncoderInput

POOLINGS = ("none", "mean", "first", "cls", "last")
RERANK_TEMPLATE_KEY = "tokenizer.chat_template.rerank"
_YES = "yes"


class TextEmbedder:
    """Implementation of `LLM.embed` and `LLM.rerank`. May be used from several threads."""

    def __init__(
        self, engine: Engine, model: "Model", media: "MediaModel | None" = None, reader: "MediaReader | None" = None
    ) -> None:
        """Embed with a model; media: its encoders; reader: of pictures in prompts, if its prompts take them."""
        self._engine = engine
        self._model = model
        self._media = media
        self._inputs = InputReader(engine, model, media, reader)
        self._pooler = TextPooler(engine, model)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give up memory, once the engine is closed."""
        self._pooler.close()

    def inputs(self, prompts: Sequence[Any], *, truncate: bool) -> list[EmbeddingInput]:
        """Prompts as they are computed."""
        truncate = check_flag("truncate", truncate)
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
            raise RequestError(f"prompts is {shown(prompts)}; give a list of texts, lists of token ids, or parts")
        return [self._inputs.read(one, f"prompts[{index}]", truncate=truncate) for index, one in enumerate(prompts)]

    def embed(
        self,
        prompts: Sequence[Any],
        *,
        pooling: str | None,
        normalize: bool,
        dimensions: int | None,
        truncate: bool,
    ) -> list[FloatArray]:
        """A vector of each prompt, float32[size], or with pooling "none" of each token, float32[T, size]."""
        if self._model.config.only_decides and pooling != "none":
            raise RequestError("this model answers decisions, and its states are no vectors of texts; use decide")
        normalize = check_flag("normalize", normalize)
        chosen = self._pooling(pooling)
        found = self._vectors(self.inputs(prompts, truncate=truncate), chosen)
        if dimensions is not None and found:
            check_number("dimensions", dimensions, 1, found[0].shape[-1])
        return [_finished(one, dimensions, normalize=normalize) for one in found]

    def rerank(
        self,
        query: str,
        documents: Sequence[Any],
        *,
        top_n: int | None,
        normalize: bool,
        truncate: bool,
        on_encoded: Callable[[int], object] | None,
    ) -> list[RankedDocument]:
        """The documents by falling score, equal ones in order."""
        self._engine.check_usable()
        normalize, truncate = check_flag("normalize", normalize), check_flag("truncate", truncate)
        check_number("top_n", top_n, 1, none="for all")
        if not isinstance(query, str):
            raise RequestError(f"query is {shown(query)}; give a text")
        if self._model.pooling is Pooling.LATE:
            inputs = self.inputs([query, *_listed(documents)], truncate=truncate)
            counts = [one.num_tokens for one in inputs]
            if on_encoded is not None:
                on_encoded(sum(counts))
            first, *others = (_finished(one, None, normalize=True) for one in self._vectors(inputs, Pooling.LATE))
            scores = [late_score(first, one) / (len(first) if normalize else 1) for one in others]
            return _ranked(scores, [counts[0] + count for count in counts[1:]], top_n)
        documents = _strings(documents)
        if self._model.pooling is not Pooling.RANK:
            raise RequestError(
                "this model is no reranker: its file has no classifier (pooling_type 4); load a reranker, or compare "
                "the vectors of embed"
            )
        pairs = [self._pair(query, text, truncate) for text in documents]
        texts = [PooledText(self._inputs.checked(ids), num_first=num_first) for ids, num_first in pairs]
        if on_encoded is not None:
            on_encoded(sum(one.token_ids.size for one in texts))
        found = self._pool(texts, Pooling.RANK)
        scores = [self._score(outputs, normalize=normalize) for outputs in found]
        return _ranked(scores, [one.token_ids.size for one in texts], top_n)

    def _vectors(self, inputs: Sequence[EmbeddingInput], pooling: Pooling) -> list[FloatArray]:
        """The vectors of prompts, of which some are pictures with vectors of their own."""
        texts = [PooledText(one.token_ids, one.num_hidden, one.media) for one in inputs if one.picture is None]
        pooled = iter(self._pool(texts, pooling))
        return [next(pooled) if one.picture is None else self._encoded(one.picture) for one in inputs]

    def _encoded(self, picture: "EncoderInput") -> FloatArray:
        assert self._media is not None, "it has prepared the picture"
        vector: FloatArray = self._media.encode(picture)[0].copy()
        if not np.isfinite(vector).all():
            raise not_finite_error(1)
        return vector

    def _pool(self, texts: Sequence[PooledText], pooling: Pooling) -> list[FloatArray]:
        # Of two threads one waits for the other's batches: a program grows while it is unused.
        with self._lock:
            return self._pooler.pool(texts, pooling)

    def _pooling(self, name: str | None) -> Pooling:
        if name is None:
            found = self._model.pooling
            if found is Pooling.RANK:
                raise RequestError(
                    "this model is a reranker, which gives scores and no vectors; use rerank, or name a pooling"
                )
            return found
        if not isinstance(name, str) or name not in POOLINGS:
            raise RequestError(f"pooling is {shown(name)}; give {', '.join(POOLINGS)}, or None for the model's own")
        return Pooling.FIRST if name == "cls" else Pooling(name)

    def _pair(self, query: str, document: str, truncate: bool) -> tuple[list[int], int]:
        """Query and document as the model was trained to read them, and how many ids are of the first token type."""
        template = self._model.file.metadata.get(RERANK_TEMPLATE_KEY)
        tokenizer, room = self._inputs.tokenizer, self._engine.context_length
        if isinstance(template, str):
            filled = self._filled(template, query, document, truncate)
            return filled, len(filled)
        if not self._model.config.is_encoder:
            raise RequestError(
                f"this reranker reads a prompt that its file does not have ({RERANK_TEMPLATE_KEY}); convert it again "
                "with a current converter"
            )
        first = tokenizer.encode(query, max_tokens=room)
        between, end = tokenizer.ids_between, tokenizer.ids_after
        second = tokenizer.encode(document, add_special=False, max_tokens=None if truncate else room)
        if truncate:
            second = second[: max(0, room - len(first) - len(between) - len(end))]
        ids = [*first, *between, *second, *end]
        has_types = tokenizer.second_type < self._model.num_token_types
        return ids, len(first) + len(between) if tokenizer.second_type and has_types else len(ids)

    def _filled(self, template: str, query: str, document: str, truncate: bool) -> list[int]:
        """The ids of a prompt; only the template's own text may spell control tokens."""
        tokenizer, room = self._inputs.tokenizer, self._engine.context_length

        def encoded(text: str) -> list[int]:
            segments = [
                (query, False) if part == "{query}" else (text, False) if part == "{document}" else (part, True)
                for part in _template_parts(template)
            ]
            return tokenizer.encode_segments(segments, max_tokens=None if truncate else room)

        found = encoded(document)
        while truncate and len(found) > room and document:
            # Fewer tokens by what is too much, at a character's edge.
            document = document[: max(0, len(document) * room // len(found) - 1)]
            found = encoded(document)
        return found

    def _score(self, outputs: FloatArray, *, normalize: bool) -> float:
        """One number of the classifier's output: the relevance of the document."""
        labels = self._model.labels
        if len(outputs) == 1:
            score = float(outputs[0])
            return 1.0 / (1.0 + math.exp(-max(score, -700.0))) if normalize else score
        if _YES not in labels or len(labels) != len(outputs):
            raise RequestError(
                f"this model classifies into {len(outputs)} labels ({', '.join(labels) or 'unnamed'}), none of which "
                "says yes to a document; load a reranker"
            )
        exponentials = np.exp(outputs.astype(np.float64) - float(outputs.max()))
        return float(exponentials[labels.index(_YES)] / exponentials.sum())


def late_score(query: FloatArray, document: FloatArray) -> float:
    """The sum, over rows of a query, of the greatest product with a row of a document (ColBERT, arXiv 2004.12832)."""
    # Not by a library of matrices, whose sums may depend on its threads.
    products = np.einsum("qd,kd->qk", query.astype(np.float64), document.astype(np.float64))
    return float(products.max(axis=1).sum())


def _ranked(scores: Sequence[float], counts: Sequence[int], top_n: int | None) -> list[RankedDocument]:
    """Documents of these scores and numbers of tokens, the best first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    return [RankedDocument(index, scores[index], counts[index]) for index in order]


def _template_parts(template: str) -> list[str]:
    parts: list[str] = []
    for outer in template.split("{query}"):
        if parts:
            parts.append("{query}")
        inner = outer.split("{document}")
        parts.append(inner[0])
        for text in inner[1:]:
            parts += ["{document}", text]
    return [part for part in parts if part]


def _listed(documents: object) -> list[Any]:
    if not isinstance(documents, Sequence) or isinstance(documents, str | bytes):
        raise RequestError(f"documents is {shown(documents)}; give a list of texts")
    return list(documents)


def _strings(documents: object) -> list[str]:
    found = _listed(documents)
    wrong = [one for one in found if not isinstance(one, str)]
    if wrong:
        raise RequestError(f"documents holds {shown(wrong[0])}, and this reranker reads texts; give a list of texts")
    return found


def _finished(values: FloatArray, dimensions: int | None, *, normalize: bool) -> FloatArray:
    """The first dimensions (Matryoshka, arXiv 2205.13147), of length 1 where wanted."""
    wide = values[..., :dimensions].astype(np.float64)
    if normalize:
        lengths = np.sqrt(np.sum(wide * wide, axis=-1, keepdims=True))
        wide = np.divide(wide, lengths, out=wide, where=lengths > 0)
    return np.ascontiguousarray(wide, np.float32)
