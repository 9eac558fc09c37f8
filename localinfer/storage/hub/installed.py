"""Models on this machine, pulled or brought by other programs, and the one that a name means."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localinfer.errors import RequestError
from localinfer.storage.hub.places import Places, pointer_path, snapshots, stored_files
from localinfer.storage.hub.records import DamagedRecord, PullRecord, PullRecords
from localinfer.storage.hub.variants import StoredFile, Variant, describe_size, find_variants, parse_reference
from localinfer.system.files import read_bounded
from localinfer.system.folders import expand_home

PULLED, HUB_CACHE, LM_STUDIO, OLLAMA = "localinfer", "hub cache", "lm studio", "ollama"


@dataclass(frozen=True)
class InstalledModel:
    """A model on this machine."""

    name: str
    """As -m takes it."""
    quant: str | None
    """Its quantization, if known."""
    num_bytes: int
    """Size of its files."""
    path: Path
    """A GGUF file, the first part of a split one, or a Hugging Face folder."""
    source: str
    """The program that brought it."""
    last_used: float | None = None
    """In seconds since 1970, if known."""
    problem: str = ""
    """Reason why it cannot be used, with the way out; empty for a good one."""
    is_unfinished: bool = False
    """True if its pull stopped on the way."""


def find_pulled(places: Places) -> list[InstalledModel]:
    """The models of `localinfer pull`, unfinished and broken ones included."""
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


_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_HOST, _NAMESPACE = "registry.ollama.ai", "library"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class OllamaModel:
    """A model of Ollama's."""

    name: str
    """As `ollama list` shows it."""
    quant: str | None
    """Its quantization, if its manifest tells it."""
    num_bytes: int
    """Size of its file."""
    path: Path
    """Its blob."""
    problem: str = ""
    """Reason why it cannot be used; empty for a good one."""


def find_ollama(folder: Path) -> Iterator[OllamaModel]:
    """The models of a folder that holds `manifests` and `blobs`, by name; none where it is missing or closed."""
    manifests = folder / "manifests"
    try:
        paths = sorted(path for path in manifests.glob("*/*/*/*") if path.is_file())
    except OSError:
        return
    for path in paths:
        if not path.name.startswith("."):
            yield _read(folder, path, _name(path.relative_to(manifests).parts))


def _name(parts: tuple[str, ...]) -> str:
    """The shortest name that Ollama knows a model by."""
    host, namespace, model, tag = parts
    above = [] if namespace == _NAMESPACE and host == _HOST else [namespace]
    return "/".join([*([] if host == _HOST else [host]), *above, f"{model}:{tag}"])


def _read(folder: Path, path: Path, name: str) -> OllamaModel:
    pull = f"`ollama pull {name}` brings it again"
    try:
        layers = json.loads(read_bounded(path, _MOST_BYTES))["layers"]
        kinds = [layer["mediaType"] for layer in layers]
        models = [layer for layer in layers if layer["mediaType"] == _MODEL]
        # `sha256:<hex>` is the file `sha256-<hex>`.
        algorithm, _, digest = models[0]["digest"].partition(":") if models else ("", "", "")
        size = int(models[0]["size"]) if models else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return OllamaModel(name, None, 0, path, f"its manifest cannot be read ({type(error).__name__}); {pull}")
    if not models:
        return OllamaModel(name, None, 0, path, "it holds no GGUF file: it runs elsewhere, or is of another kind")
    blob = folder / "blobs" / f"{algorithm}-{digest}"
    if algorithm != "sha256" or not digest.isalnum():
        return OllamaModel(name, None, size, path, f"its manifest names no blob; {pull}")
    problem = ""
    try:
        found = blob.stat().st_size
        if found != size:
            problem = f"its file has {found:,} bytes in place of {size:,}; {pull}"
    except OSError:
        problem = f"its file is missing; {pull}"
    if not problem and len(models) > 1:
        problem = "its model is split into several files, which have no names here; import the GGUF files themselves"
    if not problem and _ADAPTER in kinds:
        problem = "it is an adapter (LoRA) over a model, which localinfer does not apply; use a merged model"
    return OllamaModel(name, _quant(folder, path), size, blob, problem)


def _quant(folder: Path, path: Path) -> str | None:
    """The quantization, which the manifest's configuration tells."""
    try:
        manifest = json.loads(read_bounded(path, _MOST_BYTES))
        blob = folder / "blobs" / manifest["config"]["digest"].replace(":", "-").replace("/", "")
        quant = json.loads(read_bounded(blob, _MOST_BYTES))["file_type"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return quant if isinstance(quant, str) else None


_LATEST = ":latest"
_MOST_SHOWN = 8


def find_model(name: str | os.PathLike[str], places: Places | None = None) -> Path:
    """The path of a model: a GGUF file, or a Hugging Face folder.

    A path that exists is taken as it is. Otherwise names count in any case: what was pulled, `org/repo:quant` of the
    hub's cache, Ollama's names, LM Studio's, and what is left of these without organisation or quantization, if it
    means one model only.
    Raises: RequestError that names the next command to type.
    """
    text = os.fspath(name)
    if not text or "\0" in text:
        raise RequestError(
            f"the model is {text!r}; give the path of a file or folder, or a name of `localinfer list --all`"
        )
    path = expand_home(text)
    if _exists(path):
        return path
    places = Places.of_user() if places is None else places
    models = find_installed(places)
    matching = _matching(text, models)
    if not matching:
        raise RequestError(_unknown(text, models))
    sound = [model for model in matching if not model.problem]
    if len(sound) > 1:
        raise RequestError(f"{text} means several models; name one of: {_listed(sound)}")
    if not sound:
        raise RequestError(f"{matching[0].name} cannot be used: {matching[0].problem}")
    if sound[0].source == PULLED and places.records is not None:
        PullRecords(places.records).mark_used(sound[0].name)
    return sound[0].path


def _matching(text: str, models: Sequence[InstalledModel]) -> list[InstalledModel]:
    """The models that a text names at the first level of shortness at which it names any."""
    reference = parse_reference(text)
    wanted = (text if reference is None else str(reference)).lower()
    whole = [model for model in models if wanted in _whole_names(model)]
    if whole:
        # Sources are in order of precedence, and a name means one model of each.
        return sorted(whole, key=lambda model: bool(model.problem))[:1]
    for shorten in (_without_quant, _without_organisation, _shortest):
        found = [model for model in models if wanted in shorten(model)]
        if found:
            return found
    return []


def _whole_names(model: InstalledModel) -> set[str]:
    name = _plain_name(model)
    return {name, name.removesuffix(_LATEST)}


def _plain_name(model: InstalledModel) -> str:
    """Without the address of the hub, which Ollama keeps."""
    return model.name.lower().removeprefix("hf.co/").removeprefix("huggingface.co/")


def _without_quant(model: InstalledModel) -> set[str]:
    return {_plain_name(model).rpartition(":")[0]}


def _without_organisation(model: InstalledModel) -> set[str]:
    last = model.name.lower().rpartition("/")[2]
    repo, _, quant = last.rpartition(":")
    return {last, f"{repo.removesuffix('-gguf')}:{quant}", model.path.stem.lower(), model.path.name.lower()}


def _shortest(model: InstalledModel) -> set[str]:
    repo = model.name.lower().rpartition("/")[2].rpartition(":")[0]
    return {repo, repo.removesuffix("-gguf")}


def _unknown(text: str, models: Iterable[InstalledModel]) -> str:
    names = [model.name for model in models if not model.problem]
    near = difflib.get_close_matches(text.lower(), [name.lower() for name in names], n=1)
    meant = next((f"; did you mean {name}?" for name in names if name.lower() in near), "")
    shown = "`localinfer list --all` shows the models on this machine"
    reference = parse_reference(text)
    is_path = text.lower().endswith(".gguf") or os.path.isabs(text) or text.startswith((".", "~"))
    if reference is not None and not is_path:
        return (
            f"no model or file {text} is on this machine{meant or ';'} `localinfer pull {reference}` brings it from "
            f"the hub, {shown}"
        )
    if is_path or "/" in text or os.sep in text:
        return f"the model {text} does not exist; check the path; {shown}{meant}"
    return f"no model or file {text} is on this machine{meant or ';'} {shown}, `localinfer pull org/repo` brings one"


def _listed(models: Sequence[InstalledModel]) -> str:
    names = [f"{model.name} ({model.source})" for model in models]
    more = f", and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
