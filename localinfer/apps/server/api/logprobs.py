"""Log probabilities of tokens as OpenAI's formats write them, of chats and of completions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.types import TokenLogprobs

_LEAST = -9999.0
"""What OpenAI's formats write as the log probability of a token that is ruled out: JSON has no infinity."""


def chat_logprobs(tokenizer: "Tokenizer", token_id: int, found: "TokenLogprobs") -> dict[str, Any]:
    """A token of a chat completion's `logprobs.content`."""
    return {
        **_token(tokenizer, token_id, found.logprob),
        "top_logprobs": [_token(tokenizer, other, logprob) for other, logprob in found.top],
    }


class LegacyLogprobs:
    """A completion's `logprobs`: tokens, their log probabilities, the likeliest others, and where each begins."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._members: dict[str, list[Any]] = {}
        self.take()

    def add(self, token_id: int, found: "TokenLogprobs | None") -> None:
        """Append a token; found: None for the first of a text, which nothing predicts."""
        text = _text(self._tokenizer, token_id)
        top: dict[str, float] = {}
        for other, logprob in () if found is None else found.top:
            # Several tokens may be written alike; the likeliest comes first.
            top.setdefault(_text(self._tokenizer, other), max(logprob, _LEAST))
        self._members["tokens"].append(text)
        self._members["token_logprobs"].append(None if found is None else max(found.logprob, _LEAST))
        self._members["top_logprobs"].append(None if found is None else top)
        self._members["text_offset"].append(self._offset)
        self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """What was added since the last call, in the wire's shape."""
        taken = self._members
        self._members = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        return taken


def _token(tokenizer: "Tokenizer", token_id: int, logprob: float) -> dict[str, Any]:
    spelled = list(_bytes(tokenizer, token_id))
    return {"token": _text(tokenizer, token_id), "logprob": max(logprob, _LEAST), "bytes": spelled}


def _text(tokenizer: "Tokenizer", token_id: int) -> str:
    return _bytes(tokenizer, token_id).decode("utf-8", "replace")


def _bytes(tokenizer: "Tokenizer", token_id: int) -> bytes:
    # A model may have more logits than its vocabulary has tokens.
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
