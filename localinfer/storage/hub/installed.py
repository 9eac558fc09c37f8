"""Models that are on this machine: those that were pulled, and those that other programs brought, found in place."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localinfer.storage.hub.cache_folder import pointer_path, snapshots, stored_files
from localinfer.storage.hub.ollama import find_ollama
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.records import DamagedRecord, PullRecord, PullRecords
from localinfer.storage.hub.variants import StoredFile, Variant, describe_size, find_variants

PULLED, HUB_CACHE, LM_STUDIO, OLLAMA = "localinfer", "hub cache", "lm studio", "ollama"


@dataclass(frozen=True)
class InstalledModel:
    """A model on this machine.

    name: what -m takes. path: a GGUF file, the first part of a split one, or a Hugging Face folder. source: the program
    that brought it. last_used: in seconds since 1970, if known. problem: why it cannot be used, with the way out;
    empty for a good one. is_unfinished: its pull stopped on the way.
    """

    name: str
    quant: str | None
    num_bytes: int
    path: Path
    source: str
    last_used: float | None = None
    problem: str = ""
    is_unfinished: bool = False


def find_pulled(places: Places) -> list[InstalledModel]:
    """What `localinfer pull` brought, and what is unfinished or broken of it."""
    if places.records is None:
        return []
    models = [_of_record(record) for record in PullRecords(places.records).all()]
    broken = {model.name for model in models if model.problem and not model.is_unfinished}
    return [model for model in models if not (model.is_unfinished and model.name in broken)]


def find_installed(places: Places) -> list[InstalledModel]:
    """All models, each file once: what was pulled first, then the hub's cache, Ollama's and LM Studio's."""
    found: dict[str, InstalledModel] = {}
    for model in _all_sources(places):
        known = found.setdefault(os.path.realpath(model.path), model)
        if known.is_unfinished and not model.problem:
            found[os.path.realpath(model.path)] = model
    return list(found.values())


def _all_sources(places: Places) -> Iterator[InstalledModel]:
    pulled = find_pulled(places)
    yield from pulled
    # Their snapshots lie in the hub's cache, unfinished ones too.
    ours = {model.name.lower() for model in pulled}
    if places.hub_cache is not None:
        for repo, folder in snapshots(places.hub_cache):
            models = _of_folder(repo, folder, stored_files(folder), HUB_CACHE)
            yield from (model for model in models if model.name.lower() not in ours)
    for one in (model for folder in places.ollama for model in find_ollama(folder)):
        yield InstalledModel(one.name, one.quant, one.num_bytes, one.path, OLLAMA, problem=one.problem)
    for top in places.lm_studio:
        for folder in _repositories(top):
            repo = f"{folder.parent.name}/{folder.name}"
            yield from _of_folder(repo, folder, stored_files(folder), LM_STUDIO)


def _of_record(entry: PullRecord | DamagedRecord) -> InstalledModel:
    if isinstance(entry, DamagedRecord):
        problem = f"the record of a pull is damaged ({entry.problem}); delete {entry.path} and pull the model again"
        return InstalledModel(entry.path.name, None, 0, entry.path, PULLED, problem=problem)
    first = pointer_path(entry.cache, entry.repository, entry.files[0].stored)
    path = (
        pointer_path(entry.cache, entry.repository, StoredFile("config.json", 0)).parent if entry.is_folder else first
    )
    problem = "" if entry.is_whole else _unfinished(entry)
    if entry.is_whole:
        for file in entry.files:
            size = _size(pointer_path(entry.cache, entry.repository, file.stored))
            if size != file.size:
                what = "is missing" if size is None else f"has {size:,} bytes in place of {file.size:,}"
                problem = (
                    f"{file.path} {what}; `localinfer pull {entry.name}` brings it again, `localinfer rm {entry.name}` "
                    "forgets it"
                )
                break
    return InstalledModel(
        entry.name, entry.quant, entry.num_bytes, path, PULLED, entry.last_used, problem, not entry.is_whole
    )


def _unfinished(record: PullRecord) -> str:
    from localinfer.storage.hub.download import held_bytes

    held = sum(held_bytes(record.cache, record.repository, file.stored) for file in record.files)
    return (
        f"{describe_size(held)} of {describe_size(record.num_bytes)} are here; `localinfer pull {record.name}` brings "
        f"the rest, `localinfer rm {record.name}` deletes them"
    )


def _of_folder(repo: str, folder: Path, files: Iterable[StoredFile], source: str) -> Iterator[InstalledModel]:
    """The models of a folder that is a repository, or a part of one."""
    for variant in find_variants(files):
        path = folder if variant.is_folder else folder / variant.files[0].path
        num_bytes = sum(max(file.size, 0) for file in variant.files)
        yield InstalledModel(
            f"{repo}:{variant.name}", variant.quant, num_bytes, path, source, problem=_problem(variant)
        )


def _problem(variant: Variant) -> str:
    dangling = [file.path for file in variant.files if file.size < 0]
    if dangling:
        return f"{dangling[0]} is a link to a file that is gone; bring it again with the program that brought it"
    return f"{variant.missing}; bring it again with the program that brought it" if variant.missing else ""


def _repositories(top: Path) -> Iterator[Path]:
    """Folders publisher/repository."""
    try:
        publishers = sorted(path for path in top.iterdir() if path.is_dir() and not path.name.startswith("."))
        for publisher in publishers:
            yield from sorted(path for path in publisher.iterdir() if path.is_dir())
    except OSError:
        return


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
