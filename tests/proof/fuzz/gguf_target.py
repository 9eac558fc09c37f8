"""GGUF files: shown, loaded and quantized, and what loads answers."""

import tempfile
from pathlib import Path

from tests.proof.fuzz.file_set import NoFileSetError, total_bytes, unpack, write_files
from tests.proof.fuzz.gguf_mutation import mutate, simplify
from tests.proof.fuzz.gguf_seeds import corpus, plain
from tests.proof.fuzz.model_use import use_model
from tests.proof.fuzz.target import Limits, Target


def run(data: bytes, folder: Path) -> str:
    """Load the first file, and use the model."""
    try:
        files = unpack(data)
    except NoFileSetError:
        return "no files"
    if not files:
        return "no files"
    write_files(files, folder)
    return use_model(folder / next(iter(files)), data)


def prepare() -> None:
    """Import and compile what nearly every model needs; the corpus, which comes first, brings the rest."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(plain(), Path(folder))
        assert "loaded" in outcome, outcome


TARGET = Target("gguf", corpus, mutate, run, Limits(), prepare=prepare, simplify=simplify, file_bytes=total_bytes)
