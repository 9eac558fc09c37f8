"""How many kernels a token takes on a GPU: of every architecture that runs there, on a device that only records.

Weights are Q8_0 wherever they can be, so that products read quantized activations.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import ShapeError, UnsupportedFormatError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import OpGraph
from localinfer.kernels.program import Batch, MediaRows, Segment
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.decoder.decoder import write_decoder
from localinfer.models.decoder.text_head import write_text_model
from tests.kernels.cpu.device import DecodedWeights
from tests.models.arch_models import architectures, build_model, build_text_model, read_config, text_models
from tests.models.checkpoint.published_models import cases_of_folders_alone, read_cases, write_case

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.weights import DeviceWeight
from tests.bench.random_llama import SHAPES, make_program
from tests.kernels.cuda.recording_device import RecordingDevice

LAYER = (
    "rows.norm",
    "matmul.matmul",
    "attention.attend_chunks",
    "matmul.matmul",
    "rows.norm",
    "matmul.matmul",
    "matmul.matmul",
)
"""A layer of a llama: norm and quantization; q, k and v; the cache and attention with RoPE, and quantization; output
with residual; norm and quantization; gate, up, activation and quantization; down with residual."""

LAUNCHES: dict[str, int] = {
    "llama-dense": 21,
    "llama-moe": 37,
    "qwen2-dense": 21,
    "qwen2moe-moe": 47,
    "qwen3-dense": 25,
    "qwen3moe-moe": 41,
    "gemma-dense": 21,
    "gemma2-dense": 30,
    "gemma3-dense": 33,
    "phi2-dense": 25,
    "phi3-dense": 21,
    "granite-dense": 21,
    "granitemoe-moe": 41,
    "olmo2-dense": 33,
    "olmoe-moe": 41,
    "smollm3-dense": 21,
    "mistral3-dense": 21,
    "deepseek-moe": 31,
    "deepseek2-moe": 54,
    "gpt-oss-moe": 37,
    "glm4-dense": 29,
    "glm4moe-moe": 35,
    "command-r-dense": 21,
    "cohere2-dense": 21,
    "exaone4-dense": 33,
    "falcon-dense": 29,
    "gpt2-dense": 25,
    "gptneox-dense": 29,
    "starcoder2-dense": 25,
    "stablelm-dense": 25,
    "internlm2-dense": 21,
    "minicpm-dense": 21,
    "hunyuan-dense-dense": 29,
    "seed_oss-dense": 21,
    "arcee-dense": 25,
    "llama4-moe": 70,
    "bailingmoe2-moe": 35,
    "dots1-moe": 35,
    "hunyuan-moe-moe": 49,
    "minimax-m2-moe": 41,
    "nemotron-dense": 25,
    "chatglm-dense": 21,
    "baichuan-dense": 20,
    "orion-dense": 21,
    "qwen-dense": 21,
    "mpt-dense": 33,
    "bloom-dense": 25,
    "llama-gqa": 21,
    "qwen2-gqa": 21,
    "qwen3-gqa": 25,
    "qwen3moe-gqa": 41,
    "gemma2-gqa": 30,
    "gemma3-gqa": 33,
    "granite-gqa": 21,
    "smollm3-gqa": 21,
    "gpt-oss-gqa": 37,
    "olmo2-gqa": 33,
    "mistral3-gqa": 21,
    "gemma3n-altup": 1252,
    "gemma4-e2b": 231,
    "gemma4-dense": 145,
    "gemma4-moe": 201,
    "qwen3vl-gqa": 34,
    "qwen3vlmoe-moe": 58,
    "mistral4-mla": 116,
    "ernie4_5-gqa": 30,
    "ernie4_5-moe-moe": 68,
    "exaone-moe-moe": 111,
    "bailingmoe-moe": 58,
    "bailingmoe2-groups": 76,
    "smallthinker-moe": 88,
    "smallthinker-dense-attention": 72,
    "apertus-gqa": 42,
    "afmoe-moe": 194,
    "mimo2-mtp": 79,
    "step35-mtp": 130,
    "minimax-m3-dense": 73,
    "deepseek32-mtp": 108,
    "hunyuan-dense-gqa": 40,
    "hunyuan-moe-gqa": 67,
    "minicpm3-mla": 57,
    "bitnet-gqa": 33,
    "bitnet-scales": 36,
    "glm4moe-mtp": 73,
    "deepseek2-mtp": 108,
    "olmo-gqa": 39,
    "qwen2vl-gqa": 30,
    "deci-mixed": 38,
}
"""Launches of a token, logits included, by model; those that a GPU refuses are left out."""


def weights_of(path: Path, device: RecordingDevice) -> DecodedWeights:
    def placed(_data: object, experts: int, rows: int, columns: int) -> DeviceWeight:
        layout = Layout.Q8_0 if columns % 32 == 0 else Layout.F32
        return DeviceWeight(layout, rows, columns, experts, device.allocate(4 * experts * rows * columns))

    return DecodedWeights(path, placed)


def launches_of(graph: OpGraph, device: RecordingDevice, num_rows: int, position: int) -> list[str]:
    """Kernels of rows from `position` on, over a cache of float16; raises what lowering raises."""
    layout = KVLayout("f16", graph.kv_layers)
    program = lower_to_cuda(graph, device, layout, max_batch_rows=64, max_output_rows=4, samples=False)
    pages = np.array([device.allocate(layout.page_bytes)] * (1 + (position + num_rows) // 32), np.int64)
    ids = np.zeros(num_rows, np.int32)
    program.run(Batch(ids, [Segment(position, num_rows, pages)], ids[:1]))
    return [launch.kernel for launch in device.launches]


def launches_of_a_token(name: str, folder: Path) -> list[str]:
    device, path = RecordingDevice(), build_model(folder, name).path
    return launches_of(write_decoder(read_config(path), weights_of(path, device)), device, 1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launches")


@pytest.mark.parametrize("name", architectures())
def test_a_token_takes_so_many_launches(name: str, folder: Path) -> None:
    if name not in LAUNCHES:
        with pytest.raises((ShapeError, UnsupportedFormatError), match="device 'cpu'"):
            launches_of_a_token(name, folder)
        return
    assert len(launches_of_a_token(name, folder)) == LAUNCHES[name]


@pytest.mark.parametrize("name", ["gemma3-gqa", "gemma4-e2b", "qwen2vl-gqa", "qwen3vl-gqa"])
def test_words_take_the_launches_of_a_model_of_words_and_pictures_only_what_was_prepared(
    name: str, folder: Path
) -> None:
    path = build_model(folder, name).path
    config, found = read_config(path), []
    for takes_media in (False, True):
        device = RecordingDevice()
        graph = write_decoder(replace(config, takes_media=takes_media), weights_of(path, device))
        found.append([launches_of(graph, device, rows, 3) for rows in (1, 5, 40)])
    assert found[0] == found[1]
    layout, prepared = KVLayout("f16", graph.kv_layers), set(device.keys)
    program = lower_to_cuda(graph, device, layout, max_batch_rows=64, max_output_rows=4, samples=False)
    for rows in (1, 5, 40):
        pages = np.array([device.allocate(layout.page_bytes)] * 2, np.int64)
        media = MediaRows([(0, np.zeros((rows, graph.media_width), np.float32))], np.ones((rows, 3), np.int64))
        ends = np.full(rows, rows) if graph.takes_ranges else None
        device.launches.clear()
        segment = Segment(0, rows, pages, media=media, key_ends=ends)
        program.run(Batch(np.full(rows, -9, np.int32), [segment], np.zeros(1, np.int32)))
        kernels = {launch.key for launch in device.launches}
        assert kernels <= prepared and "rows.embed_media" in {kernel for kernel, _ in kernels}


@pytest.mark.parametrize("name", cases_of_folders_alone())
def test_models_that_only_folders_hold_are_lowered(name: str, tmp_path: Path) -> None:
    device, path = RecordingDevice(), write_case(tmp_path, read_cases()[name])
    graph = write_decoder(read_config(path), weights_of(path, device))
    if graph.states:
        with pytest.raises(UnsupportedFormatError, match="device 'cpu'"):
            launches_of(graph, device, 1, 3)
        return
    assert launches_of(graph, device, 1, 3)


TEXT_LAUNCHES: dict[str, int] = {
    "bert-encoder": 38,
    "nomic-bert-encoder": 32,
    "nomic-bert-moe-encoder": 57,
    "jina-bert-v2-encoder": 31,
    "jina-bert-v2-code-encoder": 46,
    "jina-bert-v3-encoder": 38,
    "modern-bert-encoder": 50,
    "modern-bert-swiglu-encoder": 41,
    "eurobert-encoder": 31,
    "neo-bert-encoder": 31,
    "gemma-embedding-encoder": 103,
    "bert-reranker": 27,
    "modern-bert-reranker": 41,
    "qwen3-reranker": 24,
}
"""Launches of a text of eight tokens, pooling included, by model."""


@pytest.mark.parametrize("name", text_models())
def test_a_text_takes_so_many_launches(name: str, folder: Path) -> None:
    path = build_text_model(folder, name).path
    device = RecordingDevice()
    graph = write_text_model(read_config(path), weights_of(path, device), Pooling.MEAN, Pooling.FIRST)
    assert len(launches_of(graph, device, 8, 0)) == TEXT_LAUNCHES[name]
    # Every other pooling, and rows enough for the library's products and for tiles.
    for pooling in (Pooling.FIRST, Pooling.LAST, Pooling.NONE):
        device = RecordingDevice()
        graph = write_text_model(read_config(path), weights_of(path, device), pooling, Pooling.FIRST)
        kernels = launches_of(graph, device, 24, 0)
        assert "attention_tiles.attend_tiles" in kernels


@pytest.mark.parametrize("layout", [Layout.Q4_0, Layout.INT4_128, Layout.Q6_K])
def test_a_layer_of_a_llama_takes_seven(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", (3, 256, 4, 2, 64, 512, 256, False))
    device = RecordingDevice()
    program, kv_layout, _ = make_program(device, "small", layout, "f16")
    ids = np.zeros(1, np.int32)
    program.run(Batch(ids, [Segment(3, 1, np.array([device.allocate(kv_layout.page_bytes)], np.int64))], ids))
    kernels = [launch.kernel for launch in device.launches]
    first = 1 + len(LAYER) + kernels.count("rows.rope_angles")
    assert tuple(kernels[first : first + len(LAYER)]) == LAYER
    assert len(kernels) == first + 2 * len(LAYER) + 5, "rows of the output, with codes; norm; logits"
