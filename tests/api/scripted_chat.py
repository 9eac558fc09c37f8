"""A model whose replies are written beforehand, in the order in which a conversation comes to them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.llm import LLM
from tests.engine.fakes import ByteTokenizer, FakeTemplate, fake_model

_BOT = 259
_END = 257


class PlainTemplate(FakeTemplate):
    """Shows no tools and no system message."""

    def render_segments(self, messages: Sequence[Mapping[str, Any]], *rest: Any, **more: Any) -> list[tuple[str, bool]]:
        return super().render_segments([m for m in messages if m["role"] != "system"], *rest, **more)


def scripted_chat(*replies: str, context_length: int = 2000) -> LLM:
    """A model that answers a conversation with i replies in it by the i-th of these; after the last by that again."""

    def logits(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        begun = np.flatnonzero(history == _BOT)
        reply = [*replies[min(begun.size, len(replies)) - 1].encode(), _END]
        row = np.zeros(vocab_size, np.float32)
        row[reply[min(history.size - int(begun[-1]) - 1, len(reply) - 1)]] = 50.0
        return row

    model = fake_model(logits, context_length=context_length, max_batch_rows=64)
    model.chat_template, model.tokenizer = PlainTemplate(), ByteTokenizer()
    return LLM(model)  # type: ignore[arg-type]


def called(name: str, arguments: str) -> str:
    """The text of a reply that calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
