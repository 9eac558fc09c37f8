"""Digests of the sources, by which compiled code and cached values of one version are told from those of another.

They are of the files, where these are there: in a checkout, an editable install, an installed wheel. Of a module that
is no file (in a frozen application or a zip) it is what the build wrote into `built_sources`.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path

BUILT = "built_sources.py"
"""The one module that is not counted, for a build replaces it."""

PACKAGES = ("kernels", "models")
"""The packages of localinfer whose code decides what is computed."""

UNKNOWN_SOURCES = (
    "which version of its code this localinfer runs is not known: there are no files, and no build noted it"
)
UNKNOWN_SOURCES_WAY_OUT = "bundle what `pip wheel .` builds, with its module localinfer.kernels.built_sources"


def digests_of(package: str, folder: Path) -> dict[str, str]:
    """SHA-256 of every module in a package's folder, by the package and the path in it.

    Of a module that lies there as bytecode only, it is that of its bytecode. Scripts in a folder that is no package are
    not counted.
    """
    if not folder.is_dir():
        return {}
    bytecode = [path for path in folder.rglob("*.pyc") if path.parent.name != "__pycache__"]
    modules = {path.with_suffix(".py"): path for path in bytecode} | {path: path for path in folder.rglob("*.py")}
    return {
        f"{package}/{module.relative_to(folder).as_posix()}": hashlib.sha256(modules[module].read_bytes()).hexdigest()
        for module in sorted(modules)
        if module.with_name("__init__.py") in modules and module.relative_to(folder).as_posix() != BUILT
    }


def source_digests(package: str) -> dict[str, str] | None:
    """SHA-256 of every module of one of `PACKAGES`, by the package and the path in it.

    None if that cannot be known: then nothing may be shared with another process, which could run another version.
    """
    # Not above: a build runs this file where the package is not installed.
    from localinfer.kernels.built_sources import DIGESTS

    spec = importlib.util.find_spec(f"localinfer.{package}")
    found: dict[str, str] = {}
    for folder in [] if spec is None else spec.submodule_search_locations or ():
        found |= digests_of(package, Path(folder))
    written = {name: digest for name, digest in DIGESTS.items() if name.startswith(f"{package}/")}
    if not written and getattr(sys, "frozen", False):
        # Sources that lie beside a frozen application are not what it runs.
        return None
    # A file that is there may have been edited since the build.
    return written | found or None


def combined(digests: dict[str, str]) -> str:
    """One hash of several digests and their names, 16 hexadecimal digits."""
    return hashlib.sha256("".join(f"{name}\0{digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()[:16]
