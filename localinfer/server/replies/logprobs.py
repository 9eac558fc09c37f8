"""Log probabilities as OpenAI's two formats write them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.sampling.filters import TokenLogprobs

_LEAST = -9999.0
"""What both formats write for a token that is ruled out: JSON has no infinity."""


def chat_logprobs(tokenizer: "Tokenizer", token_id: int, found: "TokenLogprobs") -> dict[str, Any]:
    """A token of a chat completion's `logprobs.content`."""
    return {
        **_token(tokenizer, token_id, found.logprob),
        "top_logprobs": [_token(tokenizer, other, logprob) for other, logprob in found.top],
    }


class LegacyLogprobs:
    """A completion's `logprobs`: tokens, their log probabilities, the likeliest others, and where each begins."""

    def __init__(self, tokenizer: "Tokenizer", offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, found: "TokenLogprobs | None") -> None:
        """Take the next token; None for the first of a text, which nothing predicts."""
        text = _text(self._tokenizer, token_id)
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        if found is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(max(found.logprob, _LEAST))
        top: dict[str, float] = {}
        for other, logprob in found.top:
            # Several tokens may be written alike; the likeliest comes first.
            top.setdefault(_text(self._tokenizer, other), max(logprob, _LEAST))
        self._top.append(top)

    def add_prompt(self, token_ids: Sequence[int], scores: "Sequence[TokenLogprobs | None]") -> None:
        """Take all tokens of a prompt."""
        for token_id, found in zip(token_ids, scores, strict=True):
            self.add(token_id, found)

    def take(self) -> dict[str, Any]:
        """What was added since the last call, in the wire's shape."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._top, self._offsets = [], [], [], []
        return taken


def _token(tokenizer: "Tokenizer", token_id: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token_id)
    spelled = list(_bytes(tokenizer, token_id))
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": spelled}


def _text(tokenizer: "Tokenizer", token_id: int) -> str:
    return _bytes(tokenizer, token_id).decode("utf-8", "replace")


def _bytes(tokenizer: "Tokenizer", token_id: int) -> bytes:
    # A model may have more logits than its vocabulary has tokens.
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
