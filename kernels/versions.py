"""Versions of what is installed, also where a frozen application left their metadata behind."""

import importlib
from importlib import metadata


def installed_version(package: str) -> str:
    """Version of a package that is installed.

    Where its metadata was not bundled it is what the module itself says, or, of localinfer, what the build wrote down.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    if package == "localinfer":
        from localinfer.kernels.built_sources import VERSION

        return VERSION or "unknown"
    return str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", "unknown"))
