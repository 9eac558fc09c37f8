"""What a reply has cost, under the names of the wire formats: OpenAI's `usage`, llama.cpp's `timings`."""

from typing import TYPE_CHECKING, Any

from localinfer.apps.server.replies.reply import Reply

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats


def usage(reply: Reply) -> dict[str, Any]:
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


def running_usage(reply: Reply) -> dict[str, Any]:
    """OpenAI's `usage` of a reply so far."""
    prompt, completion = reply.num_used()
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def timings(stats: "Stats") -> dict[str, Any]:
    """What one text took: llama.cpp's names, times in milliseconds."""
    computed = stats.prompt_tokens - stats.cached_tokens
    first, rate = stats.time_to_first_token_seconds, stats.decode_tokens_per_second
    decoded = max(0, stats.completion_tokens - 1)
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": 1e3 * first,
        "prompt_per_token_ms": 1e3 * first / computed if computed else 0.0,
        "prompt_per_second": computed / first if first > 0 else 0.0,
        "predicted_n": stats.completion_tokens,
        "predicted_ms": 1e3 * decoded / rate if rate > 0 else 0.0,
        "predicted_per_token_ms": 1e3 / rate if rate > 0 else 0.0,
        "predicted_per_second": rate,
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        **({"cache_miss": stats.cache_miss_summary} if stats.cache_miss_summary is not None else {}),
        **({"notices": list(stats.notices)} if stats.notices else {}),
    }
