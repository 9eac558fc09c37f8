"""Whether two vocabularies give the same ids for the same text, and a hash of all that decides it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from localinfer.models.text.splitting import PRE_TOKENIZERS
from localinfer.models.text.vocabulary import TokenType, Vocabulary
from localinfer.system.pieces import pieces

if TYPE_CHECKING:
    pass


def vocabulary_fingerprint(vocabulary: Vocabulary) -> str:
    """A hash of everything that decides which ids a text gets: 64 hexadecimal digits."""
    import numpy as np

    digest = hashlib.sha256()
    facts = (
        vocabulary.kind,
        # An unknown name means the default rule, and may mean another one in a later version.
        vocabulary.pre_tokenizer in PRE_TOKENIZERS,
        vocabulary.pre_tokenizer,
        sorted(vocabulary.flags.items()),
        sorted(vocabulary.role_ids.items()),
        sorted(vocabulary.end_of_generation_ids),
        vocabulary.strips_after_special,
    )
    digest.update(repr(facts).encode("utf-8", "surrogateescape"))
    for strings in (vocabulary.tokens, vocabulary.merges):
        for piece in pieces(strings):
            digest.update(np.fromiter(map(len, piece), "<i8", len(piece)).tobytes())
        for piece in pieces(strings):
            digest.update("".join(piece).encode("utf-8", "surrogateescape"))
    digest.update(vocabulary.types.tobytes())
    if vocabulary.scores is not None:
        digest.update(vocabulary.scores.astype("<f4").tobytes())
    if vocabulary.charsmap is not None:
        digest.update(vocabulary.charsmap.tobytes())
    if vocabulary.normalizer_steps:
        digest.update(repr(vocabulary.normalizer_steps).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def vocabulary_difference(one: Vocabulary, other: Vocabulary) -> str | None:
    """Say what makes some text give other ids in one than in the other, or return None if nothing does.

    Everything that encoding reads is compared, so None is a proof. Tokens that no text turns into may be missing in
    one: files of a family are padded to different sizes.
    """
    import numpy as np

    if (one.kind, one.pre_tokenizer) != (other.kind, other.pre_tokenizer):
        kinds = (e.kind if e.pre_tokenizer is None else f"{e.kind} ({e.pre_tokenizer})" for e in (one, other))
        return f"one is {' and the other '.join(kinds)}"
    for name, ids, others in (("token", one.ids, other.ids), ("special token", one.special_ids, other.special_ids)):
        if ids == others:
            continue
        shared = ids.keys() & others.keys()
        # A special token that only one has is its own spelling in the other, and only where special tokens are parsed.
        texts = ids.keys() | others.keys() if name == "token" else shared
        text = min((text for text in texts if ids.get(text) != others.get(text)), default=None)
        if text is not None:
            return f"{name} {text!r} is {_place(ids.get(text))} in one and {_place(others.get(text))} in the other"
    user_defined = [np.flatnonzero(each.types == TokenType.USER_DEFINED).tolist() for each in (one, other)]
    for what, found, wanted in (
        ("merges", one.merges, other.merges),
        ("byte tokens", one.byte_ids, other.byte_ids),
        ("user-defined tokens", *user_defined),
    ):
        if found != wanted:
            return f"their {what} differ"
    if one.scores is not None and other.scores is not None:
        count = min(one.scores.size, other.scores.size)
        if (one.scores[:count] != other.scores[:count]).any():
            return "the scores of their tokens differ"
    if not np.array_equal(
        one.charsmap if one.charsmap is not None else [], [] if other.charsmap is None else other.charsmap
    ):
        return "their normalizations differ"
    if one.normalizer_steps != other.normalizer_steps:
        return "the steps of their normalizations differ"
    if _splitting_flags(one) != _splitting_flags(other) or one.strips_after_special != other.strips_after_special:
        return "what they do to a text before splitting it differs"
    return None


def _place(token_id: int | None) -> str:
    return "missing" if token_id is None else f"id {token_id}"


def _splitting_flags(vocabulary: Vocabulary) -> dict[str, bool]:
    """What is done to a text before it is split; what is put around it, the draft model gets from its target."""
    return {name: value for name, value in vocabulary.flags.items() if name.startswith("normalizer.")}
