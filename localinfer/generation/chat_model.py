"""Conversations with a loaded model: messages and options in, a prompt and the stream of its reply out.

A text can be cut into tokens in many ways, and a model does not always choose the tokenizer's. A reply that was
tokenized anew would then part from the cache at its first odd token. So `ChatHistory` remembers each chat that was
answered, its rendered text beside its ids: a later prompt that begins with that text takes these ids, and only the rest
is encoded.

Programs put a billing header, the date or the state of a folder into the system message. Keys and values depend on all
ids before them, so where such a line changes, nothing behind it can be taken from the cache: the prompt is read again.
`SystemPromptDrift` finds these lines by comparison. It names them, which changes no answer, or moves them behind the
others, which makes another prompt.
"""

import hashlib
import threading
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_flag
from localinfer.engine.cache.block_hashes import NO_SALT, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.errors import RequestError, TemplateError
from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.media_parts import Segments, cut_segments, flattened
from localinfer.generation.chat.messages import SYSTEM_ROLES, check_no_media, check_roles, read_messages
from localinfer.generation.chat.reply import AssistantPrefill, ReplyRequest, TemplateFormats
from localinfer.generation.options import Constraint, ReplyOptions, check_options
from localinfer.generation.stream import StreamEvent, TextStream
from localinfer.generation.text_generation import EncodedPrompt, TextGeneration
from localinfer.models.text.template_costs import sharing_render_time
from localinfer.models.text.tokenizer import StreamDecoder
from localinfer.storage.chats import AnsweredChat, EncodedChat
from localinfer.types import TokenIds

if TYPE_CHECKING:
    from localinfer.engine.media import MediaRun
    from localinfer.generation.media import MediaReader, ReadMedia
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.prompt_cache import DiskCache


Messages = Sequence[Mapping[str, Any]]

BILLING_HEADER = "x-anthropic-billing-header:"
"""Lines that begin so are known to vary before they were seen to."""
NOTE = "Lines of the system message that vary:"
"""Stands before lines that were moved."""

_LEAST_SHARED = 0.75
"""Heads belong together if they share so much of the longer one, in characters of whole lines."""
_MOST_HEADS = 32
_MOST_LINES = 4096
_MOST_NOTES = 4096


class HeadLine(NamedTuple):
    """A line of a system message at the start of a conversation. message: its index; number: from 1."""

    message: int
    number: int
    text: str


class VaryingSpan(NamedTuple):
    """Position of a varying line in a rendered text, and its description."""

    start: int
    end: int
    words: str


@dataclass(frozen=True)
class _Family:
    """Heads of one origin."""

    stable: tuple[str, ...]
    """Lines that all of them have, in order."""
    last: tuple[str, ...]
    """Lines of the latest one."""
    salt: bytes
    """Salt of all of them."""


class SystemPromptDrift:
    """Lines that the heads of a model's conversations have in common. Threads may share it.

    moves: whether `arrange` moves lines that vary behind the conversation they came with.
    """

    def __init__(self, *, moves: bool = False) -> None:
        self.moves = moves
        self._families: deque[_Family] = deque(maxlen=_MOST_HEADS)
        self._notes: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def observe(self, messages: Messages, *, learns: bool = True, salt: bytes = NO_SALT) -> tuple[HeadLine, ...]:
        """Compare the system messages at the start with earlier ones, and return their lines that vary.

        A line varies if an earlier request did not have it whose other lines are the same: three quarters of all
        characters at least. learns: whether this one is remembered. salt: requests of others do not count.
        """
        lines = _head_lines(messages)
        if not lines or len(lines) > _MOST_LINES:
            return ()
        texts = tuple(line.text for line in lines)
        with self._lock:
            family = self._family_of(texts, salt)
            shared = range(len(texts)) if family is None else _shared(family.stable, texts)
            if learns:
                if family is not None:
                    self._families.remove(family)
                # The families that are used stay.
                self._families.append(_Family(tuple(texts[index] for index in shared), texts, salt))
        kept = set(shared)
        return tuple(
            line
            for index, line in enumerate(lines)
            if line.text.startswith(BILLING_HEADER) or (index not in kept and line.text.strip())
        )

    def arrange(
        self, messages: Messages, varying: Sequence[HeadLine], *, learns: bool = True, salt: bytes = NO_SALT
    ) -> Messages:
        """The messages as they are to be rendered: with `moves`, lines that vary behind what they came with.

        The rule: the lines, as `observe` found them, are taken out of the system messages, and written, after NOTE, at
        the end of the last message of a user or a tool, unless those that were last written into this conversation are
        the same. Written lines stay where they are: a conversation that continues is given the same lines in the same
        messages, as long as they are remembered. learns: whether what is written now is.
        """
        if not self.moves or not varying:
            return messages
        num_system = len(_system_messages(messages))
        rest = list(messages[num_system:])
        place = max((i for i, message in enumerate(rest) if message["role"] in ("user", "tool")), default=None)
        if place is None:
            return messages
        head = [message for message in _without(messages[:num_system], varying) if message["content"].strip()]
        now = "\n".join(line.text for line in varying)
        digest = hashlib.sha256(salt + repr([message["content"] for message in head]).encode())
        latest: str | None = None
        with self._lock:
            for index, message in enumerate(rest):
                digest.update(repr(message).encode())
                key = digest.digest()
                note = self._notes.get(key)
                if index == place:
                    # In a repeated request the present lines replace the former ones.
                    note = None if latest == now else now
                if note is None:
                    continue
                latest = note
                if learns:
                    self._notes[key] = note
                    self._notes.move_to_end(key)
                rest[index] = {**message, "content": f"{message.get('content') or ''}\n\n{NOTE}\n{note}"}
            while len(self._notes) > _MOST_NOTES:
                self._notes.popitem(last=False)
        return [*head, *rest]

    def _family_of(self, texts: tuple[str, ...], salt: bytes) -> _Family | None:
        """Of the families that a head may belong to, the one that it shares most with."""
        size = _size(texts)
        best, most = None, 0
        for family in reversed(self._families):
            if family.salt != salt:
                continue
            if texts == family.last:
                return family
            wanted = _LEAST_SHARED * max(size, _size(family.last))
            # No order of lines shares more than their multiset: what cannot do is not compared line by line.
            if _size(family.stable) < wanted or _common_size(family.stable, texts) < wanted:
                continue
            shared = _size([texts[index] for index in _shared(family.stable, texts)])
            if shared >= wanted and shared > most:
                best, most = family, shared
        return best


def varying_spans(text: str, messages: Messages, lines: Sequence[HeadLine]) -> tuple[VaryingSpan, ...]:
    """Positions of lines of messages in the text rendered of them, but for those that a template rewrote."""
    found = []
    for line in lines:
        content = messages[line.message]["content"]
        start = text.find(content.strip())
        if start < 0:
            continue
        before = "\n".join(content.split("\n")[: line.number - 1])
        start += max(0, len(before) + (line.number > 1) - (len(content) - len(content.lstrip())))
        which = f"system message {line.message + 1}" if line.message else "the system message"
        words = f"in line {line.number} of {which}, which varies between requests that share the rest"
        found.append(VaryingSpan(start, start + len(line.text), words))
    return tuple(found)


def words_at(
    spans: Sequence[VaryingSpan], text: str, token_ids: TokenIds, tokenizer: "Tokenizer", position: int
) -> str:
    """Description of the line that a token of a rendered text is part of; empty if that does not vary."""
    before = int(token_ids[position - 1]) if position else None
    end, start = (
        len(text) - len(tokenizer.decode(token_ids[first:], skip_special=False, previous_token_id=previous))
        for first, previous in ((position + 1, int(token_ids[position])), (position, before))
    )
    return next((span.words for span in spans if span.start < end and start <= span.end), "")


def _system_messages(messages: Messages) -> Sequence[Mapping[str, Any]]:
    """The system messages at the start, as far as they are text."""
    found = []
    for message in messages:
        if message["role"] not in SYSTEM_ROLES or not isinstance(message.get("content"), str):
            break
        found.append(message)
    return found


def _head_lines(messages: Messages) -> list[HeadLine]:
    return [
        HeadLine(index, number, text)
        for index, message in enumerate(_system_messages(messages))
        for number, text in enumerate(message["content"].split("\n"), 1)
    ]


def _without(messages: Messages, lines: Sequence[HeadLine]) -> list[dict[str, Any]]:
    """System messages without some of their lines."""
    dropped = {(line.message, line.number) for line in lines}
    return [
        {
            **message,
            "content": "\n".join(
                text for number, text in enumerate(message["content"].split("\n"), 1) if (index, number) not in dropped
            ),
        }
        for index, message in enumerate(messages)
    ]


def _shared(stable: tuple[str, ...], texts: tuple[str, ...]) -> list[int]:
    """Indices of the lines of a head that stand in the same order in `stable`."""
    matcher = SequenceMatcher(None, stable, texts, autojunk=False)
    return [index for block in matcher.get_matching_blocks() for index in range(block.b, block.b + block.size)]


def _size(texts: Iterable[str]) -> int:
    return sum(len(text) + 1 for text in texts)


def _common_size(first: Sequence[str], second: Sequence[str]) -> int:
    """Characters of the lines that two heads share in any order."""
    return _size((Counter(first) & Counter(second)).elements())


_MOST_CHATS = 128
_MOST_CHARACTERS = 1 << 24
_MOST_OF_SESSION = 8
"""Chats that a session keeps beside the shared ones: each repeats the text of those before it."""
_MOST_PREFIXES = 16
_CUT_TOKENS = 4


class ChatHistory:
    """Encodes chats, and remembers those that were answered. Threads may share it.

    finds_branches: whether `EncodedChat.branch_tokens` are wanted, as for models with recurrent layers; each takes a
    rendering of its own. media: what a model that sees or hears reads in place of markers.
    `on_answer`, where it is set, is called with each; it must not wait, as it may run inside the garbage collector.
    """

    def __init__(
        self,
        template: "ChatTemplate",
        tokenizer: "Tokenizer",
        *,
        finds_branches: bool = False,
        media: "MediaReader | None" = None,
    ) -> None:
        self.on_answer: Callable[[AnsweredChat], None] | None = None
        self._media = media
        self._template = template
        self._tokenizer = tokenizer
        self._finds_branches = finds_branches
        self._lock = threading.Lock()
        self._chats: deque[AnsweredChat] = deque(maxlen=_MOST_CHATS)
        self._prefixes: OrderedDict[tuple[bytes, str], list[int]] = OrderedDict()

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        begin: Callable[[str], Segments] | None = None,
        max_tokens: int | None = None,
        answered: Sequence["AnsweredChat"] = (),
        salt: bytes = NO_SALT,
    ) -> EncodedChat:
        """Render messages and return the ids of the prompt; tools, variables: what else the template is given.

        All renderings share the time that one may take; once it is used up, `branch_tokens` are fewer.
        begin: gives what goes behind the rendered text, of a reply that was begun. max_tokens: what the context holds.
        answered: further chats whose ids are kept. salt: only chats of the same one count.
        Raises: TemplateError and RequestError as `ChatTemplate.encode`; ContextLengthError for more tokens than that.
        """
        with sharing_render_time():
            return self._encode_chat(messages, tools, variables, begin, max_tokens, answered, salt)

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        begin: Callable[[str], Segments] | None,
        max_tokens: int | None,
        answered: Sequence["AnsweredChat"],
        salt: bytes,
    ) -> EncodedChat:
        values = {**(variables or {}), "tools": tools}
        segments = self._render(messages, values)
        if begin is not None:
            segments = [*segments, *begin("".join(segment for segment, _ in segments))]
        text = "".join(segment for segment, _ in segments)
        closed = _closed_spans(segments)
        is_whole = self._media is not None and self._media.sees_whole(text)
        with self._lock:  # rows of a former prompt that sees itself have not seen what came after them
            chats = [chat for chat in (*self._chats, *answered) if chat.prompt.salt == salt and not is_whole]
        token_ids = self._reuse(text, segments, closed, chats, max_tokens)
        if token_ids is None:
            token_ids = np.array(self._encode(segments, max_tokens), np.int32)
        written = tuple(map(repr, messages))
        system_tokens = self._count_system_tokens(text, segments, messages, token_ids, salt)
        former = _answered_ids(written, messages, chats)
        finds = self._finds_branches
        branches = self._find_branches(text, segments, messages, token_ids, values, salt) if finds else ()
        media = () if self._media is None else self._media.runs(text)
        return EncodedChat(text, closed, token_ids, system_tokens, former, written, branches, salt, media)

    def remember(self, prompt: EncodedChat, reply_ids: Sequence[int]) -> AnsweredChat | None:
        """Keep the ids of a reply, whole or cut short, and return what is kept; None of one without any text."""
        tokenizer = self._tokenizer
        decoder = StreamDecoder(tokenizer, previous_token_id=int(prompt.token_ids[-1]))
        reply, ends, length = [], [], 0
        for token_id in reply_ids:
            reply.append(decoder.push(token_id) if token_id < tokenizer.vocab_size else "")
            length += len(reply[-1])
            ends.append(length)
        if not length:
            return None
        chat = AnsweredChat(prompt, "".join(reply), np.array(reply_ids, np.int32), ends)
        self._add([chat])
        if self.on_answer is not None:
            self.on_answer(chat)
        return chat

    def recall(self, chats: Sequence[AnsweredChat]) -> None:
        """Add chats that were answered before this history began, oldest first."""
        with self._lock:
            later = list(self._chats)
            self._chats.clear()
        self._add([*chats, *later])

    @property
    def vocab_size(self) -> int:
        """Number of token ids that chats may hold."""
        return self._tokenizer.vocab_size

    def _add(self, chats: Sequence[AnsweredChat]) -> None:
        with self._lock:
            self._chats.extend(chats)
            while len(self._chats) > 1 and sum(len(chat.prompt.text) for chat in self._chats) > _MOST_CHARACTERS:
                self._chats.popleft()

    def _render(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> Segments:
        """The rendered template, with markers of pictures and sounds. Raises: TemplateError."""
        spellings, media = self._tokenizer.special_spellings, self._media
        asked = messages if media is None else media.as_parts(messages)
        segments = self._template.render_segments(
            asked, spellings, add_generation_prompt=add_generation_prompt, **values
        )
        return segments if media is None else media.with_markers(segments, messages)

    def _encode(self, segments: Segments, max_tokens: int | None = None) -> list[int]:
        ids = self._encode_segments(segments, max_tokens=max_tokens)
        bos = self._tokenizer.bos_token_id if self._tokenizer.adds_bos else None
        if bos is not None and ids[:1] != [bos] and not (self._media is not None and self._media.begins_whole(ids)):
            ids.insert(0, bos)
        return ids

    def _encode_segments(
        self, segments: Segments, *, continues_run: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """The ids of texts in a row, with those of pictures and sounds in place of their markers."""
        if self._media is None:
            return self._tokenizer.encode_segments(segments, continues_run=continues_run, max_tokens=max_tokens)
        return self._media.encode_segments(segments, continues_run=continues_run, max_tokens=max_tokens)

    def _reuse(
        self,
        text: str,
        segments: Segments,
        closed: tuple[tuple[int, int], ...],
        chats: list[AnsweredChat],
        max_tokens: int | None,
    ) -> NDArray[np.int32] | None:
        """The ids of a text that begins with an answered chat, the longest there is; None if it begins with none."""
        for chat in sorted(chats, key=lambda chat: len(chat.prompt.text) + len(chat.reply), reverse=True):
            start = len(chat.prompt.text)
            if not text.startswith(chat.prompt.text) or _before(closed, start) != chat.prompt.closed:
                continue
            count = self._reply_tokens(chat, text, closed)
            if count == 0:
                continue
            end = start + chat.reply_ends[count - 1]
            head = np.concatenate((chat.prompt.token_ids, chat.reply_ids[:count]))
            tail = self._encode_tail(text, segments, end, int(head[-1]), max_tokens)
            if tail is not None:
                return np.concatenate((head, np.array(tail, np.int32)))
        return None

    def _reply_tokens(self, chat: AnsweredChat, text: str, closed: tuple[tuple[int, int], ...]) -> int:
        """Number of a reply's ids that spell the text at its position; 0 if another text is there.

        The ids must end where the template continues: at a control token, at white space after the whole reply, or at
        the end. A reply that only begins alike was edited, and is another text.
        """
        start = len(chat.prompt.text)
        rest = text[start : start + len(chat.reply)]
        shared = len(commonprefix((chat.reply, rest)))
        count = bisect_left(chat.reply_ends, shared) + 1
        if not shared or chat.reply_ends[count - 1] != shared:
            return 0
        end = start + shared
        spellings = [
            spelling
            for spelling in self._tokenizer.special_spellings.find(text[start:])
            if not any(first < start + spelling.end and start + spelling.start < last for first, last in closed)
        ]
        if any(start + spelling.start < end for spelling in spellings):
            return 0
        at_control = any(start + spelling.start == end for spelling in spellings)
        at_space = not chat.reply[shared:].strip() and text[end : end + 1].isspace()
        return count if at_control or at_space or end == len(text) else 0

    def _encode_tail(
        self, text: str, segments: Segments, start: int, last_id: int, max_tokens: int | None
    ) -> list[int] | None:
        """The ids of a text from `start` on, after an id of plain text; None if they would not read as that text."""
        tail = cut_segments(segments, start, len(text))
        ids = self._encode_segments(tail, continues_run=True, max_tokens=max_tokens)
        if text[start : start + 1].isspace():
            decoded = self._tokenizer.decode(ids, skip_special=False, previous_token_id=last_id)
            if decoded != text[start:]:
                return None
        return ids

    def _find_branches(
        self,
        text: str,
        segments: Segments,
        messages: Sequence[Mapping[str, Any]],
        token_ids: NDArray[np.int32],
        values: Mapping[str, Any],
        salt: bytes,
    ) -> tuple[int, ...]:
        """Numbers of ids before the reply, before the last message, and before the first after the system's.

        A chat without its last message shows where one of another role would part. One with another text instead
        shows it for the same role: a template may refuse a chat that ends before, or write earlier replies in another
        way then; and it may put tools behind the system message.
        """
        if not messages:
            return ()
        last = len(messages) - 1
        ends = [self._shared(text, messages, values), self._shared(text, messages[:-1], values)]
        ends.append(self._shared(text, _changed(messages, last), values, add_generation_prompt=True))
        places = {self._tail_start(text, segments, token_ids, end) for end in ends if end}
        first = _first_message(messages)
        if first < last:
            # Encoded from the start, which other chats share: the tail is long.
            end = self._shared(text, _changed(messages, first), values, add_generation_prompt=True)
            places.add(self._count_prefix(text[:end], segments, token_ids, salt))
        return tuple(sorted(place for place in places if 0 < place < token_ids.size))

    def _shared(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
        *,
        add_generation_prompt: bool = False,
    ) -> int:
        """Number of characters that a text shares with the rendered messages; 0 if the template refuses them."""
        if not messages:
            return 0
        try:
            segments = self._render(messages, values, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            return 0
        return len(commonprefix((text, "".join(part for part, _ in segments))))

    def _tail_start(self, text: str, segments: Segments, token_ids: NDArray[np.int32], start: int) -> int:
        """Number of ids before a character; somewhat fewer where it is inside a token."""
        tail = self._encode_segments(cut_segments(segments, start, len(text)), continues_run=True)
        place = token_ids.size - len(tail)
        return place if token_ids[place:].tolist() == tail else place - _CUT_TOKENS

    def _count_system_tokens(
        self,
        text: str,
        segments: Segments,
        messages: Sequence[Mapping[str, Any]],
        token_ids: NDArray[np.int32],
        salt: bytes,
    ) -> int:
        """Number of leading ids that the text up to the end of the system message has when encoded alone."""
        return self._count_prefix(text[: _system_end(text, messages)], segments, token_ids, salt)

    def _count_prefix(self, prefix: str, segments: Segments, token_ids: NDArray[np.int32], salt: bytes) -> int:
        """Number of leading ids that a prefix of the text has when it is encoded alone."""
        if not prefix:
            return 0
        with self._lock:
            ids = self._prefixes.get((salt, prefix))
        if ids is None:
            ids = self._encode(cut_segments(segments, 0, len(prefix)))
            with self._lock:
                self._prefixes[salt, prefix] = ids
                while len(self._prefixes) > _MOST_PREFIXES:
                    self._prefixes.popitem(last=False)
        size = min(len(ids), token_ids.size)
        differs = np.flatnonzero(np.array(ids[:size], np.int32) != token_ids[:size])
        return int(differs[0]) if differs.size else size


class SessionHistory:
    """A history that also keeps the latest chats of one session, which those of many others cannot push out."""

    def __init__(self, history: ChatHistory, chats: Sequence[AnsweredChat] = ()) -> None:
        self._history = history
        self._chats = tuple(chats)

    def encode(self, *arguments: Any, **options: Any) -> EncodedChat:
        """As `ChatHistory.encode`, with the session's own chats."""
        return self._history.encode(*arguments, **options, answered=self._chats)

    def remember(self, prompt: EncodedChat, reply_ids: Sequence[int]) -> None:
        """Keep the ids of a reply, here and in the shared history."""
        chat = self._history.remember(prompt, reply_ids)
        if chat is not None:
            self._chats = (*self._chats[1 - _MOST_OF_SESSION :], chat)

    def copy(self) -> "SessionHistory":
        """A history of the same chats, for a session that goes its own way from here."""
        return SessionHistory(self._history, self._chats)


def _system_end(text: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """End of the last leading system message in a rendered text, or without one the start of the first message."""
    num_system = _first_message(messages)
    content = messages[max(0, num_system - 1)].get("content")
    if not isinstance(content, str) or not content.strip():
        return 0
    start = text.find(content.strip())
    return max(0, start + len(content.strip()) if num_system and start >= 0 else start)


def _changed(messages: Sequence[Mapping[str, Any]], index: int) -> list[Mapping[str, Any]]:
    """Messages of which one has a content that differs from its first character on."""
    content = "y" if str(messages[index].get("content")).lstrip()[:1] == "x" else "x"
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]


def _first_message(messages: Sequence[Mapping[str, Any]]) -> int:
    """Index of the first message after the system's."""
    return next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))


def _answered_ids(
    written: tuple[str, ...], messages: Sequence[Mapping[str, Any]], chats: list[AnsweredChat]
) -> NDArray[np.int32] | None:
    """The ids of the longest answered chat whose messages and reply these messages repeat."""
    for chat in sorted(chats, key=lambda chat: len(chat.prompt.messages), reverse=True):
        size = len(chat.prompt.messages)
        if written[:size] == chat.prompt.messages and size < len(messages):
            content = messages[size].get("content")
            if isinstance(content, str) and content.strip() == chat.reply.strip():
                return np.concatenate((chat.prompt.token_ids, chat.reply_ids))
    return None


def _closed_spans(segments: Segments) -> tuple[tuple[int, int], ...]:
    spans, position = [], 0
    for text, is_open in segments:
        if not is_open:
            spans.append((position, position + len(text)))
        position += len(text)
    return tuple(spans)


def _before(spans: tuple[tuple[int, int], ...], end: int) -> tuple[tuple[int, int], ...]:
    return tuple(span for span in spans if span[0] < end)


class ChatModel:
    """Renders, encodes and answers conversations with one model; threads may share it.

    template, history: the model's template, and the chats that it answered. formats: how it writes tool calls and
    reasoning. heads: lines of system messages that vary. disk: is waited for before a chat, as its chats are used.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer",
        template: "ChatTemplate",
        constraints: ConstraintCompiler,
        media: "MediaReader | None" = None,
    ) -> None:
        self.template = template
        self.history = ChatHistory(template, tokenizer, finds_branches=engine.pool.has_states, media=media)
        self._media = media
        self.formats = TemplateFormats(template, tokenizer, constraints)
        self.heads = SystemPromptDrift()
        self.disk: DiskCache | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._constraints = constraints

    def keep_on(self, disk: "DiskCache") -> None:
        """Use what a disk cache holds of chats and their pictures, and have it kept there."""
        self.disk = disk
        if self._media is not None:
            self._media.files = disk.media

    @property
    def context_length(self) -> int:
        """Most tokens that prompt and completion may have together."""
        return self._engine.context_length

    def check_usable(self) -> None:
        """Raise ClosedError after the model was closed, RequestError for one that generates nothing."""
        self._engine.check_usable()
        self._engine.check_generates()

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise ConstraintError for what cannot be enforced."""
        self._constraints.mask(constraint, start=0)

    def stream(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        *,
        history: SessionHistory | None = None,
        through: Callable[[Generator[StreamEvent]], Generator[StreamEvent]] | None = None,
    ) -> TextStream:
        """Answer messages; options: ChatOptions. through: passes on the events. Raises: as `LLM.stream_chat`."""
        values: dict[str, Any] = dict(options)
        request = self.formats.request(
            cast(ReplyOptions, {name: values.pop(name) for name in ReplyOptions.__annotations__ if name in values}),
            salt_of(values.get("cache_salt")),
        )
        self.check_usable()
        checked = check_options(values, self._tokenizer)
        if request.continues and checked.constraint is not None:
            raise RequestError(
                "a constraint was given, which holds for whole replies; leave it or continue_final_message out",
                field="constraint",
            )
        if self.disk is not None:
            self.disk.wait_until_open()
        max_tokens = None if values.get("context_shift") else self.context_length
        read, media = self.read(messages, checked.salt)
        varying = self.heads.observe(read, salt=checked.salt)
        arranged = self.heads.arrange(read, varying, salt=checked.salt)
        chat, prefill = self._encode(request, arranged, max_tokens, history, checked.salt)
        spans = varying_spans(chat.text, read, varying)
        prompt = EncodedPrompt(
            chat.token_ids,
            chat.system_tokens,
            chat,
            request.format_after(chat.text, prefill, read),
            partial(words_at, spans, chat.text, chat.token_ids, self._tokenizer) if spans else None,
            media=self._named(chat.media, media),
            notices=tuple(notice for one in media for notice in one.notices),
        )
        generation = TextGeneration(
            self._engine,
            self._tokenizer,
            prompt,
            checked,
            self.template.stop_strings,
            self._constraints,
            self.history if history is None else history,
            through,
        )
        return TextStream(generation)

    def encode(
        self,
        messages: Messages,
        options: ReplyOptions,
        *,
        history: SessionHistory | None = None,
        salt: bytes = NO_SALT,
    ) -> EncodedChat:
        """Return the prompt of a conversation. Raises: TemplateError, RequestError."""
        arranged, _media = self._arranged(messages, salt)
        chat, _ = self._encode(self.formats.request(options, salt), arranged, None, history, salt)
        return chat

    def render(
        self, messages: Messages, options: ReplyOptions, *, add_generation_prompt: bool, salt: bytes = NO_SALT
    ) -> str:
        """Return the prompt of a conversation as text. Raises: TemplateError, RequestError."""
        add_generation_prompt = check_flag("add_generation_prompt", add_generation_prompt)
        request = self.formats.request(options, salt)
        arranged, _ = self._arranged(messages, salt)
        asked, prefill = request.split(arranged)
        if prefill is not None:
            add_generation_prompt = True
        text = self.template.render(asked, add_generation_prompt, request.template_tools or None, **request.variables)
        if prefill is None:
            return text
        segments = prefill.segments(text, request.format.reasoning, self._tokenizer.special_spellings)
        return text + "".join(part for part, _ in segments)

    def compute(self, token_ids: TokenIds, *, system_tokens: int, is_pinned: bool, salt: bytes = NO_SALT) -> int:
        """Have a text's keys and values in the cache, and return how many tokens had to be computed for it.

        Raises: ContextLengthError, OutOfMemoryError, ClosedError.
        """
        self.check_usable()
        if self.disk is not None:
            self.disk.wait_until_open()
        with self._engine.exclusive_cache() as cache:
            if cache.tree.match(token_ids, salt).usable == token_ids.size:
                return 0
        hints = CacheHints(system_tokens=min(system_tokens, token_ids.size), is_pinned=is_pinned, salt=salt)
        # What is sampled at the end is not computed, so it is not cached.
        generation = self._engine.generate(token_ids, SamplingParams(), max_tokens=1, cache_hints=hints)
        for _ in generation:
            pass
        return int(token_ids.size) - generation.record.cached_tokens

    def _named(self, runs: "Sequence[MediaRun]", media: "Sequence[ReadMedia]") -> "Sequence[MediaRun]":
        if not runs:
            return runs
        from localinfer.generation.media import named_runs

        return named_runs(runs, media)

    def read(self, messages: Messages, salt: bytes) -> "tuple[list[dict[str, Any]], list[ReadMedia]]":
        """Messages of text, and the pictures and sounds of their markers, to be held until they are encoded."""
        read = read_messages(messages)
        check_roles(read, self.template.source, self.template.tool_source)
        if self._media is None:
            check_no_media(read)
            return read, []
        read, sources = flattened(read)
        return read, self._media.read(sources, salt)

    def _arranged(self, messages: Messages, salt: bytes) -> "tuple[Messages, list[ReadMedia]]":
        """As `read`, with messages as `stream` would have them rendered, of which nothing is remembered."""
        read, media = self.read(messages, salt)
        varying = self.heads.observe(read, learns=False, salt=salt)
        return self.heads.arrange(read, varying, learns=False, salt=salt), media

    def _encode(
        self,
        request: ReplyRequest,
        messages: Messages,
        max_tokens: int | None,
        history: SessionHistory | None,
        salt: bytes,
    ) -> tuple[EncodedChat, AssistantPrefill | None]:
        """The prompt of a chat, its messages as `read_messages` reads them, and the reply that it continues."""
        asked, prefill = request.split(messages)
        begin = None
        if prefill is not None:
            spellings = self._tokenizer.special_spellings
            begin = partial(prefill.segments, form=request.format.reasoning, spellings=spellings)
        encode = self.history.encode if history is None else history.encode
        tools = request.template_tools or None
        return encode(asked, tools, request.variables, begin=begin, max_tokens=max_tokens, salt=salt), prefill
