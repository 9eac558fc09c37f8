"""The tokens by which a model for code fills in what stands between two texts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from localinfer.models.text.splitting import FILL_IN_SPELLINGS

FILL_IN_ROLES = ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")
"""As files name them; the last three are of older ones."""
_REPOSITORY = "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split()
_SEPARATOR = "<|file_sep|> <|file_separator|> <file_sep>".split()


class FillInTokens(NamedTuple):
    """prefix, suffix: stand before the text there; middle: before what is to be filled in.

    repository: stands before a project's name, separator: before each file's; None where the vocabulary has none.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    separator: int | None = None

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The ids of a prompt for what stands between two texts of these. Source: arXiv 2207.14255 (PSM)."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_fill_in_tokens(special_ids: Mapping[str, int], role_ids: Mapping[str, int]) -> FillInTokens | None:
    """The tokens that a file names for it, or else those that are spelled so; None without all of the first three."""
    found: list[int] = []
    for role, old_role, spellings in zip(FILL_IN_ROLES[:3], FILL_IN_ROLES[3:], FILL_IN_SPELLINGS, strict=True):
        token_id = role_ids.get(role, role_ids.get(old_role, _spelled(spellings, special_ids)))
        if token_id is None:
            return None
        found.append(token_id)
    repository = role_ids.get("fim_rep", _spelled(_REPOSITORY, special_ids))
    prefix, suffix, middle = found
    return FillInTokens(prefix, suffix, middle, repository, role_ids.get("fim_sep", _spelled(_SEPARATOR, special_ids)))


def _spelled(spellings: list[str], special_ids: Mapping[str, int]) -> int | None:
    return next((special_ids[text] for text in spellings if text in special_ids), None)
