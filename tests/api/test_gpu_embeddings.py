"""Embeddings and scores on emulated GPUs: the CPU's numbers, beside generations, in memory that is there already."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.sampling.params import SamplingParams
from localinfer.generation.pooling import PooledText, TextPooler
from localinfer.models.decoder.block_config import Pooling
from localinfer.types import ProgressCallback
from tests.api.encoder_models import write_encoder
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import build_text_model, normalized_error, run_texts
from tests.models.small_models import HIDDEN, write_small_llama
from tests.support.inside import engine_of, model_of

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.kernel_cache import KernelKey
from tests.kernels.cuda.device import CudaTestDevice, EmulatedDevice
from tests.models.decoder.test_text_head import pooling_of
from tests.models.emulated_gpu import NamedDevice, emulate_gpus

TEXTS = [np.array(ids, np.int32) for ids in ([3, 1, 4], [2], [*range(5, 18)], [9, 9, 8, 7, 6, 5])]
LONG_TEXT = np.arange(5, 22, dtype=np.int32)
"""As the texts together it has more rows than a captured graph, which takes an emulator several times as long."""
OPTIONS: dict[str, Any] = {"threads": 1, "context_length": 64, "kv_memory": 1 << 22, "speculation": None}


class CountingDevice(NamedDevice):
    """The emulator, with the bytes that were allocated and the kernels that were prepared."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.allocated = 0
        self.keys: list[KernelKey] = []

    def allocate(self, num_bytes: int) -> int:
        self.allocated += num_bytes
        return super().allocate(num_bytes)

    def prepare(
        self, first: Sequence[KernelKey], every: Sequence[KernelKey], progress: ProgressCallback | None
    ) -> None:
        self.keys += [*first, *every]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return emulate_gpus(monkeypatch, [64 << 30] * 2, CountingDevice)


def vectors(
    path: Path, pooling: str, texts: Sequence[NDArray[np.int32]] = TEXTS, **options: Any
) -> list[NDArray[np.float32]]:
    with localinfer.load(path, **OPTIONS, **options) as llm:
        return llm.embed_many(texts, pooling=pooling, normalize=False)


def check_vectors(
    gpus: list[Any], path: Path, pooling: str, options: dict[str, Any], texts: Sequence[NDArray[np.int32]] = TEXTS
) -> None:
    wanted = vectors(path, pooling, texts, device="cpu")
    found = vectors(path, pooling, texts, **options)
    assert gpus, "a GPU was opened"
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(theirs).max())


ONE: dict[str, Any] = {"device": "cuda:0"}
TWO: dict[str, Any] = {"device": "cuda:0,cuda:1"}
PART: dict[str, Any] = {"device": "cuda:0", "gpu_layers": 1}


# What is pooled is the same whatever computed it: every kind of each, and all rows of every placement.
@pytest.mark.parametrize(
    ("options", "pooling"),
    [(ONE, "mean"), (TWO, "first"), (PART, "last"), (ONE, "none"), (TWO, "none"), (PART, "none")],
)
def test_vectors_of_a_decoder_on_gpus_are_the_cpus(
    gpus: list[Any], tmp_path: Path, options: dict[str, Any], pooling: str
) -> None:
    path = write_small_llama(tmp_path / "small.gguf")
    check_vectors(gpus, path, pooling, options)


@pytest.mark.parametrize(("pooling_type", "device"), [(1, "cuda:0,cuda:1"), (3, "cuda:0")])
def test_matrices_behind_the_pooling_run_on_the_gpu(
    gpus: list[Any], tmp_path: Path, pooling_type: int, device: str
) -> None:
    more = {"dense_2": (48, HIDDEN), "dense_3": (8, 48)}
    path = write_small_llama(tmp_path / "dense.gguf", extra={"pooling_type": pooling_type}, more=more)
    wanted = vectors(path, "mean" if pooling_type == 1 else "last", device="cpu")
    found = vectors(path, "mean" if pooling_type == 1 else "last", device=device)
    assert [vector.shape for vector in found] == [(8,)] * len(TEXTS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


# Window and ALiBi; of a decoder below. On a GPU `test_cuda_on_gpu.py` has them all.
@pytest.mark.parametrize("name", ["modern-bert-encoder", "jina-bert-v2-encoder"])
def test_what_a_gpu_makes_of_texts_is_what_the_cpu_makes_of_them(name: str, tmp_path: Path) -> None:
    """The CPU's own is the reference runtime's in `test_text_head.py`; the text is longer than the window of eight."""
    # Of up to 16 rows a graph is captured, which runs with all the chunks that it has room for.
    model = build_text_model(tmp_path, name)
    devices = (CpuDevice(1), CudaTestDevice(EmulatedDevice()))
    wanted, found = (run_texts(model.path, device, [model.token_ids[:17]], pooling_of(name))[0] for device in devices)
    assert normalized_error(found, wanted) <= 1e-6


def test_a_decoder_ranks_on_a_gpu_as_on_the_cpu(gpus: list[Any], tmp_path: Path) -> None:
    path = build_text_model(tmp_path, "qwen3-reranker").path
    pooled = []
    for device in ("cpu", "cuda:0"):
        with localinfer.load(path, device=device, kv_type="f32", **OPTIONS) as llm:
            pooled.append(
                np.stack(
                    TextPooler(engine_of(llm), model_of(llm)).pool([PooledText(text) for text in TEXTS], Pooling.RANK)
                )
            )
    np.testing.assert_allclose(pooled[1], pooled[0], rtol=0, atol=0.02 * np.abs(pooled[0]).max())


def test_texts_and_generations_take_turns_in_the_same_memory(gpus: list[Any], tmp_path: Path) -> None:
    path = write_small_llama(tmp_path / "small.gguf")
    with localinfer.load(path, device="cuda:0", **OPTIONS) as llm:
        (gpu,) = gpus

        def tokens() -> list[int]:
            run = engine_of(llm).generate(TEXTS[0], SamplingParams(temperature=0), max_tokens=4)
            return [event.token_id for event in run]

        before, keys = tokens(), set(gpu.keys)
        buffers = gpu.allocated
        first = llm.embed_many(TEXTS, pooling="last")
        more = gpu.allocated - buffers
        assert tokens() == before
        for ours, again in zip(first, llm.embed_many(TEXTS, pooling="last"), strict=True):
            np.testing.assert_array_equal(ours, again)
        assert set(gpu.keys) == keys, "nothing is compiled after the load"
        # Tables of pages, numbers of rows and angles of RoPE, but no buffers.
        assert more < 512 * 4 * HIDDEN * 4


@pytest.mark.parametrize(("options", "texts"), [({"device": "auto"}, TEXTS), (TWO, [LONG_TEXT]), (PART, [LONG_TEXT])])
def test_vectors_of_an_encoder_on_gpus_are_the_cpus(
    gpus: list[Any], tmp_path: Path, options: dict[str, Any], texts: Sequence[NDArray[np.int32]]
) -> None:
    path = write_encoder(tmp_path, "bert-encoder")
    check_vectors(gpus, path, "none", options, texts)


def test_experts_of_an_encoder_stay_on_the_cpu(gpus: list[Any], tmp_path: Path) -> None:
    path = build_text_model(tmp_path, "nomic-bert-moe-encoder").path
    options = OPTIONS | {"context_length": 16}
    texts = [text % 30 for text in TEXTS[:2]]
    found = []
    for device in ({"device": "cpu"}, {"device": "cuda:0", "cpu_moe": True}):
        with localinfer.load(path, **options, **device) as llm:
            found += TextPooler(engine_of(llm), model_of(llm)).pool([PooledText(text) for text in texts], Pooling.MEAN)
    np.testing.assert_allclose(found[2:], found[:2], rtol=0, atol=0.02 * np.abs(found[0]).max())


def test_a_text_longer_than_a_batch_is_whole_on_a_gpu(
    gpus: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder's text is not cut: its program grows."""
    monkeypatch.setattr("localinfer.generation.pooling.MAX_BATCH_ROWS", 16)
    path = write_encoder(tmp_path, "bert-encoder")
    text = np.random.default_rng(3).integers(5, 100, 40).astype(np.int32)
    found = []
    for device in ("cpu", "cuda:0"):
        with localinfer.load(path, device=device, **OPTIONS) as llm:
            assert llm.info.device == device.partition(":")[0]
            found += llm.embed_many([text, text[:30]], normalize=False)
    np.testing.assert_allclose(found[2:], found[:2], rtol=0, atol=0.02 * np.abs(found[0]).max())
