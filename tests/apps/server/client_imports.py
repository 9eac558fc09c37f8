"""Clients that may not be installed."""

import warnings
from typing import Any

import pytest


def import_or_skip(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
