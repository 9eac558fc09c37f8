"""A Hugging Face folder's pictures and sounds: their processors, their towers, and the configuration of encoders."""

from collections.abc import Callable
from dataclasses import dataclass

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.adapter import ADAPTED_TYPES, ADAPTER_CONFIG, ADAPTER_FILE
from localinfer.models.checkpoint.changes import Change, Moved
from localinfer.models.media.folder_processors import (
    PictureProcessor,
    family_name,
    picture_processor,
    sound_processor,
)
from localinfer.models.media.folder_settings import JsonFolder, ProcessorSettings, read_processor_settings
from localinfer.models.media.folder_sound_towers import (
    SOUND_TOWERS,
    SoundTowerFamily,
    made_positions,
    sound_config,
    sound_settings,
)
from localinfer.models.media.folder_sounds import SoundProcessor
from localinfer.models.media.folder_towers import (
    TOWER_FAMILIES,
    Tower,
    TowerFamily,
    picture_config,
    vision_settings,
)
from localinfer.models.media.mmproj import MediaConfig
from localinfer.models.media.tower_file import TowerFile, TowerNames
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.types import FloatArray

WHOLE_PROMPTS = ("paligemma",)
"""Types in which all of a prompt with pictures sees itself in both directions."""

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
    settings: ProcessorSettings
    """Everything that the folder says of its processors."""


def _families(settings: ProcessorSettings) -> tuple[TowerFamily | None, SoundTowerFamily | None]:
    """The families of a folder's towers."""
    name = family_name(settings)
    seeing, hearing = TOWER_FAMILIES.get(name), SOUND_TOWERS.get(name)
    if seeing is not None and not settings.part("audio_config"):
        hearing = None  # some of a family's folders only see
    return seeing, hearing


def media_families(
    folder: JsonFolder, settings: ProcessorSettings
) -> tuple[TowerFamily | None, SoundTowerFamily | None]:
    """The families of a folder's towers, one of which is there. Raises: UnsupportedFormatError; CorruptFileError."""
    found = _families(settings)
    if found == (None, None):
        raise UnsupportedFormatError(
            f"config.json: model_type is {settings.model_type!r:.60}, whose pictures and sounds this version does not "
            "read from folders; its text runs. Use a GGUF file and its mmproj file, or a model of another family."
        )
    says_adapter = settings.model_type in ADAPTED_TYPES and settings.config.boolean("has_lora_adapter", True)
    if says_adapter and folder.json(ADAPTER_CONFIG) is None:
        raise UnsupportedFormatError(
            "config.json: has_lora_adapter says that an adapter (LoRA) changes the text model where there is sound, "
            f"and the folder has no {ADAPTER_CONFIG}; its text runs. Download the folder again, with {ADAPTER_FILE}."
        )
    return found


def open_folder_media(folder: CheckpointFolder, token_id: TokenId | None, *, has_mrope: bool = False) -> FolderMedia:
    """Read a folder's processors and towers; the folder stays the caller's, who keeps it open while weights are read.

    token_id: of the tokenizer; None for a plan, which reads no rows. Raises: UnsupportedFormatError, on one line, for a
    family that neither sees nor hears here; CorruptFileError naming a setting or tensor.
    """
    settings = read_processor_settings(folder)
    seeing, hearing = media_families(folder, settings)
    if settings.model_type in ADAPTED_TYPES:
        _check_adapter(folder)
    towers: list[TowerNames] = []
    extra: dict[str, tuple[str, Change | None]] = {}
    made: dict[str, FloatArray] = {}
    if seeing is not None:
        vision = vision_settings(settings, seeing)
        towers.append(seeing.names(settings, vision))
        extra |= {target: (_embedding(folder), _row(token, token_id)) for target, token in seeing.extra.items()}
        if token_id is not None:
            _check_marks(settings, seeing, token_id)
    if hearing is not None:
        towers.append(hearing.names)
        made |= made_positions(hearing, sound_settings(settings, hearing))
    file = TowerFile(folder, towers, extra, made)
    pictures = sounds = picture = sound = None
    if seeing is not None:
        pictures = picture_processor(settings)
        picture = picture_config(seeing, Tower(settings, vision, file), pictures)
    if hearing is not None:
        sounds = sound_processor(settings)
        sound = sound_config(hearing, settings, file)
    bidirectional = None
    if settings.model_type in ("gemma4", "gemma4_unified"):
        usual = "vision" if settings.model_type == "gemma4_unified" else None
        text = settings.part("text_config").over({"use_bidirectional_attention": usual})
        bidirectional = text.get("use_bidirectional_attention") == "vision"
    return FolderMedia(pictures, sounds, file, MediaConfig(picture, sound, has_mrope, bidirectional), settings)


def _check_adapter(folder: CheckpointFolder) -> None:
    """Prove that the text model has the adapter that its sounds want. Raises: ModelFileError."""
    # Only models that hear read all of the text model's names here.
    from localinfer.models.checkpoint.model import open_checkpoint

    with open_checkpoint(folder.path, warns=False) as file:
        if file.adapter_error is not None:
            raise file.adapter_error


def _embedding(folder: CheckpointFolder) -> str:
    """The name of the text model's embedding."""
    found = next((name for name in folder.tensors if name.endswith("embed_tokens.weight")), None)
    if found is None:
        raise UnsupportedFormatError(
            f"{folder.path.name} has no plain embed_tokens.weight, of which its encoder puts rows between others; its "
            "text runs. Choose a copy of the model whose embedding is not quantized."
        )
    return found


def _check_marks(settings: ProcessorSettings, family: TowerFamily, token_id: TokenId) -> None:
    """Prove that the marks which the processor writes are those that the model takes from the encoder's table."""
    key, tokens = family.marks
    if key in settings.config and settings.config.get(key) != [token_id(token) for token in tokens]:
        raise settings.config.unsupported(key, f"the tokenizer's numbers of {', '.join(tokens)}")


def _row(token: str, token_id: TokenId | None) -> Change:
    """The row of a token."""
    number = 0 if token_id is None else token_id(token)
    if number is None:
        raise UnsupportedFormatError(
            f"the tokenizer has no {token}, whose embedding stands between the rows of a picture; its text runs. "
            "Download the folder again"
        )
    return Moved(lambda values: values[number])
