"""Chats as token ids in which a reply keeps the ids it was generated with, however often it is rendered again.

A text can be cut into tokens in many ways, and a model does not always choose the tokenizer's. A reply that was
tokenized anew would then part from the cache at its first odd token. So each chat that was answered is remembered, its
rendered text beside its ids, and a later prompt that begins with that text takes these ids and encodes only the rest.
"""

import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.errors import TemplateError
from localinfer.generation.chat.messages import SYSTEM_ROLES
from localinfer.models.text.template_costs import sharing_render_time
from localinfer.models.text.tokenizer import StreamDecoder
from localinfer.storage.chats import AnsweredChat, EncodedChat

if TYPE_CHECKING:
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.tokenizer import Tokenizer

Segments = Sequence[tuple[str, bool]]
"""Texts in a row, each with whether the template wrote it, so that control tokens may be read in it."""

_MOST_CHATS = 128
_MOST_CHARACTERS = 1 << 24
_MOST_OF_SESSION = 8
"""Chats that a session keeps beside the shared ones: each repeats the text of those before it."""
_MOST_PREFIXES = 16
_CUT_TOKENS = 4


class ChatHistory:
    """Encodes chats, and remembers those that were answered. Threads may share it.

    finds_branches: whether `EncodedChat.branch_tokens` are wanted, as for models with recurrent layers; each takes a
    rendering of its own.
    `on_answer`, where it is set, is called with each; it must not wait, as it may run inside the garbage collector.
    """

    def __init__(self, template: "ChatTemplate", tokenizer: "Tokenizer", *, finds_branches: bool = False) -> None:
        self.on_answer: Callable[[AnsweredChat], None] | None = None
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
        segments = self._template.render_segments(
            messages, self._tokenizer.special_spellings, tools=tools, **(variables or {})
        )
        if begin is not None:
            segments = [*segments, *begin("".join(segment for segment, _ in segments))]
        text = "".join(segment for segment, _ in segments)
        closed = _closed_spans(segments)
        with self._lock:
            chats = [chat for chat in (*self._chats, *answered) if chat.prompt.salt == salt]
        token_ids = self._reuse(text, segments, closed, chats, max_tokens)
        if token_ids is None:
            token_ids = np.array(self._encode(segments, max_tokens), np.int32)
        written = tuple(map(repr, messages))
        system_tokens = self._count_system_tokens(text, segments, messages, token_ids, salt)
        former = _answered_ids(written, messages, chats)
        branches: tuple[int, ...] = ()
        if self._finds_branches:
            values = {**(variables or {}), "tools": tools}
            branches = self._find_branches(text, segments, messages, token_ids, values, salt)
        return EncodedChat(text, closed, token_ids, system_tokens, former, written, branches, salt)

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

    def _encode(self, segments: Segments, max_tokens: int | None = None) -> list[int]:
        tokenizer = self._tokenizer
        ids = tokenizer.encode_segments(segments, max_tokens=max_tokens)
        if tokenizer.adds_bos and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
            ids.insert(0, tokenizer.bos_token_id)
        return ids

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
        tail = _cut(segments, start, len(text))
        ids = self._tokenizer.encode_segments(tail, continues_run=True, max_tokens=max_tokens)
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
            segments = self._template.render_segments(
                messages, self._tokenizer.special_spellings, add_generation_prompt=add_generation_prompt, **values
            )
        except TemplateError:
            return 0
        return len(commonprefix((text, "".join(part for part, _ in segments))))

    def _tail_start(self, text: str, segments: Segments, token_ids: NDArray[np.int32], start: int) -> int:
        """Number of ids before a character; somewhat fewer where it is inside a token."""
        tail = self._tokenizer.encode_segments(_cut(segments, start, len(text)), continues_run=True)
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
            ids = self._encode(_cut(segments, 0, len(prefix)))
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


def _cut(segments: Segments, start: int, end: int) -> Segments:
    """The characters from `start` to `end` of segments."""
    kept, position = [], 0
    for text, is_open in segments:
        part = text[max(0, start - position) : max(0, end - position)]
        if part:
            kept.append((part, is_open))
        position += len(text)
    return kept
