"""Whether two vocabularies give the same ids for the same text, as a draft model and its target must."""

import numpy as np

from localinfer.models.text.vocabulary import TokenType, Vocabulary


def vocabulary_difference(one: Vocabulary, other: Vocabulary) -> str | None:
    """Say what makes some text give other ids in one than in the other, or return None if nothing does.

    Everything that encoding reads is compared, so None is a proof. Tokens that no text turns into may be missing in
    one: files of a family are padded to different sizes.
    """
    if (one.kind, one.pre_tokenizer) != (other.kind, other.pre_tokenizer):
        return f"one is {_kind(one)} and the other {_kind(other)}"
    for name, ids, others in (("token", one.ids, other.ids), ("special token", one.special_ids, other.special_ids)):
        if ids == others:
            continue
        shared = ids.keys() & others.keys()
        # A special token that only one has is its own spelling in the other, and only where special tokens are parsed.
        texts = ids.keys() | others.keys() if name == "token" else shared
        text = min((text for text in texts if ids.get(text) != others.get(text)), default=None)
        if text is not None:
            return f"{name} {text!r} is {_place(ids.get(text))} in one and {_place(others.get(text))} in the other"
    if one.merges != other.merges:
        return "their merges differ"
    if one.byte_ids != other.byte_ids:
        return "their byte tokens differ"
    if _user_defined(one) != _user_defined(other):
        return "their user-defined tokens differ"
    if one.scores is not None and other.scores is not None:
        count = min(one.scores.size, other.scores.size)
        if (one.scores[:count] != other.scores[:count]).any():
            return "the scores of their tokens differ"
    if _splitting_flags(one) != _splitting_flags(other) or one.strips_after_special != other.strips_after_special:
        return "what they do to a text before splitting it differs"
    return None


def _kind(vocabulary: Vocabulary) -> str:
    return vocabulary.kind if vocabulary.pre_tokenizer is None else f"{vocabulary.kind} ({vocabulary.pre_tokenizer})"


def _place(token_id: int | None) -> str:
    return "missing" if token_id is None else f"id {token_id}"


def _splitting_flags(vocabulary: Vocabulary) -> dict[str, bool]:
    """What is done to a text before it is split; what is put around it, the draft model gets from its target."""
    return {name: value for name, value in vocabulary.flags.items() if name.startswith("normalizer.")}


def _user_defined(vocabulary: Vocabulary) -> list[int]:
    """Tokens that are cut out of a text before words are."""
    return np.flatnonzero(vocabulary.types == TokenType.USER_DEFINED).tolist()
