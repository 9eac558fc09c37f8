"""Names of the models on this machine, for people: quickly, and none where they cannot be found."""

from importlib import import_module
from importlib.util import find_spec

from localinfer.errors import LocalinferError


def known_models() -> list[str]:
    """What -m takes besides paths: names of models that were pulled, or that other programs keep here."""
    if find_spec("localinfer.hub") is None:
        return []
    places = import_module("localinfer.hub.places").Places.of_user()
    try:
        models = import_module("localinfer.hub.installed").find_installed(places)
    except (LocalinferError, OSError):
        return []
    return [model.name for model in models if not model.problem]
