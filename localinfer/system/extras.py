"""The parts of localinfer that need more packages than running a model does, and the line that installs them."""

from importlib.util import find_spec

from localinfer.errors import MissingPackageError

EXTRAS: dict[str, tuple[str, ...]] = {
    "cli": ("click",),
    "chat": ("click", "prompt_toolkit", "wcwidth", "pygments"),
    "server": ("click", "starlette", "uvicorn", "h11", "msgspec", "prometheus_client", "python_multipart"),
    "hub": ("huggingface_hub", "filelock"),
    "constraints": ("llguidance",),
    "tools": ("msgspec", "llguidance"),
    "gguf": ("gguf",),
    "convert": ("gguf", "threadpoolctl"),
}
"""Modules of each extra of the distribution; all of them are dependencies, so that a plain install has every part."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "events": ("zmq", "msgspec"),
    "mcp": ("mcp",),
    "media": ("PIL", "soundfile", "soxr"),
    "ray": ("ray.serve",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""The same of extras that a plain install is without."""

_PACKAGES = {"PIL": "pillow"}
"""Packages whose modules have other names."""
_found: set[str] = set()


def require(extra: str, what: str, modules: tuple[str, ...] = ()) -> None:
    """Raise MissingPackageError unless the packages of an extra are there, or those with these modules of it.

    what: the part that needs them.
    """
    wanted = modules or (EXTRAS | OPTIONAL)[extra]
    if _found.issuperset(wanted):
        return
    missing = [name for name in wanted if not _is_there(name)]
    if missing:
        names = ", ".join(_PACKAGES.get(name, name).replace("_", "-").replace(".", "-") for name in missing)
        raise MissingPackageError(
            f"{what} needs {names}, which {'are' if missing[1:] else 'is'} not installed; "
            f"type `pip install 'localinfer[{extra}]'`",
            extra=extra,
        )
    _found.update(wanted)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
