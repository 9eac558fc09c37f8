"""Replies that another process relays: notes of their progress, by which a third process resumes one.

The client receives every byte once."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from localinfer.generation.resumption import ResumedText

if TYPE_CHECKING:
    from localinfer.apps.server.replies.reply import Reply
    from localinfer.generation.stream import TextStream
    from localinfer.types import TokenIds


RELAY = "reply_relay"
"""The member of a request's state with its `ReplyRelay`."""


class ReplyNote(NamedTuple):
    """The reply's id, the time of its creation, what it says of the model's version, and its slots."""

    reply_id: str
    created: int
    fingerprint: str
    slot_ids: tuple[int, ...]


class PromptNote(NamedTuple):
    """A text was begun: the ids of its prompt as int32 bytes, and its seed."""

    text: int
    prompt_ids: bytes
    seed: int


class TokenNote(NamedTuple):
    """A token of a text was generated, and all that it adds to the answer was sent. cached: tokens of the prompt, None
    where that is not known."""

    text: int
    token_id: int
    cached: int | None


class SentNote(NamedTuple):
    """Something else was sent: what goes before all texts, the end of one, or what comes after all."""

    part: Literal["begin", "end", "tail"]
    text: int = 0


class UsedNote(NamedTuple):
    """A request has ended, and has read and generated so many tokens."""

    tokens: int


class ReserveNote(NamedTuple):
    """Before anything of a prompt is computed: the tokens to be taken of its client's limit, see `RateLimiter`."""

    least: int
    most: int


Note = ReplyNote | PromptNote | TokenNote | SentNote | UsedNote | ReserveNote


@dataclass(frozen=True)
class Resumption:
    """Progress of a reply. texts: by index, None for one that had not begun. sent: beside tokens."""

    reply_id: str
    created: int
    fingerprint: str
    slot_ids: tuple[int, ...]
    texts: tuple[ResumedText | None, ...]
    sent: frozenset[SentNote]


class ReplyProgress:
    """Progress of a reply, as its notes tell; kept by the process that relays it."""

    def __init__(self) -> None:
        self._reply: ReplyNote | None = None
        self._prompts: dict[int, PromptNote] = {}
        self._tokens: dict[int, list[int]] = {}
        self._cached: dict[int, int] = {}
        self._sent: set[SentNote] = set()
        self._used: int | None = None

    @property
    def num_texts(self) -> int | None:
        """Number of texts of the reply; None before it was begun."""
        return None if self._reply is None else len(self._reply.slot_ids)

    @property
    def num_used(self) -> int:
        """Tokens that were read and generated: as the request's end says, or as noted so far."""
        if self._used is not None:
            return self._used
        prompts = {note.prompt_ids for note in self._prompts.values()}
        return sum(len(ids) // np.dtype(np.int32).itemsize for ids in prompts) + self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts whose bytes were sent."""
        return sum(map(len, self._tokens.values()))

    @property
    def is_whole(self) -> bool:
        """True if the last bytes were sent."""
        return SentNote("tail") in self._sent

    def take(self, note: Note) -> None:
        """Take the next note."""
        match note:
            case ReplyNote():
                self._reply = note
            case PromptNote():
                self._prompts[note.text] = note
            case TokenNote():
                self._tokens.setdefault(note.text, []).append(note.token_id)
                if note.cached is not None:
                    self._cached[note.text] = note.cached
            case SentNote():
                self._sent.add(note)
            case UsedNote():
                self._used = note.tokens

    def resumption(self) -> Resumption | None:
        """State from which another process resumes; None where no reply was begun."""
        if self._reply is None:
            return None
        return Resumption(
            *self._reply,
            tuple(self._text(index) for index in range(len(self._reply.slot_ids))),
            frozenset(self._sent),
        )

    def _text(self, index: int) -> ResumedText | None:
        begun = self._prompts.get(index)
        if begun is None:
            return None
        prompt_ids = np.frombuffer(begun.prompt_ids, np.int32)
        return ResumedText(prompt_ids, begun.seed, tuple(self._tokens.get(index, ())), self._cached.get(index))


class ReplyRelay:
    """Notes of a reply for the process that relays it, and the bytes that its client has not. Lives on the event loop.

    resumption: of a reply that another process began. note: called with each note, before the bytes that it is about,
    and whether there may be such bytes: then the note is true as soon as the next message was sent.
    """

    def __init__(self, note: Callable[[Note, bool], object], resumption: Resumption | None = None) -> None:
        self.resumption = resumption
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._sent: frozenset[SentNote] = frozenset() if resumption is None else resumption.sent
        texts = () if resumption is None else resumption.texts
        self._num_had = [0 if text is None else len(text.token_ids) for text in texts]

    def text(self, index: int) -> ResumedText | None:
        """Progress of another process with a text."""
        return None if self.resumption is None else self.resumption.texts[index]

    def reserve(self, least: int, most: int) -> None:
        """Note the tokens that a request takes of its limit, unless another process did; the relay may end it then.

        Any thread may call; nothing that is sent later is taken before it.
        """
        if self.resumption is None:
            self._loop.call_soon_threadsafe(self._note, ReserveNote(least, most), False)

    def settle(self, used: int) -> None:
        """Do nothing: the tokens used are reported at the request's end."""

    def resume(self, index: int, stream: "TextStream", _: Callable[[], bool]) -> None:
        """Stage of a text: let its stream continue from where another process left it."""
        begun = self.text(index)
        if begun is not None:
            stream.resume(begun)

    def reply_begun(self, reply: "Reply") -> None:
        """Note a reply, unless another process did; then it has the same names and slots here."""
        begun = self.resumption
        if begun is None:
            self._note(ReplyNote(reply.id, reply.created, reply.fingerprint, tuple(reply.slot_ids)), False)
        else:
            reply.created, reply.fingerprint = begun.created, begun.fingerprint
            reply.slot_ids = list(begun.slot_ids)

    def text_begun(self, index: int, prompt_ids: "TokenIds", seed: int) -> None:
        """Note a text, unless another process did."""
        if self.text(index) is None:
            self._note(PromptNote(index, np.ascontiguousarray(prompt_ids, np.int32).tobytes(), seed), False)

    def token(self, index: int, token_id: int, cached_tokens: int | None, frames: Sequence[bytes] | None) -> bytes:
        """Bytes to be sent of all that a token adds to the answer, which may be none.

        cached_tokens: of the text's prompt. frames: None for an answer that is sent as a whole, at its end.
        """
        if index < len(self._num_had) and self._num_had[index]:
            self._num_had[index] -= 1
            return b""
        self._note(TokenNote(index, token_id, cached_tokens), frames is not None)
        return b"".join(frames or ())

    def sent(self, part: Literal["begin", "end", "tail"], index: int, frames: Sequence[bytes]) -> bytes:
        """Bytes to be sent of a part of the answer that is no token."""
        note = SentNote(part, index)
        if note in self._sent:
            return b""
        self._note(note, True)
        return b"".join(frames)
