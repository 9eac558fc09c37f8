"""Encoders of sounds after Whisper's (arXiv 2212.04356): convolutions over frames, transformer blocks, a projector."""

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.ops import Activation, Buffer
from localinfer.models.media.convolutions import (
    halved,
    plane_kernel,
    row_kernel,
    unfolded_planes,
    unfolded_rows,
)
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import SoundConfig
from localinfer.models.media.row_graph import KeyPages, RowGraph, RowWriter, Seen, graph_writer, mean_of_parts
from localinfer.models.media.vision_blocks import BlockShape, norm, write_block
from localinfer.types import FloatArray

_ULTRAVOX_EPSILON = 1e-6
_UNIT = 100
"""Frames that Qwen 3's convolutions take at a time, where the file does not say."""


def block_shape(config: SoundConfig) -> BlockShape:
    """Whisper's blocks."""
    size = config.hidden_size // config.num_heads
    return BlockShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_heads,
        size,
        config.norm_epsilon,
        Activation.GELU_ERF,
    )


def _blocks(writer: RowWriter, config: SoundConfig, rows: Buffer) -> None:
    for layer in range(config.num_layers):
        write_block(writer, block_shape(config), rows, f"a.blk.{layer}", [], is_windowed=config.piece_frames > 0)


def _windows(num_rows: int, size: int) -> Seen:
    """Rows that see those of their window of so many."""
    starts = np.arange(num_rows) // size * size
    return Seen(starts, np.minimum(starts + size, num_rows))


def _two_matrices(writer: RowWriter, config: SoundConfig, rows: Buffer) -> Buffer:
    inner = writer.activation(writer.linear(rows, "mm.a.mlp.1", "projected"), Activation.GELU_ERF)
    return writer.linear(inner, "mm.a.mlp.2", "embeddings", config.output_size)


class WhisperEncoder:
    """Encoders of ultravox, voxtral and qwen2a: 3000 frames become 1500 rows, some of which are joined."""

    def __init__(self, config: SoundConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._config = config
        width = config.hidden_size
        shape, pages = block_shape(config), KeyPages(block_shape(config).keys)
        count = weights.shape("a.position_embd.weight")[0]
        self._positions = weights.values("a.position_embd.weight", count, width)
        writer = graph_writer(weights)
        rows = self._convolution(writer, "a.conv1d.1", config.num_mel_bins)
        self._first = RowGraph(pool, writer, [rows])
        writer = graph_writer(weights, pages)
        positions = writer.input("positions", width)
        rows = self._convolution(writer, "a.conv1d.2", width)
        writer.builder.add(rows, rows, positions)
        _blocks(writer, config, rows)
        joins_pairs = config.projector != "ultravox" if config.joins_pairs is None else config.joins_pairs
        self._joined_before_norm = 2 if joins_pairs else 1
        if self._joined_before_norm == 1:
            rows = norm(writer, shape, rows, "a.post_ln", "last rows")
        self._body = RowGraph(pool, writer, [rows], pages)
        self._mean: RowGraph | None = None
        if self._joined_before_norm > 1:
            writer = graph_writer(weights)
            pairs = writer.input("pairs of rows", 2 * width)
            mean = mean_of_parts(writer, pairs, 2)
            self._mean = RowGraph(pool, writer, [norm(writer, shape, mean, "a.post_ln", "last rows")])
        writer = graph_writer(weights)
        joined = writer.input("joined rows", width * config.merge)
        self._projector = RowGraph(pool, writer, [self._project(writer, joined)])
        graphs = (self._first, self._body, self._mean, self._projector)
        self.graphs = [graph for graph in graphs if graph is not None]

    def _convolution(self, writer: RowWriter, name: str, channels: int) -> Buffer:
        weights, width = writer.weights, self._config.hidden_size
        frames = writer.input("unfolded frames", 3 * channels)
        kernel = row_kernel(weights.values(f"{name}.weight", width, channels, 3))
        rows = writer.linear(frames, name, "rows", weight=weights.matrix(f"{name}.weight", kernel))
        return writer.activation(rows, Activation.GELU_ERF)

    def _project(self, writer: RowWriter, rows: Buffer) -> Buffer:
        config, weights = self._config, writer.weights
        if config.projector == "qwen2a":
            return writer.linear(rows, "mm.a.fc", "embeddings", config.output_size)
        if config.projector == "voxtral":
            return _two_matrices(writer, config, rows)
        width = weights.width_of("mm.a.mlp.1.weight") // 2
        rows = writer.rms_norm(rows, "mm.a.norm_pre", "normalised", _ULTRAVOX_EPSILON)
        first, second = writer.halves(rows, "mm.a.mlp.1", ["first half", "second half"], width)
        inner = writer.gated(rows, second, first, Activation.SILU)
        inner = writer.rms_norm(inner, "mm.a.norm_mid", "inner", _ULTRAVOX_EPSILON)
        return writer.linear(inner, "mm.a.mlp.2", "embeddings", config.output_size)

    def encode(self, frames: FloatArray, num_valid: int | None = None) -> FloatArray:
        """Embeddings of frames [frames, mels]; num_valid: the first of them whose rows count and are attended to."""
        size = self._config.piece_frames or len(frames)
        if halved(min(size, len(frames))) > len(self._positions):
            raise RequestError(
                f"a sound of {len(frames)} frames was given to the encoder, which has {len(self._positions)} "
                "positions: let its layout be made first"
            )
        # Pieces are convolved each by itself, and their positions begin anew.
        starts = range(0, len(frames), size)
        unfolded = [unfolded_rows(frames[start : start + size], 3, 1) for start in starts]
        rows = self._first.run([np.concatenate(unfolded)])[0]
        pieces = [unfolded_rows(rows[start : start + size], 3, 2) for start in starts]
        if num_valid is not None:
            pieces = [np.concatenate(pieces)[: halved(num_valid)]]
        positions = np.concatenate([self._positions[: len(piece)] for piece in pieces])
        seen = _windows(len(positions), halved(size)) if self._config.piece_frames else None
        rows = self._body.run([positions, np.concatenate(pieces)], seen)[0]
        if self._mean is not None:
            rows = self._mean.run([_joined(rows, 2)])[0]
        return self._projector.run([_joined(rows, self._config.merge)])[0].copy()


def _joined(rows: FloatArray, count: int) -> FloatArray:
    """Rows joined `count` at a time; an incomplete group is dropped."""
    num_rows = len(rows) // count
    return np.ascontiguousarray(rows[: num_rows * count]).reshape(num_rows, -1)


class Qwen3SoundEncoder:
    """The encoder of qwen3a: convolutions over seconds of frames and mels, then Whisper's blocks over all of them."""

    def __init__(self, config: SoundConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._config = config
        pages, width = KeyPages(block_shape(config).keys), config.hidden_size
        self._convolutions, channels, mels = [], 1, config.num_mel_bins
        for number in range(1, 4):
            name, writer = f"a.conv2d.{number}", graph_writer(weights)
            count = weights.shape(f"{name}.weight")[0]
            kernel = plane_kernel(weights.values(f"{name}.weight", count, channels, 3, 3), is_mel_first=True)
            planes = writer.input("unfolded planes", 9 * channels)
            rows = writer.linear(planes, name, "rows", weight=weights.matrix(f"{name}.weight", kernel))
            self._convolutions.append(RowGraph(pool, writer, [writer.activation(rows, Activation.GELU_ERF)]))
            channels, mels = count, halved(mels)
        count = weights.shape("a.position_embd.weight")[0]
        self._positions = weights.values("a.position_embd.weight", count, width)
        writer = graph_writer(weights, pages)
        features, positions = writer.input("features", channels * mels), writer.input("positions", width)
        rows = writer.linear(features, "a.conv_out", "rows", width)
        writer.builder.add(rows, rows, positions)
        _blocks(writer, config, rows)
        rows = norm(writer, block_shape(config), rows, "a.post_ln", "last rows")
        self._body = RowGraph(pool, writer, [_two_matrices(writer, config, rows)], pages)
        self.graphs = [*self._convolutions, self._body]

    def encode(self, frames: FloatArray, num_valid: int | None = None) -> FloatArray:
        """Embeddings of frames [whole seconds of frames, mels], or of any number of frames where pieces have a size."""
        if self._config.piece_frames:
            return self._encode_pieces(frames, self._config.piece_frames, num_valid)
        if len(frames) % _UNIT or not len(frames):
            raise RequestError(
                f"a sound of {len(frames)} frames was given to the encoder; wanted a multiple of {_UNIT}: let its "
                "layout be made first"
            )
        features = self._convolved(frames.reshape(-1, _UNIT, frames.shape[1]))
        units, rows = features.shape[:2]
        positions = np.tile(self._positions[:rows], (units, 1))
        return self._body.run([features.reshape(units * rows, -1), positions])[0].copy()

    def _encode_pieces(self, frames: FloatArray, size: int, num_valid: int | None) -> FloatArray:
        """Embeddings of frames cut into pieces, the last filled up with zeros, which give no rows of their own.

        num_valid: frames that do, if some of the zeros are given.
        """
        size, count = min(size, len(frames)), num_valid or len(frames)
        units = -(-len(frames) // size)
        padded = np.zeros((units * size, frames.shape[1]), np.float32)
        padded[: len(frames)] = frames
        features = self._convolved(padded.reshape(units, size, -1))
        rows = features.shape[1]
        num_rows = (units - 1) * rows + halved(halved(halved(count - (units - 1) * size)))
        if rows > len(self._positions):
            raise RequestError(f"pieces of {size} frames were given to the encoder; wanted {len(self._positions)} rows")
        positions = np.tile(self._positions[:rows], (units, 1))[:num_rows]
        seen = _windows(num_rows, rows * self._config.attended_pieces)
        return self._body.run([features.reshape(units * rows, -1)[:num_rows], positions], seen)[0].copy()

    def _convolved(self, pieces: FloatArray) -> FloatArray:
        """Features [pieces, rows, values] of pieces [pieces, frames, mels]."""
        planes = pieces[..., None]
        for convolution in self._convolutions:
            time, mel = halved(planes.shape[1]), halved(planes.shape[2])
            planes = convolution.run([unfolded_planes(planes)])[0].reshape(len(pieces), time, mel, -1)
        return planes.swapaxes(2, 3).reshape(len(pieces), planes.shape[1], -1)
