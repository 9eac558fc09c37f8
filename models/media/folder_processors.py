"""Processors of Hugging Face folders: pictures and sounds as their encoders read them, and prompts around them."""

import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from os.path import commonprefix

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, UnsupportedFormatError
from localinfer.models.media.cuts import (
    Cut,
    Workbench,
    encoder_input,
    num_embeddings,
    resize_as_pillow,
    resize_as_torch,
)
from localinfer.models.media.folder_pictures import PICTURE_FAMILIES, SeeingFamily
from localinfer.models.media.folder_settings import PartSettings, ProcessorSettings
from localinfer.models.media.folder_sounds import SOUND_FAMILIES, SoundProcessor
from localinfer.models.media.records import EncoderInput, PreparedMedia

_FILTERS = (0, 1, 2, 3)
_BYTE = 1 / 255
_NORMAL_FACTOR = 1e-9


class PictureProcessor:
    """Prepares pictures as the processor of a folder does.

    `token` stands for a picture in prompts and rendered templates; `alone` is that with the texts around it, for
    prompts that no template writes. `adds_bos`: whether a prompt begins as texts without pictures do. A channel of
    0..255 is normalised as (value / 255 - mean) / std.
    """

    token: str
    alone: str
    adds_bos: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __init__(self, settings: ProcessorSettings, family: SeeingFamily) -> None:
        picture = settings.picture.over(family.defaults).under(family.given)
        settings = ProcessorSettings(
            settings.model_type, settings.config, settings.processor, picture, settings.sound, settings.tokens
        )
        for key in ("do_resize", "do_rescale"):
            if not picture.boolean(key, True):
                raise picture.unsupported(key, "true")
        resample = picture.integer("resample", low=0, high=5)
        if resample not in _FILTERS:
            raise picture.unsupported("resample", "the filters 0 to 3")
        self._resample = resample
        self._family = family
        self._plan = family.plan(settings)
        self.token = settings.token(*family.token) if family.token[0] else ""
        self._beginning = settings.token("bos_token", "<s>")
        self.alone = self.token.join(family.around)
        self.adds_bos = family.adds_bos
        self.mean, self.std = _normalisation(picture)

    @property
    def number_prefix(self) -> str:
        """Text before a picture's number in its first piece; empty for a family whose pictures have none."""
        first, second = (self.plan(64, 64, number)[0] for number in (0, 1))
        if not isinstance(first, str) or not isinstance(second, str) or first == second:
            return ""
        return commonprefix((first, second))

    def plan(self, width: int, height: int, number: int = 0) -> tuple[str | Cut, ...]:
        """The pieces of a picture of this size, the prompt's first being number 0.

        Raises: RequestError if the model cannot read such a picture.
        """
        return self._plan(width, height, number)

    def count_rows(self, width: int, height: int) -> int:
        """Embeddings that a picture of this size takes in a prompt, without the texts between and around them."""
        return num_embeddings(self.plan(width, height))

    def lay_out(self, picture: NDArray[np.uint8], number: int = 0, *, is_alone: bool = False) -> PreparedMedia:
        """Prepare a picture, uint8 [height, width, 3], the prompt's first being number 0.

        is_alone: no template writes the texts around it, so they are part of it.
        """
        resize = resize_as_torch if self._family.resizes_as_torch else resize_as_pillow
        bench = Workbench(picture, partial(resize, resample=self._resample))
        pieces = self.plan(picture.shape[1], picture.shape[0], number)
        made = [piece if isinstance(piece, str) else encoder_input(piece, bench.make(piece)) for piece in pieces]
        before, behind = self._family.around if is_alone else ("", "")
        return PreparedMedia.from_pieces([*([before] if before else ()), *made, *([behind] if behind else ())])

    def complete(self, prompt: str) -> str:
        """A prompt with what its family puts before or behind the words."""
        frame = self._family.frame
        return prompt if frame is None else frame(prompt, self.token, self._beginning)


def expand(prompt: str, media: Sequence[tuple[str, Sequence[PreparedMedia]]]) -> tuple[str | EncoderInput, ...]:
    """Put pictures and sounds in place of what stands for them in a prompt: texts and inputs of encoders in order.

    media: by the token that stands for them, in the prompt's order. Each text is tokenized as a whole, special tokens
    parsed: what a processor writes around a picture joins the words beside it.
    Raises: RequestError if there are more or fewer tokens than media.
    """
    left = {token: list(entries) for token, entries in media if token}
    for token, entries in left.items():
        if prompt.count(token) != len(entries):
            raise RequestError(
                f"the prompt has {prompt.count(token)} times {token!r:.60} for {len(entries)} pictures or sounds; "
                "wanted one for each. Change the prompt or what is sent with it"
            )
    pattern = "|".join(re.escape(token) for token in sorted(left, key=len, reverse=True))
    parts = re.split(f"({pattern})", prompt) if pattern else [prompt]
    pieces = chain.from_iterable(left[part].pop(0).pieces if part in left else (part,) for part in parts)
    joined: list[str | EncoderInput] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(last := joined[-1], str):
            joined[-1] = last + piece
        elif piece != "" or not isinstance(piece, str):
            joined.append(piece)
    return tuple(joined)


def family_name(settings: ProcessorSettings) -> str:
    """The type of a folder; `pixtral` for a `llava` with that tower."""
    name = settings.model_type
    is_pixtral = name == "llava" and settings.part("vision_config").text("model_type") == "pixtral"
    return "pixtral" if is_pixtral else name


def picture_processor(settings: ProcessorSettings) -> PictureProcessor:
    """The processor of a folder's pictures.

    Raises: UnsupportedFormatError if its family does not see here; CorruptFileError naming a setting.
    """
    family = PICTURE_FAMILIES.get(family_name(settings))
    if family is None:
        raise UnsupportedFormatError(
            f"config.json: model_type is {settings.model_type!r:.60}, whose pictures this version does not read from "
            "folders; its text runs. Use a GGUF file and its mmproj file, or a model of another family."
        )
    return PictureProcessor(settings, family)


def _normalisation(picture: PartSettings) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and deviation of channels that were divided by 255."""
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if picture.boolean("do_normalize", True):
        mean, std = picture.channels("image_mean"), picture.channels("image_std")
        if min(std) <= 0:
            raise picture.wrong("image_std", "numbers above 0")
    if "rescale_factor" in picture:
        factor = picture.number("rescale_factor", low=_NORMAL_FACTOR) / _BYTE
        if factor != 1:
            mean, std = _divided(mean, factor), _divided(std, factor)
    return mean, std


def _divided(values: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    return values[0] / factor, values[1] / factor, values[2] / factor


def sound_processor(settings: ProcessorSettings) -> SoundProcessor:
    """The processor of a folder's sounds; errors as those of pictures."""
    family = SOUND_FAMILIES.get(settings.model_type)
    if family is None:
        raise UnsupportedFormatError(
            f"config.json: model_type is {settings.model_type!r:.60}, whose sounds this version does not read from "
            "folders; its text runs. Use a GGUF file and its mmproj file, or a model of another family."
        )
    return SoundProcessor(settings, family)
