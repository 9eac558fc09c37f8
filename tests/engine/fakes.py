"""A scripted model and a byte tokenizer: everything the engine floor needs, and no weights.

The scripted program writes token ids into its pages and reads them back, so that a wrong page, position or truncation
shows as wrong logits: the logits at a position are a function of the ids before it, as a real model's are.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import TokenIdError
from localinfer.kernels.program import Batch, Segment
from localinfer.models.text.tokenizer import SpellingFinder

Logits = NDArray[np.float32]
PAGE_TOKENS = 4
PAGE_BYTES = 64


@dataclass(frozen=True)
class FakeConfig:
    vocab_size: int = 260
    context_length: int = 64
    is_encoder: bool = False
    takes_media: bool = False
    only_decides: bool = False


@dataclass(frozen=True)
class FakeLayout:
    page_tokens: int = PAGE_TOKENS
    page_bytes: int = PAGE_BYTES
    windowed_bytes: int = 0
    window: int = 0
    state_bytes: int = 0
    log_bytes: int = 0
    carried_size: int = 0


_NORMAL = np.random.default_rng(0).normal(0, 2, 1 << 18).astype(np.float32)


def hashed_logits(history: NDArray[np.int32], vocab_size: int) -> Logits:
    """Logits that depend on every id of the history and its place."""
    seed = 1469598103934665603
    for token_id in history.tolist():
        seed = (seed ^ (token_id + 1)) * 1099511628211 % 2**64
    return logits_of_hash(seed, vocab_size)


def logits_of_hash(seed: int, vocab_size: int) -> Logits:
    """A stretch of random numbers, which the hash of a history chooses."""
    start = seed % (_NORMAL.size - vocab_size)
    return _NORMAL[start : start + vocab_size].copy()


def scripted_logits(script: dict[int, int]) -> Callable[[NDArray[np.int32], int], Logits]:
    """Logits that make position p the id script[p], and id 0 where the script says nothing."""

    def logits(history: NDArray[np.int32], vocab_size: int) -> Logits:
        row = np.zeros(vocab_size, np.float32)
        row[script.get(history.size, 0)] = 50.0
        return row

    return logits


@dataclass
class FakeProgram:
    """Implements `ops.Program` over `logits_of(ids so far, vocab_size)`; keeps a note of every batch."""

    vocab_size: int
    logits_of: Callable[[NDArray[np.int32], int], Logits] = hashed_logits
    max_batch_rows: int = 5
    max_output_rows: int = 3
    batch_sizes: list[int] = field(default_factory=list)
    fails_at: set[int] = field(default_factory=set)
    closed: bool = False

    def run(self, batch: Batch) -> Logits:
        assert not self.closed, "a closed program was run"
        assert batch.token_ids.dtype == np.int32 and batch.output_rows.dtype == np.int32
        assert 0 < batch.token_ids.size <= self.max_batch_rows
        assert batch.output_rows.size <= self.max_output_rows
        assert sum(segment.num_rows for segment in batch.segments) == batch.token_ids.size
        self.batch_sizes.append(batch.token_ids.size)
        wanted = set(batch.output_rows.tolist())
        histories: dict[int, NDArray[np.int32]] = {}
        row = 0
        for segment in batch.segments:
            pages = [_page(address) for address in segment.page_addresses.tolist()]
            for offset in range(segment.num_rows):
                position = segment.start_position + offset
                pages[position // PAGE_TOKENS][position % PAGE_TOKENS] = self.stored(batch, segment, row, offset)
                if position in self.fails_at:
                    raise MemoryError("scripted failure")
                if row in wanted:
                    whole = np.concatenate(pages[: position // PAGE_TOKENS + 1])
                    histories[row] = whole[: position + 1]
                row += 1
        rows = [self.logits_of(histories[r], self.vocab_size) for r in batch.output_rows.tolist()]
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)

    def stored(self, batch: Batch, segment: Segment, row: int, offset: int) -> int:
        """What the cache keeps of a row, int32."""
        return int(batch.token_ids[row])

    def close(self) -> None:
        self.closed = True


@cache
def _page(address: int) -> NDArray[np.int32]:
    assert address % 64 == 0, "a page is not aligned"
    return np.ctypeslib.as_array((ctypes.c_int32 * PAGE_TOKENS).from_address(address))


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 begins a text, 257 ends it, 258 and 259 are roles of a chat."""

    vocab_size = 260
    bos_token_id = 256
    eos_token_id = 257
    eog_token_ids = frozenset({257})
    strips_space_at_start = False
    adds_bos = True
    special_spellings = SpellingFinder({"<begin>": 256, "<end>": 257, "<user>": 258, "<bot>": 259})

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = False, *, max_tokens: int | None = None
    ) -> list[int]:
        if parse_special and text == "<end>":
            return [257]
        return [256] * add_special + list(text.encode())

    def encode_parts(self, segments: Sequence[tuple[str, bool]], add_special: bool = False) -> Iterator[list[int]]:
        yield from (self.encode(text, add_special) for text, _ in segments)

    def encode_segments(
        self, segments: Sequence[tuple[str, bool]], *, continues_run: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        ids: list[int] = []
        for text, is_open in segments:
            position = 0
            for spelling in self.special_spellings.find(text) if is_open else ():
                ids += [*text[position : spelling.start].encode(), spelling.token_id]
                position = spelling.end
            ids += text[position:].encode()
        return ids

    def decode(
        self, token_ids: Iterable[int], *, skip_special: bool = True, previous_token_id: int | None = None
    ) -> str:
        names = {} if skip_special else {256: b"<begin>", 257: b"<end>", 258: b"<user>", 259: b"<bot>"}
        return b"".join(names.get(i) or self.token_bytes(i) for i in token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= self.vocab_size:
            raise TokenIdError(f"token id {token_id} is not in the vocabulary")
        return bytes([token_id]) if token_id < 256 else b""

    def vocabulary_bytes(self) -> list[bytes]:
        return [self.token_bytes(token_id) for token_id in range(self.vocab_size)]

    @property
    def special_ids(self) -> dict[str, int]:
        return {"<end>": 257}

    def ids_containing(self, text: str) -> frozenset[int]:
        return frozenset(text.encode() if len(text) == 1 else b"")

    def token_text(self, token_id: int) -> str:
        names = ("<begin>", "<end>", "<user>", "<bot>")
        return names[token_id - 256] if token_id >= 256 else chr(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def starts_text_after(self, token_id: int) -> bool:
        return token_id >= 256


class FakeTemplate:
    """Each message after the name of its role, as text but for that name; a reply ends with an end token."""

    stop_strings: tuple[str, ...] = ()
    source: str | None = None
    tool_source: str | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], *_: Any, **__: Any) -> str:
        return "".join(text for text, _ in self.render_segments(messages, SpellingFinder({})))

    def render_segments(
        self, messages: Sequence[Mapping[str, Any]], spellings: SpellingFinder, *_: Any, **__: Any
    ) -> list[tuple[str, bool]]:
        segments = [("<begin>", True)]
        for message in messages:
            is_reply = message["role"] == "assistant"
            segments += [("<bot>" if is_reply else "<user>", True), (message["content"] or "", not is_reply)]
            segments += [("<end>", True)] * is_reply
        return [*segments, ("<bot>", True)]


@dataclass
class FakeModel:
    """A `LoadedModel` over a FakeProgram."""

    program: FakeProgram
    config: FakeConfig = field(default_factory=FakeConfig)
    capabilities: tuple[str, ...] = ("completion", "chat", "embeddings")
    kv_layout: FakeLayout = field(default_factory=FakeLayout)
    tokenizer: ByteTokenizer | None = field(default_factory=ByteTokenizer)
    chat_template: object = None
    times_closed: int = 0
    adapts_media: bool = False

    def close(self) -> None:
        self.times_closed += 1
        self.program.close()


def fake_model(
    logits_of: Callable[[NDArray[np.int32], int], Logits] = hashed_logits,
    *,
    vocab_size: int = 260,
    context_length: int = 64,
    max_batch_rows: int = 5,
    max_output_rows: int = 3,
) -> FakeModel:
    """A model whose logits at a position are `logits_of(ids up to it, vocab_size)`."""
    program = FakeProgram(vocab_size, logits_of, max_batch_rows, max_output_rows)
    return FakeModel(program, FakeConfig(vocab_size, context_length))


def text_model(text: str, *, prompt_length: int, end: bool = True, context_length: int = 64) -> FakeModel:
    """A model that answers a prompt of `prompt_length` ids with the bytes of `text`, then its end token."""
    ids = [*text.encode(), *([257] if end else [])]
    script = {prompt_length + index: token_id for index, token_id in enumerate(ids)}
    return fake_model(scripted_logits(script), context_length=context_length)
