"""What a generation gives: its events one by one, and the whole of it with what it cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from localinfer.generation.chat.parser import ToolCall, ToolCallDelta
from localinfer.types import FinishReason, TokenLogprobs

CompletionEnd = FinishReason | Literal["tool_calls"]
"""As the engine's, and tool_calls: an end token after at least one whole tool call."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a generation was and cost.

    prompt_tokens: tokens of the prompt; cached_tokens: those whose keys and values were cached. cache_miss: why not
    more of them were, in words, which may quote cached texts; None if nothing stood in the way. cache_miss_summary: the
    same without quotes. dropped_tokens: left out by `context_shift`.
    completion_tokens: tokens sampled, an end token included. time_to_first_token_seconds: from the call, tokenizing
    included, 0 if there is none. decode_tokens_per_second: of the tokens after the first, without the time the caller
    took between them; 0 if there are none. drafted_tokens, accepted_tokens: of speculation.
    drafted_by_position, accepted_by_position: the same by place in the draft. tokens_per_pass: decoded per pass of the
    model, 1 without speculation. drafted_by: tokens drafted and accepted, by the drafter's name: "ngram", "draft" (a
    draft model), "mtp" or "assistant" (a draft model over this model's cache). speculation_speedup: over plain steps,
    as measured.
    seed: the one given, or drawn; with it the same options give the same text. stop_text: the one of the option `stop`
    that ended it, if one did. waited_seconds: before it was admitted. state_snapshots: of recurrent states, that the
    prefix cache held at the end, of any text; 0 for a model without recurrent layers. notices: deviations from the
    options, in words: a drafter that failed and was switched off, memory that ended before the text did.
    """

    prompt_tokens: int
    cached_tokens: int
    cache_miss: str | None
    dropped_tokens: int
    completion_tokens: int
    time_to_first_token_seconds: float
    decode_tokens_per_second: float
    drafted_tokens: int
    accepted_tokens: int
    seed: int
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    drafted_by: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tokens_per_pass: float = 1.0
    speculation_speedup: float = 1.0
    cache_miss_summary: str | None = None
    stop_text: str | None = None
    waited_seconds: float = 0.0
    state_snapshots: int = 0
    notices: tuple[str, ...] = ()


class StreamEvent(NamedTuple):
    """One sampled token, and the text that became certain with it: often a word, "" inside a character or stop text.

    finish_reason is None but for the last event. After `TextStream.cancel` that is "cancelled", its id NO_TOKEN, and
    its text what was held back; so it is where memory ended, with the reason "length". logprobs: where the option asks
    for them. reasoning, tool_calls: of a chat, what became certain of these; their markers are in no text.
    """

    text: str
    token_id: int
    finish_reason: CompletionEnd | None
    logprobs: TokenLogprobs | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, repr=False)
class Completion:
    """A finished generation.

    text: without end token and stop text. token_ids: every token sampled, those included. finish_reason: "stop" for an
    end token or stop text, "length" for max_tokens or the end of the context, or of `kv_memory` (`stats.notices` then
    says so), "tool_calls" for an end after calls, "cancelled" if it was.
    reasoning, tool_calls: of a chat; a call that was cut short is the last one, its arguments no whole JSON.
    logprobs: one for each of token_ids, where the option asks for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: CompletionEnd
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        """The text and why it ended; of token ids, log probabilities and figures only how many tokens there are."""
        said = {"text": self.text, "reasoning": self.reasoning, "tool_calls": self.tool_calls}
        shown = [f"{name}={value!r}" for name, value in said.items() if value or name == "text"]
        more = f"finish_reason={self.finish_reason!r}, {len(self.token_ids)} tokens"
        return f"{type(self).__name__}({', '.join(shown)}, {more})"
