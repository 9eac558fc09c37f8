"""Check that a model speaks: it must find a bundled text about as easy as models of its size do.

A conversion that goes wrong leaves weights that look sound one by one, and a model that guesses. The criteria
need no reference: bits per byte of the easiest of some passages, one of which is in a language of any trained model,
and the loss that is left when a passage stands in the context already.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.models.checks import Finding
from localinfer.quant.formats.types import TensorRecord

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer

_NUM_TOKENS = 96
_LEAST_TOKENS = 24
_LEAST_WEIGHTS = 100_000
"""Of layers; with fewer no model speaks, however it was trained."""
_MOST_BITS = ((300_000_000, 1.3), (30_000_000, 1.5), (0, 1.75))
"""Bits per byte by the weights of the layers, from which on a model speaks badly. Plain English takes models of a
billion weights and more 0.6 to 0.9, of a hundred million 0.8 to 1.2, those of stories with some million 0.5 to 1.2; a
language they hardly know takes them 2 and more, and letters by their frequency alone 4."""
_COPYING_WEIGHTS = 30_000_000
_MOST_LEFT, _MOST_LEFT_RECURRENT = 0.4, 0.8
"""Largest share of a passage's loss that is left when models of that size read it again: 0.05 to 0.2 in those that
attend to it and were trained, and all of it where positions or heads are wrong."""
_RECURRENT = re.compile(r"blk\.\d+\.(?:ssm_|shortconv|time_mix)")
_SKIPPED = 8
"""Tokens of the second reading until it is clear that it is one."""
_LEAST_CHARACTERS = 2.0
_LEAST_WIDE_CHARACTERS = 0.5
"""Characters in a token, of alphabets and of scripts of some thousand characters, below which a vocabulary was not made
for a language."""
_WIDE = 0x2E80


@dataclass(frozen=True)
class Passage:
    """A text, and the language it is in."""

    language: str
    text: str


@dataclass(frozen=True)
class Reading:
    """Losses of a model on a passage."""

    language: str
    bits: float
    """Per byte."""
    loss: float
    """In nats per token."""
    again: float
    """Loss when the passage is repeated; NaN if the context has no room for it."""


@cache
def passages() -> tuple[Passage, ...]:
    """The texts that ship inside, the easiest for most models first."""
    parts = (Path(__file__).parent / "passages.txt").read_text(encoding="utf-8").split("\n---\n")
    return tuple(Passage(*part.strip().split("\n", 1)) for part in parts)


def check_reading(llm: "LLM", tensors: Mapping[str, TensorRecord]) -> tuple[list[Finding], str | None]:
    """Let a model read until it finds a passage easy; return what is wrong, and why it was not judged if it was not.

    tensors: of its file.
    """
    try:
        tokenizer = llm.tokenizer
    except RequestError:
        # Which is said where vocabularies are checked.
        return [], None
    layer_weights = sum(math.prod(one.shape) for name, one in tensors.items() if name.startswith("blk."))
    if layer_weights < _LEAST_WEIGHTS:
        return [], None
    most = next(bits for weights, bits in _MOST_BITS if layer_weights >= weights)
    readings = []
    for passage in passages():
        ids = _ids(tokenizer, passage, min(_NUM_TOKENS, llm.context_length))
        if ids is None:
            continue
        readings.append(_read(llm, passage, ids))
        if readings[-1].bits <= most:
            break
    if not readings:
        return [], "reading: its vocabulary, or its context, is for none of the texts that ship inside"
    best = min(readings, key=lambda one: one.bits)
    is_recurrent = any(_RECURRENT.match(name) for name in tensors)
    left = _MOST_LEFT_RECURRENT if is_recurrent else _MOST_LEFT
    return list(_judge(best, most, left if layer_weights >= _COPYING_WEIGHTS else None)), None


def _ids(tokenizer: "Tokenizer", passage: Passage, most: int) -> NDArray[np.int64] | None:
    """A passage's first tokens, int64[T]; None where the vocabulary was not made for its language, or they are few."""
    ids = np.asarray(tokenizer.encode(passage.text))[:most]
    text = tokenizer.decode(ids)
    is_wide = ord(max(passage.text)) >= _WIDE
    least = _LEAST_WIDE_CHARACTERS if is_wide else _LEAST_CHARACTERS
    return ids if len(ids) >= _LEAST_TOKENS and len(text) >= least * len(ids) else None


def _read(llm: "LLM", passage: Passage, ids: NDArray[np.int64]) -> Reading:
    tokenizer = llm.tokenizer
    start = 1 if tokenizer.is_special(int(ids[0])) else 0
    whole = np.concatenate([ids, ids[start:]])[: llm.context_length]
    losses = _losses(llm.logits(whole), whole)
    # Characters that are no token of a vocabulary, and ends, are no text of its own.
    is_text = np.array([not tokenizer.is_special(int(one)) for one in whole[1:]])
    num_first = len(ids) - 1
    first, again = (losses[part][is_text[part]] for part in (slice(num_first), slice(num_first + 1 + _SKIPPED, None)))
    num_bytes = sum(len(tokenizer.token_bytes(int(one))) for one in ids[1:][is_text[:num_first]])
    return Reading(
        passage.language,
        bits=float(first.sum() / np.log(2) / max(1, num_bytes)),
        loss=float(first.mean()),
        again=float(again.mean()) if len(again) >= _LEAST_TOKENS else float("nan"),
    )


def _losses(logits: NDArray[np.float32], ids: NDArray[Any]) -> NDArray[np.float64]:
    """Nats of each id after the first, float64[T - 1], from logits float32[T, vocab_size]."""
    losses = np.empty(len(ids) - 1)
    for index, wanted in enumerate(ids[1:]):
        row = logits[index].astype(np.float64)
        largest = row.max()
        losses[index] = largest + np.log(np.exp(row - largest).sum()) - row[wanted]
    return losses


def _judge(best: Reading, most: float, left: float | None) -> Iterator[Finding]:
    again = "download the model again, or get another conversion; a model that was not trained reads so too"
    if best.bits > most:
        yield Finding(
            "reading",
            f"a plain text in {best.language}, which it reads best, takes the model {best.bits:.1f} bits a byte, where "
            f"models of its size need less than {most:g}: it was converted wrongly or is damaged; {again}",
        )
    elif left is not None and best.again > left * best.loss:
        yield Finding(
            "reading",
            f"a text in {best.language} is little easier for the model when it is repeated ({best.again:.1f} of "
            f"{best.loss:.1f} nats a token), so positions or heads are likely wrong; {again}",
        )
