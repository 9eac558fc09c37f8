"""Pictures and sounds in CUDA programs on the emulator: what a batch says of its rows, against the CPU and the oracle.

Bits are those of the same rows in any other batch, and a batch of words is launched as by a program of words alone.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import AttentionShape, EmbeddingTable, KVLayerShape, OpGraph, Pairing, RopeTable, Rows
from localinfer.kernels.program import Batch, MediaRows, Program, Segment
from localinfer.models.decoder.decoder import kv_layer_shapes, write_decoder
from localinfer.types import FloatArray
from tests.kernels.cpu.attention_cases import PLAIN, inputs_of
from tests.kernels.cpu.device import CpuDevice
from tests.kernels.cpu.tape_runs import assert_same_bits, random_rows, relative_error, table
from tests.kernels.cpu.test_attention_ranges import Ranges, ranged_oracle
from tests.models.arch_models import Device, build_model, normalized_error, read_config, skeletons, write_skeleton
from tests.models.small_models import write_small_llama, write_small_seer

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda import program
from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.weights import upload
from tests.kernels.cuda.device import CudaTestDevice, EmulatedDevice
from tests.kernels.cuda.test_cuda_attention import Cache

SLOPES = np.array([0.5, 0.01], np.float32)
SHAPES = {
    "plain": replace(PLAIN, num_heads=2, num_kv_heads=1),
    "all masks": replace(PLAIN, num_heads=2, window=50, softcap=3.0, sinks=SLOPES, alibi_slopes=SLOPES),
}
BLOCK = range(70, 90)
"""Positions that see each other."""


def block_ranges(rows: int) -> Ranges:
    """Positions that see what is before them, a block that is seen as one, positions that see few, and some that see
    more than their window."""
    own = np.arange(rows)
    starts, ends, windows = np.zeros(rows, np.int64), own + 1, own.copy()
    ends[BLOCK.start : BLOCK.stop] = BLOCK.stop
    starts[100:] = 97
    windows[60:66] = windows[BLOCK.start : BLOCK.stop : 2] = 5
    windows[BLOCK.start + 1 : BLOCK.stop : 2], windows[128:] = 65, 40
    return starts, ends, windows


# Rows by themselves at the seam of chunks and far from it; tiles of many rows.
@pytest.mark.parametrize(
    ("name", "kv_type", "run"),
    [
        ("plain", "f32", range(70, 92)),
        ("all masks", "f32", range(120, 134)),
        ("plain", "q8_0/q4_0", range(84, 90)),
        ("plain", "f16", range(60, 134)),
        ("all masks", "f16", range(134)),
        ("plain", "q4_0", range(66, 105)),
    ],
)
def test_rows_see_their_ranges_as_the_oracle_does(name: str, kv_type: str, run: range, pool: ThreadPool) -> None:
    shape, rows = SHAPES[name], 134
    cache, ranges = Cache(pool, shape, kv_type, inputs_of(shape, rows, seed=3)), block_ranges(rows)
    found, kernels = cache.attend([run], ranges=ranges)
    is_tiled = len(run) > 16 and kv_type != "f32"
    assert is_tiled == ("attention_tiles.attend_tiles" in kernels)
    wanted = ranged_oracle(cache.inputs, shape, kv_type, ranges, exact_queries=is_tiled)[run.start : run.stop]
    # Tiles round queries and weights to float16.
    assert relative_error(found, wanted) <= (8e-4 if is_tiled else 2e-6)


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_rows_with_ranges_have_the_bits_of_any_batch_and_of_rows_without(kv_type: str, pool: ThreadPool) -> None:
    shape, rows = SHAPES["all masks"], 110
    cache, ranges = Cache(pool, shape, kv_type, inputs_of(shape, rows, seed=4)), block_ranges(rows)
    runs = [range(5), range(66, 92)]
    wanted, _ = cache.attend(runs)
    up_to_their_own = np.zeros(rows, np.int64), np.arange(1, rows + 1), np.arange(rows)
    assert_same_bits(cache.attend(runs, ranges=up_to_their_own)[0], wanted)
    together, _ = cache.attend(runs, ranges=ranges)
    assert_same_bits(together[5:], cache.attend(runs[1:], ranges=ranges)[0])
    assert_same_bits(together[:5], wanted[:5])
    assert not np.array_equal(together[9:28], wanted[9:28])


WIDTH, ROWS, WORDS = 32, 14, 12
LAYOUT = KVLayout("f32", [KVLayerShape(1, WIDTH, WIDTH)])
PICTURE = slice(3, 9)
"""Rows of a text that are a picture of two rows of three, which see each other."""
IDS = np.array([1, 5, 2, -9, -8, -7, -6, -5, -4, 3, 0, 7, 8, 4], np.int32)
EMBEDDINGS = random_rows(6, 3 * WIDTH, 2)
TEXT = IDS[-5:]
"""Words alone."""
ENDS = np.arange(1, ROWS + 1)
ENDS[PICTURE] = PICTURE.stop
AXES_OF_PAIRS = np.array([0, 1, 2, 0])
AXES = np.repeat(np.arange(ROWS)[:, None], 3, axis=1)
AXES[PICTURE] = PICTURE.start + np.stack([np.zeros(6, np.int64), *np.divmod(np.arange(6), 3)], axis=1)
AXES[PICTURE.stop :] -= 3


def graph_of(words: EmbeddingTable, *, takes_media: bool = True) -> OpGraph:
    """What is looked up or given, its attention, and further parts added to all rows and to those with output."""
    tape = GraphBuilder(LAYOUT.layers)
    x, queries, keys, attended = (tape.buffer(name, WIDTH) for name in ("x", "queries", "keys", "attended"))
    out = tape.buffer("out", WIDTH, Rows.OUTPUT)
    rope = RopeTable(np.array([1.0, 0.5, 0.25, 0.1]), Pairing.HALVES, axes=AXES_OF_PAIRS if takes_media else None)
    tape.embed(x, words)
    if takes_media:
        tape.embed_media(x)
    for heads in (queries, keys):
        tape.add(heads, x, x, 0.0)
        tape.rope(heads, rope, WIDTH)
    tape.store_kv(0, keys, x)
    tape.attention(attended, queries, 0, AttentionShape(1, 1, WIDTH, WIDTH, 0.25), takes_ranges=takes_media)
    tape.add(x, x, attended)
    if takes_media:
        tape.embed_media(x, 1, adds=True)
    tape.select_output(out, x)
    if takes_media:
        tape.embed_media(out, 2, adds=True)
    return tape.finish(out)


class OnTheGpu:
    """A program of such a graph, and the kernels that it launches."""

    def __init__(self, *, takes_media: bool = True) -> None:
        self.device = EmulatedDevice()
        data = random_rows(WORDS, WIDTH, 1).reshape(-1).view(np.uint8)
        words = EmbeddingTable("words", WORDS, WIDTH, upload(self.device, Layout.F32, data, 1, WORDS, WIDTH))
        graph = graph_of(words, takes_media=takes_media)
        self.program = lower_to_cuda(graph, self.device, LAYOUT, max_batch_rows=24, max_output_rows=24)

    def page(self) -> NDArray[np.int64]:
        return np.array([self.device.allocate(LAYOUT.page_bytes)], np.int64)


def part_of(page: NDArray[np.int64], start: int, end: int) -> Segment:
    """Rows of the text with its picture."""
    first, last = max(start, PICTURE.start), min(end, PICTURE.stop)
    embeddings = EMBEDDINGS[first - PICTURE.start : last - PICTURE.start]
    media = MediaRows([(first - start, embeddings)] if first < last else [], AXES[start:end])
    return Segment(start, end - start, page, media=media, key_ends=ENDS[start:end])


def batch_of(ids: NDArray[np.int32], *segments: Segment) -> Batch:
    return Batch(ids, segments, np.arange(len(ids), dtype=np.int32))


def run_parts(on_device: Program, page: NDArray[np.int64], *ends: int) -> FloatArray:
    """All rows of the text, in batches that end there."""
    starts = [0, *ends[:-1]]
    batches = [batch_of(IDS[start:end], part_of(page, start, end)) for start, end in zip(starts, ends, strict=True)]
    return np.concatenate([on_device.run(batch).copy() for batch in batches])


def test_a_picture_is_computed_as_on_the_cpu_with_the_same_bits_in_any_batch(pool: ThreadPool) -> None:
    words = table(random_rows(WORDS, WIDTH, 1))
    on_cpu = lower_to_cpu(graph_of(words), pool, LAYOUT, max_batch_rows=24, max_output_rows=24)
    page = aligned_zeros(LAYOUT.page_bytes)
    wanted = run_parts(on_cpu, np.array([address(page)]), ROWS)
    gpu = OnTheGpu()
    found = run_parts(gpu.program, gpu.page(), ROWS)
    assert relative_error(found, wanted) <= 2e-6
    # A captured graph replayed, with other embeddings at the same addresses before.
    other = replace(part_of(gpu.page(), 0, ROWS), media=MediaRows([(PICTURE.start, -EMBEDDINGS)], AXES))
    assert not np.array_equal(gpu.program.run(batch_of(IDS, other)), found)
    assert_same_bits(run_parts(gpu.program, gpu.page(), ROWS), found)
    assert_same_bits(run_parts(gpu.program, gpu.page(), 3, 9, 10, 11, ROWS), found)
    # Beside words, as more rows than a captured graph has, and with some of its rows as output.
    ids = np.concatenate([TEXT, IDS])
    beside = gpu.program.run(batch_of(ids, Segment(0, 5, gpu.page()), part_of(gpu.page(), 0, ROWS))).copy()
    assert_same_bits(beside[5:], found)
    alone = OnTheGpu(takes_media=False)
    assert_same_bits(beside[:5], alone.program.run(batch_of(TEXT, Segment(0, 5, alone.page()))))
    few = Batch(IDS, [part_of(gpu.page(), 0, ROWS)], np.array([8, 4, 13], np.int32))
    assert_same_bits(gpu.program.run(few).copy(), found[[8, 4, 13]])


def test_words_are_launched_as_by_a_program_of_words(pool: ThreadPool) -> None:
    seeing, blind = OnTheGpu(), OnTheGpu(takes_media=False)
    # A picture before leaves nothing behind.
    run_parts(seeing.program, seeing.page(), ROWS)
    launched = len(seeing.device.kernels)
    found = [gpu.program.run(batch_of(TEXT, Segment(0, 5, gpu.page()))).copy() for gpu in (seeing, blind)]
    assert seeing.device.kernels[launched:] == blind.device.kernels
    assert_same_bits(found[0], found[1])
    with pytest.raises(RequestError, match="words only, no pictures or sounds; load the model with what"):
        blind.program.run(batch_of(IDS, replace(part_of(blind.page(), 0, ROWS), key_ends=None)))
    with pytest.raises(RequestError, match="which this program does not take"):
        blind.program.run(batch_of(TEXT, Segment(0, 5, blind.page(), key_ends=np.full(5, 5))))


def run_model(path: Path, device: Device) -> FloatArray:
    """Logits of a word, a picture of a row of two and a sound of one row, with what the model takes of them."""
    config = replace(read_config(path), takes_media=True)
    graph = write_decoder(config, device.weights(path))
    ids, axes = np.array([5, -2, -3, -4], np.int32), np.array([[0] * 3, [1] * 3, [1, 1, 2], [3] * 3])
    rows = np.random.default_rng(1).standard_normal((3, graph.media_width), np.float32)
    media = MediaRows([(1, rows[:2]), (3, rows[2:])], axes if any(config.rope.sections[1:]) else None)
    ends = np.array([1, 3, 3, 4]) if graph.takes_ranges else None
    written = device.program(graph, len(ids))
    segment = Segment(0, len(ids), device.pages(kv_layer_shapes(config), len(ids)), media=media, key_ends=ends)
    found = written.run(Batch(ids, [segment], np.arange(len(ids), dtype=np.int32))).copy()
    written.close()
    return found


def small_gemma(path: Path) -> Path:
    """The architecture tests' Gemma 3 with heads and rows that are narrow, as the emulator takes its time."""
    skeleton, sizes = deepcopy(skeletons()["gemma3-gqa"]), {256: 64, 384: 64, 128: 32, 64: 16}
    skeleton["kv"] = [setting for setting in skeleton["kv"] if not setting[0].startswith("tokenizer")]
    for setting in skeleton["kv"]:
        if "length" in setting[0] or "size" in setting[0] or "dimension" in setting[0]:
            setting[3] = sizes.get(setting[3], setting[3])
    skeleton["tensors"] = [(name, [sizes.get(size, size) for size in shape]) for name, shape in skeleton["tensors"]]
    write_skeleton(skeleton, path)
    return path


# Positions on axes; interleaved ones, and additions in deeper layers; a picture that sees itself; nothing of it.
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen2vl": lambda folder: build_model(folder, "qwen2vl-gqa").path,
    "qwen3vl": lambda folder: write_small_seer(folder / "qwen3vl.gguf"),
    "gemma3": lambda folder: small_gemma(folder / "gemma3.gguf"),
    "llama": lambda folder: write_small_llama(folder / "llama.gguf"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_see_and_hear_have_the_logits_of_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Captured graphs have room for more chunks than these rows fill.
    monkeypatch.setattr(program, "_FEWEST_CHUNKS", 1)
    path = MODELS[name](tmp_path)
    found, wanted = (run_model(path, device) for device in (CudaTestDevice(EmulatedDevice()), CpuDevice(1)))
    assert normalized_error(found, wanted) <= 1e-6
