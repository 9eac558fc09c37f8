"""Tiny folders of models that see and hear, made of the optional data folder, and what transformers makes of them."""

import ast
import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image


class MediaFolders:
    """Folders with weights, each made once when it is asked for, and the reference's arrays of them."""

    def __init__(self, source: Path, made: Path) -> None:
        self._source, self._made = source, made
        spec = importlib.util.spec_from_file_location("media_folder_weights", source / "weights.py")
        assert spec is not None and spec.loader is not None
        self._weights = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._weights)
        # What makes the references imports transformers; its pictures and sounds need nothing but NumPy.
        tree = ast.parse((source / "make.py").read_text())
        body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in ("picture", "sound")]
        self._functions: dict[str, Any] = {"np": np, "Image": Image}
        exec(compile(ast.Module(body, []), "make.py", "exec"), self._functions)
        self._references: dict[str, Mapping[str, NDArray[Any]]] = {}
        self.names = sorted(path.name for path in (source / "folders").iterdir())

    def path(self, name: str) -> Path:
        """The folder of a model, with its weights."""
        folder = self._made / name
        if not folder.exists():
            shutil.copytree(self._source / "folders" / name, folder)
            tensors = json.loads((folder / "tensors.json").read_text())
            self._weights.write(folder / "model.safetensors", tensors, 1)
        return folder

    def reference(self, name: str) -> Mapping[str, NDArray[Any]]:
        """Arrays of a model's reference."""
        if name not in self._references:
            with np.load(self._source / "reference-1" / f"{name}.npz") as file:
                self._references[name] = dict(file)
        return self._references[name]

    def picture(self, name: str, number: int) -> NDArray[np.uint8]:
        """One of a model's pictures."""
        width, height = self.reference(name)["sizes"][number].tolist()
        with np.errstate(over="ignore"):
            return np.asarray(self._functions["picture"](1, number, width, height))

    def sound(self, number: int) -> NDArray[np.float32]:
        """One of the sounds."""
        found: NDArray[np.float32] = self._functions["sound"](1, number, (1.3, 0.7)[number])
        return found


@pytest.fixture(scope="session")
def media_folders(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> MediaFolders:
    """The folders of the data folder; tests that need them skip without it."""
    source = shared / "vision" / "hf"
    if not source.is_dir():
        pytest.skip("the data folder ../shared has no models that see")
    return MediaFolders(source, tmp_path_factory.mktemp("media_folders"))
