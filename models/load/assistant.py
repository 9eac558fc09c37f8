"""Draft models without keys and values of their own, such as Gemma 4's: loaded beside the model they draft for."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localinfer.errors import BackendUnavailableError, CorruptFileError, RequestError
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.gemma_blocks import misfit, write_assistant
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.model_changes import ModelChanges, apply_changes, note_unknown_settings
from localinfer.models.load.weights import CpuWeights
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.gguf.reader import GGUFFile, read_gguf
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.models.checkpoint.model import CheckpointModel

logger = logging.getLogger(__name__)

CENTROIDS = "masked_embd_centroids.weight"
"""The matrix of an output head that scores only tokens near to the hidden states, in some files."""

_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class Target:
    """The target that a draft model has to fit: its file, sizes and cache."""

    file: ModelFile
    config: ModelConfig
    kv_layout: KVLayout


@dataclass(frozen=True)
class Assistant:
    """An open draft model that fits its target."""

    file: "GGUFFile | CheckpointModel"
    config: ModelConfig

    def write(
        self, target: Target, weights: CpuWeights, main: CpuProgram, progress: ProgressCallback | None = None
    ) -> CpuProgram:
        """Its program, of one row, over pages of the target's cache; weights, main: the target's, with its threads.

        Raises: CorruptFileError for wrong shapes, or if the file was changed meanwhile.
        """
        pool = main.tape.pool
        own = CpuWeights(self.file, pool, progress)
        layout = target.kv_layout
        graph = write_assistant(self.config, own, target.config, weights, layout.layers)
        own.check_asked(self.config)
        program = lower_to_cpu(graph, pool, layout, max_batch_rows=1, max_output_rows=1, progress=progress)
        program.decode_threads, program.is_measured = main.decode_threads, main.is_measured
        for note in (*own.notes.values(), *getattr(self.file, "notices", ())):
            logger.warning("%s: %s", self.file.path.name, note)
        if self.file.has_changed:
            raise CorruptFileError(f"{self.file.path} was changed while it was being loaded; load it again")
        return program


def is_assistant(path: str | os.PathLike[str]) -> bool:
    """True if a file or folder is of a draft model that attends to its target's cache.

    Raises: ModelFileError or a subclass if it is not sound, or of no known kind.
    """
    if os.path.isdir(path):
        from localinfer.models.checkpoint.families import find_family
        from localinfer.quant.checkpoint.folder import open_folder

        with open_folder(path) as folder:
            return find_family(folder.config).architecture in OF_ANOTHER_CACHE
    with read_gguf(path) as file:
        architecture = file.metadata.get("general.architecture")
        return isinstance(architecture, str) and architecture in OF_ANOTHER_CACHE


def check_device(request: DeviceRequest) -> None:
    """Raise BackendUnavailableError if the target is wanted on a GPU, whose cache such a draft model cannot read."""
    if request.is_required or request.gpu_layers:
        raise BackendUnavailableError(
            "a draft model that attends to its target's cache runs on the CPU only, with its target; leave draft out, "
            "or take device 'cpu' without gpu_layers"
        )


def open_assistant(path: str | os.PathLike[str], target: Target, changes: ModelChanges | None) -> Assistant:
    """Open a draft model for a target, before the weights of either are read.

    changes: those of the target, whose rotation of positions the draft model shares.
    Raises: RequestError naming both files if it is for another target; ModelFileError or a subclass.
    """
    file = _open(path)
    try:
        if changes is not None and not changes.rope.is_empty:
            apply_changes(file, ModelChanges(rope=changes.rope), target.config.context_length)
        shapes = {name: info.shape for name, info in file.tensors.items()}
        config = ModelConfig.from_metadata(file.metadata, shapes)
        difference = misfit(config, target.config, target.kv_layout.layers) or _vocabulary_difference(file, target)
        if difference is not None:
            raise RequestError(
                f"{file.path.name} is no draft model for {target.file.path.name}: it {difference}. Give the draft "
                "model that was made for this target, or leave draft out"
            )
        note_unknown_settings(file, "which may make drafts worse")
        if CENTROIDS in file.tensors:
            logger.warning(
                "%s: its centroids (%s), by which it may score some tokens only, are not used: drafts are chosen among "
                "all tokens",
                file.path.name,
                CENTROIDS,
            )
        return Assistant(file, config)
    except BaseException:
        file.close()
        raise


def _open(path: str | os.PathLike[str]) -> "GGUFFile | CheckpointModel":
    if not os.path.isdir(path):
        return read_gguf(path)
    from localinfer.models.checkpoint.model import open_checkpoint

    return open_checkpoint(path)


def _vocabulary_difference(file: ModelFile, target: Target) -> str | None:
    """The first token that differs, if both files name theirs. The target decides how text is split into them."""
    own, others = (metadata.get(_TOKENS, ()) for metadata in (file.metadata, target.file.metadata))
    if not isinstance(own, Sequence) or not isinstance(others, Sequence):
        return None
    for token_id, (text, other) in enumerate(zip(own, others, strict=False)):
        if text != other:
            return f"has the token {str(text)!r:.40} with the id {token_id}, where its target has {str(other)!r:.40}"
    return None
