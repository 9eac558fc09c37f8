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

from localinfer.engine.engine import Engine
from localinfer.engine.media import MediaRun, join_pieces, media_ids
from localinfer.models.media.encoder import MediaEncoder
from localinfer.models.media.folder_media import FolderMedia
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.text.tokenizer import Tokenizer


class Folder:
    """A folder of files that are given: config.json and others by their names."""

    def __init__(self, config: Mapping[str, Any], **files: Mapping[str, Any]) -> None:
        self.config = config
        self._files = files

    @classmethod
    def read(cls, path: Path, **picture: Any) -> "Folder":
        """The files of a folder, with other settings of its pictures."""
        files = {name.stem: json.loads(name.read_text()) for name in path.glob("*.json") if name.stem != "tokenizer"}
        return cls(files.pop("config"), **files).but(**picture)

    def but(self, **picture: Any) -> "Folder":
        """The same files with other settings of its pictures."""
        older, whole = self._files.get("preprocessor_config"), self._files.get("processor_config", {})
        if older is not None:
            return Folder(self.config, **{**self._files, "preprocessor_config": {**older, **picture}})
        part = {**whole["image_processor"], **picture}
        return Folder(self.config, **{**self._files, "processor_config": {**whole, "image_processor": part}})

    def json(self, name: str) -> dict[str, Any] | None:
        """One of the files."""
        found = self._files.get(name.removesuffix(".json"))
        return None if found is None else dict(found)


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


class Asked:
    """The parts of a folder beside its text model, which prompts with pictures and sounds ask for."""

    def __init__(self, media: FolderMedia, encoder: MediaEncoder) -> None:
        self.media, self.encoder = media, encoder

    def run(self, entry: EncoderInput) -> MediaRun:
        """An input of an encoder as the engine takes it."""
        rows = self.encoder.encode(entry).copy()
        ids = media_ids(b"", PreparedMedia.from_pieces([entry]).digest, entry.num_rows)
        sees_itself = not entry.is_sound and self.media.config.sees_itself(64)
        return MediaRun(ids, lambda check: rows, entry.grid, entry.num_positions, sees_itself)

    def logits(self, engine: Engine, tokenizer: Tokenizer, pieces: tuple[str | EncoderInput, ...]) -> NDArray[Any]:
        """Logits of all tokens of a prompt."""
        adds_bos = self.media.pictures is None or self.media.pictures.adds_bos
        parts: list[Any] = [tokenizer.encode("")] if adds_bos else []
        for piece in pieces:
            is_text = isinstance(piece, str)
            parts.append(tokenizer.encode(piece, False, parse_special=True) if is_text else self.run(piece))
        return engine.logits(*join_pieces(parts))


@pytest.fixture(scope="session")
def media_folders(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> MediaFolders:
    """The folders of the data folder; tests that need them skip without it."""
    source = shared / "vision" / "hf"
    if not source.is_dir():
        pytest.skip("the data folder ../shared has no models that see")
    return MediaFolders(source, tmp_path_factory.mktemp("media_folders"))
