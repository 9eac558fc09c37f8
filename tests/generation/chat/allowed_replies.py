"""Whether the grammar of a reply allows one, from its first letter to its end."""

import numpy as np

from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.grammar import ReasoningState, reply_grammar
from localinfer.generation.chat.messages import Tool
from localinfer.models.text.reply_format import CallFormat, ReasoningFormat
from localinfer.models.text.tokenizer import SpellingFinder
from tests.engine.fakes import ByteTokenizer


def allows_reply(
    compiler: ConstraintCompiler,
    formats: tuple[CallFormat, ReasoningFormat | None],
    tools: tuple[Tool, ...],
    text: str,
    *,
    state: ReasoningState,
    must_call: bool,
) -> bool:
    """compiler: of `ByteTokenizer`. must_call: of a reply that has to call a tool."""
    calls, reasoning = formats
    grammar = reply_grammar(
        reasoning=reasoning,
        state=state,
        calls=calls,
        tools=tools,
        must_call=must_call,
        is_parallel=True,
        answer=None,
        specials=SpellingFinder({}),
        calls_in_reasoning=True,
    )
    assert grammar is not None
    mask = compiler.grammar_mask(grammar, start=0, what="schema")
    spelled = list(text.encode())
    if mask.count_allowed(np.empty(0, np.int32), spelled) < len(spelled):
        return False
    return bool(mask(np.array(spelled, np.int32))[ByteTokenizer.eos_token_id])
