"""Why a prompt was not found in the cache as far as it might have been, in records and in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

CacheMissCause = Literal["empty", "different", "template", "evicted", "windowed", "foreign"]
"""empty: nothing is cached. different: the text parts from the cached one. template: the chat template wrote the
messages of an earlier prompt in another way. evicted: it was cached, and memory ended. windowed: it is cached, but the
model's sliding-window layers keep only what comes before the ends of texts and prompts. foreign: it is stored, but by
another model, version or kv_type."""

WINDOW_TOKENS = 8
"""Token ids kept on each side of the first one that differs."""


class TokenDecoder(Protocol):
    """What putting a miss into words asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = ...) -> str: ...


@dataclass(frozen=True)
class CacheMiss:
    """The first place where a prompt was not found, and why.

    position: of the first token that had to be computed though something of the kind was cached, or might have been.
    before, cached, wanted: token ids around it: those both share, those cached next, those the prompt has instead.
    detail: what is to be added in words; may be empty. until: how many tokens are cached, if more than are used.
    """

    cause: CacheMissCause
    position: int
    before: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    detail: str = ""
    until: int = 0

    def describe(self, tokenizer: TokenDecoder | None) -> str:
        """Say it in one sentence, with texts where there is a tokenizer and token ids where there is none."""
        if self.cause == "empty":
            return "nothing was cached yet"
        if self.cause == "evicted":
            return f"from token {self.position} on it was cached once and was evicted for lack of memory"
        if self.cause == "windowed":
            what = f"of tokens {self.position} to {self.until} the model's sliding-window layers keep nothing"
            return f"{what}, so they are computed again"
        if self.cause == "foreign":
            return f"what is stored cannot be used: {self.detail}"
        who = "the chat template wrote an earlier message anew" if self.cause == "template" else "the text differs"
        place = f"{who} at token {self.position}"
        if not self.cached:
            return place
        after = f", after {_show(self.before, tokenizer)}" if self.before else ""
        return f"{place}{after}: cached {_show(self.cached, tokenizer)}, now {_show(self.wanted, tokenizer)}"


def _show(token_ids: Sequence[int], tokenizer: TokenDecoder | None) -> str:
    if tokenizer is None or any(token_id >= tokenizer.vocab_size for token_id in token_ids):
        return str(list(token_ids))
    return repr(tokenizer.decode(token_ids, skip_special=False))
