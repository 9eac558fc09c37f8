"""Special tokens: which ones end a generation, and where their spellings stand in a text."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

# Converters leave many of these without a role or even a control type, so they go by their spelling,
# the same list that llama.cpp keeps. Not on it: </s>, an ordinary word of vocabularies with HTML.
_END_TEXTS = frozenset(
    (
        "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>"
        " <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>"
        " <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|>"
        " <fim-repo> <REPO> <reponame> <|file_sep|>"
    ).split()
)
FILL_IN_SPELLINGS = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>".split(),
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>".split(),
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split(),
)
"""Spellings of the tokens that stand before a text, before what follows it, and before what is to be filled in."""
_FILL_IN_TEXTS = frozenset().union(*FILL_IN_SPELLINGS)
CONTROL_TEXTS = _END_TEXTS | _FILL_IN_TEXTS
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def find_end_of_generation(
    ids: Mapping[str, int], roles: Mapping[str, int], is_control: Callable[[int], bool]
) -> frozenset[int]:
    """Return the ids that end a generation: those with such a role, and the well-known spellings."""
    ending = {ids[text] for text in _END_TEXTS if text in ids}
    if "</s>" in ids and is_control(ids["</s>"]) and "<|tool_response>" not in ids:
        ending.add(ids["</s>"])
    # In the Harmony and Solar formats <|end|> closes one message of several, not the turn.
    has_calls = "<|call|>" in ids or "<|calls|>" in ids
    if has_calls and ("<|return|>" in ids or "<|flush|>" in ids):
        ending.discard(ids.get("<|end|>", -1))
    ending.update(roles[role] for role in _END_ROLES if role in roles)
    return frozenset(ending)


# Characters of a spelling that a first search looks for, and how many different ones it tells apart.
_BEGINNING = 5
_MOST_BEGINNINGS = 64


class Spelling(NamedTuple):
    """One place where a special token is spelled out: text[start:end]."""

    start: int
    end: int
    token_id: int


class SpellingFinder:
    """Finds every place where one of some texts stands, overlapping ones too.

    Time grows with the length of the text and the number of different lengths that begin alike, not
    with the number of texts: a vocabulary may hold thousands of special tokens.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        shortest: dict[str, int] = {}
        for text in ids:
            shortest[text[0]] = min(len(text), shortest.get(text[0], _BEGINNING))
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[: shortest[text[0]]], set()).add(len(text))
        self._lengths = {beginning: sorted(found, reverse=True) for beginning, found in lengths.items()}
        self._beginning = _beginnings(self._lengths, shortest)

    def ignoring_case(self) -> "SpellingFinder":
        """Return the finder for lower-cased text."""
        return SpellingFinder({text.lower(): token_id for text, token_id in self._ids.items()})

    def find(self, text: str) -> Iterator[Spelling]:
        """Yield the spellings from left to right, at one place the longest first."""
        if self._beginning is None:
            return
        for match in self._beginning.finditer(text):
            start = match.start()
            for length in self._lengths.get(match[1], ()):
                token_id = self._ids.get(text[start : start + length])
                if token_id is not None and start + length <= len(text):
                    yield Spelling(start, start + length, token_id)


def _beginnings(texts: Iterable[str], lengths: Mapping[str, int]) -> re.Pattern[str] | None:
    """Return the pattern of a place where one of some texts begins; those of one first character are equally long."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    if not rests:
        return None
    ways = []
    for first, found in rests.items():
        # Alternatives are tried one by one, so of many only the length is matched.
        rest = f".{{{lengths[first] - 1}}}" if len(found) > _MOST_BEGINNINGS else "|".join(map(re.escape, found))
        ways.append(f"{re.escape(first)}(?:{rest})")
    firsts = "".join(map(re.escape, rests))
    return re.compile(f"(?=[{firsts}])(?=({'|'.join(ways)}))", re.DOTALL)
