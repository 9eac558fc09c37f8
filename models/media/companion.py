"""Finding the mmproj file that belongs to a model.

Repositories keep the encoders of a model in a file of its own, often in several types. A folder of downloads holds
files of many models, so a file is taken only if its projector's rows are as wide as the text model, and if it is clear
whose it is: by the common part of their names, or because no other model lies there.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from localinfer.errors import ModelFileError
from localinfer.models.media.encoder import read_mmproj
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf

_PREFERRED = (TensorType.F16, TensorType.BF16, TensorType.F32, TensorType.Q8_0)
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
    ranks = [(rank, path.name, path) for path in candidates if (rank := _rank(path, width)) is not None]
    return min(ranks)[2] if ranks else None


def _stem(path: Path) -> str:
    """The name of a model without the type of its weights, the number of its part and the word mmproj."""
    name = _PART.sub("", path.stem)
    return _WEIGHT_TYPE.sub("", _MMPROJ.sub("", name)).strip("-_.").lower()


def _of_the_name(stem: str, candidates: Sequence[Path], others: set[str]) -> list[Path]:
    """The files of this model's whole name; without any, those whose name begins its name, or the other way round, and
    is no other model's."""
    exact = [path for path in candidates if _stem(path) == stem]
    if exact:
        return exact
    names = [(path, _stem(path)) for path in candidates]
    return [
        path
        for path, name in names
        if name and _agrees(name, stem) and not any(_agrees(name, other) for other in others)
    ]


def _agrees(name: str, stem: str) -> bool:
    return stem.startswith(name) or name.startswith(stem)


def _rank(path: Path, width: int) -> int | None:
    """The place of a file's usual type among those preferred; None for one that is damaged or of another width."""
    try:
        with read_gguf(path) as file:
            config = read_mmproj(file)
            sizes = Counter[TensorType]()
            for tensor in file.tensors.values():
                sizes[tensor.type] += math.prod(tensor.shape) if len(tensor.shape) == 2 else 0
    except (ModelFileError, OSError):
        return None
    if any(part is not None and part.output_size != width for part in (config.picture, config.sound)):
        return None
    usual = sizes.most_common(1)[0][0]
    return _PREFERRED.index(usual) if usual in _PREFERRED else len(_PREFERRED)
