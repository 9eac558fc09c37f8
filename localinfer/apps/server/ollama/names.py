"""Names of models as Ollama's clients write them, with tags and in any case, and the models that they mean here."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from localinfer.apps.server.router.models import ModelRegistry
from localinfer.apps.server.router.served_model import ServedModel
from localinfer.apps.server.transport.http import ApiError

_LATEST = ":latest"
_HUBS = ("hf.co/", "huggingface.co/")
_MOST_SHOWN = 10


class NamedModel(NamedTuple):
    """A model that a request named. shown: the name that its answer has: the one asked for, if it is this model's."""

    model: ServedModel
    shown: str

    @property
    def id(self) -> str:
        return self.model.source.id


def listed_name(model_id: str) -> str:
    """The name that a model is listed by: Ollama's always have a tag."""
    return model_id if ":" in model_id.rpartition("/")[2] else f"{model_id}{_LATEST}"


def find_named(registry: ModelRegistry, name: str | None) -> NamedModel:
    """The model that a client means. Where one model is served and any name will do, it is that one.

    Raises: ApiError 400 without a name, 404 for an unknown one.
    """
    model = find_exactly(registry, name)
    if model is not None:
        return NamedModel(model, name or "")
    plain = _without_tag(name or "")
    try:
        found = registry.find(plain)
    except ApiError as error:
        raise error if error.code == "model_ambiguous" else not_found(registry, name or "") from None
    is_its_own = any(own.casefold().endswith(plain.casefold().removesuffix(".gguf")) for own in _names_of(found))
    return NamedModel(found, (name or "") if is_its_own else listed_name(found.source.id))


def find_exactly(registry: ModelRegistry, name: str | None) -> ServedModel | None:
    """The model with this very name, but for its case, `:latest`, and a quantization written as a tag.

    Raises: ApiError 400 without a name.
    """
    if not name:
        raise ApiError(400, "model is required; name one of GET /api/tags", param="model")
    own = {one: model for model in registry.models() for one in _names_of(model)}
    in_any_case = {one.casefold(): model for one, model in own.items()}
    found = (own.get(one) or in_any_case.get(one.casefold()) for one in _spellings(name.strip()))
    return next((model for model in found if model is not None), None)


def not_found(registry: ModelRegistry, name: str) -> ApiError:
    """The error for an unknown name, in the words by which clients know it."""
    known = ", ".join(listed_name(source.id) for source in registry.sources[:_MOST_SHOWN])
    return ApiError(404, f"model '{name:.80}' not found; there are {known}", code="model_not_found", param="model")


def _names_of(model: ServedModel) -> Iterable[str]:
    return (model.source.id, *model.source.aliases)


def _spellings(name: str) -> Iterator[str]:
    """The ways in which a name may be written here."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    yield name
    yield _without_tag(name)
    base, _, tag = name.rpartition(":")
    if base:
        # A file's name has its quantization after a hyphen or a dot.
        yield f"{base}-{tag}"
        yield f"{base}.{tag}"


def _without_tag(name: str) -> str:
    return name[: -len(_LATEST)] if name.casefold().endswith(_LATEST) else name
