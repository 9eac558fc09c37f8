"""Inputs of embeddings: texts as their model was trained to read them, pictures, and prompts with pictures in them.

Models that compare texts with pictures by towers of their own (CLIP, SigLIP) take a text or a picture. Their texts are
filled up, or cut behind the token whose row is pooled, as `models/checkpoint/contrastive_families.py` has read it.
Models that read pictures among words take both in one prompt.
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import shown
from localinfer.engine.engine import Engine
from localinfer.engine.media import MediaRun
from localinfer.errors import ContextLengthError, RequestError
from localinfer.generation.chat.media_parts import MediaSource, part_text, read_media_part
from localinfer.generation.text_generation import EncodedPrompt
from localinfer.models.text.vocabulary import PREFIX

if TYPE_CHECKING:
    from localinfer.generation.media import MediaModel, MediaReader
    from localinfer.models.load.loader import Model
    from localinfer.models.media.records import EncoderInput
    from localinfer.models.text.tokenizer import Tokenizer

TokenIds = NDArray[np.int32]
_NO_IDS = np.zeros(0, np.int32)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WAYS = "give a text, token ids, a part such as {'type': 'image', 'image': ...}, or a list of parts"


@dataclass(frozen=True, eq=False)
class EmbeddingInput:
    """One text, picture, or prompt with pictures, ready to be computed."""

    token_ids: TokenIds
    """Ids of the prompt, with those of its pictures; none for a picture that has a vector of its own."""
    media: tuple[MediaRun, ...] = ()
    """Its pictures and sounds in order, whose ids are among its ids."""
    picture: "EncoderInput | None" = None
    """A picture that has a vector of its own."""
    num_patches: int = 0
    """Patches of that picture."""
    num_hidden: int = 0
    """First ids that the others do not see, which fill up a text."""

    @property
    def num_tokens(self) -> int:
        """Rows that are computed: tokens, and patches of a picture with a vector of its own."""
        return self.token_ids.size + self.num_patches


@dataclass(frozen=True)
class TextRules:
    """Changes of texts by a model whose vector is of one certain row."""

    padded_length: int = 0
    """Tokens that every text is filled up to; 0: none is."""
    pads_left: bool = False
    """True if it is filled up before its first token."""
    padding_id: int = 0
    """The token that it is filled up with."""
    lowers: bool = False
    """True if letters are made small."""
    strips: bool = False
    """True if punctuation goes, and white space is merged."""
    query: tuple[str, str] | None = None
    """Texts of special tokens around a text, in models of many vectors; None for others."""
    picture: tuple[str, str] = ("", "")
    """The same around a picture."""
    pools_end: bool = False
    """True if a text ends, for the model, with the first token of a certain id."""
    end_id: int | None = None
    """That id; None for the greatest one of the text."""

    @classmethod
    def of_model(cls, metadata: Mapping[str, object]) -> "TextRules":
        """The rules of a model's metadata."""
        prefix = metadata.get("general.architecture")

        def value(key: str, kind: type, default: Any) -> Any:
            found = metadata.get(f"{prefix}.{key}", default)
            return found if isinstance(found, kind) else default

        def around(name: str) -> tuple[str, str]:
            return value(f"{name}_before", str, ""), value(f"{name}_behind", str, "")

        padding = metadata.get(f"{PREFIX}padding_token_id", 0)
        return cls(
            padded_length=value("padded_length", int, 0),
            pads_left=value("pads_left", bool, False),
            padding_id=padding if isinstance(padding, int) else 0,
            lowers=value("lowers_texts", bool, False),
            strips=value("strips_punctuation", bool, False),
            query=around("query") if value("late_interaction", bool, False) else None,
            picture=around("picture"),
            pools_end=value("pools_end_token", bool, False),
            end_id=value("pooled_token_id", int, None),
        )

    def spelled(self, text: str) -> str:
        """A text as the tokenizer gets it."""
        text = text.lower() if self.lowers else text
        return re.sub(r"\s+", " ", text.translate(_PUNCTUATION)).strip() if self.strips else text

    def filled(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text, with those that fill it up."""
        padding = [self.padding_id] * (self.padded_length - len(ids))
        return [*padding, *ids] if self.pads_left else [*ids, *padding]

    def ended(self, ids: TokenIds) -> EmbeddingInput:
        """The ids up to the one whose row is pooled, as what stands behind it changes nothing; those that fill up the
        text before its first token are hidden, as processors do."""
        if not self.pools_end:
            return EmbeddingInput(ids)
        words = np.flatnonzero(ids != self.padding_id)
        hidden = int(words[0]) if words.size else 0
        end = ids[hidden:].max() if self.end_id is None else self.end_id
        found = np.flatnonzero(ids[hidden:] == end)
        return EmbeddingInput(ids[: hidden + int(found[0]) + 1] if found.size else ids, num_hidden=hidden)


class InputReader:
    """Reads what one loaded model is to embed. Threads may share it."""

    def __init__(
        self, engine: Engine, model: "Model", media: "MediaModel | None" = None, reader: "MediaReader | None" = None
    ) -> None:
        """Read for a model; media: its encoders; reader: of pictures in prompts, if its prompts take them."""
        self._engine = engine
        self._model = model
        self._media = media
        self._reader = reader
        self._rules = TextRules.of_model(model.file.metadata)

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's. Raises: RequestError if it has none."""
        if self._model.tokenizer is None:
            raise RequestError("the model file has no tokenizer; give texts as token ids")
        return self._model.tokenizer

    def read(self, prompt: Any, path: str, *, truncate: bool) -> EmbeddingInput:
        """Read a text, token ids, an encoded prompt, a part or a list of parts; path: its place among the arguments.

        Raises: RequestError, ContextLengthError; MessageError for pictures and sounds that the model does not read.
        """
        if isinstance(prompt, EmbeddingInput):
            return prompt
        if isinstance(prompt, EncodedPrompt):
            return EmbeddingInput(self.checked(prompt.token_ids, media=prompt.media), tuple(prompt.media))
        parts = _parts(prompt, path)
        if parts is None:
            return self._text(prompt, truncate)
        sources = [part for part in parts if isinstance(part, MediaSource)]
        if not sources:
            return self._text("".join(map(str, parts)), truncate)
        if self._media is not None and self._media.gives_vectors:
            if len(parts) > 1:
                raise RequestError(
                    f"{path} has {len(parts)} parts, and this model makes a vector of one text or of one picture; "
                    "give each by itself"
                )
            return self._picture(self._media, sources[0])
        if self._rules.query is not None and len(parts) > 1:
            raise RequestError(
                f"{path} has {len(parts)} parts, and this model reads a query or the picture of a page; give each by "
                "itself"
            )
        return self._prompt(parts)

    def checked(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        *,
        cut: bool = False,
        media: Sequence[MediaRun] = (),
    ) -> TokenIds:
        """Ids that fit the context, or are cut to it. Raises: as `Engine.check_prompt`."""
        room = self._engine.context_length
        tokens = self._engine.check_prompt(token_ids, media=media, needs_tokens=True, shifts_context=True)
        if cut:
            tokens = tokens[:room]
        if tokens.size > room:
            raise ContextLengthError(
                f"a text has {tokens.size} tokens, but the context holds {room}; shorten it, or allow truncate",
                num_tokens=tokens.size,
                context_length=room,
            )
        return tokens

    def _text(self, text: str | Sequence[int] | NDArray[np.integer], truncate: bool) -> EmbeddingInput:
        room = self._engine.context_length
        if not isinstance(text, str):
            return self._rules.ended(self.checked(text, cut=truncate))
        tokenizer, query = self.tokenizer, self._rules.query
        most = None if truncate else room
        if query is None:
            ids, end = tokenizer.encode(self._rules.spelled(text), max_tokens=most), tokenizer.ids_after
        else:
            segments = [(query[0], True), (text, False), (query[1], True)]
            ids = tokenizer.encode_segments(segments, max_tokens=most)
            end = tokenizer.encode(query[1], add_special=False, parse_special=True)
        if truncate and len(ids) > room:
            # The tokens that end a text stay.
            ids = ids[: room - len(end)] + end
        return self._rules.ended(self.checked(self._rules.filled(ids)))

    def _picture(self, media: "MediaModel", source: MediaSource) -> EmbeddingInput:
        from localinfer.generation.media import check_kind, prepared
        from localinfer.models.media.records import EncoderInput

        check_kind(source, media.kinds)
        found, _ = prepared(media, source)
        (piece,) = (piece for piece in found.pieces if isinstance(piece, EncoderInput))
        return EmbeddingInput(_NO_IDS, picture=piece, num_patches=media.count_patches(piece))

    def _prompt(self, parts: Sequence[str | MediaSource]) -> EmbeddingInput:
        if self._reader is None:
            from localinfer.generation.chat.messages import check_no_media

            check_no_media([{"content": list(parts)}])
        assert self._reader is not None, "there is a picture or sound among them"
        room = self._engine.context_length
        if self._rules.query is None:
            encoded = self._reader.encode_parts(parts, max_tokens=room)
            ids, runs = [*encoded.token_ids, *self.tokenizer.ids_after], tuple(encoded.media)
        else:
            (source,) = (part for part in parts if isinstance(part, MediaSource))
            ids, placed = self._reader.encode_framed(source, *self._rules.picture)
            # As transformers computes ColQwen2: rows of a picture stand one behind the other, not in a grid.
            runs = tuple(replace(run, grid=None, num_positions=run.ids.size) for run in placed)
        return EmbeddingInput(self.checked(ids, media=runs), runs)


def _parts(prompt: Any, path: str) -> list[str | MediaSource] | None:
    """The parts of an input, None for a text and for token ids."""
    if isinstance(prompt, Mapping | MediaSource):
        return [_part(prompt, path)]
    is_list = isinstance(prompt, list | tuple) and any(isinstance(one, Mapping | MediaSource) for one in prompt)
    return [_part(one, f"{path}[{index}]") for index, one in enumerate(prompt)] if is_list else None


def _part(part: Any, path: str) -> str | MediaSource:
    if isinstance(part, str):
        return part
    found = read_media_part(part, path)
    if found is not None:
        return found
    text = part_text(part)
    if text is not None:
        return text
    raise RequestError(f"{path} of the prompt is {shown(part)}; {_WAYS}")
