"""The error without Ray."""

import pytest

import localinfer.ray
from localinfer.errors import MissingPackageError
from localinfer.system import extras


def test_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(extras, "_is_there", lambda module: False)
    monkeypatch.setattr(extras, "_found", set())
    for name in ("app", "demo"):
        with pytest.raises(MissingPackageError, match=r"pip install 'localinfer\[ray\]'"):
            getattr(localinfer.ray, name)


def test_other_names_are_no_part_of_the_package():
    with pytest.raises(AttributeError, match="has no attribute 'deployment'"):
        localinfer.ray.deployment  # noqa: B018
