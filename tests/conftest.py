"""Fixtures every floor's tests share."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional data folder beside the checkout; tests that need it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("the data folder ../shared is not beside this checkout")
    return SHARED
