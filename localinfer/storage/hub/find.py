"""From what a user calls a model to its file: a path, a name of the hub's, Ollama's or LM Studio's, or a short name."""

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from localinfer.errors import RequestError
from localinfer.storage.hub.installed import PULLED, InstalledModel, find_installed
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.records import PullRecords
from localinfer.storage.hub.variants import parse_reference
from localinfer.system.folders import expand_home

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
