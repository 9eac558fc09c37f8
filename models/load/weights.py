"""Sources of weights for programs: packed once, read on demand, sent to several devices, or only counted.

A memory map would be simpler, but truncating the file while a kernel reads the map kills the process (SIGBUS), and
writing to the file changes the model. Rows are copied, so neither can happen.

`quant/pipeline/conversion.py` maps tensor types to layouts. After packing, the file's pages are released, so loading
needs little more memory than the packed weights. Float and Q8_0 matrices of large files are packed behind the first
batch (`kernels/cpu/deferred_packing.py`).
"""

import contextlib
import mmap
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.kernels import ops
from localinfer.kernels.cpu import guard
from localinfer.kernels.cpu.deferred_packing import DeferredPacking, UnpackedMatrix, can_defer, reserved
from localinfer.kernels.cpu.memory import Arena
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cpu.weights import PackedWeight, RowTable, pack
from localinfer.kernels.layouts import (
    CUDA_LAYOUTS,
    GGUF_LAYOUTS,
    TILE_ROWS,
    Layout,
    num_tiles,
    stored_row_bytes,
    tile_bytes,
)
from localinfer.kernels.ops import EmbeddingTable, LinearWeight, OpGraph
from localinfer.models.decoder.checked_weights import is_of_adapter
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType, row_bytes
from localinfer.quant.gguf.mapped_file import FileStretch
from localinfer.quant.pipeline.conversion import conversion_note, convert, layout_of, runs_directly
from localinfer.system.machine_limits import memory_limits
from localinfer.types import FloatArray, ProgressCallback

if TYPE_CHECKING:
    from localinfer.kernels.cuda.device import CudaDevice
    from localinfer.quant.checkpoint.groups import GroupedMatrix

_WHOLE_BYTES = 4 << 20
"""Tables up to this size are read at once, in a millisecond or two."""
_BLOCK_BYTES = 4 << 10
"""About how many bytes are read at a time. Tokens that occur together are not adjacent."""


class RowsOnDemand:
    """`num_rows` rows of equal size in a file.

    data: uint8[bytes of the table]; valid are the rows that `fill` was called with. fill: None if all are valid. One
    thread at a time may fill. Raises: CorruptFileError if the file was changed since it was opened.
    """

    def __init__(
        self, stretch: FileStretch, num_rows: int, *, whole_bytes: int = _WHOLE_BYTES, block_bytes: int = _BLOCK_BYTES
    ) -> None:
        assert num_rows > 0 and stretch.num_bytes % num_rows == 0, "rows are of one size"
        self._stretch = stretch
        self.data = _untouched(stretch.num_bytes)
        self.fill: Callable[[NDArray[np.int32]], None] | None = None
        if stretch.num_bytes <= whole_bytes:
            stretch.read_into([(0, self.data.data)])
            return
        row_bytes = stretch.num_bytes // num_rows
        self._block_rows = max(1, block_bytes // row_bytes)
        self._block_bytes = self._block_rows * row_bytes
        self._is_there = bytearray(-(-num_rows // self._block_rows))
        self._there = np.frombuffer(self._is_there, np.bool_)
        self.fill = self._fill

    def _fill(self, row_ids: NDArray[np.int32]) -> None:
        """Read these rows, which exist, into `data`. For a known token it takes a tenth of a microsecond.

        Raises: CorruptFileError if the file was changed since it was opened; rows read before stay valid.
        """
        if row_ids.size == 1:
            block = int(row_ids[0]) // self._block_rows
            if not self._is_there[block]:
                self._read([block])
            return
        blocks = row_ids // self._block_rows
        missing = np.unique(blocks[~self._there[blocks]])
        if missing.size:
            self._read(missing.tolist())

    def _read(self, blocks: list[int]) -> None:
        size, memory = self._block_bytes, self.data.data
        self._stretch.read_into([(block * size, memory[block * size : (block + 1) * size]) for block in blocks])
        for block in blocks:
            self._is_there[block] = True


def _untouched(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that is allocated page by page when written: no huge pages, of which each row would allocate one."""
    if guard.IS_ON:
        return guard.guarded(num_bytes)
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A system without huge pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


DEFERRED_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0)
"""Types of matrices that are large for what is computed with them, and that kernels run directly."""
_LEAST_DEFERRED = 128 << 20
"""Bytes of a file's matrices of these types for which it is worth it."""


def defers_packing(file: ModelFile) -> bool:
    """True if the first token of a model is to come before its matrices are packed.

    The file is read twice then, so it has to fit into memory beside the packed matrices.
    """
    num_bytes = sum(tensor.num_bytes for tensor in file.tensors.values() if tensor.type in DEFERRED_TYPES)
    is_possible = num_bytes >= _LEAST_DEFERRED and not guard.IS_ON and can_defer()
    return is_possible and memory_limits().most_bytes >= file.num_bytes + num_bytes


Found = TypeVar("Found")

_LOADING = "loading weights"
_UNGROUPED_NOTE = (
    "some quantized matrices run as F32, 32 bits per weight: their groups end inside a block of 32 columns, or their "
    "scales exceed float16"
)
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")
_NEEDLESS_TENSORS = re.compile(
    # For images; for next-token prediction; what activations were measured to be; a table that is computed.
    r"vis_.*|nextn\..*|.*\.input_scale|attn_rot_embd\.weight"
    # Of two forms of the same, the one that is not taken: a latent's matrix, Qwen3-Next's projections.
    r"|attn_kv_b\.weight|ssm_in\.weight"
    # Indexers that would choose everything; a mix with the first layer in the first layer; norms of keys alone.
    r"|indexer\..*|time_mix_v\d\.weight|attn_k_norm\..*"
)


class CpuWeights:
    """A `WeightSource` over a model file, which packs each weight once, for any number of programs.

    notes: the layout of each tensor type that the device's kernels do not run directly. asked: names of tensors that a
    graph wanted or looked for.
    """

    _layouts: Collection[Layout] = GGUF_LAYOUTS

    def __init__(
        self, file: ModelFile, pool: ThreadPool, progress: ProgressCallback | None = None, *, defers: bool = False
    ) -> None:
        """defers: whole matrices of DEFERRED_TYPES get memory alone, until `pack_behind` is called."""
        self._file = file
        self._progress = progress
        self._defers = defers
        self._unpacked: list[UnpackedMatrix] = []
        self._packs_behind: CpuProgram | None = None
        self._arena = Arena()
        self._num_threads = pool.num_threads
        self._pack: Callable[..., Any] = partial(pack, pool, arena=self._arena)
        self._done_bytes = 0
        self._stage = _LOADING
        self._converted_tables: dict[str, RowTable] = {}
        self._loaded: dict[tuple[object, ...], Any] = {}
        self.notes: dict[TensorType, str] = {}
        self.asked: set[str] = set()

    def close(self) -> None:
        """Give up every weight; those that programs hold stay alive with them."""
        self._loaded.clear()
        self._converted_tables.clear()
        self._unpacked.clear()
        self._packs_behind = None
        self._arena.release()

    def pack_behind(self, program: CpuProgram, pool: ThreadPool) -> None:
        """Let a program pack the matrices that were deferred, after its first batch; from now on none is deferred."""
        self._defers = False
        if self._unpacked:
            deferred = DeferredPacking(program, pool, self._unpacked)
            self._unpacked = []
            if not deferred.is_done:
                program.deferred, self._packs_behind = deferred, program
                deferred.start()

    @property
    def packed_bytes(self) -> int:
        """Bytes of all matrices that were packed so far; parts of others count with these."""
        weights = [found for found in self._loaded.values() if isinstance(found, LinearWeight)]
        return sum(int(weight.packed.data.nbytes) for weight in weights)

    def has(self, name: str) -> bool:
        """True if the file holds this tensor."""
        self.asked.add(name)
        return name in self._file.tensors

    def check_asked(self, config: ModelConfig) -> None:
        """Raise UnsupportedFormatError if the model's blocks have tensors that no graph looked for.

        Such a model was made for other blocks than those that were written: a norm, bias or gate would be missing.
        """
        left = [name for name in self._file.tensors if name not in self.asked and _is_of_blocks(name, config)]
        if left:
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise UnsupportedFormatError(
                f"{self._file.path.name} has {left[0]:.80}{more}, which {config.architecture!r} models are computed "
                "without here, so its answers would be wrong. Update localinfer or choose another model."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._file.tensor(name).shape

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """Pack a matrix [rows, columns], a stack of them, or some rows of either; a vector is a matrix of one row."""
        if self._packs_behind is not None and self._packs_behind.deferred is not None:
            # Another program would find memory that is not filled.
            self._packs_behind.deferred.finish()
        part = None if rows is None else (rows.start, rows.stop, rows.step)
        return self._once(("linear", name, part), lambda: self._load_linear(name, rows))

    def _load_linear(self, name: str, rows: slice | None) -> LinearWeight:
        beginning = self._beginning(name, rows)
        if beginning is not None:
            return beginning
        grouped = self._file.grouped(name)
        if grouped is not None:
            return self._grouped_linear(name, grouped, rows)
        info = self._file.tensor(name)
        experts, num_rows, num_columns = (1,) * (3 - len(info.shape)) + info.shape
        table = self._converted_tables.get(name)
        if table is not None and rows is None:
            packed = self._pack(table.layout, table.data, experts, num_rows, num_columns, done=self._still_loading)
            return LinearWeight(name, num_rows, num_columns, packed, experts)
        stretch = self._file.stretch(name) if self._defers and info.type in DEFERRED_TYPES else None
        if stretch is not None and rows is None and experts == 1:
            packed = reserved(layout_of(info.type), num_rows, num_columns, self._arena)
            file = stretch.file
            unpacked = UnpackedMatrix(name, packed, file.descriptor, stretch.start, file.check_unchanged)
            self._unpacked.append(unpacked)
            self._report(_LOADING, info.num_bytes)
            return LinearWeight(name, num_rows, num_columns, packed)
        data = self._file.tensor_bytes(name)
        if rows is not None:
            matrix = data.reshape(experts, num_rows, -1)[:, rows]
            num_rows, data = matrix.shape[1], np.ascontiguousarray(matrix).reshape(-1)
        done = self._done(name, info.type, is_whole=rows is None)
        layout, data = self._runnable(name, data, (experts, num_rows, num_columns), done)
        # Offsets refer to the file's bytes, not to converted ones.
        shown = done if runs_directly(info.type, self._layouts) else self._still_loading
        packed = self._pack(layout, data, experts, num_rows, num_columns, done=shown)
        return LinearWeight(name, num_rows, num_columns, packed, experts)

    def _beginning(self, name: str, rows: slice | None) -> LinearWeight | None:
        """The first rows of a matrix that is packed already, where they are whole tiles of it."""
        whole: LinearWeight | None = self._loaded.get(("linear", name, None))
        if rows is None or whole is None or rows.start or rows.step or rows.stop is None or rows.stop % TILE_ROWS:
            return None
        packed = whole.packed
        if not isinstance(packed, PackedWeight) or whole.num_experts > 1 or rows.stop > whole.num_rows:
            return None
        data = packed.data[: packed.tile_bytes * num_tiles(rows.stop)]
        return replace(whole, num_rows=rows.stop, packed=replace(packed, num_rows=rows.stop, data=data))

    def _grouped_linear(self, name: str, matrices: "Sequence[GroupedMatrix]", rows: slice | None) -> LinearWeight:
        """Pack a checkpoint's codes; columns in act-order are sorted by group, and the tape gathers the input alike."""
        if rows is not None:
            matrices = [matrix.rows(np.arange(matrix.shape[0])[rows]) for matrix in matrices]
        columns = None
        layout = matrices[0].layout(*matrices[1:])
        if not all(matrix.is_in_order for matrix in matrices):
            if len(matrices) > 1:
                raise UnsupportedFormatError(
                    f"{name} is a stack of experts with act-order (desc_act) per expert; this version supports it in "
                    "single matrices only. Choose a copy quantized without desc_act."
                )
            if layout is not Layout.F32:
                columns, ordered = matrices[0].in_group_order()
                matrices = [ordered]
        if layout is Layout.F32:
            self.notes[TensorType.F32] = _UNGROUPED_NOTE
        data = []
        for matrix in matrices:
            self._still_loading()
            data.append(matrix.kernel_rows(layout))
        num_rows, num_columns = matrices[0].shape
        joined = data[0] if len(data) == 1 else np.concatenate(data)
        packed = self._pack(layout, joined, len(matrices), num_rows, num_columns, done=self._still_loading)
        if rows is None:
            self._file.forget(name, 0, self._file.tensor(name).num_bytes)
        self._report(_LOADING, joined.size)
        return LinearWeight(name, num_rows, num_columns, replace(packed, columns=columns), len(matrices))

    def embedding(self, name: str) -> EmbeddingTable:
        """A table whose rows are read on demand, or all converted if no kernel reads their type."""
        return self._once(("embedding", name), lambda: self._load_embedding(name))

    def _load_embedding(self, name: str) -> EmbeddingTable:
        info = self._file.tensor(name)
        num_rows, width = info.shape
        stretch = self._file.stretch(name) if runs_directly(info.type, self._layouts) else None
        if stretch is not None:
            rows = RowsOnDemand(stretch, num_rows)
            layout = layout_of(info.type, self._layouts)
            return EmbeddingTable(name, num_rows, width, RowTable(layout, num_rows, width, rows.data, rows.fill))
        data = self._file.tensor_bytes(name)
        layout, converted = self._runnable(name, data, info.shape, self._done(name, info.type, is_whole=True))
        # The file may change after loading, so read rows are copied.
        own = converted.copy() if converted is data else converted
        table = RowTable(layout, num_rows, width, own)
        if not runs_directly(info.type, self._layouts):
            # A tied output matrix is packed from it, because converting again would take longest.
            self._converted_tables[name] = table
        return EmbeddingTable(name, num_rows, width, table)

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, in its own shape."""
        return self._once(("vector", name), lambda: self._load_vector(name))

    def _load_vector(self, name: str) -> FloatArray:
        info = self._file.tensor(name)
        with named_tensor(name):
            return np.array(dequantize(self._file.tensor_bytes(name), info.type, info.shape))

    def _once(self, key: tuple[object, ...], load: Callable[[], Found]) -> Found:
        if key not in self._loaded:
            self._loaded[key] = load()
        return cast(Found, self._loaded[key])

    def _runnable(
        self, name: str, data: NDArray[np.uint8], shape: tuple[int, ...], done: Callable[[int, int], None]
    ) -> tuple[Layout, NDArray[np.uint8]]:
        type = self._file.tensor(name).type
        if runs_directly(type, self._layouts):
            assert data.size == np.prod(shape[:-1], dtype=np.int64) * row_bytes(type, shape[-1]), (
                "the reader checks this"
            )
            return layout_of(type, self._layouts), data
        with named_tensor(name):
            self.notes[type] = conversion_note(type, self._layouts)
            return convert(data, type, shape, done, self._layouts, self._num_threads)

    def _still_loading(self, *_: int) -> None:
        """Report again how far it is, so that a caller of many steps in a row hears of each."""
        self._report(self._stage, 0)

    def _done(self, name: str, type: TensorType, *, is_whole: bool) -> Callable[[int, int], None]:
        """Return a callback for each range of a tensor's bytes in the file that has been packed or converted.

        is_whole: the ranges cover the tensor, not some of its rows, so that their pages may be released.
        """
        stage = _LOADING if runs_directly(type, self._layouts) else f"converting {type.name} weights"

        def done(first: int, end: int) -> None:
            if is_whole:
                self._file.forget(name, first, end)
            self._report(stage, end - first)

        return done

    def _report(self, stage: str, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._stage = stage
        if self._progress is not None:
            done, total = self._done_bytes >> 20, self._file.num_bytes >> 20
            self._progress(f"{stage} (MB)", min(done, total), total)


def _is_of_blocks(name: str, config: ModelConfig) -> bool:
    """True if a tensor belongs to the main layers and changes their results."""
    found = _BLOCK_TENSOR.fullmatch(name)
    if found is None or int(found[1]) >= config.num_main_layers or _NEEDLESS_TENSORS.fullmatch(found[2]):
        return False
    if is_of_adapter(name) and not config.takes_media:
        return False
    # Layers that attend to the keys and values of others may have their own nevertheless.
    is_shared = int(found[1]) >= config.num_layers - config.num_shared_layers
    return not (is_shared and found[2].startswith(("attn_k", "attn_v")))


class CudaWeights(CpuWeights):
    """A `WeightSource` over a model file with matrices on a device; an embedding table too is uploaded once."""

    _layouts = CUDA_LAYOUTS

    def __init__(
        self, file: ModelFile, pool: ThreadPool, device: "CudaDevice", progress: ProgressCallback | None = None
    ) -> None:
        from localinfer.kernels.cuda.weights import upload

        super().__init__(file, pool, progress)
        self._pack = partial(upload, device)

    def _load_embedding(self, name: str) -> EmbeddingTable:
        table = self.linear(name)
        return EmbeddingTable(name, table.num_rows, table.num_columns, table.packed)


@contextmanager
def named_tensor(name: str) -> Iterator[None]:
    """Name the tensor in what is said against its type or its weights."""
    try:
        yield
    except (CorruptFileError, UnsupportedFormatError) as error:
        raise type(error)(f"{name}: {error}") from error


WeightKey = tuple[bool, str]
"""True for a tensor read as an embedding table, and its name: a tied one is read as a matrix as well."""


class PlacedWeights:
    """A `WeightSource` that asks the weights of the part that computes with a tensor.

    sources: of each part. parts: the number of the part, by how a tensor is read.
    """

    def __init__(self, sources: Sequence[CpuWeights], parts: Mapping[WeightKey, int]) -> None:
        self._sources = sources
        self._parts = parts

    def has(self, name: str) -> bool:
        """True if the file holds this tensor."""
        return self._sources[0].has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._sources[0].shape(name)

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """Pack a matrix for its part; see `CpuWeights.linear`."""
        return self._sources[self._parts.get((False, name), 0)].linear(name, rows)

    def embedding(self, name: str) -> EmbeddingTable:
        """A table for its part; see `CpuWeights.embedding`."""
        return self._sources[self._parts.get((True, name), 0)].embedding(name)

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, which every part may read."""
        return self._sources[0].vector(name)

    def check_asked(self, config: ModelConfig) -> None:
        """See `CpuWeights.check_asked`."""
        self._sources[0].check_asked(config)

    @property
    def notes(self) -> list[str]:
        """Notes of the types that weights were converted to, on any part."""
        return list(dict.fromkeys(note for source in self._sources for note in source.notes.values()))


def parts_of_weights(graph: OpGraph, parts: Sequence[int]) -> dict[WeightKey, int]:
    """Map each tensor to the part that reads it; parts: the one that computes each op of the graph."""
    found: dict[WeightKey, int] = {}
    for op, part in zip(graph.ops, parts, strict=True):
        if isinstance(op, ops.Embed | ops.EmbedPositions | ops.EmbedTypes):
            found[True, op.table.name] = part
        elif isinstance(op, ops.Matmul):
            found |= {(False, projection.weight.name): part for projection in op.projections}
        elif isinstance(op, ops.HeadMatmul | ops.ExpertMatmul):
            found[False, op.weight.name] = part
    return found


NO_POOL = cast(ThreadPool, SimpleNamespace(num_threads=1, max_threads=1, control_address=0))
"""The attributes of a pool that lowering reads; it starts no thread, which would take compiled kernels."""


class UnreadWeights(CpuWeights):
    """Weights with the sizes and layouts of a file's, in memory that is never touched, so that it takes none."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file, NO_POOL)
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def _load_linear(self, name: str, rows: slice | None) -> LinearWeight:
        info = self._file.tensor(name)
        experts, num_rows, num_columns = (1,) * (3 - len(info.shape)) + info.shape
        columns = None
        if rows is not None:
            num_rows = len(range(*rows.indices(num_rows)))
        grouped = self._file.grouped(name)
        layout = layout_of(info.type) if grouped is None else grouped[0].layout(*grouped[1:])
        if grouped is not None and not grouped[0].is_in_order and layout is not Layout.F32:
            columns, _ = grouped[0].in_group_order()
        data = self._untouched(experts * num_tiles(num_rows) * tile_bytes(layout, num_columns))
        packed = PackedWeight(layout, num_rows, num_columns, experts, data, columns)
        return LinearWeight(name, num_rows, num_columns, packed, experts)

    def _load_embedding(self, name: str) -> EmbeddingTable:
        info = self._file.tensor(name)
        num_rows, width = info.shape
        layout = layout_of(info.type)
        num_bytes = info.num_bytes if runs_directly(info.type) else num_rows * stored_row_bytes(layout, width)
        return EmbeddingTable(name, num_rows, width, RowTable(layout, num_rows, width, self._untouched(num_bytes)))

    def _untouched(self, num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > self._memory.size:
            self._memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        return self._memory[:num_bytes]
