"""Checks of a vocabulary: its kind against its tokens, its word splitting against its merges, its ends."""

from collections.abc import Iterator

import numpy as np

from localinfer.models.text.encoders import SPACE_MARK
from localinfer.models.text.known_vocabularies import known_vocabulary
from localinfer.models.text.splitting import PRE_TOKENIZERS, build_splitter
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import TokenType, Vocabulary
from localinfer.models.verification.finding import Finding

_SAMPLES = 256
_SAMPLED_TOKENS = 4096
_BYTE_SPACE = "Ġ"
_MOST_UNREACHABLE = 0.1
"""Share of merges that a word splitting makes impossible; a vocabulary has up to 0.02 of them under its own."""
_AGAIN = "get a current conversion of the model"
_FEW_TOKENS = 300
"""Vocabularies of fewer are made by hand: 256 are bytes."""


def check_vocabulary(tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yield what makes texts other ids than those a model was trained with; takes about a millisecond."""
    vocabulary = tokenizer.vocabulary
    other_kind = list(_check_kind(vocabulary))
    if other_kind:
        # Nothing else can be right.
        yield from other_kind
        return
    if vocabulary.kind in ("spm", "unigram"):
        yield from _check_scores(vocabulary)
    if vocabulary.kind == "spm":
        yield from _check_bytes(vocabulary)
    if vocabulary.kind == "bpe":
        yield from _check_pre_tokenizer(tokenizer)
    yield from _check_ends(vocabulary)


def _check_kind(vocabulary: Vocabulary) -> Iterator[Finding]:
    """A kind writes spaces in one way only."""
    tokens = vocabulary.tokens[:: max(1, len(vocabulary.tokens) // _SAMPLED_TOKENS)]
    num_marks, num_byte_spaces = (sum(space in token for token in tokens) for space in (SPACE_MARK, _BYTE_SPACE))
    rule = PRE_TOKENIZERS.get(vocabulary.pre_tokenizer or "")
    is_byte_level = vocabulary.kind == "bpe" and not (rule is not None and rule.is_raw)
    if is_byte_level and not num_byte_spaces and num_marks > len(tokens) // 20:
        yield Finding(
            "tokenizer kind",
            "tokenizer.ggml.model is 'gpt2', byte-level BPE, but its tokens write spaces as SentencePiece does (▁): "
            f"texts become wrong ids; {_AGAIN}",
        )
    if vocabulary.kind == "spm" and not num_marks and num_byte_spaces > len(tokens) // 20:
        yield Finding(
            "tokenizer kind",
            "tokenizer.ggml.model is 'llama', SentencePiece, but its tokens write spaces as byte-level BPE does (Ġ): "
            f"texts become wrong ids; {_AGAIN}",
        )


def _check_scores(vocabulary: Vocabulary) -> Iterator[Finding]:
    scores = vocabulary.scores
    if scores is not None and scores.size > _FEW_TOKENS and scores.min() == scores.max():
        yield Finding(
            "tokenizer scores",
            f"tokenizer.ggml.scores are all {scores[0]:g}, so nothing says what merges first and texts become wrong "
            f"ids; {_AGAIN}",
        )


def _check_bytes(vocabulary: Vocabulary) -> Iterator[Finding]:
    missing = [byte for byte, token_id in enumerate(vocabulary.byte_ids) if token_id < 0]
    if 0 < len(missing) < 256 and len(vocabulary.tokens) > _FEW_TOKENS:
        yield Finding(
            "byte tokens",
            f"tokenizer.ggml.tokens lacks {len(missing)} of 256 byte tokens (first: <0x{missing[0]:02X}>), so texts "
            f"with these bytes lose them; {_AGAIN}",
        )


def _check_pre_tokenizer(tokenizer: Tokenizer) -> Iterator[Finding]:
    """A missing or unknown one was reported when the tokenizer was built."""
    vocabulary = tokenizer.vocabulary
    name = vocabulary.pre_tokenizer
    rule = PRE_TOKENIZERS.get(name or "")
    if rule is None or not vocabulary.merge_texts:
        return
    known = known_vocabulary(vocabulary.merge_texts)
    if known is not None:
        whose, wanted = known
        if PRE_TOKENIZERS[wanted].steps != rule.steps:
            yield Finding(
                "pre-tokenizer",
                f"tokenizer.ggml.pre is {name!r}, but the vocabulary is {whose}, which splits words as {wanted!r}: "
                f"texts become wrong ids; set tokenizer.ggml.pre={wanted} (--set), or {_AGAIN}",
            )
        return
    texts = _merged_texts(tokenizer)
    split = build_splitter(rule)
    unreachable = [text for text in texts if len(split(text)) > 1]
    if len(unreachable) > max(1, len(texts)) * _MOST_UNREACHABLE:
        yield Finding(
            "pre-tokenizer",
            f"tokenizer.ggml.pre is {name!r}, which splits {len(unreachable)} of {len(texts)} sampled tokens, such as "
            f"{unreachable[0]!r:.40}, so that no text becomes them: it is not this vocabulary's; {_AGAIN}, or set the "
            "right name (--set tokenizer.ggml.pre=NAME)",
        )


def _merged_texts(tokenizer: Tokenizer) -> list[str]:
    """What some merges make, as far as it is whole characters."""
    merges = tokenizer.vocabulary.merge_texts
    ids = tokenizer.vocabulary.ids
    texts = []
    for index in range(min(_SAMPLES, len(merges))):
        token_id = ids.get(merges[index * len(merges) // _SAMPLES].replace(" ", ""))
        if token_id is not None:
            text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            if "\ufffd" not in text:
                texts.append(text)
    return texts


def _check_ends(vocabulary: Vocabulary) -> Iterator[Finding]:
    """A text's beginning and end have tokens of their own, not characters."""
    if vocabulary.kind == "wordpiece" or len(vocabulary.tokens) < _FEW_TOKENS:
        return
    for role, what in (("bos", "begins texts"), ("eos", "ends texts"), ("eot", "ends turns")):
        token_id = vocabulary.role_ids.get(role)
        if token_id is None:
            continue
        text = vocabulary.tokens[token_id]
        if len(text) == 1 or vocabulary.types[token_id] == TokenType.BYTE:
            wanted = _likely_end(vocabulary) if role != "bos" else None
            way_out = "" if wanted is None else f"set tokenizer.ggml.{role}_token_id={wanted} (--set), or "
            yield Finding(
                "end of text",
                f"tokenizer.ggml.{role}_token_id is {token_id}, which is the character {text!r}, not a token that "
                f"{what}; {way_out}{_AGAIN}",
            )


def _likely_end(vocabulary: Vocabulary) -> int | None:
    others = [i for i in vocabulary.end_of_generation_ids if len(vocabulary.tokens[i]) > 1]
    controls = np.flatnonzero(vocabulary.types == TokenType.CONTROL)
    return others[0] if len(others) == 1 and others[0] in controls else None
