"""Versions of code: digests of the sources, in the keys of compiled kernels and of cached values, and of packages.

Digests are computed from the files if these exist: in a checkout, an editable install, an installed wheel. In a frozen
application or a zip they come from `built_sources`. A build runs this file without the package installed.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path


def installed_version(package: str) -> str:
    """Version of an installed package: of localinfer that of the build, if it was built.

    Without metadata it is the module's `__version__`.
    """
    if package == "localinfer":
        from localinfer.kernels.built_sources import VERSION

        if VERSION:
            return VERSION
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is not None and spec.origin is not None:
        folders = list(Path(spec.origin).parents[1].glob(f"{package}-*.dist-info"))
        if len(folders) == 1:
            return folders[0].stem.removeprefix(f"{package}-")
    # Looked up last: it imports what reads mail, which takes as long as a tenth of the other imports.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    if package == "localinfer":
        return "unknown"
    return str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", "unknown"))


BUILT = "built_sources.py"
"""The one module without a digest, because a build replaces it."""

PACKAGES = ("kernels", "models")
"""The packages whose code affects results."""

UNKNOWN_SOURCES = "the version of localinfer's code is unknown: there are no source files, and the build has no digests"
UNKNOWN_SOURCES_WAY_OUT = "bundle what `pip wheel .` builds, with its module localinfer.kernels.built_sources"


def digests_of(package: str, folder: Path) -> dict[str, str]:
    """SHA-256 of every module in a package's folder, by package and path.

    For a module without source it is that of its bytecode. Scripts in folders that are not packages are left out.
    """
    found: dict[str, str] = {}
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        # Sources after bytecode, which they replace.
        modules = {
            name.removesuffix("c"): name for name in sorted(names, reverse=True) if name.endswith((".py", ".pyc"))
        }
        prefix = Path(package, Path(where).relative_to(folder)).as_posix()
        for module, name in modules.items() if "__init__.py" in modules else ():
            with open(os.path.join(where, name), "rb") as file:
                found[f"{prefix}/{module}"] = hashlib.sha256(file.read()).hexdigest()
    found.pop(f"{package}/{BUILT}", None)
    return dict(sorted(found.items()))


def source_digests(package: str) -> dict[str, str] | None:
    """SHA-256 of every module of one of `PACKAGES`, by package and path.

    None if unknown: then nothing may be shared with another process, which could run another version.
    """
    # Imported here, because a build runs this file without the package installed.
    from localinfer.kernels.built_sources import DIGESTS

    spec = importlib.util.find_spec(f"localinfer.{package}")
    found: dict[str, str] = {}
    for folder in [] if spec is None else spec.submodule_search_locations or ():
        found |= digests_of(package, Path(folder))
    written = {name: digest for name, digest in DIGESTS.items() if name.startswith(f"{package}/")}
    if not written and getattr(sys, "frozen", False):
        # Sources beside a frozen application are not what it runs.
        return None
    # Existing files may have been edited since the build.
    return written | found or None


def cpu_kernels(digests: dict[str, str]) -> dict[str, str]:
    """Those digests of the package of kernels on which code for CPUs depends."""
    return {name: digest for name, digest in digests.items() if not name.startswith("kernels/cuda/")}


def combined(digests: dict[str, str]) -> str:
    """One hash of several digests and their names, 16 hexadecimal digits."""
    return hashlib.sha256("".join(f"{name}\0{digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()[:16]
