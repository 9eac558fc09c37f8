"""Scores in place of merges: SentencePiece ranks merges by the tokens they make, tokenizer.json by the pairs.

SentencePiece's converters write every pair of tokens whose join is a token, ordered by the score of the join. Such
lists say the same as scores do; after others texts may get other ids.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.tokenizer_document import shown, wrong
from localinfer.system.pieces import pieces


def merge_scores(merges: Sequence[tuple[str, str]], ids: Mapping[str, int], num_tokens: int) -> NDArray[np.float32]:
    """float32[num_tokens]: minus the rank of the first merge that makes each token, minus infinity where none does.

    Raises: TokenizerError for a merge that makes no token.
    """
    scores = np.full(num_tokens, -np.inf, np.float32)
    for rank, (left, right) in enumerate(merges):
        index = ids.get(left + right)
        if index is None:
            raise wrong(f"the merge {shown(left + right, 60)} is not a token")
        scores[index] = max(scores[index], -rank)
    return scores


def difference_from_scores(merges: Sequence[tuple[str, str]], texts: Collection[str]) -> str | None:
    """Say what of the merges scores cannot say, or return None. texts: the tokens of which ordinary text is made."""
    made: dict[str, None] = {}
    last = ""
    for left, right in merges:
        joined = left + right
        # Runs of one character, of spaces above all, share one score in published vocabularies, so theirs are mixed.
        if joined != last and joined in made and joined in texts and joined.strip(joined[0]):
            return f"the merges that make {shown(joined, 60)} do not follow one another"
        made[joined] = None
        last = joined
    pairs = set(merges)
    for piece in pieces(made):
        for left, right in _pairs(piece, texts):
            if (left, right) not in pairs:
                return f"{shown(left, 60)} and {shown(right, 60)} are not merged, but others to the same token are"
    return None


def _pairs(joins: Iterable[str], texts: Collection[str]) -> Iterable[tuple[str, str]]:
    """All pairs of tokens that make one of these."""
    for text in joins:
        if text in texts:
            for cut in range(1, len(text)):
                if text[:cut] in texts and text[cut:] in texts:
                    yield text[:cut], text[cut:]
