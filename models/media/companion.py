"""Finding the mmproj file that belongs to a model.

Repositories keep the encoders of a model in a file of its own, often in several types. A folder of downloads holds
files of many models, so a file is taken only if its projector's rows are as wide as the text model, and if it is clear
whose it is: by the common part of their names, or because no other model lies there.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from localinfer.errors import ModelFileError
from localinfer.models.media.encoder import read_mmproj
from localinfer.quant.gguf.reader import read_gguf

_PREFERRED = ("f16", "bf16", "q8_0", "f32")
"""Types of weights, first those that keep what the encoder says and take no more memory than they need."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
"""Name of a snapshot of a repository in the hub's cache."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MMPROJ = re.compile(r"(?i)[-_.]?mmproj[-_.]?(model)?[-_.]?")
_WEIGHT_TYPE = re.compile(r"(?i)[-_.](ud|i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4\w*|bf16|f16|f32|fp16|fp32|text)(?=[-_.]|$)")


def is_mmproj_name(name: str) -> bool:
    """True for the name of a file that holds encoders, as converters and repositories name them."""
    return "mmproj" in name.lower() and name.lower().endswith(".gguf")


def find_companion(model: Path, width: int) -> Path | None:
    """The mmproj file beside a GGUF file whose embeddings are `width` wide; None if there is none, or whose is unclear.

    Of a file in a subfolder of a pulled repository also the one at the repository's top. Unreadable candidates are
    passed over.
    """
    top = model.parent.parent
    found = _in_folder(model, model.parent, width)
    if found is None and _COMMIT.fullmatch(top.name):
        found = _in_folder(model, top, width)
    return found


def _in_folder(model: Path, folder: Path, width: int) -> Path | None:
    try:
        names = [path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file()]
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
        with read_gguf(path) as file:
            config = read_mmproj(file)
    except (ModelFileError, OSError):
        return False
    return all(part is None or part.output_size == width for part in (config.picture, config.sound))


def _rank(path: Path) -> tuple[int, str]:
    name = path.stem.lower()
    places = [index for index, kind in enumerate(_PREFERRED) if re.search(rf"(?<![a-z]){kind}(?![a-z0-9])", name)]
    return min(places, default=len(_PREFERRED)), path.name
