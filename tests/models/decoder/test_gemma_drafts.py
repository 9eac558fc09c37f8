"""A draft model over the cache of its target, against another runtime's drafts, and its bits in any batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.errors import ModelFileError, UnsupportedFormatError
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.decoder import kv_layer_shapes, write_decoder
from localinfer.models.decoder.gemma_blocks import write_assistant
from localinfer.models.load.loader import load_model
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.writer import encode_value
from localinfer.types import FloatArray
from tests.kernels.cpu.device import CpuWeights
from tests.models.arch_models import DATA, build_model, normalized_error, read_config, skeletons, write_skeleton
from tests.support.oracle import NumpyProgram, NumpyWeights
from tests.support.typed_models import make_model

NAME = "gemma4-assistant-draft"
TARGET = skeletons()[NAME]["options"]["target"]


@pytest.fixture
def files(folder: Path) -> tuple[Path, Path]:
    """The draft model's and its target's."""
    path = folder / f"{NAME}.gguf"
    if not path.exists():
        write_skeleton(skeletons()[NAME], path)
    return path, build_model(folder, TARGET).path


def answers() -> tuple[np.ndarray, FloatArray, FloatArray]:
    """Token ids, and logits and states of the draft of every token but the first."""
    with np.load(DATA / "logits.npz") as found:
        return found[f"{NAME}.tokens"], found[f"{NAME}.draft_logits"], found[f"{NAME}.draft_hidden"]


def whole(ids: np.ndarray, start: int, pages: np.ndarray) -> Batch:
    """Tokens of one sequence, all of them output rows."""
    return Batch(ids, [Segment(start, len(ids), pages)], np.arange(len(ids), dtype=np.int32))


def after(states: FloatArray, ids: np.ndarray, start: int, pages: np.ndarray) -> Batch:
    """Tokens from a position on, a segment each, with the state of the position before it."""
    places = [row.ctypes.data for row in states]
    segments = [Segment(start + row, 1, pages, carried=(place, 0)) for row, place in enumerate(places)]
    return Batch(ids, segments, np.arange(len(ids), dtype=np.int32))


def test_drafts_equal_those_of_the_reference_runtime(files: tuple[Path, Path]) -> None:
    draft_path, target_path = files
    config, target = read_config(draft_path), read_config(target_path)
    layers, weights = kv_layer_shapes(target), NumpyWeights(target_path)
    ids, logits, hidden = answers()
    pages = np.array([1], np.int64)
    main = NumpyProgram(write_decoder(target, weights, has_output_head=False))
    states = main.run(whole(ids, 0, pages)).astype(np.float32)
    program = NumpyProgram(write_assistant(config, NumpyWeights(draft_path), target, weights, layers))
    program.share_cache(main)
    found = program.run(after(states[:-1], ids[1:], 1, pages))
    assert program.hidden is not None
    assert normalized_error(found, logits) <= 1e-6
    assert normalized_error(program.hidden, hidden) <= 1e-6


@pytest.mark.parametrize("num_threads", [1, 2])
def test_drafts_on_the_cpu_are_the_same_bits_in_any_batch(num_threads: int, files: tuple[Path, Path]) -> None:
    draft_path, target_path = files
    config, target = read_config(draft_path), read_config(target_path)
    ids, logits, hidden = answers()
    layout = KVLayout("f32", kv_layer_shapes(target))
    memory = aligned_zeros(2 * layout.page_bytes)
    memory[:] = 255
    pages = address(memory) + np.arange(2, dtype=np.int64) * layout.page_bytes
    pool = ThreadPool(num_threads)
    weights = CpuWeights(pool, target_path)
    sizes = {"max_batch_rows": 40, "max_output_rows": 40}
    main = lower_to_cpu(write_decoder(target, weights, shows_states=True), pool, layout, **sizes)
    graph = write_assistant(config, CpuWeights(pool, draft_path), target, weights, layout.layers)
    program: CpuProgram = lower_to_cpu(graph, pool, layout, **sizes)
    assert main.hidden is not None
    assert program.hidden is not None
    main.run(whole(ids[:1], 0, pages))
    drafts = []
    for position in range(1, len(ids)):
        # Nothing is stored yet for this position, nor by the draft.
        before = memory.copy()
        drawn = program.run(after(main.hidden[:1], ids[position : position + 1], position, pages))
        drafts.append(np.concatenate([drawn, program.hidden[:1]], axis=1))
        np.testing.assert_array_equal(memory, before)
        main.run(whole(ids[position : position + 1], position, pages))
    one_by_one = np.concatenate(drafts)
    main.run(whole(ids, 0, pages))
    drawn = program.run(after(main.hidden[: len(ids) - 1], ids[1:], 1, pages))
    at_once = np.concatenate([drawn, program.hidden[: len(drawn)]], axis=1)
    program.close()
    np.testing.assert_array_equal(at_once.view(np.uint32), one_by_one.view(np.uint32))
    assert normalized_error(at_once[:, : target.vocab_size], logits) <= 1e-6
    assert normalized_error(at_once[:, target.vocab_size :], hidden) <= 1e-6


def test_draft_model_is_refused_alone_and_beside_a_target_that_it_does_not_fit(files: tuple[Path, Path]) -> None:
    draft_path, target_path = files
    with pytest.raises(UnsupportedFormatError, match="a draft model without keys and values.*as its draft"):
        load_model(draft_path)
    config, target, weights = read_config(draft_path), read_config(target_path), NumpyWeights(target_path)
    layers = kv_layer_shapes(target)
    larger = [replace(shape, key_size=64) for shape in layers]
    for other, kept, reason in (
        (replace(target, architecture="gemma3"), layers, "drafts for 'gemma4' models, and .* architecture 'gemma3'"),
        (replace(target, vocab_size=64), layers, "has 128 tokens, and its target 64"),
        (replace(target, hidden_size=96), layers, "reads states of 64 numbers, and those of its target have 96"),
        (replace(target, sliding_window=16), layers, "has windows of 12, and its target of 16"),
        (replace(target, windowed_layers=(False,) * 9), layers, "has a windowed layer 0, and its target none"),
        (target, larger, r"has 4 heads of sizes \(16, 16\) in layer 0, where its target keeps 1 of \(64, 16\)"),
    ):
        with pytest.raises(UnsupportedFormatError, match=reason):
            write_assistant(config, NumpyWeights(draft_path), other, weights, kept)


def test_draft_model_whose_architecture_is_an_array_is_refused(tmp_path: Path) -> None:
    """It was looked up in a table as it is, which arrays cannot be."""
    model = make_model(TensorType.F32)
    path = model.write(tmp_path / "model.gguf")
    model.metadata["general.architecture"] = encode_value(np.array([1, 2]))
    draft = model.write(tmp_path / "draft.gguf")
    with pytest.raises(ModelFileError, match="general.architecture is an array of 2 int64"):
        localinfer.load(path, draft=draft, threads=1, device="cpu")
