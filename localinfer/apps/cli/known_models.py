"""Names of the models on this machine, for people: quickly, and none where they cannot be found."""

from localinfer.errors import LocalinferError


def known_models() -> list[str]:
    """What -m takes besides paths: names of models that were pulled, or that other programs keep here."""
    from localinfer.storage.hub.installed import find_installed
    from localinfer.storage.hub.places import Places

    places = Places.of_user()
    try:
        models = find_installed(places)
    except (LocalinferError, OSError):
        return []
    return [model.name for model in models if not model.problem]
