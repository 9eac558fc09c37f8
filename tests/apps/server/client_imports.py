"""Clients that may not be installed."""

import gc
import sys
import warnings
from typing import Any

import pytest


def import_or_skip(name: str) -> Any:
    """Import a client, and leave it out of the garbage collector: some make a million objects that stay."""
    is_new = name not in sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
    if is_new:
        gc.freeze()
    return found
