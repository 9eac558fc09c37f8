"""Models on disk: which files and folders are models, in a folder and those below it, and their names."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from localinfer.apps.server.router.model_settings import ModelSettings
from localinfer.errors import RequestError
from localinfer.kernels.versions import installed_version

logger = logging.getLogger("localinfer.server")

MAX_FOLDER_DEPTH = 5
"""Folders below the one that was named: enough for publisher/repository/file, and for Hugging Face's download cache."""
MAX_ENTRIES = 50_000
"""More files and folders than this are a whole disk rather than a collection of models."""
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d+)-of-\d+")
"""The name of one file of a model that is split into several."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded: its name to clients, which does not show where the folder lies, and its file.

    created: when the file was last changed, in seconds since 1970. aliases: further names that clients may use.
    settings: what holds for this model alone.
    """

    id: str
    path: Path
    created: int
    aliases: tuple[str, ...] = ()
    settings: ModelSettings = ModelSettings()

    @cached_property
    def fingerprint(self) -> str:
        """Differs for other models and other versions of localinfer; begins as llama-server's does, for its clients."""
        facts = f"{installed_version('localinfer')} {self.id} {self.created}"
        return f"b{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def find_models(folder: Path) -> list[ModelSource]:
    """The models of a folder, by name: GGUF files, of split ones the first part, and Hugging Face folders.

    Those of folders below have the path to them in their names, such as publisher/repository/file. Hidden files and
    folders, and the files of projectors that go with a model, are passed over.
    Raises: RequestError if there is none, or two have one name.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; name one that holds models")
    sources: dict[str, ModelSource] = {}
    for path in _paths_below(folder):
        source = model_source(path)
        if source is None:
            continue
        place = path.relative_to(folder)
        name = (place.parent / source.id).as_posix()
        if name in sources:
            former = sources[name].path.relative_to(folder)
            raise RequestError(f"{place.as_posix()} and {former.as_posix()} have one name; rename one of them")
        sources[name] = ModelSource(name, path, source.created)
    if not sources:
        raise RequestError(
            f"{folder} is a model itself; serve it with -m"
            if _is_checkpoint(folder)
            else f"{folder} holds no model; put GGUF files or Hugging Face folders into it, or into folders below"
        )
    return sorted(sources.values(), key=lambda source: (source.id.count("/") > 0, source.id))


def model_source(path: Path) -> ModelSource | None:
    """The model at a path; None if it is none, a part of one, or a later part of a split one."""
    name = path.name
    try:
        if path.is_dir():
            if not _is_checkpoint(path):
                return None
        elif path.suffix.lower() == ".gguf" and "mmproj" not in name.lower() and path.is_file():
            part = _PART.fullmatch(path.stem)
            if part is not None and int(part["number"]) != 1:
                return None
            name = path.stem if part is None else part["name"]
        else:
            return None
        return ModelSource(name, path, int(path.stat().st_mtime))
    except OSError as error:
        logger.warning("%s is passed over: %s", path.name, error.strerror)
        return None


def matching_names(wanted: str, names: Sequence[str]) -> list[str]:
    """The names that a client may mean: the very one, else those that end with it, else those of a folder of it."""
    if wanted in names:
        return [wanted]
    ending = [name for name in names if name.endswith(f"/{wanted}")]
    return ending or [name for name in names if f"/{name.rpartition('/')[0]}".endswith(f"/{wanted}") and "/" in name]


def matching_sources(wanted: str, sources: Sequence[ModelSource]) -> list[ModelSource]:
    """The models that a client may mean, by their names and aliases: each of these comes before a part of another."""
    owners = {name: source for source in sources for name in (source.id, *source.aliases)}
    found = [owners[name] for name in matching_names(wanted, list(owners))]
    return list({source.id: source for source in found}.values())


def _paths_below(folder: Path) -> Iterator[Path]:
    """Files and folders, level by level, each folder once however many links lead to it."""
    seen = {os.path.realpath(folder)}
    level = [folder]
    num_entries = 0
    for depth in range(MAX_FOLDER_DEPTH + 1):
        below: list[Path] = []
        for inner in level:
            for path in _entries(inner):
                num_entries += 1
                if num_entries > MAX_ENTRIES:
                    raise RequestError(
                        f"{folder} holds more than {MAX_ENTRIES:,} files and folders; name the one with the models"
                    )
                yield path
                if depth < MAX_FOLDER_DEPTH and path.is_dir() and not _is_checkpoint(path):
                    real = os.path.realpath(path)
                    if real not in seen:
                        seen.add(real)
                        below.append(path)
        level = below


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        logger.warning("the folder %s is passed over: %s", folder.name, error.strerror)
        return []


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a model as Hugging Face keeps them, and not a file of that name beside other models."""
    try:
        if not (folder / "config.json").is_file():
            return False
        paths = list(folder.iterdir())
    except OSError:
        return False
    kinds = {path.suffix.lower() for path in paths}
    return ".safetensors" in kinds or (".gguf" not in kinds and not any(path.is_dir() for path in paths))
