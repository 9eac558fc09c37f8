"""Encoders of sounds, by the kind of their projector."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.models.media.conformer_encoder import Gemma4SoundEncoder, GraniteSoundEncoder, Lfm2SoundEncoder
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import SoundConfig
from localinfer.models.media.row_graph import RowGraph, buffer_bytes, graph_writer
from localinfer.models.media.whisper_encoder import Qwen3SoundEncoder, WhisperEncoder
from localinfer.types import FloatArray

_SAMPLES_A_FRAME = 640
"""Raw samples of a frame of Gemma 4's files without an encoder, whatever the file says."""
_EPSILON = 1e-6
"""Of the norm before its projection."""


class FrameEncoder(Protocol):
    """An encoder of frames of one family."""

    @property
    def graphs(self) -> list[RowGraph]:
        """Its graphs."""

    def encode(self, frames: FloatArray, num_valid: int | None = None) -> FloatArray:
        """Embeddings of frames float32[frames, values]; num_valid: as in `EncoderInput`."""


class UnifiedSoundEncoder:
    """Gemma 4 without an encoder: frames of samples, normalised and projected."""

    def __init__(self, config: SoundConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        writer = graph_writer(weights)
        rows = writer.rms_norm(writer.input("frames", _SAMPLES_A_FRAME), "", "normalised", _EPSILON)
        self._projector = RowGraph(
            pool, writer, [writer.linear(rows, "mm.a.input_projection", "embeddings", config.output_size)]
        )
        self.graphs = [self._projector]

    def encode(self, frames: FloatArray, num_valid: int | None = None) -> FloatArray:
        """Embeddings of frames of samples."""
        return self._projector.run([frames])[0].copy()


_ENCODERS: dict[str, Callable[[SoundConfig, EncoderWeights, ThreadPool | None], FrameEncoder]] = {
    "ultravox": WhisperEncoder,
    "voxtral": WhisperEncoder,
    "qwen2a": WhisperEncoder,
    "qwen3a": Qwen3SoundEncoder,
    "gemma4a": Gemma4SoundEncoder,
    "gemma4ua": UnifiedSoundEncoder,
    "lfm2a": Lfm2SoundEncoder,
    "granite_speech": GraniteSoundEncoder,
}
"""By `projector_type`."""


class SoundEncoder:
    """The encoder of sounds of an mmproj file; one caller at a time.

    Raises: CorruptFileError or UnsupportedFormatError naming a tensor that is missing, wrong or not known.
    """

    def __init__(self, config: SoundConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._frame_size = _SAMPLES_A_FRAME if config.projector == "gemma4ua" else config.num_mel_bins
        self._encoder: FrameEncoder = _ENCODERS[config.projector](config, weights, pool)
        self.width = config.output_size
        weights.check_asked("a", config.num_layers)

    @property
    def graphs(self) -> list[RowGraph]:
        """Its graphs at present."""
        return self._encoder.graphs

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels that it is made of."""
        return [kernel for graph in self._encoder.graphs for kernel in graph.kernels]

    def num_bytes(self, num_frames: int) -> int:
        """Bytes of buffers for a sound of so many frames, at most."""
        return buffer_bytes([(graph, max(num_frames, 1)) for graph in self._encoder.graphs])

    def encode(self, frames: NDArray[np.float32], num_valid: int | None = None) -> FloatArray:
        """Embeddings float32[rows, width] of one stretch of frames; num_valid: as in `EncoderInput`."""
        is_right = frames.ndim == 2 and len(frames) and frames.shape[1] == self._frame_size
        if not is_right or frames.dtype != np.float32:
            raise RequestError(
                f"a sound of {frames.dtype} {list(frames.shape)} was given to the encoder; wanted float32 [frames, "
                f"{self._frame_size}]: let its layout be made first"
            )
        return self._encoder.encode(frames, num_valid)

    def close(self) -> None:
        """Give up programs and buffers."""
        for graph in self._encoder.graphs:
            graph.close()
