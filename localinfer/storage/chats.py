"""Answered chats on disk, so that a reply keeps its generated token ids over a restart.

One sealed record per chat (`records.py`), of JSON in which token ids are base64 of little-endian int32. An invalid one
is deleted.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.media import MediaRun
from localinfer.storage.records import NewerRecordError, RecordStore

logger = logging.getLogger(__name__)

_MOST_FILES = 128
_MOST_READ = 32
_MOST_BYTES_READ = 8 << 20


@dataclass(frozen=True)
class EncodedChat:
    """A chat as a prompt."""

    text: str
    """The rendered template."""
    closed: tuple[tuple[int, int], ...]
    """Spans of the text that the template did not write, where names of control tokens are plain text."""
    token_ids: NDArray[np.int32]
    """The prompt's ids."""
    system_tokens: int
    """Number of ids at the start that are the system message's, or come before the first message."""
    history: NDArray[np.int32] | None
    """The ids of an earlier prompt of the same chat and its reply, where the messages repeat them."""
    messages: tuple[str, ...]
    """The messages, each as a key."""
    branch_tokens: tuple[int, ...] = ()
    """Numbers of ids at the start that a later prompt of the chat is likely to share: those before the reply, where
    a template writes the reply in another way than it was generated; before the last message, which may be edited;
    and all before the first message, tools included, with which other chats may begin."""
    salt: bytes = NO_SALT
    """Of the chats that it may continue."""
    media: tuple[MediaRun, ...] = ()
    """Its pictures and sounds, in order."""


@dataclass(frozen=True)
class AnsweredChat:
    """A prompt and its reply, with the ids it was generated with.

    reply_ends: how many characters of `reply` the first i + 1 of them are.
    """

    prompt: EncodedChat
    reply: str
    reply_ids: NDArray[np.int32]
    reply_ends: list[int]


class ChatMemory(Protocol):
    """The chats that a loaded model remembers, as they are read from disk and written there."""

    on_answer: Callable[[AnsweredChat], None] | None
    """Called with each chat that was answered; must not wait."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def recall(self, chats: Sequence[AnsweredChat]) -> None:
        """Remember chats, oldest first."""
        ...


class StoredChats:
    """The answered chats of one fingerprint, in one folder. Any number of processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._records = RecordStore(
            folder,
            names=r"[0-9a-f]{32}\.chat",
            most_bytes=_MOST_BYTES_READ,
            most_files=_MOST_FILES,
            is_sealed=True,
        )

    def save(self, chats: Iterable[AnsweredChat]) -> None:
        """Write chats, each atomically, and delete the oldest beyond the limit. Raises: OSError."""
        for chat in chats:
            named = chat.prompt.salt + (chat.prompt.text + chat.reply).encode("utf-8", "surrogatepass")
            self._records.write(f"{hashlib.sha256(named).hexdigest()[:32]}.chat", _to_json(chat))

    def load(self, vocab_size: int) -> list[AnsweredChat]:
        """Return the chats that were written last, oldest first, without invalid ones."""
        chats, left = [], _MOST_BYTES_READ
        for file in self._records.files()[:_MOST_READ]:
            if file.num_bytes > left:
                # An oversized file must not hide older ones.
                continue
            left -= file.num_bytes
            name = Path(file.path).name
            try:
                chats.append(_from_json(self._records.read(name), vocab_size))
            except NewerRecordError as error:
                logger.info("%s is not used: %s", file.path, error)
            except (OSError, ValueError, KeyError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
                logger.info("%s is not used: %s", file.path, error)
                self._records.discard(name)
        return chats[::-1]


def _to_json(chat: AnsweredChat) -> bytes:
    prompt = chat.prompt
    fields = {
        "text": prompt.text,
        "closed": prompt.closed,
        "token_ids": _encode(prompt.token_ids),
        "system_tokens": prompt.system_tokens,
        "messages": prompt.messages,
        "salt": prompt.salt.hex(),
        "reply": chat.reply,
        "reply_ids": _encode(chat.reply_ids),
        "reply_ends": _encode(np.array(chat.reply_ends, np.int32)),
    }
    return json.dumps(fields).encode()


def _from_json(text: bytes, vocab_size: int) -> AnsweredChat:
    """Parse and check a chat. Raises: ValueError, KeyError, TypeError and similar if it is invalid."""
    fields = json.loads(text)
    token_ids, reply_ids, ends = (_decode(fields[name]) for name in ("token_ids", "reply_ids", "reply_ends"))
    # Negative ids are those of pictures and sounds, which no reply has.
    for ids in (token_ids[token_ids >= 0], reply_ids):
        if not ids.size or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError("its token ids are not of this vocabulary")
    reply, prompt_text = str(fields["reply"]), str(fields["text"])
    if ends.size != reply_ids.size or (np.diff(ends, prepend=0) < 0).any() or ends[-1] != len(reply):
        raise ValueError("its reply does not match its token ids")
    closed = tuple((int(start), int(end)) for start, end in fields["closed"])
    messages = tuple(map(str, fields["messages"]))
    system_tokens = int(fields["system_tokens"])
    if not 0 <= system_tokens <= token_ids.size or any(
        not 0 <= start <= end <= len(prompt_text) for start, end in closed
    ):
        raise ValueError("its spans are outside its text")
    # Files of former versions are of no salt.
    salt = bytes.fromhex(fields.get("salt", ""))
    prompt = EncodedChat(prompt_text, closed, token_ids, system_tokens, None, messages, salt=salt)
    return AnsweredChat(prompt, reply, reply_ids, ends.tolist())


def _encode(values: NDArray[np.int32]) -> str:
    return base64.b64encode(values.astype("<i4").tobytes()).decode("ascii")


def _decode(text: str) -> NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int32)
