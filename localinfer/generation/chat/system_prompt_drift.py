"""Lines at the head of prompts that vary from request to request: found by comparison, and moved behind if wanted.

Programs put a billing header, the date or the state of a folder into the system message. Keys and values depend on all
ids before them, so where such a line changes, nothing behind it can be taken from the cache: the prompt is read again.
The cause of the miss is named without changing the answer; `move` changes the prompt, if that is acceptable.
"""

import hashlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.generation.chat.messages import SYSTEM_ROLES
from localinfer.types import TokenIds

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

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
