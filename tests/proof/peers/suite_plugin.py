"""A pytest plugin for llama.cpp's server tests: skips the cases that README.md lists, and downloads nothing."""

import fnmatch
import os
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.proof.peers.suite_models import MODELS_VARIABLE, SuiteModels

_ROW = re.compile(r"\| `(?P<pattern>[^`]+)` \| (?P<reason>[^|]+?) \|")
_WITHOUT_STORIES = "## Cases that need"


class Row(NamedTuple):
    """Cases that do not apply: a pattern of their names, and why."""

    pattern: str
    reason: str


def rows(text: str, *, has_stories: bool) -> Iterator[Row]:
    """The rows of the README's tables that count. has_stories: the model of the second table is there."""
    always, _, without = text.partition(_WITHOUT_STORIES)
    for line in (always if has_stories else always + without).splitlines():
        if found := _ROW.match(line):
            yield Row(found["pattern"], found["reason"])


def _models() -> SuiteModels:
    return SuiteModels(Path(os.environ[MODELS_VARIABLE]))


def _download(url: str, out: str) -> None:
    if not url.endswith("stories15M-q4_0.gguf"):
        pytest.skip(f"nothing is downloaded: {url}")
    Path(out).parent.mkdir(exist_ok=True)
    shutil.copyfile(_models().folder / "draft.gguf", out)


def _replace_downloads() -> None:
    """Put a module in the place of the one that the suite downloads with, before it is imported."""
    module = types.ModuleType("wget")
    module.download = _download  # type: ignore[attr-defined]
    sys.modules["wget"] = module


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start no server only to have its model downloaded."""
    sys.modules["utils"].ServerPreset.load_all = staticmethod(lambda: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that do not apply."""
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    listed = list(rows(readme, has_stories=_models().has_stories))
    for item in items:
        name = item.nodeid.removeprefix("unit/")
        for row in listed:
            if name == row.pattern or fnmatch.fnmatchcase(name, row.pattern.replace("[", "[[]")):
                item.add_marker(pytest.mark.skip(reason=f"does not apply: {row.reason}"))
                break


_replace_downloads()
