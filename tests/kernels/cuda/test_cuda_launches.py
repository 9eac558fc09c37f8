"""How many kernels a token takes on a GPU: of every architecture that runs there, on a device that only records.

Weights are Q8_0 wherever they can be, so that products read quantized activations.
"""

from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import ShapeError, UnsupportedFormatError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.decoder import write_decoder
from tests.kernels.cpu.device import DecodedWeights
from tests.models.arch_models import architectures, build_model, read_config

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.weights import DeviceWeight
from tests.bench.random_llama import SHAPES, make_program
from tests.kernels.cuda.recording_device import RecordingDevice

LAYER = (
    "rows.norm",
    "matmul.matmul",
    "kv_store.store_rows",
    "attention.attend_chunks",
    "attention.merge_chunks",
    "matmul.matmul",
    "rows.norm",
    "matmul.matmul",
    "matmul.matmul",
)
"""A layer of a llama: norm and quantization; q, k and v; the cache with RoPE of keys; attention by chunks with RoPE of
queries; their merging and quantization; output with residual; norm and quantization; gate, up, activation and
quantization; down with residual."""

LAUNCHES: dict[str, int] = {
    "llama-dense": 25,
    "llama-moe": 41,
    "qwen2-dense": 25,
    "qwen2moe-moe": 51,
    "qwen3-dense": 29,
    "qwen3moe-moe": 45,
    "gemma-dense": 25,
    "gemma2-dense": 34,
    "gemma3-dense": 37,
    "phi2-dense": 29,
    "phi3-dense": 25,
    "granite-dense": 25,
    "granitemoe-moe": 45,
    "olmo2-dense": 37,
    "olmoe-moe": 45,
    "smollm3-dense": 25,
    "mistral3-dense": 25,
    "deepseek-moe": 35,
    "deepseek2-moe": 58,
    "gpt-oss-moe": 41,
    "glm4-dense": 33,
    "glm4moe-moe": 39,
    "command-r-dense": 25,
    "cohere2-dense": 25,
    "exaone4-dense": 37,
    "falcon-dense": 33,
    "gpt2-dense": 29,
    "gptneox-dense": 33,
    "starcoder2-dense": 29,
    "stablelm-dense": 29,
    "internlm2-dense": 25,
    "minicpm-dense": 25,
    "hunyuan-dense-dense": 33,
    "seed_oss-dense": 25,
    "arcee-dense": 29,
    "llama4-moe": 78,
    "bailingmoe2-moe": 39,
    "dots1-moe": 39,
    "hunyuan-moe-moe": 53,
    "minimax-m2-moe": 45,
    "nemotron-dense": 29,
    "chatglm-dense": 25,
    "baichuan-dense": 24,
    "orion-dense": 25,
    "qwen-dense": 25,
    "mpt-dense": 37,
    "bloom-dense": 29,
    "llama-gqa": 25,
    "qwen2-gqa": 25,
    "qwen3-gqa": 29,
    "qwen3moe-gqa": 45,
    "gemma2-gqa": 34,
    "gemma3-gqa": 37,
    "granite-gqa": 25,
    "smollm3-gqa": 25,
    "gpt-oss-gqa": 41,
    "olmo2-gqa": 37,
    "mistral3-gqa": 25,
    "gemma3n-altup": 1277,
    "gemma4-e2b": 240,
    "gemma4-dense": 153,
    "gemma4-moe": 207,
    "qwen3vl-gqa": 40,
    "qwen3vlmoe-moe": 64,
    "mistral4-mla": 124,
    "ernie4_5-gqa": 36,
    "ernie4_5-moe-moe": 76,
    "exaone-moe-moe": 123,
    "bailingmoe-moe": 64,
    "bailingmoe2-groups": 84,
    "smallthinker-moe": 98,
    "smallthinker-dense-attention": 80,
    "apertus-gqa": 48,
    "afmoe-moe": 210,
    "mimo2-mtp": 89,
    "step35-mtp": 142,
    "minimax-m3-dense": 81,
    "deepseek32-mtp": 116,
    "hunyuan-dense-gqa": 46,
    "hunyuan-moe-gqa": 73,
    "minicpm3-mla": 63,
    "bitnet-gqa": 39,
    "bitnet-scales": 42,
    "glm4moe-mtp": 81,
    "deepseek2-mtp": 116,
    "olmo-gqa": 45,
    "qwen2vl-gqa": 36,
    "deci-mixed": 44,
}
"""Launches of a token, logits included, by model; those that a GPU refuses are left out."""


def launches_of_a_token(name: str, folder: Path) -> list[str]:
    """Kernels of one row at position 3 over a cache of float16; raises what lowering raises."""
    device = RecordingDevice()

    def placed(_data: object, experts: int, rows: int, columns: int) -> DeviceWeight:
        layout = Layout.Q8_0 if columns % 32 == 0 else Layout.F32
        return DeviceWeight(layout, rows, columns, experts, device.allocate(4 * experts * rows * columns))

    path = build_model(folder, name).path
    graph = write_decoder(read_config(path), DecodedWeights(path, placed))
    layout = KVLayout("f16", graph.kv_layers)
    program = lower_to_cuda(graph, device, layout, max_batch_rows=4, max_output_rows=4)
    pages = np.array([device.allocate(layout.page_bytes)], np.int64)
    ids = np.zeros(1, np.int32)
    program.run(Batch(ids, [Segment(3, 1, pages)], ids))
    return [launch.kernel for launch in device.launches]


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


@pytest.mark.parametrize("layout", [Layout.Q4_0, Layout.INT4_128, Layout.Q6_K])
def test_a_layer_of_a_llama_takes_nine(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", (3, 256, 4, 2, 64, 512, 256, False))
    device = RecordingDevice()
    program, kv_layout, _ = make_program(device, "small", layout, "f16")
    ids = np.zeros(1, np.int32)
    program.run(Batch(ids, [Segment(3, 1, np.array([device.allocate(kv_layout.page_bytes)], np.int64))], ids))
    kernels = [launch.kernel for launch in device.launches]
    first = 1 + len(LAYER) + kernels.count("rows.rope_angles")
    assert tuple(kernels[first : first + len(LAYER)]) == LAYER
    assert len(kernels) == first + 2 * len(LAYER) + 5, "rows of the output, with codes; norm; logits"
