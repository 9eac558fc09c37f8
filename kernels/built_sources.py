"""Source digests of a build: replaced in every wheel, empty in a checkout."""

VERSION = ""
DIGESTS: dict[str, str] = {}
"""SHA-256 of every source, by its package and path in it: "kernels/layouts.py"."""
PACKS: dict[str, str] = {}
"""SHA-256 of the index of every pack of kernels in this build, by its file's name."""
