"""Models in place of those that llama.cpp's server tests download: the demo model, and small ones of random weights."""

import shutil
from pathlib import Path

from localinfer.apps.server.router.model_folder import measure_need
from localinfer.loading.options import model_path
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, copy_values, encode_value
from tests.api.encoder_models import write_encoder

MODELS_VARIABLE = "LOCALINFER_PEER_MODELS"
STORIES = "stories260K.gguf"
"""A model that the suite's expectations of texts and counts were made with; used where it is given."""
_ROUTED = (
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
)


class SuiteModels:
    """The models of a run, in a folder that `write` filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, given: Path | None) -> None:
        """Write or copy them all. given: a folder that may hold STORIES."""
        demo = model_path(None)
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(demo, self.folder / "demo.gguf")
        shutil.copyfile(demo.with_name("demo-q4_k_m.gguf"), self.folder / "draft.gguf")
        if given is not None and (given / STORIES).is_file():
            shutil.copyfile(given / STORIES, self.folder / STORIES)
        add_fill_in_tokens(self.find("stories260K", None), self.folder / "infill.gguf")
        for name in ("bert-encoder", "bert-reranker"):
            write_encoder(self.folder, name)
        for name in _ROUTED:
            path = self.cached() / f"{name}.gguf"
            path.parent.mkdir(parents=True, exist_ok=True)
            # One model under several names, so that so much memory is so many models.
            shutil.copyfile(self.folder / "demo.gguf", path)

    @property
    def has_stories(self) -> bool:
        """Whether the suite's own model is there."""
        return (self.folder / STORIES).is_file()

    def cached(self) -> Path:
        """A folder with models under the names that the suite downloads them by."""
        return self.folder / "cached"

    def memory_of(self, count: int) -> int:
        """Bytes in which so many of the cached models fit, and not one more."""
        need = measure_need(self.folder / "demo.gguf", "f16")
        return count * need.fixed_bytes + (need.fixed_bytes + need.context_length * need.bytes_per_token) // 2

    def find(self, repository: str, file: str | None) -> Path:
        """The model for one of the suite's downloads."""
        name = f"{repository}/{file or ''}"
        if "bge" in name:
            return self.folder / "bert-encoder.gguf"
        if "reranker" in name:
            return self.folder / "bert-reranker.gguf"
        if "infill" in name:
            return self.folder / "infill.gguf"
        if "stories260K" in name and self.has_stories:
            return self.folder / STORIES
        return self.folder / "demo.gguf"


def add_fill_in_tokens(source: Path, target: Path) -> None:
    """Copy a model; its last three tokens become those for filling in."""
    with read_gguf(source) as file:
        values = copy_values(file.metadata)
        size = len(file.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
        for place, role in enumerate(("fim_pre", "fim_suf", "fim_mid")):
            values[f"tokenizer.ggml.{role}_token_id"] = encode_value(size - 3 + place)
        with GGUFWriter(target, values, list(file.tensors.values()), alignment=file.alignment) as writer:
            for name in file.tensors:
                writer.write(file.tensor_bytes(name))
