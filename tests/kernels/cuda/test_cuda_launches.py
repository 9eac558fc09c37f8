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
