"""Encoders of an mmproj file: from prepared pictures and sounds to rows that a text model reads as embeddings."""

from collections.abc import Callable

import numpy as np

from localinfer.errors import ClosedError, CorruptFileError, RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import ARCHITECTURE, MediaConfig, read_media_config
from localinfer.models.media.records import EncoderInput
from localinfer.models.media.sound_encoder import SoundEncoder
from localinfer.models.media.vision_encoder import VisionEncoder
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import FloatArray, ProgressCallback


def read_mmproj(file: ModelFile, *, has_mrope: bool = False) -> MediaConfig:
    """Read the configuration of an open mmproj file.

    has_mrope: whether the text model has positions in several dimensions. Raises: CorruptFileError naming a key or
    tensor, UnsupportedFormatError naming a projector that does not run.
    """
    found = file.metadata.get("general.architecture")
    if found != ARCHITECTURE:
        raise CorruptFileError(
            f"{file.path.name} is of architecture {found!r:.80}; wanted {ARCHITECTURE!r}, an mmproj file: give the one "
            "that belongs to the model"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    return read_media_config(file.metadata, shapes, has_mrope=has_mrope)


class MediaEncoder:
    """The encoders of one file, on threads of a pool; one caller at a time, and none while the pool runs else.

    An embedding depends on its picture or sound alone: not on threads, nor on what is computed beside it.
    config: `read_mmproj`'s of the file. file: an mmproj file, or what has tensors of the same names; it may be closed
    after. pool: None for a plan, which knows bytes and kernels without reading matrices, and encodes nothing.
    Raises: CorruptFileError or UnsupportedFormatError naming the tensor at fault.
    """

    def __init__(
        self, config: MediaConfig, file: ModelFile, pool: ThreadPool | None, progress: ProgressCallback | None = None
    ) -> None:
        self.config = config
        self._is_closed = pool is None
        self._weights = EncoderWeights(file, pool, progress)
        self._pictures = None
        if self.config.picture is not None:
            self._pictures = VisionEncoder(self.config.picture, self._weights, pool)
        self._sounds = None
        if self.config.sound is not None:
            self._sounds = SoundEncoder(self.config.sound, self._weights, pool)

    @property
    def width(self) -> int:
        """Columns of an embedding: the text model's width, or several times that with deepstack."""
        found = self._pictures or self._sounds
        assert found is not None, "a file has at least one encoder"
        return found.width

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self._weights.num_bytes

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels that encoding takes, each once."""
        encoders = [encoder for encoder in (self._pictures, self._sounds) if encoder is not None]
        return list(dict.fromkeys(kernel for encoder in encoders for kernel in encoder.kernels))

    def picture_bytes(self, num_patches: int) -> int:
        """Bytes of buffers while a picture of so many patches is encoded; they stay until `close`."""
        return 0 if self._pictures is None else self._pictures.num_bytes(num_patches)

    def num_patches(self, width: int, height: int, *, is_tiled: bool = False) -> int:
        """Patches that are encoded at once of an input of this size; is_tiled: its tiles are one input."""
        return 0 if self._pictures is None else self._pictures.num_patches(width, height, is_tiled=is_tiled)

    def sound_bytes(self, num_frames: int) -> int:
        """Bytes of buffers while a stretch of so many frames of sound is encoded; they stay until `close`."""
        return 0 if self._sounds is None else self._sounds.num_bytes(num_frames)

    def encode(self, piece: EncoderInput, check: Callable[[], None] | None = None) -> FloatArray:
        """Embeddings float32[num_rows, width] of one picture, tile or sound.

        check: called every few hundredths of the work; an error that it raises ends the encoding, and is raised.
        """
        if self._is_closed:
            raise ClosedError("the encoder was closed; load the model again to go on")
        kind = "sound" if piece.is_sound else "picture"
        for encoder in (self._pictures, self._sounds):
            for graph in [] if encoder is None else encoder.graphs:
                graph.check = check
        if piece.is_sound and self._sounds is not None:
            rows = self._sounds.encode(piece.values, piece.num_valid)
        elif not piece.is_sound and self._pictures is not None:
            tiles = self._pictures.encode_tiles
            rows = self._pictures.encode(piece.values) if piece.kept is None else tiles(piece.values, piece.kept)
            if any(piece.marks):
                rows = self._pictures.marked(rows, piece.marks)
        else:
            raise RequestError(f"a {kind} was given, and the model has no encoder for it; use a model that has one")
        if len(rows) != piece.num_rows:
            raise RequestError(
                f"a {kind} of {list(piece.values.shape)} gives {len(rows)} embeddings, and its layout says "
                f"{piece.num_rows}: the layout was made for another model"
            )
        if rows.shape[1] == self.width:
            return rows
        # Sounds have no parts for the decoder's first layers.
        padded = np.zeros((len(rows), self.width), np.float32)
        padded[:, : rows.shape[1]] = rows
        return padded

    def close(self) -> None:
        """Give up weights and buffers; safe to call twice."""
        self._is_closed = True
        for encoder in (self._pictures, self._sounds):
            if encoder is not None:
                encoder.close()
        self._pictures = self._sounds = None
        self._weights.close()
