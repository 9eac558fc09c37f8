"""What a reply adds and costs, under the names of the wire formats: deltas, log probabilities, usage, timings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.sampling.filters import TokenLogprobs
    from localinfer.server.replies.reply import Reply
    from localinfer.stream import Stats, StreamEvent

_LEAST = -9999.0
"""What OpenAI's formats write as the log probability of a token that is ruled out: JSON has no infinity."""


class Delta(NamedTuple):
    """What an event adds to the reply's text, to its reasoning, or to a tool call's arguments.

    call: which call of the reply, from 0. call_id, name: with the first delta of a call only, whose text is empty.
    """

    kind: Literal["text", "reasoning", "call"]
    text: str
    call: int = 0
    call_id: str | None = None
    name: str | None = None


def deltas_of(event: "StreamEvent") -> Iterator[Delta]:
    """The deltas of an event, none if it adds nothing."""
    if event.reasoning:
        yield Delta("reasoning", event.reasoning)
    if event.text:
        yield Delta("text", event.text)
    for delta in event.tool_calls:
        yield Delta("call", delta.arguments, delta.index, delta.id, delta.name)


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


def usage(reply: "Reply") -> dict[str, Any]:
    """OpenAI's `usage` of the texts that have ended; a prompt that several share counts once."""
    stats = [one for one in reply.stats if one is not None]
    prompts = [one for index, one in enumerate(reply.stats) if one is not None and not reply.shares_prompt(index)]
    prompt = sum(one.prompt_tokens for one in prompts)
    completion = sum(one.completion_tokens for one in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": reply.num_reasoning_tokens,
            "accepted_prediction_tokens": sum(one.accepted_tokens for one in stats),
            "rejected_prediction_tokens": sum(one.drafted_tokens - one.accepted_tokens for one in stats),
        },
    }


def running_usage(reply: "Reply") -> dict[str, Any]:
    """OpenAI's `usage` of a reply so far."""
    prompt = sum(count for index, count in enumerate(reply.prompt_tokens) if not reply.shares_prompt(index))
    completion = reply.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def timings(stats: "Stats") -> dict[str, Any]:
    """What one text took: llama.cpp's names, times in milliseconds."""
    computed = stats.prompt_tokens - stats.cached_tokens
    first, rate = stats.time_to_first_token_seconds, stats.decode_tokens_per_second
    decoded = max(0, stats.completion_tokens - 1)
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(1e3 * first, 3),
        "prompt_per_second": round(computed / first, 3) if first > 0 else 0.0,
        "predicted_n": stats.completion_tokens,
        "predicted_ms": round(1e3 * decoded / rate, 3) if rate > 0 else 0.0,
        "predicted_per_second": round(rate, 3),
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        **({"notices": list(stats.notices)} if stats.notices else {}),
    }
