"""What one event of a stream adds to a reply, in the same words for every wire format."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from localinfer.stream import StreamEvent

PieceKind = Literal["text", "reasoning", "call"]


class Delta(NamedTuple):
    """A piece of the reply's text, of its reasoning, or of a tool call's arguments.

    call: which call of the reply, from 0. call_id, name: with the first piece of a call only, whose text is empty.
    """

    kind: PieceKind
    text: str
    call: int = 0
    call_id: str | None = None
    name: str | None = None


def pieces_of(event: "StreamEvent") -> Iterator[Delta]:
    """The pieces of an event, none if it says nothing."""
    if event.reasoning:
        yield Delta("reasoning", event.reasoning)
    if event.text:
        yield Delta("text", event.text)
    for delta in event.tool_calls:
        yield Delta("call", delta.arguments, delta.index, delta.id, delta.name)
