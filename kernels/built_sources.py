"""What a build writes down of itself: this module is replaced in every wheel, and says nothing in a checkout."""

VERSION = ""
DIGESTS: dict[str, str] = {}
"""SHA-256 of every source, by its package and path in it: "kernels/ops.py"."""
