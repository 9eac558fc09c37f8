"""Encoders of pictures: patches, transformer blocks and a projector, from a family's record and a file's tensors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, RequestError, UnsupportedFormatError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.ops import Buffer, Projection
from localinfer.models.media.attention_mergers import PoolingHead, Resampler, WindowMerger
from localinfer.models.media.encoder_weights import EncoderWeights
from localinfer.models.media.mmproj import PictureConfig
from localinfer.models.media.patch_positions import (
    Grid,
    Indices,
    Resize,
    Rotary,
    blocks_order,
    encode_tiles,
    gathered,
    inverse_order,
    joined_patches,
    resized_table,
    rotary_angles,
    window_order,
)
from localinfer.models.media.row_graph import KeyPages, RowGraph, RowWriter, Seen, buffer_bytes, graph_writer
from localinfer.models.media.vision_blocks import ACTIVATIONS, BlockShape, optional_norm, write_block
from localinfer.models.media.vision_families import FAMILIES, Table, VisionFamily, write_deepstack
from localinfer.types import FloatArray

_LARGE_RMS = (3200, 45)
"""Width and blocks of the one InternViT whose norms have no mean; nothing else in its files says so."""


class VisionEncoder:
    """The encoder of pictures of an mmproj file; one caller at a time.

    Raises: CorruptFileError or UnsupportedFormatError naming a tensor that is missing, wrong or not known.
    """

    def __init__(self, config: PictureConfig, weights: EncoderWeights, pool: ThreadPool | None) -> None:
        self._config, self._weights, self._pool = config, weights, pool
        self._family: VisionFamily = FAMILIES[config.projector]
        self._tables: dict[Grid, FloatArray | None] = {}
        self._channels = _channels(config, self._family)
        self._table = self._read_table()
        self.graphs: list[RowGraph] = []
        self._class_row = weights.optional("v.class_embd", config.hidden_size)
        self._has_class_row = self._class_row is not None
        self._line_end = None
        if config.has_image_break:
            self._line_end = weights.values("v.token_embd.img_break", config.output_size)
        self._marks = weights.optional("v.mark_embd.weight", config.num_marks, config.output_size)
        self._patch_weight, self._patch_bias = self._read_patches()
        self._shape = self._block_shape()
        self._pages = KeyPages(self._shape.keys)
        if self._has_windows and config.window_size < config.patch_size * config.merge:
            raise UnsupportedFormatError(
                f"windows of {config.window_size} pixels hold no block of {config.merge} patches of "
                f"{config.patch_size}: choose another model"
            )
        self._features: list[str] = []
        self._merger = WindowMerger(config, self._shape, weights, pool, self._pages) if self._merges_windows else None
        self._resampler: Resampler | PoolingHead | None = None
        if config.projector == "resampler":
            self._resampler = Resampler(config, weights, pool)
        elif self._family.pools_rows:
            self._resampler = PoolingHead(config, self._shape, weights, pool)
        self._body: RowGraph | None = None
        self._later: RowGraph | None = None
        self._projector: RowGraph | None = None
        if config.projector == "gemma4uv":
            self._projector = self._write_unified()
        else:
            self._write_bodies()
        weights.check_asked("v", self._num_blocks)
        self.graphs = [graph for graph in (self._body, self._later, self._projector) if graph is not None]
        for part in (self._merger, self._resampler):
            self.graphs += [] if part is None else part.graphs

    @property
    def width(self) -> int:
        """Columns of an embedding."""
        return self._config.output_size * (1 + len(self._features) * bool(self._config.num_deepstack))

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels that it is made of."""
        return [kernel for graph in self.graphs for kernel in graph.kernels]

    def num_bytes(self, num_patches: int) -> int:
        """Bytes of buffers for a picture of so many patches."""
        joined = -(-num_patches // self._config.merge**2)
        counts = {id(self._projector): joined, id(self._later): num_patches // 4}
        return buffer_bytes([(graph, max(counts.get(id(graph), num_patches), 1)) for graph in self.graphs])

    @property
    def _side(self) -> int:
        """Pixels across a patch."""
        return self._config.patch_size * (self._config.merge if self._config.projector == "gemma4uv" else 1)

    def num_patches(self, width: int, height: int, *, is_tiled: bool = False) -> int:
        """Patches that are encoded at once of a picture of this size; is_tiled: its tiles are one input."""
        width, height = (self._config.image_size,) * 2 if is_tiled else (width, height)
        return (width // self._side) * (height // self._side)

    def encode(self, pixels: NDArray[np.uint8]) -> FloatArray:
        """Embeddings float32[rows, width] of a picture uint8[height, width, 3] whose sides are whole patches."""
        side = self._side
        grid = pixels.shape[0] // side, pixels.shape[1] // side
        if min(grid) < 1 or pixels.shape != (grid[0] * side, grid[1] * side, 3) or pixels.dtype != np.uint8:
            raise RequestError(
                f"a picture of {pixels.dtype} {list(pixels.shape)} was given to the encoder; wanted uint8 [height, "
                f"width, 3], both sides multiples of {side}: let its layout be made first"
            )
        order, ends = self._order(grid)
        patches = self._patches(pixels, grid, side)[order]
        positions = self._positions(grid)
        if self._projector is not None and self._body is None:
            assert positions is not None, "this family has them"
            return self._projector.run([patches, positions[order]])[0].copy()
        rows = self._run_blocks(patches, None if positions is None else positions[order], grid, order, ends)
        return self._project(rows, grid, order)

    def encode_tiles(self, pixels: NDArray[np.uint8], kept: Grid) -> FloatArray:
        """Embeddings of a picture in tiles, of which `kept` rows and columns are no padding."""
        config = self._config
        line_end = self._weights.values("model.image_newline", config.output_size)
        return encode_tiles(pixels, config.image_size, kept, line_end, config.max_tiles, self.encode)

    def marked(self, rows: FloatArray, marks: tuple[tuple[int, ...], tuple[int, ...]]) -> FloatArray:
        """Embeddings of a picture between rows of the marks before and behind it."""
        if self._marks is None or max(marks[0] + marks[1]) >= len(self._marks):
            raise RequestError(
                f"a picture between the marks {marks} was given to the encoder, which has {self._config.num_marks}: "
                "let its layout be made first"
            )
        before, behind = (self._marks[list(numbers)] for numbers in marks)
        return np.concatenate([before, rows, behind])

    def close(self) -> None:
        """Give up programs and buffers."""
        for graph in self.graphs:
            graph.close()
        self._pages.release()

    def _run_blocks(
        self, patches: FloatArray, positions: FloatArray | None, grid: Grid, order: Indices, ends: Indices | None
    ) -> list[FloatArray]:
        """Outputs of the blocks for patches: of the last, and of those that are taken beside."""
        assert self._body is not None, "written for every family with blocks"
        inputs = [patches]
        if self._has_class_row:
            inputs = [np.concatenate([patches, np.zeros((1, patches.shape[1]), np.float32)])]
        if self._has_positions:
            added = np.zeros((len(patches), self._config.hidden_size), np.float32) if positions is None else positions
            inputs.append(self._with_class_row(added) if self._has_class_row else added)
        if self._family.rotary is not Rotary.NONE:
            inputs += self._angles(grid, order)
        seen = None
        if ends is not None:
            starts = np.concatenate([[0], ends[:-1]])
            seen = Seen(np.repeat(starts, ends - starts), np.repeat(ends, ends - starts))
        rows = self._body.run(inputs, seen)
        if self._merger is not None and self._later is not None:
            rows = self._later.run([self._merger.run(rows[0])])
        if self._family.takes_class_row:
            rows = [part[len(patches) :].copy() for part in rows]
        elif self._has_class_row:
            # llama.cpp puts it last in LLaVA's encoder, and leaves out the first row, as if it were there.
            first = 1 if self._family.skips_last_block and not self._config.is_class_first else 0
            rows = [part[first : first + len(patches)] for part in rows]
        return rows

    def _project(self, rows: list[FloatArray], grid: Grid, order: Indices) -> FloatArray:
        config = self._config
        if self._resampler is not None:
            return self._resampler.run(rows[0], grid)
        assert self._projector is not None, "written for every other family"
        if self._family.takes_class_row:
            return self._projector.run([rows[0]])[0].copy()
        if config.projector == "minicpmv4_6":
            # Its rows are in the order of its blocks of blocks.
            joined = [rows[0].reshape(len(rows[0]) // 4, -1)]
        else:
            places = inverse_order(order)
            is_transposed = self._family.joins_transposed and config.joins_columns_first
            numbers = joined_patches(grid, config.merge, is_transposed=is_transposed)
            numbers = np.where(numbers >= 0, places[np.maximum(numbers, 0)], numbers)
            if config.num_deepstack or len(rows) == 1:
                joined = [gathered(part, numbers) for part in rows]
            else:
                joined = [gathered(np.concatenate(rows, axis=1), numbers)]
        found = np.concatenate(self._projector.run(joined), axis=1)
        if self._line_end is not None:
            found = _with_line_ends(found, -(-grid[1] // config.merge), self._line_end)
        return found

    # What the host gives.

    def _patches(self, pixels: NDArray[np.uint8], grid: Grid, side: int) -> FloatArray:
        """Patches [rows * columns, 3 * side * side] in raster order; of each the channel, the row, the column."""
        values = np.empty(pixels.shape, np.float32)
        for channel, table in enumerate(self._channels):
            values[..., channel] = table[pixels[..., channel]]
        parts = values.reshape(grid[0], side, grid[1], side, 3).transpose(0, 2, 4, 1, 3)
        return parts.reshape(grid[0] * grid[1], -1)

    def _order(self, grid: Grid) -> tuple[Indices, Indices | None]:
        """Patches in the order of the encoder's rows, and where windows end."""
        config, merge = self._config, self._config.merge
        if config.projector == "gemma4uv":
            return np.arange(grid[0] * grid[1]), None
        if config.projector == "minicpmv4_6":
            self._check_multiple(grid, merge)
            if merge == 2:
                return blocks_order(grid, 2), None
            numbers = np.arange(grid[0] * grid[1]).reshape(grid[0] // 4, 2, 2, grid[1] // 4, 2, 2)
            return numbers.transpose(0, 3, 1, 4, 2, 5).reshape(-1), None
        if self._has_windows:
            self._check_multiple(grid, merge)
            return window_order(grid, merge, config.window_size // config.patch_size // merge)
        if grid[0] % merge or grid[1] % merge:
            return np.arange(grid[0] * grid[1]), None
        return blocks_order(grid, merge), None

    def _check_multiple(self, grid: Grid, size: int) -> None:
        if grid[0] % size or grid[1] % size:
            raise RequestError(
                f"a picture of {grid[1]} x {grid[0]} patches was given to the encoder; wanted multiples of {size}: let "
                "its layout be made first"
            )

    def _positions(self, grid: Grid) -> FloatArray | None:
        """Learned positions of patches in raster order, as the file's table has them for this size."""
        table = self._table
        if table is None:
            return None
        rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
        if isinstance(self._family.table, Resize):
            kind = Resize(self._config.table_resize) if self._config.table_resize else self._family.table
            return resized_table(table, grid, kind)
        if self._family.table is Table.AXES:
            if max(grid) > table.shape[1]:
                raise RequestError(
                    f"a picture of {grid[1]} x {grid[0]} patches was given to the encoder, which has {table.shape[1]} "
                    "positions a side: make it smaller"
                )
            added: FloatArray = table[0][columns] + table[1][rows]
            return added
        if self._family.table is Table.BUCKETS:
            side = round(len(table) ** 0.5)
            nearest: FloatArray = table[rows * side // grid[0] * side + columns * side // grid[1]]
            return nearest
        if len(table) != len(rows) + self._has_class_row:
            raise RequestError(
                f"a picture of {len(rows)} patches was given to the encoder, which has {len(table)} positions: let its "
                "layout be made first"
            )
        return table[1:] if self._has_class_row and self._config.is_class_first else table[: len(rows)]

    def _with_class_row(self, positions: FloatArray) -> FloatArray:
        """Positions with what the class row is, which has no patch but is a row of patches' product all the same."""
        assert self._class_row is not None, "there is one"
        row = self._class_row.copy()
        if self._table is not None:
            row += self._table[0 if self._config.is_class_first else len(positions)]
        if self._patch_bias is not None:
            row -= self._patch_bias
        return np.concatenate([positions, row[None]])

    def _angles(self, grid: Grid, order: Indices) -> list[FloatArray]:
        rows, columns = np.divmod(order, grid[1])
        if self._has_class_row:
            rows, columns = np.append(rows + 1, 0), np.append(columns + 1, 0)
        return rotary_angles(self._family.rotary, rows, columns, self._config.head_size, self._config.rotary_base)

    # What files hold.

    @property
    def _merges_windows(self) -> bool:
        return self._config.projector == "minicpmv4_6" and self._config.merge == 4

    @property
    def _has_windows(self) -> bool:
        return any(map(self._sees_window, range(self._num_blocks)))

    def _sees_window(self, layer: int) -> bool:
        """True if rows of a block see a window of the picture."""
        config = self._config
        if not self._family.has_windows or (config.full_layers is None and not config.window_pattern):
            return False
        if config.full_layers is not None:
            return layer not in config.full_layers
        return (layer + 1) % config.window_pattern != 0

    @property
    def _has_positions(self) -> bool:
        return self._table is not None or self._has_class_row

    @property
    def _num_blocks(self) -> int:
        """Blocks that are computed."""
        config = self._config
        if config.feature_layers and self._family.skips_last_block:
            return max(config.feature_layers)
        return config.num_layers - 1 if self._family.skips_last_block else config.num_layers

    def _read_table(self) -> FloatArray | None:
        name, kind, width = "v.position_embd.weight", self._family.table, self._config.hidden_size
        if kind is None or not self._weights.has(name):
            return None
        shape = self._weights.shape(name)
        if kind is Table.AXES:
            return self._weights.values(name, 2, shape[1] if len(shape) == 3 else 0, width)
        if kind is not Table.BUCKETS and not isinstance(kind, Resize):
            side = self._config.image_size // self._config.patch_size
            return self._weights.values(name, side * side + self._weights.has("v.class_embd"), width)
        side = round(shape[0] ** 0.5)
        sides = shape[:2] if len(shape) == 3 else (side, side)
        if len(shape) == 2 and side * side != shape[0]:
            raise CorruptFileError(
                f"tensor {name!r} has {shape[0]} positions; wanted a square of them: convert the model's mmproj file "
                "again, or download another copy"
            )
        table = self._weights.values(name, *((*sides, width) if len(shape) == 3 else (shape[0], width)))
        return table if kind is Table.BUCKETS else table.reshape(*sides, width)

    def _read_patches(self) -> tuple[FloatArray, FloatArray | None]:
        """The kernel as a matrix of patches, of both frames where a still stands for two, and its bias."""
        config, weights = self._config, self._weights
        name, width, side = "v.patch_embd.weight", config.hidden_size, config.patch_size
        is_unified = config.projector == "gemma4uv"
        columns = 3 * side * side * (config.merge**2 if is_unified else 1)
        found = weights.shape(name)
        shape = (width, columns) if len(found) == 2 else (width, 3, side, side)
        kernel = weights.values(name, *shape)
        if weights.has(f"{name}.1"):
            kernel = kernel + weights.values(f"{name}.1", *shape)
        return kernel.reshape(width, columns), weights.optional("v.patch_embd.bias", width)

    def _block_shape(self) -> BlockShape:
        config, family = self._config, self._family
        is_large = config.projector == "internvl" and (config.hidden_size, config.num_layers) == _LARGE_RMS
        if family.rotary is not Rotary.NONE and config.head_size % 4:
            raise UnsupportedFormatError(
                f"heads of {config.head_size} columns are rotated by rows and columns; wanted a multiple of 4: choose "
                "another model"
            )
        return BlockShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.norm_epsilon,
            ACTIVATIONS[config.activation],
            has_rms_norms=family.has_rms_norms or is_large if config.has_rms_norms is None else config.has_rms_norms,
            has_rms_query_norms=config.has_rms_query_norms,
            scale=1.0 if family.is_gemma4 else 0.0,
            normalises_values=family.is_gemma4,
            pairing=family.rotary.pairing,
            may_swap_ffn=family.may_swap_ffn,
            swiglu_clamp=config.swiglu_clamp if config.projector == "glm5v" else 0.0,
        )

    # Graphs.

    def _write_bodies(self) -> None:
        writer = graph_writer(self._weights, self._pages)
        rows, angles = self._write_patches(writer)
        split = self._config.window_layer + 1 if self._merger is not None else self._num_blocks
        features = self._write_blocks(writer, rows, angles, range(split))
        if self._merger is not None:
            self._body = RowGraph(self._pool, writer, [rows], self._pages)
            writer = graph_writer(self._weights, self._pages)
            rows = writer.input("rows", self._config.hidden_size)
            self._write_blocks(writer, rows, [], range(split, self._num_blocks))
        if self._weights.has("v.post_ln.weight"):
            rows = self._after(writer, rows)
        outputs = self._outputs(writer, rows, features)
        if self._merger is None:
            self._body = RowGraph(self._pool, writer, outputs, self._pages)
        else:
            self._later = RowGraph(self._pool, writer, outputs, self._pages)
        if self._resampler is None:
            self._projector = self._write_projector(outputs)

    def _after(self, writer: RowWriter, rows: Buffer) -> Buffer:
        """Rows after the last norm; those inside may be features."""
        shape, out = self._shape, "normed"
        write = writer.rms_norm if shape.has_rms_norms else writer.layer_norm
        return write(rows, "v.post_ln", out, shape.norm_epsilon)

    def _outputs(self, writer: RowWriter, rows: Buffer, features: dict[int, Buffer]) -> list[Buffer]:
        """Rows that are projected: the last ones, and outputs of blocks that are taken beside or instead."""
        config = self._config
        if config.num_deepstack:
            return [rows, *features.values()]
        if config.feature_layers and self._family.skips_last_block:
            return [
                rows if layer == self._num_blocks else features[layer] for layer in sorted(set(config.feature_layers))
            ]
        return [rows]

    def _write_patches(self, writer: RowWriter) -> tuple[Buffer, list[Buffer]]:
        """The rows that enter the first block, and angles of rotation."""
        config, weights = self._config, self._weights
        patches = writer.input("patches", self._patch_weight.shape[1])
        positions = writer.input("positions", config.hidden_size) if self._has_positions else None
        rotary = self._family.rotary
        angles = []
        for part in range(rotary.num_parts if rotary is not Rotary.NONE else 0):
            angles.append(writer.input(f"angles {part}", config.head_size // rotary.num_parts))
        rows = writer.buffer("rows", config.hidden_size)
        weight = weights.matrix("v.patch_embd.weight", self._patch_weight)
        is_normed = weights.has("v.norm_embd.weight")
        residual = None if is_normed else positions
        writer.builder.matmul(patches, [Projection(weight, rows, self._patch_bias, residual)])
        if is_normed:
            optional_norm(writer, self._shape, rows, "v.norm_embd")
            if positions is not None:
                writer.builder.add(rows, rows, positions)
        optional_norm(writer, self._shape, rows, "v.pre_ln")
        return rows, angles

    def _write_blocks(
        self, writer: RowWriter, rows: Buffer, angles: list[Buffer], layers: Sequence[int]
    ) -> dict[int, Buffer]:
        """Blocks, and copies of what some of them get or give, by the number of blocks before."""
        config, kept = self._config, {}
        takes_features = self._family.skips_last_block and config.feature_layers
        for layer in layers:
            if takes_features and layer in config.feature_layers:
                kept[layer] = writer.copied(rows, f"rows after {layer} blocks")
            is_windowed = self._sees_window(layer)
            write_block(writer, self._shape, rows, f"v.blk.{layer}", angles, is_windowed=is_windowed)
            if config.num_deepstack and self._weights.has(f"v.deepstack.{layer}.fc1.weight"):
                kept[layer + 1] = writer.copied(rows, f"rows after {layer + 1} blocks")
                self._features.append(str(layer))
        return kept

    def _write_projector(self, outputs: list[Buffer]) -> RowGraph:
        config = self._config
        writer = graph_writer(self._weights)
        count = 4 if config.projector == "minicpmv4_6" else config.merge**2
        width = outputs[0].width * count
        parts = len(outputs) if config.num_deepstack else 1
        if parts == 1:
            width *= len(outputs)
        inputs = [writer.input(f"joined rows {part}", width) for part in range(parts)]
        results = [self._family.project(writer, config, inputs[0])]
        for layer, joined in zip(self._features, inputs[1:], strict=True):
            results.append(write_deepstack(writer, config, joined, layer, f"embeddings of block {layer}"))
        return RowGraph(self._pool, writer, results)

    def _write_unified(self) -> RowGraph:
        """Patches projected, with no blocks between."""
        writer = graph_writer(self._weights)
        patches = writer.input("patches", self._patch_weight.shape[1])
        return RowGraph(self._pool, writer, [self._family.project(writer, self._config, patches)])


def _with_line_ends(rows: FloatArray, columns: int, line_end: FloatArray) -> FloatArray:
    """Rows of a picture with the row that ends a line after each line but the last."""
    width = rows.shape[1]
    lines = rows.reshape(-1, columns, width)
    ended = np.empty((len(lines), columns + 1, width), np.float32)
    ended[:, :columns], ended[:, columns] = lines, line_end
    return ended.reshape(-1, width)[:-1].copy()


def _channels(config: PictureConfig, family: VisionFamily) -> list[FloatArray]:
    """Numbers [256] of each channel's bytes, each step in float32, or rounded to bfloat16."""
    rounded = _to_bfloat16 if config.rounds_pixels else lambda values: values
    bytes = np.arange(256, dtype=np.float32)
    values = rounded(bytes * np.float32(1 / 255)) if config.rounds_pixels else bytes / np.float32(255)
    found = []
    for mean, std in zip(config.mean, config.std, strict=True):
        table = rounded(rounded(values - np.float32(mean)) / np.float32(std))
        found.append(np.float32(2) * table - np.float32(1) if family.is_gemma4 else table)
    return found


def _to_bfloat16(values: FloatArray) -> FloatArray:
    """The nearest numbers of eight bits, of two equally near ones the even one."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
