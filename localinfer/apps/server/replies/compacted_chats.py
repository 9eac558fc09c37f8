"""Chats that the server compacts (`--compact`), whose clients send their whole history with every request.

A summary is kept under a digest of the messages that it stands for. A later request that begins with these messages is
answered from the summary on, so that it is written once, and the prompt begins like the one before it.
"""

import hashlib
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from localinfer.apps.server.replies.fields import seeded, without_missing_thinking
from localinfer.apps.server.replies.service import service_of
from localinfer.errors import ContextLengthError
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.generation.compaction import (
    COMPACT_AT,
    PromptMeter,
    SummaryPlan,
    compaction_steps,
    covered_messages,
    read_turns_of,
    summary_streams,
    summary_turns,
    system_count,
)
from localinfer.generation.options import ReplyOptions
from localinfer.generation.stream import CompactionStats
from localinfer.storage.response_store import ResponseStore, ResponseStoreOptions

if TYPE_CHECKING:
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM
    from localinfer.types import TokenIds

logger = logging.getLogger("localinfer.server")

Message = Mapping[str, Any]
_DIGEST_BYTES = 12


class _Head(msgspec.Struct):
    """A summary of the beginning of a conversation."""

    summary: str
    quoted: int | None
    """Index of the message that stays word for word beside it, the system messages not counted."""


class CompactedHeads:
    """Summaries by the messages that they stand for, and by the cache salt of their client. Threads may share it.

    store: where they outlive the process; one that keeps nothing is not used.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store if store.keeps else ResponseStore(ResponseStoreOptions())

    def marked(self, messages: Sequence[Message], salt: str) -> tuple[list[dict[str, Any]], int]:
        """Messages with the summary of as many of them as there is one of, and their number."""
        turns = [dict(message) for message in messages]
        num_system = system_count(turns)
        names = list(_names(turns[num_system:], salt))
        # The last message waits for a reply, so no summary covers it.
        for count in range(len(names) - 1, 0, -1):
            content = self._store.get(names[count - 1])
            if content is not None:
                head, end = msgspec.json.decode(content, type=_Head), num_system + count
                quoted = None if head.quoted is None else num_system + head.quoted
                return [*turns[:end], *summary_turns(head.summary, turns, end, quoted), *turns[end:]], count
        return turns, 0

    def keep(self, messages: Sequence[Message], plan: SummaryPlan, summary: str, salt: str) -> None:
        """Keep a summary of the first of these messages."""
        count, num_system = covered_messages(plan.turns, plan.end), system_count(plan.turns)
        quoted = None if plan.quoted is None else covered_messages(plan.turns, plan.quoted)
        name = list(_names(messages[num_system : num_system + count], salt))[-1]
        self._store.put(name, msgspec.json.encode(_Head(summary, quoted)))


def compacted_heads(request: Request) -> CompactedHeads | None:
    """The summaries of a server that compacts chats."""
    heads: CompactedHeads | None = request.app.state.compacted
    return heads if service_of(request).settings.compacts_chats else None


class CompactedChat:
    """One reply to a chat that is compacted where it takes too much of the context. Used by the reply's thread."""

    def __init__(
        self, heads: CompactedHeads, llm: "LLM", messages: Sequence[Message], options: Mapping[str, Any], index: int
    ) -> None:
        self._heads = heads
        self._llm = llm
        self._messages = messages
        self._options = dict(seeded(without_missing_thinking(llm, dict(options)), index, llm.defaults))
        self._salt = str(options.get("cache_salt") or "")
        self._stream: TextStream | None = None

    def summaries(self) -> Generator["TextStream"]:
        """Yield the stream of each summary that has to be written before the reply, to be read to its end."""
        llm, options = self._llm, self._options
        limit = COMPACT_AT * llm.context_length
        turns, count = self._heads.marked(self._messages, self._salt)
        if options.get("context_shift"):
            limit = float("inf")
        try:
            self._open(turns, CompactionStats(count) if count else None)
        except ContextLengthError:
            self._stream = None
        if self._stream is not None and self._stream.prompt_tokens <= limit:
            return
        self.close()
        reply_options = {name: options[name] for name in ReplyOptions.__annotations__ if name in options}
        continues = bool(reply_options.pop("continue_final_message", False))

        def encode(asked: Sequence[dict[str, Any]], is_direct: bool) -> "TokenIds":
            given: Any = {**reply_options, "thinking": False} if is_direct else reply_options
            prompt = llm.encode_chat(read_turns_of(asked), cache_salt=options.get("cache_salt"), **given)
            return prompt.token_ids  # type: ignore[return-value]

        def open_summary(plan: SummaryPlan) -> "TextStream":
            logger.info("a chat of %d messages is compacted", covered_messages(plan.turns, len(plan.turns)))
            return llm.stream_chat(plan.prompt, **plan.options(options))

        steps = compaction_steps(turns, PromptMeter(encode, llm.context_length), limit, continues=continues)
        made = yield from summary_streams(steps, open_summary)
        # What was begun is not refused any more.
        self._options.pop("ttft_objective", None)
        if made.plan is not None:
            self._heads.keep(self._messages, made.plan, made.summary, self._salt)
        self._open(made.turns, made.stats)

    def open(self) -> "TextStream":
        """The stream of the reply."""
        if self._stream is None:
            self._open(list(map(dict, self._messages)), None)
        stream, self._stream = self._stream, None
        assert stream is not None, "it was opened"
        return stream

    def close(self) -> None:
        """Close a stream that was opened and not taken."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self, turns: Sequence[dict[str, Any]], stats: CompactionStats | None) -> None:
        """Open the stream of the reply to turns."""
        self._stream = self._llm.stream_chat(read_turns_of(turns), **self._options)
        if stats is not None:
            self._stream.note_compaction(stats)


def _names(messages: Sequence[Message], salt: str) -> Iterator[str]:
    """The name of the record of each beginning of messages, the shortest first."""
    digest = hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES)
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [part.marker if isinstance(part, MediaSource) else part for part in content]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        digest.update(repr((message["role"], content, calls)).encode("utf-8", "surrogatepass"))
        yield f"cmp_{digest.hexdigest()}.json"
