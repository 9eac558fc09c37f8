"""Encoders of sounds with conformer blocks (arXiv 2005.08100): attention with relative positions, and convolutions.

A block is half a feed-forward layer, attention, a gated convolution over time, and the other half. What attention adds
for a distance is a product of the query with a row for that distance, which is made when the encoder is written.
"""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.ops import Activation, AttentionShape, Buffer, KVLayerShape, LinearWeight, Relative
from localinfer.models.media.convolutions import (
    convolved_planes,
    convolved_rows,
    halved,
    plane_kernel,
    unfolded_planes,
)
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import SoundConfig
from localinfer.models.media.query_projector import QueryProjector
from localinfer.models.media.row_graph import KeyPages, RowGraph, RowWriter, Seen, graph_writer
from localinfer.types import FloatArray


def _half_feed_forward(writer: RowWriter, x: Buffer, y: Buffer, name: str, suffix: str, post_norm: float = 0.0) -> None:
    """x += half a feed-forward layer of y. post_norm: the epsilon of an RMS norm of what is added; 0 for none."""
    inner = writer.activation(writer.linear(y, f"{name}.ffn_up{suffix}", "inner"), Activation.SILU)
    out = writer.linear(inner, f"{name}.ffn_down{suffix}", "branch", x.width)
    if post_norm:
        out = writer.rms_norm(out, f"{name}.ffn_post_norm{suffix}", "branch", post_norm)
    writer.builder.add(x, x, out, 0.5)


class Gemma4SoundEncoder:
    """The encoder of gemma4a: rows see themselves and the eleven before."""

    SEEN = 12
    EPSILON = 1e-6
    CAP = 50.0

    def __init__(self, config: SoundConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._config, width = config, config.hidden_size
        self._size = width // config.num_heads
        pages = KeyPages(KVLayerShape(config.num_heads, self._size, self._size))
        self._convolutions, channels, mels = [], 1, config.num_mel_bins
        for number in range(2):
            name, writer = f"a.conv1d.{number}", graph_writer(weights)
            count = weights.shape(f"{name}.weight")[0]
            kernel = plane_kernel(weights.values(f"{name}.weight", count, channels, 3, 3))
            planes = writer.input("unfolded planes", 9 * channels)
            rows = writer.linear(planes, name, "rows", weight=weights.matrix(f"{name}.weight", kernel))
            rows = writer.activation(writer.layer_norm(rows, f"{name}.norm", "rows", self.EPSILON), Activation.RELU)
            self._convolutions.append(RowGraph(pool, writer, [rows]))
            channels, mels = count, halved(mels)
        writer = graph_writer(weights, pages)
        rows = writer.linear(writer.input("features", channels * mels), "a.input_projection", "rows", width)
        for layer in range(config.num_layers):
            rows = self._write_block(writer, rows, f"a.blk.{layer}")
        out = writer.linear(rows, "a.pre_encode.out", "encoded")
        norm_name = "mm.a.soft_emb_norm" if weights.has("mm.a.soft_emb_norm.weight") else ""
        out = writer.rms_norm(out, norm_name, "normalised", self.EPSILON)
        out = writer.linear(out, "mm.a.input_projection", "embeddings", config.output_size)
        self._body = RowGraph(pool, writer, [out], pages)
        self.graphs = [*self._convolutions, self._body]

    def encode(self, frames: FloatArray, num_valid: int | None = None) -> FloatArray:
        """Embeddings of frames [frames, mels]."""
        planes: FloatArray = frames[None, :, :, None]
        for convolution in self._convolutions:
            time, mel = halved(planes.shape[1]), halved(planes.shape[2])
            planes = convolution.run([unfolded_planes(planes)])[0].reshape(1, time, mel, -1)
        own = np.arange(planes.shape[1])
        seen = Seen(np.maximum(own - self.SEEN + 1, 0), own + 1)
        return self._body.run([planes.reshape(len(own), -1)], seen)[0].copy()

    def _write_block(self, writer: RowWriter, x: Buffer, name: str) -> Buffer:
        builder, epsilon, width = writer.builder, self.EPSILON, x.width
        normed = writer.rms_norm(x, f"{name}.ffn_norm", "normed", epsilon)
        _half_feed_forward(writer, x, normed, name, "", epsilon)
        normed = writer.rms_norm(x, f"{name}.attn_pre_norm", "normed", epsilon)
        out = writer.linear(self._write_attention(writer, normed, name), f"{name}.attn_out", "branch", width)
        out = writer.rms_norm(out, f"{name}.attn_post_norm", "branch", epsilon)
        builder.add(x, x, out)
        # Converters give these two norms each other's name.
        normed = writer.rms_norm(x, f"{name}.conv_norm", "normed", epsilon)
        out = _gated_convolution(writer, normed, name, is_causal=True)
        out = writer.activation(writer.rms_norm(out, f"{name}.norm_conv", "normed", epsilon), Activation.SILU)
        builder.add(x, x, writer.linear(out, f"{name}.conv_pw2", "branch", width))
        normed = writer.rms_norm(x, f"{name}.ffn_norm_1", "normed", epsilon)
        _half_feed_forward(writer, x, normed, name, "_1", epsilon)
        return writer.rms_norm(x, f"{name}.ln2", x.name, epsilon)

    def _write_attention(self, writer: RowWriter, x: Buffer, name: str) -> Buffer:
        builder, weights, width, size, heads = (
            writer.builder,
            writer.weights,
            x.width,
            self._size,
            self._config.num_heads,
        )
        names = [f"{name}.attn_{part}" for part in "qkv"]
        queries, keys, values = writer.linears(x, names, ["queries", "keys", "values"], [width] * 3)
        factors = weights.values(f"{name}.per_dim_scale.weight", size) * np.float32(size**-0.5 / math.log(2))
        builder.multiply(queries, queries, np.tile(factors, heads))
        builder.scale(keys, math.log1p(math.e) / math.log(2))
        builder.store_kv(0, keys, values)
        by_distance = weights.values(f"{name}.attn_k_rel.weight", width, width)
        frequencies = 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
        turns = np.arange(self.SEEN)[:, None] * frequencies
        distances = np.concatenate([np.sin(turns), np.cos(turns)], axis=1)
        rows = np.einsum("oi,ti->to", by_distance.astype(np.float64), distances).astype(np.float32)
        weight = weights.matrix(f"{name}.attn_k_rel.weight", rows.reshape(self.SEEN, heads, size).swapaxes(0, 1))
        reach = self.SEEN - 1
        buckets = np.maximum(-np.arange(-reach, reach + 1), 0)
        relative = _relative(writer, queries, weight, buckets)
        out = writer.buffer("attended", width)
        shape = AttentionShape(heads, heads, size, size, 1.0, softcap=self.CAP, bidirectional=True)
        builder.attention(out, queries, 0, shape, relative=relative, takes_ranges=True)
        return out


def _gated_convolution(writer: RowWriter, normed: Buffer, name: str, *, is_causal: bool) -> Buffer:
    """Gated linear units, then each column convolved over time: with rows before only, or as many on either side."""
    weights = writer.weights
    width, taps = (weights.shape(f"{name}.conv_dw.weight")[axis] for axis in (0, -1))
    first, second = writer.halves(normed, f"{name}.conv_pw1", ["values", "gates"], width)
    writer.builder.multiply_sigmoid(first, first, second)
    kernel = weights.values(f"{name}.conv_dw.weight", width, taps)
    before = taps - 1 if is_causal else taps // 2
    return writer.host_step(first, "convolved", width, lambda rows: convolved_rows(rows, kernel, before))


def _relative(writer: RowWriter, queries: Buffer, weight: LinearWeight, buckets: NDArray[np.int64]) -> Relative:
    """Products of each head's query with the rows of distances, weight [heads, distances, size]."""
    by_row = writer.buffer("by distance", weight.num_experts * weight.num_rows)
    writer.builder.head_matmul(by_row, queries, weight, weight.num_rows, weight.num_columns)
    return Relative(buckets, weight.num_rows, by_row=by_row)


class GraniteSoundEncoder:
    """The encoder of Granite Speech: rows see those of their block, and in the middle what they are most like.

    There they are scored as letters, as for connectionist temporal classification, and the shares of these are added.
    """

    EPSILON = 1e-5

    def __init__(self, config: SoundConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._config = config
        num_rows, _ = weights.shape("a.blk.0.attn_q.weight")
        self._size, width = num_rows // config.num_heads, config.hidden_size
        pages = KeyPages(KVLayerShape(config.num_heads, self._size, self._size))
        writer = graph_writer(weights, pages)
        rows = writer.linear(writer.input("features", config.num_mel_bins), "a.input_projection", "rows", width)
        taken = []
        for layer in range(config.num_layers + 1):
            if layer == config.num_layers // 2 and layer:
                letters = writer.linear(rows, "a.ctc_out", "letters")
                writer.builder.softmax(letters, letters)
                rows = writer.linear(letters, "a.ctc_in", rows.name, width, residual=rows)
            if layer in config.feature_layers:
                taken.append(writer.copied(rows, f"rows after {layer} blocks"))
            if layer < config.num_layers:
                rows = self._write_block(writer, rows, f"a.blk.{layer}")
        self._body = RowGraph(pool, writer, [*taken, rows], pages)
        self._projector = QueryProjector(config, width * (len(taken) + 1), weights, pool)
        self.graphs = [self._body, *self._projector.graphs]

    def encode(self, frames: FloatArray, num_valid: int | None = None) -> FloatArray:
        """Embeddings of frames [frames, values]."""
        count, size = len(frames), self._config.block_rows
        starts = np.arange(count) // size * size
        parts = self._body.run([frames], Seen(starts, np.minimum(starts + size, count)))
        return self._projector.run(np.concatenate(parts, axis=1))

    def _write_block(self, writer: RowWriter, x: Buffer, name: str) -> Buffer:
        builder, epsilon, width = writer.builder, self.EPSILON, x.width
        _half_feed_forward(writer, x, writer.layer_norm(x, f"{name}.ffn_norm", "normed", epsilon), name, "")
        normed = writer.layer_norm(x, f"{name}.ln1", "normed", epsilon)
        attended = self._write_attention(writer, normed, name)
        builder.add(x, x, writer.linear(attended, f"{name}.attn_out", "branch", width))
        out = _gated_convolution(
            writer, writer.layer_norm(x, f"{name}.norm_conv", "normed", epsilon), name, is_causal=False
        )
        factors, shift = self._batch_norm(writer.weights, f"{name}.conv_norm", out.width)
        builder.multiply(out, out, factors)
        builder.add_vector(out, shift)
        out = writer.activation(out, Activation.SILU)
        builder.add(x, x, writer.linear(out, f"{name}.conv_pw2", "branch", width))
        _half_feed_forward(writer, x, writer.layer_norm(x, f"{name}.ffn_norm_1", "normed", epsilon), name, "_1")
        return writer.layer_norm(x, f"{name}.ln2", x.name, epsilon)

    def _batch_norm(self, weights: EncoderWeights, name: str, width: int) -> tuple[FloatArray, FloatArray]:
        """Factor and summand of each column, whose mean and variance are the training's."""
        variance = weights.values(f"{name}.running_var", width).astype(np.float64)
        factors = weights.values(f"{name}.weight", width) / np.sqrt(variance + self.EPSILON)
        shift = weights.values(f"{name}.bias", width) - weights.values(f"{name}.running_mean", width) * factors
        return factors.astype(np.float32), shift.astype(np.float32)

    def _write_attention(self, writer: RowWriter, x: Buffer, name: str) -> Buffer:
        builder, weights, size, heads = writer.builder, writer.weights, self._size, self._config.num_heads
        names = [f"{name}.attn_{part}" for part in "qkv"]
        queries, keys, values = writer.linears(x, names, ["queries", "keys", "values"], [heads * size] * 3)
        builder.store_kv(0, keys, values)
        tensor, reach = f"{name}.attn_rel.weight", self._config.block_rows - 1
        count = weights.shape(tensor)[0]
        zero = count // 2
        if count % 2 == 0 or reach > zero:
            raise CorruptFileError(
                f"{tensor} has rows for {count} distances; wanted an odd number, at least {2 * reach + 1}: download "
                "the model again"
            )
        # Its rows are by the row's position less the key's (Shaw et al., arXiv 1803.02155, section 3.2).
        rows = weights.values(tensor, count, size)[zero - reach : zero + reach + 1][::-1]
        weight = weights.matrix(tensor, np.stack([rows] * heads))
        relative = _relative(writer, queries, weight, np.arange(len(rows)))
        out = writer.buffer("attended", heads * size)
        shape = AttentionShape(heads, heads, size, size, size**-0.5, bidirectional=True)
        builder.attention(out, queries, 0, shape, relative=relative, takes_ranges=True)
        return out


class Lfm2SoundEncoder:
    """The encoder of lfm2a: rows see each other at any distance, so graphs are written for a number of rows."""

    EPSILON = 1e-5
    POSITION_SIZE = 512
    MOST_BYTES = 1 << 30
    """Of what is kept of distances while a sound is encoded."""

    def __init__(self, config: SoundConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._config, self._weights, self._pool = config, weights, pool
        width = config.hidden_size
        self._size = width // config.num_heads
        self._pages = KeyPages(KVLayerShape(config.num_heads, self._size, self._size))
        count = weights.shape("a.conv1d.0.weight")[0]
        kernel = plane_kernel(weights.values("a.conv1d.0.weight", count, 1, 3, 3))
        writer = graph_writer(weights)
        planes = writer.input("unfolded planes", 9)
        rows = writer.linear(planes, "a.conv1d.0", "rows", weight=weights.matrix("a.conv1d.0.weight", kernel))
        self._convolutions = [RowGraph(pool, writer, [writer.activation(rows, Activation.RELU)])]
        self._kernels = []
        for number in (2, 5):
            name = f"a.conv1d.{number}"
            bias = weights.values(f"{name}.bias", count)
            self._kernels.append((weights.values(f"{name}.weight", count, 1, 3, 3), bias))
            writer, name = graph_writer(weights), f"a.conv1d.{number + 1}"
            rows = writer.linear(writer.input("planes", count), name, "rows", count)
            self._convolutions.append(RowGraph(pool, writer, [writer.activation(rows, Activation.RELU)]))
        # The first part of every block is the same at any length, and so is what distances are made of.
        writer = graph_writer(weights)
        positions = writer.input("positions", self.POSITION_SIZE)
        layers = range(config.num_layers)
        names = [f"a.blk.{layer}.linear_pos" for layer in layers]
        self._distances = RowGraph(
            pool, writer, [writer.linear(positions, name, f"distances {name}", width) for name in names]
        )
        self._most_rows = math.isqrt(self.MOST_BYTES // (8 * config.num_heads))
        self._body, self._capacity = self._write_body(64), 64

    @property
    def graphs(self) -> list[RowGraph]:
        """Graphs at present."""
        return [*self._convolutions, self._distances, self._body]

    def encode(self, frames: FloatArray, num_valid: int | None = None) -> FloatArray:
        """Embeddings of frames [frames, mels]."""
        num_rows = halved(halved(halved(len(frames))))
        if num_rows > self._most_rows:
            raise RequestError(
                f"a sound of {len(frames) // 100} s was given; wanted {self._most_rows * 8 // 100} s at most for this "
                "model: give a shorter one",
                field="audio",
            )
        planes: FloatArray = frames[None, :, :, None]
        time, mel = halved(planes.shape[1]), halved(planes.shape[2])
        planes = self._convolutions[0].run([unfolded_planes(planes)])[0].reshape(1, time, mel, -1)
        for (kernel, bias), graph in zip(self._kernels, self._convolutions[1:], strict=True):
            found = convolved_planes(planes, kernel, bias)
            planes = graph.run([found.reshape(-1, len(bias))])[0].reshape(found.shape)
        features: FloatArray = planes.swapaxes(2, 3).reshape(num_rows, -1)
        if num_rows > self._capacity:
            self._capacity = min(self._most_rows, 1 << (num_rows - 1).bit_length())
            self._body = self._write_body(self._capacity)
        return self._body.run([features])[0].copy()

    def _write_body(self, capacity: int) -> RowGraph:
        config, weights = self._config, self._weights
        width, heads, size = config.hidden_size, config.num_heads, self._size
        reach = capacity - 1
        frequencies = 10000.0 ** (-2.0 * np.arange(self.POSITION_SIZE // 2) / self.POSITION_SIZE)
        # A key's distance from the row is minus what the sines are of.
        turns = -np.arange(-reach, reach + 1)[:, None] * frequencies
        sines = np.stack([np.sin(turns), np.cos(turns)], axis=2).reshape(2 * reach + 1, -1).astype(np.float32)
        if weights.is_read:
            distances = self._distances.run([sines])
        else:
            distances = [np.zeros((len(sines), width), np.float32)] * config.num_layers
        writer = graph_writer(weights, self._pages)
        mels = config.num_mel_bins
        for _ in range(3):
            mels = halved(mels)
        count = weights.shape("a.conv1d.0.weight")[0]
        rows = writer.linear(writer.input("features", count * mels), "a.pre_encode.out", "rows", width)
        for layer, rows_of_distances in enumerate(distances):
            stack = rows_of_distances.reshape(-1, heads, size).swapaxes(0, 1)
            weight = weights.own_matrix(f"distances of layer {layer}", stack)
            rows = self._write_block(writer, rows, f"a.blk.{layer}", weight)
        out = writer.layer_norm(rows, "mm.a.mlp.0", "normalised", self.EPSILON)
        out = writer.activation(writer.linear(out, "mm.a.mlp.1", "projected"), Activation.GELU_ERF)
        out = writer.linear(out, "mm.a.mlp.3", "embeddings", config.output_size)
        return RowGraph(self._pool, writer, [out], self._pages)

    def _write_block(self, writer: RowWriter, x: Buffer, name: str, weight: LinearWeight) -> Buffer:
        builder, weights, epsilon, width = writer.builder, writer.weights, self.EPSILON, x.width
        normed = writer.layer_norm(x, f"{name}.ffn_norm", "normed", epsilon)
        _half_feed_forward(writer, x, normed, name, "")
        normed = writer.layer_norm(x, f"{name}.ln1", "normed", epsilon)
        attended = self._write_attention(writer, normed, name, weight)
        builder.add(x, x, writer.linear(attended, f"{name}.attn_out", "branch", width))
        normed = writer.layer_norm(x, f"{name}.norm_conv", "normed", epsilon)
        out = _gated_convolution(writer, normed, name, is_causal=False)
        builder.add_vector(out, weights.values(f"{name}.conv_dw.bias", width))
        builder.multiply(out, out, weights.values(f"{name}.conv_norm.weight", width))
        builder.add_vector(out, weights.values(f"{name}.conv_norm.bias", width))
        out = writer.activation(out, Activation.SILU)
        builder.add(x, x, writer.linear(out, f"{name}.conv_pw2", "branch", width))
        normed = writer.layer_norm(x, f"{name}.ffn_norm_1", "normed", epsilon)
        _half_feed_forward(writer, x, normed, name, "_1")
        return writer.layer_norm(x, f"{name}.ln2", x.name, epsilon)

    def _write_attention(self, writer: RowWriter, x: Buffer, name: str, weight: LinearWeight) -> Buffer:
        builder, weights, width, size, heads = (
            writer.builder,
            writer.weights,
            x.width,
            self._size,
            self._config.num_heads,
        )
        names = [f"{name}.attn_{part}" for part in "qkv"]
        queries, keys, values = writer.linears(x, names, ["queries", "keys", "values"], [width] * 3)
        shifted = writer.buffer("queries of distances", width)
        builder.copy_heads(shifted, queries, 1, width, width, width)
        builder.add_vector(queries, weights.values(f"{name}.pos_bias_u", heads, size).reshape(-1))
        builder.add_vector(shifted, weights.values(f"{name}.pos_bias_v", heads, size).reshape(-1))
        builder.store_kv(0, keys, values)
        relative = _relative(writer, shifted, weight, np.arange(weight.num_rows))
        out = writer.buffer("attended", width)
        shape = AttentionShape(heads, heads, size, size, size**-0.5, bidirectional=True)
        builder.attention(out, queries, 0, shape, relative=relative)
        return out
