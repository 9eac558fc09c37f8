"""A Hugging Face folder's pictures and sounds: their processors, their towers, and the configuration of encoders."""

from collections.abc import Callable
from dataclasses import dataclass

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.changes import Change, Moved
from localinfer.models.media.folder_processors import (
    PictureProcessor,
    family_name,
    read_picture_processor,
)
from localinfer.models.media.folder_settings import read_processor_settings
from localinfer.models.media.folder_sounds import SoundProcessor
from localinfer.models.media.folder_towers import TOWER_FAMILIES, Tower, picture_config, vision_settings
from localinfer.models.media.mmproj import MediaConfig
from localinfer.models.media.tower_file import TowerFile
from localinfer.quant.checkpoint.folder import CheckpointFolder

TokenId = Callable[[str], int | None]
"""The number of a special token, by its text."""


@dataclass(frozen=True)
class FolderMedia:
    """Parts of a folder beside its text model."""

    pictures: PictureProcessor | None
    """Prepares pictures; None if the model sees nothing."""
    sounds: SoundProcessor | None
    """Prepares sounds; None if the model hears nothing."""
    file: TowerFile
    """Tensors of the encoders, under GGUF's names."""
    config: MediaConfig
    """Configuration of the encoders."""


def open_folder_media(folder: CheckpointFolder, token_id: TokenId, *, has_mrope: bool = False) -> FolderMedia:
    """Read a folder's processors and towers; the folder stays the caller's, who keeps it open while weights are read.

    token_id: of the tokenizer. Raises: UnsupportedFormatError, on one line, for a family that neither sees nor hears
    here; CorruptFileError naming a setting or tensor.
    """
    settings = read_processor_settings(folder)
    name = family_name(settings)
    if name not in TOWER_FAMILIES:
        raise UnsupportedFormatError(
            f"config.json: model_type is {settings.model_type!r:.60}, whose pictures and sounds this version does not "
            "read from folders; its text runs. Use a GGUF file and its mmproj file, or a model of another family."
        )
    family = TOWER_FAMILIES[name]
    vision = vision_settings(settings, family)
    extra: dict[str, tuple[str, Change | None]] = {}
    for target, token in family.extra.items():
        extra[target] = _embedding(folder), _row(token, token_id)
    file = TowerFile(folder, family.names(settings, vision), extra)
    pictures = read_picture_processor(folder)
    config = picture_config(family, Tower(settings, vision, file), pictures)
    return FolderMedia(pictures, None, file, MediaConfig(config, None, has_mrope))


def _embedding(folder: CheckpointFolder) -> str:
    """The name of the text model's embedding."""
    found = next((name for name in folder.tensors if name.endswith("embed_tokens.weight")), None)
    if found is None:
        raise UnsupportedFormatError(
            f"{folder.path.name} has no plain embed_tokens.weight, of which its encoder puts rows between others; its "
            "text runs. Choose a copy of the model whose embedding is not quantized."
        )
    return found


def _row(token: str, token_id: TokenId) -> Change:
    """The row of a token."""
    number = token_id(token)
    if number is None:
        raise UnsupportedFormatError(
            f"the tokenizer has no {token}, whose embedding stands between the rows of a picture; its text runs. "
            "Download the folder again"
        )
    return Moved(lambda values: values[number])
