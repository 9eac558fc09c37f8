"""Models on disk: their names, the overrides that a user set for one, and the memory that each takes."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.kernels.versions import installed_version

if TYPE_CHECKING:
    from localinfer.models.load.model_changes import ModelChanges


@dataclass(frozen=True)
class ModelSettings:
    """Per-model overrides of server defaults."""

    load: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of `localinfer.load`."""
    sampling: Mapping[str, float | int] = field(default_factory=dict, hash=False)
    """Values by the names of SamplingParams, for requests that name none."""
    is_pinned: bool = False
    """Loaded when the server starts, and never unloaded."""
    keep_alive_seconds: float | None = None
    """Time that it stays loaded without requests, math.inf for ever; None: the server's."""


_LEAST_CONTEXT = 512
"""A model with room for fewer tokens than this is not worth loading."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes."""

    fixed_bytes: int
    """Weights, with all that comes with them."""
    bytes_per_token: int
    """Cache per token of context."""
    context_length: int
    """Tokens that it will have room for."""
    capabilities: tuple[str, ...] = ("completion", "chat", "embeddings")
    """Kinds of requests that it answers."""
    file_bytes: int = 0
    """Bytes on disk."""
    trained_context_length: int | None = None
    """The context length that its file names."""
    decides: bool = True
    """False for a model made for decisions of a type that is not run."""

    def largest_context(self, available_bytes: int) -> int:
        """Tokens of context that fit beside the weights, 0 if not even the weights do."""
        return min(self.context_length, max(0, available_bytes - self.fixed_bytes) // max(1, self.bytes_per_token))

    def bytes_for(self, wanted_context: int | None) -> int:
        """Bytes that must be free to load it: for so many tokens, or, for None, for enough to be of use."""
        return self.fixed_bytes + self._least(wanted_context) * self.bytes_per_token

    def check(self, name: str, available_bytes: int, *, wanted_context: int | None) -> None:
        """Raise OutOfMemoryError, with the numbers, if the model would not fit.

        wanted_context: tokens that must fit; None asks for enough to be of use, as the cache grows when it is needed.
        """
        least = self._least(wanted_context)
        fits = self.largest_context(available_bytes)
        if fits >= least:
            return
        needed = self.bytes_for(wanted_context)
        is_usable = fits >= _LEAST_CONTEXT
        way_out = f"load it with a context of at most {fits} tokens" if is_usable else "use a smaller model"
        raise OutOfMemoryError(
            f"{name} needs {needed:,} bytes ({self.fixed_bytes:,} for weights, {self.bytes_per_token:,} for each of "
            f"{least} tokens), and {max(0, available_bytes):,} are available; close something, or {way_out}"
        )

    def _least(self, wanted_context: int | None) -> int:
        return min(self.context_length, _LEAST_CONTEXT if wanted_context is None else wanted_context)


def measure_need(
    path: str | os.PathLike[str],
    kv_type: str,
    changes: "ModelChanges | None" = None,
    context_length: int | None = None,
    *,
    draft: str | os.PathLike[str] | None = None,
    mmproj: str | os.PathLike[str] = "auto",
) -> MemoryNeed:
    """Read from a model's file what it will take.

    changes: settings in place of those of the file. context_length: the one it will be loaded with, None for its own.
    draft: path of a draft model that is loaded with it. mmproj: the option of its encoders of pictures and sounds.
    Raises: ModelFileError and below; RequestError for changes without meaning.
    """
    from localinfer.generation.decision_readouts import is_run
    from localinfer.loading.memory.plan import plan_file, plan_memory
    from localinfer.loading.options import find_encoders
    from localinfer.models.load.assistant import is_assistant
    from localinfer.models.load.loader import capabilities, open_model_file

    file = open_model_file(path, changes, context_length)
    try:
        assistant = draft if draft is not None and is_assistant(draft) else None
        plan = plan_memory(file, kv_type=kv_type, draft_layers=draft is None, assistant=assistant, changes=changes)
        if draft is not None and assistant is None:
            plan = replace(plan, beside=plan_file(draft, kv_type=kv_type))
        encoders = find_encoders(mmproj, Path(path))
        media: tuple[str, ...] = ()
        if encoders is not None:
            from localinfer.generation.chat.media_parts import CAPABILITIES

            plan = plan.with_media(encoders.weight_bytes, encoders.buffer_bytes)
            media = tuple(CAPABILITIES[kind] for kind in encoders.kinds)
        longest = max(plan.config.context_length, context_length or 0)
        layouts = [one.kv_layout(longest) for one in (plan, plan.beside) if one is not None]
        per_token = sum(-(-layout.page_bytes // layout.page_tokens) for layout in layouts)
        pages = sum(-(-longest // layout.page_tokens) * layout.page_bytes for layout in layouts)
        # Sliding windows and recurrent states do not grow with the text.
        fixed = plan.total_bytes(longest) - pages
        trained = file.metadata.get(f"{plan.config.architecture}.context_length")
        return MemoryNeed(
            fixed,
            per_token,
            longest,
            capabilities(plan.config, file.metadata) + media,
            file.num_bytes,
            trained if isinstance(trained, int) else None,
            is_run(file.metadata),
        )
    finally:
        file.close()


logger = logging.getLogger("localinfer.server")

MAX_FOLDER_DEPTH = 5
"""Folders below the one that was named: enough for publisher/repository/file, and for Hugging Face's download cache."""
MAX_ENTRIES = 50_000
"""More files and folders than this are a whole disk rather than a collection of models."""
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d+)-of-\d+")
"""The name of one file of a model that is split into several."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded."""

    id: str
    """Its name to clients, which does not show its folder."""
    path: Path
    """Its file or folder."""
    created: int
    """Time of the file's last change, in seconds since 1970."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use."""
    settings: ModelSettings = ModelSettings()
    """Its overrides of the server's defaults."""

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
    """Check if a folder is a model as Hugging Face keeps them, and not one with such a file beside other models."""
    try:
        if not (folder / "config.json").is_file():
            return False
        paths = list(folder.iterdir())
    except OSError:
        return False
    kinds = {path.suffix.lower() for path in paths}
    return ".safetensors" in kinds or (".gguf" not in kinds and not any(path.is_dir() for path in paths))
