"""Versions of installed packages, also in frozen applications without their metadata."""

import importlib
from importlib import metadata


def installed_version(package: str) -> str:
    """Version of an installed package: of localinfer that of the build, if it was built.

    Without metadata it is the module's `__version__`.
    """
    if package == "localinfer":
        from localinfer.kernels.built_sources import VERSION

        if VERSION:
            return VERSION
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    if package == "localinfer":
        return "unknown"
    return str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", "unknown"))
