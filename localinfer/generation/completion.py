"""Results of a generation: its events one by one, and the completion with its figures."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from localinfer.types import FinishReason, TokenLogprobs

CompletionEnd = FinishReason | Literal["tool_calls"]
"""As the engine's, and tool_calls: an end token after at least one whole tool call."""


@dataclass(frozen=True)
class ToolCall:
    """One call that the model makes.

    id: the model's where its format has one, else nine random letters and digits. arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """News of one call.

    index: of the call in its reply, from 0. The first delta of a call has its id and name and no arguments; each
    later one has the next part of the arguments' JSON text and neither.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ReplyDelta(NamedTuple):
    """The next part of a reply that is certain."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of a generation."""

    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Tokens of the prompt whose keys and values were cached."""
    cache_miss: str | None
    """The reason why no more were cached, in words, which may quote cached texts; None if nothing stood in the way."""
    dropped_tokens: int
    """Tokens left out by `context_shift`."""
    completion_tokens: int
    """Tokens sampled, an end token included."""
    time_to_first_token_seconds: float
    """Time from the call to the first token, tokenizing included; 0 if there is none."""
    decode_tokens_per_second: float
    """Rate of the tokens after the first, without the time that the caller took between them; 0 if there are none."""
    drafted_tokens: int
    """Tokens that speculation drafted; `accepted_tokens` of them were accepted."""
    accepted_tokens: int
    seed: int
    """The seed that was given, or drawn; with it the same options give the same text."""
    drafted_by_position: tuple[int, ...] = ()
    """Drafted tokens by position in the draft; `accepted_by_position` likewise."""
    accepted_by_position: tuple[int, ...] = ()
    drafted_by: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens drafted and accepted, by the drafter's name: "ngram", "draft" (a draft model), "mtp" or "assistant" (a
    draft model over this model's cache)."""
    tokens_per_pass: float = 1.0
    """Tokens decoded per pass of the model, 1 without speculation."""
    speculation_speedup: float = 1.0
    """Measured speed over that of plain steps."""
    cache_miss_summary: str | None = None
    """`cache_miss` without quotes of cached texts."""
    stop_text: str | None = None
    """The text of the option `stop` that ended it, if one did."""
    waited_seconds: float = 0.0
    """Time before it was admitted."""
    state_snapshots: int = 0
    """Snapshots of recurrent states that the prefix cache held at the end, of any text; 0 for a model without recurrent
    layers."""
    notices: tuple[str, ...] = ()
    """Deviations from the options, in words: a drafter that failed and was switched off, memory that ended before the
    text did."""


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
    """A finished generation."""

    text: str
    """The text without end token and stop text."""
    token_ids: list[int]
    """Every sampled token, end tokens and those of stop texts included."""
    finish_reason: CompletionEnd
    """Why it ended: "stop" for an end token or stop text, "length" for max_tokens or the end of the context, or of
    `kv_memory` (`stats.notices` then says so), "tool_calls" for an end after calls, or "cancelled"."""
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    """An entry for each of token_ids, where the option asks for them."""
    reasoning: str = ""
    """Reasoning of a chat. Of `tool_calls`, a call that was cut short is the last one, its arguments no whole JSON."""
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        """The text and why it ended; of token ids, log probabilities and figures only how many tokens there are."""
        said = {"text": self.text, "reasoning": self.reasoning, "tool_calls": self.tool_calls}
        shown = [f"{name}={value!r}" for name, value in said.items() if value or name == "text"]
        more = f"finish_reason={self.finish_reason!r}, {len(self.token_ids)} tokens"
        return f"{type(self).__name__}({', '.join(shown)}, {more})"


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that deltas spell out, in order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name, ""))
        else:
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.id, call.name, call.arguments + delta.arguments)
    return tuple(calls)
