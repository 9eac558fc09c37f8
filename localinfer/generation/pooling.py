"""Whole texts of token ids to vectors, scores or log probabilities, many in a batch."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.engine import Engine
from localinfer.engine.media import MediaRun, PlacedMedia
from localinfer.engine.sampling.sampler import not_finite_error
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS
from localinfer.kernels.program import Program, Segment
from localinfer.models.decoder.block_config import Pooling
from localinfer.types import FloatArray

if TYPE_CHECKING:
    from localinfer.models.load.loader import Model


from localinfer.arguments import check_number
from localinfer.engine.sampling.filters import token_logprobs
from localinfer.types import TokenLogprobs

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PooledText:
    """A text, and what its rows are told."""

    token_ids: TokenIds
    """Checked by `Engine.check_prompt`, at least one."""
    num_hidden: int = 0
    """First ids that the others do not see."""
    media: tuple[MediaRun, ...] = ()
    """Its pictures and sounds in order, whose ids are among its ids."""
    num_first: int | None = None
    """Of a pair, how many ids are of the first of the model's token types, the others being of the second; None for
    all."""
    row_type: int = 0
    """Token type of all rows, of texts that are no pair."""
    places: tuple[int, ...] | None = None
    """Rows whose results are wanted, of a text that is computed whole; None for those that the pooling takes."""


@dataclass(frozen=True)
class _HiddenStart:
    """Stands in for the media of a sequence whose first rows are hidden from the others."""

    num_hidden: int

    def on_rows(self, segment: Segment) -> Segment:
        """A segment with the first position that each row sees: its own, for hidden ones."""
        own = np.arange(segment.start_position, segment.start_position + segment.num_rows)
        return replace(segment, key_starts=np.minimum(own, self.num_hidden))


@dataclass(eq=False)
class _Text:
    """A text on its way: its pages while it has any, and the results of its rows that are wanted."""

    given: PooledText
    media: PlacedMedia | None
    """Its pictures and sounds, or what else its rows are told."""
    sequence: SequenceCache | None = None
    rows: list[FloatArray] = field(default_factory=list)

    @property
    def token_ids(self) -> TokenIds:
        """Its ids."""
        return self.given.token_ids

    @property
    def num_first(self) -> int:
        """Ids of the first token type."""
        return self.token_ids.size if self.given.num_first is None else self.given.num_first


@dataclass(frozen=True)
class _Piece:
    """Rows of a text that a batch computes."""

    text: _Text
    start: int
    stop: int


class TextPooler:
    """Computes what a model makes of texts, in batches between the steps of generations.

    A text's result does not depend on the others of its batch, but on GPUs for what batches of more than sixteen rows
    round otherwise (`kernels/README.md`). Programs are written on first use, one per pooling.
    Texts of an encoder are computed whole, and so are those whose mean goes through matrices, so such a program grows
    to the longest one; others are cut where a batch is full of one of them.
    """

    def __init__(self, engine: Engine, model: "Model") -> None:
        self._engine = engine
        self._model = model
        self._is_encoder = model.config.is_encoder
        self._programs: dict[Pooling, Program] = {}

    def pool(self, texts: Sequence[PooledText], pooling: Pooling) -> list[FloatArray]:
        """Pool each text: float32[size], float32[labels] scores, or float32[T, size] for NONE.

        Vectors have the length that the model gives them. Raises: OutOfMemoryError, ClosedError; ModelFileError for
        what is not finite.
        """
        if not texts:
            return []
        kind = self._computed(pooling)
        self._engine.check_usable()
        waiting = [_Text(one, self._placed(one)) for one in texts]
        room = self._reserve(kind, max(self._rows_at_once(kind, one) for one in waiting))
        taken = self._taken_rows(kind, pooling)
        try:
            for batch in _batches(waiting, room, None if self._is_whole(kind) else room):
                self._run(kind, batch, taken)
                self._close(piece.text for piece in batch if piece.stop == len(piece.text.token_ids))
        finally:
            self._close(waiting)
        return [_result(text, pooling, is_mean=kind is Pooling.NONE and pooling is Pooling.MEAN) for text in waiting]

    def close(self) -> None:
        """Give up the programs, of which none is run any more."""
        self._programs.clear()

    def _computed(self, pooling: Pooling) -> Pooling:
        """Pooling that the program computes: a plain decoder's gives single rows, which are pooled here."""
        is_in_graph = self._is_encoder or self._model.has_dense or pooling is Pooling.RANK
        return pooling if is_in_graph else Pooling.NONE

    def _is_whole(self, kind: Pooling) -> bool:
        """True if a batch must hold all rows of its texts."""
        return self._is_encoder or kind is Pooling.MEAN

    def _placed(self, text: PooledText) -> PlacedMedia | None:
        """The media of a text. Raises: as `Engine.place_media`."""
        if text.num_hidden:
            # Of a sequence that is not cached, what it tells of its rows is all that is asked.
            return cast("PlacedMedia", _HiddenStart(text.num_hidden))
        return self._engine.place_media(text.token_ids, text.media)

    def _rows_at_once(self, kind: Pooling, text: _Text) -> int:
        """Rows of a text that one batch has to hold."""
        if self._is_whole(kind):
            return text.token_ids.size
        return text.media.largest_batch() if text.given.media and text.media is not None else 1

    def _reserve(self, kind: Pooling, longest: int) -> int:
        """Have a program that holds the most rows that are computed at once; returns how many rows to batch."""
        wanted = MAX_BATCH_ROWS
        while wanted < longest:
            wanted *= 2
        with self._engine.exclusive_cache():
            program = self._programs.get(kind)
            if program is None or program.max_batch_rows < wanted:
                # The former one is released first: both would not have to fit.
                self._programs.pop(kind, None)
                program = None
                program = self._programs[kind] = self._model.text_program(kind, wanted)
            if self._is_whole(kind):
                return max(longest, MAX_BATCH_ROWS)
            return min(program.max_batch_rows, program.max_output_rows)

    def _taken_rows(self, kind: Pooling, pooling: Pooling) -> Callable[[_Piece], Sequence[int]]:
        """Wanted rows of a piece, counted from its first."""
        chosen = self._model.classified_rows if pooling is Pooling.RANK else pooling
        if pooling in (Pooling.NONE, Pooling.LATE) or (chosen is Pooling.MEAN and kind is Pooling.NONE):
            return lambda piece: range(piece.stop - piece.start)
        if chosen is Pooling.LAST:

            def last(piece: _Piece) -> range:
                count = piece.stop - piece.start
                return range(count - 1, count) if piece.stop == len(piece.text.token_ids) else range(0)

            return last
        return lambda piece: range(1) if piece.start == 0 else range(0)

    def _run(self, kind: Pooling, batch: Sequence[_Piece], taken: Callable[[_Piece], Sequence[int]]) -> None:
        rows: list[int] = []
        counts = []
        first = 0
        for piece in batch:
            if piece.text.given.media and piece.text.media is not None:
                # Before the step, which others wait for.
                piece.text.media.hold(piece.start, lambda: False)
        for piece in batch:
            wanted = taken(piece) if piece.text.given.places is None else piece.text.given.places
            rows.extend(first + row for row in wanted)
            counts.append(len(wanted))
            first += piece.stop - piece.start
        with self._engine.exclusive_cache() as cache:
            sequences = []
            for piece in batch:
                if piece.text.sequence is None:
                    piece.text.sequence = cache.open()
                    piece.text.sequence.media = piece.text.media
                    given = piece.text.given
                    piece.text.sequence.row_type = given.row_type or self._engine.row_type(given.token_ids)
                sequences.append(piece.text.sequence)
            ids = [piece.text.token_ids[piece.start : piece.stop] for piece in batch]
            types = _token_types(batch)
            program = self._programs[kind]
            found = forward(program.run, sequences, ids, np.array(rows, np.int32), token_types=types).copy()
        start = 0
        for piece, count in zip(batch, counts, strict=True):
            part = found[start : start + count]
            start += count
            if not np.isfinite(part).all():
                raise not_finite_error(piece.start + 1 + int(np.argmin(np.isfinite(part).all(axis=1))))
            piece.text.rows.append(part)

    def _close(self, texts: Iterable[_Text]) -> None:
        held = [text for text in texts if text.sequence is not None]
        if held:
            with self._engine.scheduler.exclusive():
                for text in held:
                    assert text.sequence is not None, "chosen so"
                    text.sequence.close()
                    text.sequence = None
                    if text.given.media and text.media is not None:
                        text.media.release(sys.maxsize)


def _token_types(batch: Sequence[_Piece]) -> NDArray[np.int32] | None:
    """The token type of every row, None where all are of the first."""
    if all(piece.stop <= piece.text.num_first for piece in batch):
        return None
    return np.concatenate([np.arange(piece.start, piece.stop) >= piece.text.num_first for piece in batch]).astype(
        np.int32
    )


def _batches(texts: Sequence[_Text], room: int, longest: int | None) -> Iterator[list[_Piece]]:
    """Pieces of at most `room` rows together, in order. longest: rows of a piece, None for whole texts.

    A text is cut at multiples of its own positions only, so that its results do not depend on its neighbours.
    """
    batch: list[_Piece] = []
    used = 0
    for text in texts:
        start, step = 0, longest or len(text.token_ids)
        while start < len(text.token_ids):
            piece = _Piece(text, start, _whole_runs(text, start, min(start + step, len(text.token_ids))))
            # Two pieces of one text cannot be in one batch.
            if batch and (start or used + piece.stop - start > room):
                yield batch
                batch, used = [], 0
            batch.append(piece)
            used += piece.stop - start
            start = piece.stop
    if batch:
        yield batch


def _whole_runs(text: _Text, start: int, stop: int) -> int:
    """The end of a piece, so that rows which see each other are computed at once."""
    parted = text.media.whole_run_at(stop) if text.given.media and text.media is not None else None
    if parted is None:
        return stop
    return parted[0] if parted[0] > start else parted[1]


def _result(text: _Text, pooling: Pooling, *, is_mean: bool) -> FloatArray:
    if is_mean:
        total = np.sum([part.sum(axis=0, dtype=np.float64) for part in text.rows], axis=0)
        return np.asarray(total / len(text.token_ids), np.float32)
    if pooling in (Pooling.NONE, Pooling.LATE) or text.given.places is not None:
        return np.concatenate(text.rows)
    return next(part[0] for part in text.rows if len(part))


def score_tokens(
    engine: Engine,
    program: Program,
    token_ids: Sequence[int] | NDArray[np.integer],
    top: int,
    media: Sequence[MediaRun] = (),
) -> list[TokenLogprobs | None]:
    """The log probability of each token after those before it, and of the `top` likeliest; None for the first, and for
    rows of pictures and sounds, which are no tokens. media: as of `Engine.generate`.

    Raises: as `Engine.check_prompt`; RequestError for no tokens; OutOfMemoryError, ClosedError.
    """
    engine.check_generates()
    tokens = engine.check_prompt(token_ids, media=media, needs_tokens=True)
    placed = engine.place_media(tokens, media)
    top = check_number("top", top, 0, engine.vocab_size)
    scores: list[TokenLogprobs | None] = [None]
    for start, logits in engine.outputs(program, tokens, media=placed):
        for row, token_id in enumerate(tokens[start + 1 : start + 1 + len(logits)]):
            scores.append(None if token_id < 0 else token_logprobs(logits[row], int(token_id), top))
    return scores
