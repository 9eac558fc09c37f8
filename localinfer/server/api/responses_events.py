"""A response as a sequence of events: items and parts that open, grow and close, numbered from 0."""

from collections.abc import Iterator, Mapping
from typing import Any

from localinfer.server.replies.deltas import Delta

Event = dict[str, Any]


class ResponseWriter:
    """Turns pieces into events, and keeps the items they make.

    Items come one after another: a reasoning, a message, each function call. An item is closed when a piece of another
    begins, or by `finish`.
    """

    def __init__(self, response_id: str, namespaces: Mapping[str, tuple[str, str]] | None = None) -> None:
        """namespaces: by the name that the model calls, the namespace and the name of a tool in it."""
        self._namespaces = namespaces or {}
        self.output: list[dict[str, Any]] = []
        self._token = response_id.partition("-")[2] or response_id
        self._number = 0
        self._kind: tuple[str, int] | None = None
        self._texts: list[str] = []

    def event(self, kind: str, **members: Any) -> Event:
        """An event with the next number."""
        made = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return made

    def add(self, piece: Delta) -> Iterator[Event]:
        """The events that a piece makes."""
        kind = (piece.kind, piece.call)
        if kind != self._kind:
            yield from self.finish()
            self._kind = kind
            yield from self._open(piece)
        if piece.text:
            self._texts.append(piece.text)
            yield self._delta(piece)

    def finish(self, status: str = "completed") -> Iterator[Event]:
        """Close the item that is open, if one is."""
        if self._kind is None:
            return
        kind, text, item = self._kind[0], "".join(self._texts), self.output[-1]
        self._kind, self._texts = None, []
        item["status"] = status
        at = {"item_id": item["id"], "output_index": len(self.output) - 1}
        match kind:
            case "text":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
                item["content"] = [part]
                yield self.event("response.output_text.done", **at, content_index=0, text=text, logprobs=[])
                yield self.event("response.content_part.done", **at, content_index=0, part=part)
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                yield self.event("response.reasoning_text.done", **at, content_index=0, text=text)
            case _:
                item["arguments"] = text
                yield self.event("response.function_call_arguments.done", **at, name=item["name"], arguments=text)
        yield self.event("response.output_item.done", output_index=at["output_index"], item=dict(item))

    def _open(self, piece: Delta) -> Iterator[Event]:
        index = len(self.output)
        name = {"text": "msg", "reasoning": "rs", "call": "fc"}[piece.kind]
        item: dict[str, Any] = {"id": f"{name}_{self._token}_{index}", "status": "in_progress"}
        match piece.kind:
            case "text":
                item |= {"type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": []}
            case "call":
                item |= {"type": "function_call", "call_id": piece.call_id, "name": piece.name, "arguments": ""}
                if (place := self._namespaces.get(piece.name or "")) is not None:
                    item["namespace"], item["name"] = place
        self.output.append(item)
        yield self.event("response.output_item.added", output_index=index, item=dict(item))
        if piece.kind == "text":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self.event(
                "response.content_part.added", item_id=item["id"], output_index=index, content_index=0, part=part
            )

    def _delta(self, piece: Delta) -> Event:
        at = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "delta": piece.text}
        match piece.kind:
            case "text":
                return self.event("response.output_text.delta", **at, content_index=0, logprobs=[])
            case "reasoning":
                return self.event("response.reasoning_text.delta", **at, content_index=0)
            case "call":
                return self.event("response.function_call_arguments.delta", **at)
