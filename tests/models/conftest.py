"""Where the tests of architectures build their models."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models that are built once, and read only."""
    return tmp_path_factory.mktemp("archs")
