"""What a reply cost, in the words of each wire format."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.server.replies.reply import Reply
    from localinfer.server.replies.sampling_fields import StreamOptions
    from localinfer.stream import Stats


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
    prompts = (count for index, count in enumerate(reply.prompt_tokens) if not reply.shares_prompt(index))
    prompt, completion = sum(prompts), reply.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def stream_usage(reply: "Reply", options: "StreamOptions | None") -> "Callable[[], dict[str, Any]]":
    """Makes the member `usage` of all chunks of a stream but the last: none, null, or what it is so far."""
    if options is None or not options.include_usage:
        return dict
    if options.continuous_usage_stats:
        return lambda: {"usage": running_usage(reply)}
    return lambda: {"usage": None}


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
