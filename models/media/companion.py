"""Finding the mmproj file that belongs to a model.

Repositories keep the encoders of a model in a file of its own, often in several types. A folder of downloads holds
files of many models, so a file is taken only if its projector's rows are as wide as the text model, and if it is clear
whose it is: by the common part of their names, or because no other model lies there.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from localinfer.errors import ModelFileError
from localinfer.models.media.mmproj import ARCHITECTURE, MediaConfig, read_media_config
from localinfer.quant.gguf.reader import GGUFFile, read_gguf

_PREFERRED = ("f16", "bf16", "q8_0", "f32")
"""Types of weights, first those that keep what the encoder says and take no more memory than they need."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MMPROJ = re.compile(r"(?i)[-_.]?mmproj[-_.]?(model)?[-_.]?")
_WEIGHT_TYPE = re.compile(r"(?i)[-_.](ud|i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4\w*|bf16|f16|f32|fp16|fp32|text)(?=[-_.]|$)")


def is_mmproj_name(name: str) -> bool:
    """True for the name of a file that holds encoders, as converters and repositories name them."""
    return "mmproj" in name.lower() and name.lower().endswith(".gguf")


def find_companion(model: Path, width: int) -> Path | None:
    """The mmproj file beside a GGUF file whose embeddings are `width` wide; None if there is none, or whose is unclear.

    Unreadable candidates are passed over.
    """
    try:
        names = [path for path in model.parent.iterdir() if path.suffix.lower() == ".gguf" and path.is_file()]
    except OSError:
        return None
    candidates = sorted(path for path in names if is_mmproj_name(path.name))
    if not candidates:
        return None
    others = {_stem(path) for path in names if path not in candidates} - {_stem(model)}
    if others:
        candidates = _of_the_name(_stem(model), candidates, others)
    fitting = [path for path in candidates if _fits(path, width)]
    return min(fitting, key=_rank, default=None)


def open_media_file(path: Path) -> GGUFFile:
    """Open an mmproj file. Raises: ModelFileError for another kind of file."""
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        file.close()
        raise ModelFileError(
            f"{path}: its architecture is {architecture!r:.40}; wanted a file of encoders, of architecture "
            f"{ARCHITECTURE!r}, which repositories name mmproj-...gguf"
        )
    return file


def media_config(file: GGUFFile, *, has_mrope: bool) -> MediaConfig:
    """The configuration of an open mmproj file. Raises: as `read_media_config`."""
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return read_media_config(file.metadata, shapes, has_mrope=has_mrope)


def _stem(path: Path) -> str:
    """The name of a model without the type of its weights, the number of its part and the word mmproj."""
    name = _PART.sub("", path.stem)
    return _WEIGHT_TYPE.sub("", _MMPROJ.sub("", name)).strip("-_.").lower()


def _of_the_name(stem: str, candidates: Sequence[Path], others: set[str]) -> list[Path]:
    """The files that share their whole name with this model, and with no other one more of it."""
    return [
        path
        for path in candidates
        if (name := _stem(path))
        and _agrees(name, stem)
        and not any(_agrees(name, other) and len(other) >= len(stem) for other in others if other != stem)
    ]


def _agrees(name: str, stem: str) -> bool:
    return stem.startswith(name) or name.startswith(stem)


def _fits(path: Path, width: int) -> bool:
    try:
        with open_media_file(path) as file:
            config = media_config(file, has_mrope=False)
    except (ModelFileError, OSError):
        return False
    return all(part is None or part.output_size == width for part in (config.picture, config.sound))


def _rank(path: Path) -> tuple[int, str]:
    name = path.stem.lower()
    places = [index for index, kind in enumerate(_PREFERRED) if re.search(rf"(?<![a-z]){kind}(?![a-z0-9])", name)]
    return min(places, default=len(_PREFERRED)), path.name
