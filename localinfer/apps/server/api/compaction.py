"""Compaction of the Responses API: a conversation becomes a summary, written by the model behind the very prompt.

An input that ends with an item `compaction_trigger` is answered by one item `compaction`, and `/v1/responses/compact`
by the user's messages and such an item. Its content is a sealed text: a client keeps it, and sends it back in place of
what it stands for. Since the summary is asked for behind the conversation as it is, with the same tools, everything
before the request for it comes from the cache.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from localinfer.apps.server.api.responses_items import (
    CompactedSummary,
    Item,
    ResponsesRequest,
    ResponseWriter,
    kept_items,
    response_usage,
)
from localinfer.apps.server.api.serving import Event, deltas_of
from localinfer.apps.server.transport.http import ApiError
from localinfer.generation.compaction import MOST_SUMMARY_TOKENS
from localinfer.storage.sealed_texts import TextSealer

if TYPE_CHECKING:
    from localinfer.apps.server.api.responses import Turn
    from localinfer.apps.server.replies.reply import Reply
    from localinfer.generation.stream import Stats, StreamEvent


class Compactor:
    """Seals summaries for one client, and reads them when they come back."""

    def __init__(self, sealer: Callable[[], TextSealer], owner: str) -> None:
        self._sealer = sealer
        self._owner = owner

    def seal(self, summary: CompactedSummary) -> str:
        """The content of an item."""
        return self._sealer().seal(msgspec.json.encode(summary).decode(), self._owner)

    def unseal(self, content: object, path: str) -> CompactedSummary:
        """The summary that an item stands for. Raises: ApiError for a content that was changed or is another's."""
        try:
            if not isinstance(content, str):
                raise ValueError("it is no text")
            return msgspec.json.decode(self._sealer().unseal(content, self._owner), type=CompactedSummary)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ApiError(
                400,
                f"{path}.encrypted_content cannot be read here: {error}; send it as it came from this server, or the "
                "conversation itself",
                code="compaction_unreadable",
                param=path,
            ) from None


def is_triggered(turn: "Turn") -> bool:
    """Return whether a turn asks for a compaction: it ends with the trigger."""
    return bool(turn.new) and turn.new[-1].kind == "compaction_trigger"


def summary_request(body: ResponsesRequest) -> ResponsesRequest:
    """A request whose reply is a summary: with the same prompt, and no calls, forms or endless text."""
    limit = min(body.max_output_tokens or MOST_SUMMARY_TOKENS, MOST_SUMMARY_TOKENS)
    choice = "none" if body.tools else None
    return msgspec.structs.replace(body, tool_choice=choice, text=None, max_output_tokens=limit)


class CompactionWriter(ResponseWriter):
    """A response whose one item is a compaction; its text is not streamed."""

    def __init__(
        self,
        reply: "Reply",
        body: ResponsesRequest,
        turn: "Turn",
        keep: Callable[[dict[str, Any]], None],
        flush: Callable[[], None],
        *,
        seal: Callable[[CompactedSummary], str],
        retains: bool = False,
    ) -> None:
        super().__init__(reply, body, turn, keep, flush)
        self._seal = seal
        self._retains = retains
        self._pieces: list[str] = []

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        yield from self._progress_events(is_read=True)
        self._pieces += [delta.text for delta in deltas_of(token) if delta.kind == "text"]

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        self._status = "incomplete" if reason == "length" else "completed"
        item: Item = {"id": f"cmp_{self._token}_0", "type": "compaction", "encrypted_content": ""}
        yield self._event("response.output_item.added", output_index=0, item=dict(item))
        summary = CompactedSummary("".join(self._pieces).strip(), retains=self._retains)
        item["encrypted_content"] = self._seal(summary)
        self.blocks.append(item)
        yield self._event("response.output_item.done", output_index=0, item=dict(item))


class CompactedWriter(CompactionWriter):
    """The answer of `/v1/responses/compact`: the user's messages, then the compaction."""

    def whole(self) -> dict[str, Any]:
        items = [*self._turn.before, *kept_items(self._turn.new, self._token)]
        messages = [one for one in items if one["type"] == "message" and one.get("role") == "user"]
        return {
            "id": self.reply.id,
            "object": "response.compaction",
            "created_at": self.reply.created,
            "output": [*messages, *self.blocks],
            "usage": response_usage(self.reply),
        }
