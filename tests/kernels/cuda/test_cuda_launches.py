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
    "attention.merge_chunks",
    "matmul.matmul",
    "rows.norm",
    "matmul.matmul",
    "matmul.matmul",
)
"""A layer of a llama: norm and quantization; q, k and v; the cache and attention by chunks with RoPE; their merging and
quantization; output with residual; norm and quantization; gate, up, activation and quantization; down with residual."""

LAUNCHES: dict[str, int] = {
    "llama-dense": 23,
    "llama-moe": 39,
    "qwen2-dense": 23,
    "qwen2moe-moe": 49,
    "qwen3-dense": 27,
    "qwen3moe-moe": 43,
    "gemma-dense": 23,
    "gemma2-dense": 32,
    "gemma3-dense": 35,
    "phi2-dense": 27,
    "phi3-dense": 23,
    "granite-dense": 23,
    "granitemoe-moe": 43,
    "olmo2-dense": 35,
    "olmoe-moe": 43,
    "smollm3-dense": 23,
    "mistral3-dense": 23,
    "deepseek-moe": 33,
    "deepseek2-moe": 56,
    "gpt-oss-moe": 39,
    "glm4-dense": 31,
    "glm4moe-moe": 37,
    "command-r-dense": 23,
    "cohere2-dense": 23,
    "exaone4-dense": 35,
    "falcon-dense": 31,
    "gpt2-dense": 27,
    "gptneox-dense": 31,
    "starcoder2-dense": 27,
    "stablelm-dense": 27,
    "internlm2-dense": 23,
    "minicpm-dense": 23,
    "hunyuan-dense-dense": 31,
    "seed_oss-dense": 23,
    "arcee-dense": 27,
    "llama4-moe": 74,
    "bailingmoe2-moe": 37,
    "dots1-moe": 37,
    "hunyuan-moe-moe": 51,
    "minimax-m2-moe": 43,
    "nemotron-dense": 27,
    "chatglm-dense": 23,
    "baichuan-dense": 22,
    "orion-dense": 23,
    "qwen-dense": 23,
    "mpt-dense": 35,
    "bloom-dense": 27,
    "llama-gqa": 23,
    "qwen2-gqa": 23,
    "qwen3-gqa": 27,
    "qwen3moe-gqa": 43,
    "gemma2-gqa": 32,
    "gemma3-gqa": 35,
    "granite-gqa": 23,
    "smollm3-gqa": 23,
    "gpt-oss-gqa": 39,
    "olmo2-gqa": 35,
    "mistral3-gqa": 23,
    "gemma3n-altup": 1277,
    "gemma4-e2b": 240,
    "gemma4-dense": 153,
    "gemma4-moe": 207,
    "qwen3vl-gqa": 37,
    "qwen3vlmoe-moe": 61,
    "mistral4-mla": 120,
    "ernie4_5-gqa": 33,
    "ernie4_5-moe-moe": 72,
    "exaone-moe-moe": 117,
    "bailingmoe-moe": 61,
    "bailingmoe2-groups": 80,
    "smallthinker-moe": 93,
    "smallthinker-dense-attention": 76,
    "apertus-gqa": 45,
    "afmoe-moe": 202,
    "mimo2-mtp": 84,
    "step35-mtp": 136,
    "minimax-m3-dense": 77,
    "deepseek32-mtp": 112,
    "hunyuan-dense-gqa": 43,
    "hunyuan-moe-gqa": 70,
    "minicpm3-mla": 60,
    "bitnet-gqa": 36,
    "bitnet-scales": 39,
    "glm4moe-mtp": 77,
    "deepseek2-mtp": 112,
    "olmo-gqa": 42,
    "qwen2vl-gqa": 33,
    "deci-mixed": 41,
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
def test_a_layer_of_a_llama_takes_eight(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", (3, 256, 4, 2, 64, 512, 256, False))
    device = RecordingDevice()
    program, kv_layout, _ = make_program(device, "small", layout, "f16")
    ids = np.zeros(1, np.int32)
    program.run(Batch(ids, [Segment(3, 1, np.array([device.allocate(kv_layout.page_bytes)], np.int64))], ids))
    kernels = [launch.kernel for launch in device.launches]
    first = 1 + len(LAYER) + kernels.count("rows.rope_angles")
    assert tuple(kernels[first : first + len(LAYER)]) == LAYER
    assert len(kernels) == first + 2 * len(LAYER) + 5, "rows of the output, with codes; norm; logits"
