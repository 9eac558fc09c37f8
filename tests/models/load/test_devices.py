"""Which device a model runs on, and a whole model on an emulated GPU behind the public API."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.sampling.params import SamplingParams
from localinfer.errors import BackendUnavailableError, RequestError, SessionMismatchError
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.kernels.cuda.sharded_pages import ShardedKVLayout
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Batch, Segment
from localinfer.loading import drafters
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.load import device_request, devices, placement
from localinfer.models.load.device_request import DeviceRequest, looks_for_gpus
from localinfer.models.load.loader import load_model
from localinfer.models.load.placement import MemoryNeeds, choose_placement, memory_needs
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.system.machine_limits import has_driver
from tests.models.arch_models import read_config
from tests.models.small_models import write_small_llama
from tests.support.inside import engine_of
from tests.support.typed_models import make_model

needs_no_gpu = pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")


NEEDS = MemoryNeeds(layers=[1 << 30] * 4, output=1 << 28, embedding=1 << 29, working=1 << 28)


@needs_no_gpu
def test_cuda_by_name_without_a_gpu_is_an_error_and_auto_is_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BackendUnavailableError, match="needs an NVIDIA GPU"):
        localinfer.load(device="cuda")
    with caplog.at_level(logging.WARNING):
        assert not looks_for_gpus(DeviceRequest(device="auto"))
        assert not caplog.text
        assert devices.open_devices(DeviceRequest(device="auto", gpu_layers=3), lambda: NEEDS) is None
    assert "running on the CPU: device 'cuda' needs an NVIDIA GPU" in caplog.text


def test_a_model_that_does_not_fit_runs_on_the_cpu_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_request, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "find_devices", lambda *_, **__: [FoundDevice("a small GPU", 1 << 30)])
    with caplog.at_level(logging.WARNING):
        assert devices.open_devices(DeviceRequest(device="auto"), lambda: NEEDS) is None
    reason = "a single layer and the output need 1.9 GB on a small GPU, which has 1.1 GB free"
    assert f"running on the CPU: {reason}" in caplog.text
    with pytest.raises(BackendUnavailableError, match="a single layer"):
        devices.open_devices(DeviceRequest(device="cuda"), lambda: NEEDS)
    assert looks_for_gpus(DeviceRequest(device="auto")) and not looks_for_gpus(
        DeviceRequest(device="auto", gpu_layers=0)
    )


@pytest.mark.parametrize(
    ("free", "wanted", "num_layers", "has_embedding"),
    [
        ((5 << 30) + (1 << 28), None, 4, True),
        ((5 << 30) + (1 << 28) - 1, None, 4, False),
        ((4 << 30) - 1, None, 3, False),
        ((3 << 30) + (3 << 28) - 1, None, 2, False),
        (8 << 30, 2, 2, False),
        (8 << 30, 99, 4, True),
        # Who says how many does without the margin.
        ((3 << 30) + (1 << 29), 3, 3, False),
    ],
)
def test_as_many_layers_as_fit_go_to_the_gpu(
    free: int, wanted: int | None, num_layers: int, has_embedding: bool
) -> None:
    placement = choose_placement(NEEDS, [FoundDevice("a GPU", free)], DeviceRequest(device="auto", gpu_layers=wanted))
    assert placement is not None
    assert (placement.num_gpu_layers, placement.has_embedding) == (num_layers, has_embedding)
    assert placement.is_whole is has_embedding
    assert placement.num_bytes <= free
    said = placement.describe()
    assert said.startswith(f"{num_layers} of 4 layers on the GPU: they need ")
    assert said.endswith(("on a GPU", "; the others on the CPU", "; embeddings on the CPU"))


def test_more_layers_than_fit_are_refused_with_how_many_do() -> None:
    with pytest.raises(RequestError, match="4 layers need 4.8 GB .* 4.3 GB free, where 3 of 4 fit"):
        choose_placement(NEEDS, [FoundDevice("a GPU", 4 << 30)], DeviceRequest(device="auto", gpu_layers=4))
    for device, gpu_layers in (("cpu", 2), ("cuda", 0), ("auto", -1), ("auto", True), ("auto", "all")):
        with pytest.raises(RequestError, match=f"gpu_layers is {gpu_layers!r}"):
            localinfer.load(device=device, gpu_layers=gpu_layers)  # type: ignore[arg-type]


def test_what_a_model_needs_is_counted_from_its_file(tmp_path: Path) -> None:
    model = write_small_llama(tmp_path / "small.gguf")
    config = read_config(model)
    layout = KVLayout("f16", kv_layer_shapes(config))
    with read_gguf(model) as file:
        short, long = (memory_needs(file, config, layout, count) for count in (1, 65))
        weights = sum(tensor.num_bytes for name, tensor in file.tensors.items() if name.startswith("blk."))
    assert sum(short.layers) == weights + layout.page_bytes
    assert sum(long.layers) == weights + 3 * layout.page_bytes
    assert short.output > 0 and short.working > 0


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")
    from tests.models.emulated_gpu import emulate_gpu

    emulate_gpu(monkeypatch)


def test_what_cannot_run_on_the_gpu_falls_back_with_the_reason(
    emulated_gpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_small_llama(tmp_path / "small.gguf")
    with pytest.raises(BackendUnavailableError, match="kv_window evicts by the attention of all layers"):
        load_model(
            model, device=DeviceRequest(device="cuda", gpu_layers=1), threads=1, context_length=256, kv_window=128
        )
    with caplog.at_level(logging.WARNING):
        load_model(
            model, device=DeviceRequest(device="auto", gpu_layers=1), threads=1, context_length=256, kv_window=128
        ).close()
    assert "running on the CPU: kv_window evicts by the attention of all layers" in caplog.text


def generated(model: Path, device: str, sampling: SamplingParams, **options: Any) -> list[list[int]]:
    """Three tokens after each of two prompts that begin alike, in turns, by the whole engine."""
    with localinfer.load(model, device=device, threads=1, context_length=64, kv_memory=1 << 24, **options) as llm:
        prompts = [np.array([3, 1, 4, last], np.int32) for last in (3, 2)]
        runs = [engine_of(llm).generate(prompt, sampling, max_tokens=3) for prompt in prompts]
        return [[event.token_id for event in events] for events in zip(*runs, strict=True)]


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (SamplingParams(temperature=0), {}),
        (SamplingParams(temperature=0), {"kv_type": "q4_0", "speculation": None}),
        (SamplingParams(temperature=1.5, top_k=7, top_p=0.9, seed=5), {"gpu_layers": 1, "speculation": None}),
        # What a device does not do of sampling: the logits come to the host.
        (SamplingParams(temperature=1.5, seed=5, repetition_penalty=1.2), {"speculation": None}),
    ],
)
def test_a_model_on_the_gpu_continues_a_prompt_as_the_cpu_does(
    emulated_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams,
    options: dict[str, Any],
) -> None:
    # Drafts cost nothing, by a measurement that the emulator is spared.
    monkeypatch.setattr(drafters, "_verification_seconds", lambda *_: [1.0, 1.0, 1.0])
    model = write_small_llama(tmp_path / "small.gguf", num_layers=1 + options.get("gpu_layers", 0))
    on_cpu = generated(model, "cpu", sampling, **{**options, "speculation": None, "gpu_layers": None})
    assert generated(model, "cuda", sampling, **options) == on_cpu


@pytest.mark.parametrize("gpu_layers", [1, 2])
def test_a_model_split_between_cpu_and_gpu_says_what_one_device_says(
    emulated_gpu: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    gpu_layers: int,
) -> None:
    """Where all layers are on the GPU, only the embeddings are on the CPU, for which there is no room."""
    model = write_small_llama(tmp_path / "small.gguf")
    if gpu_layers == 2:
        monkeypatch.setattr(placement, "memory_needs", lambda *given: replace(memory_needs(*given), embedding=1 << 50))
    ids, rows = np.array([7, 20, 33], np.int32), np.arange(3, dtype=np.int32)
    wanted = load_model(model, threads=1, context_length=64)
    with caplog.at_level(logging.WARNING):
        split = load_model(
            model, device=DeviceRequest(device="cuda", gpu_layers=gpu_layers), threads=1, context_length=64
        )
    assert f"{gpu_layers} of 2 layers on the GPU: they need" in caplog.text
    found = []
    for loaded in (wanted, split):
        pool = PagePool(loaded.kv_layout)
        pages = pool.acquire(2)
        both = pool.addresses(pages[::-1])
        run = loaded.program.run
        found.append(
            [
                run(Batch(ids[:2], [Segment(0, 2, both)], rows[:2])).copy(),
                run(Batch(ids[2:], [Segment(2, 1, both)], rows[:1])).copy(),
            ]
        )
        # A copied page holds both of its parts.
        pool.copy(int(pages[1]), int(pages[0]))
        again = run(Batch(ids[2:], [Segment(2, 1, pool.addresses(pages[:1]))], rows[:1]))
        np.testing.assert_array_equal(again, found[-1][1])
    for on_cpu, on_both in zip(*found, strict=True):
        np.testing.assert_allclose(on_both, on_cpu, rtol=0, atol=1e-4)
    layout = split.kv_layout
    assert isinstance(layout, ShardedKVLayout)
    kept = np.empty(layout.page_bytes, np.uint8)
    layout.read(int(both[0]), kept)
    layout.write(int(both[1]), kept)
    moved = split.program.run(Batch(ids[2:], [Segment(2, 1, both[1:])], rows[:1]))
    np.testing.assert_array_equal(moved, found[1][1])
    wanted.close()
    split.close()


@pytest.mark.parametrize("gpu_layers", [None, 1])
def test_conversations_of_a_gpu_go_to_disk_and_back(emulated_gpu: None, tmp_path: Path, gpu_layers: int | None) -> None:
    model = write_small_llama(tmp_path / "small.gguf", num_layers=1 if gpu_layers is None else 2)
    session = tmp_path / "conversation.session"
    prompt = np.array([3, 1, 4], np.int32)
    found = []
    for turn, disk_cache in enumerate((True, True, False)):
        with localinfer.load(
            model,
            device="cuda",
            gpu_layers=gpu_layers,
            threads=1,
            context_length=64,
            kv_memory=1 << 24,
            speculation=None,
            disk_cache=disk_cache,
            disk_cache_folder=tmp_path / "kept",
        ) as llm:
            if turn == 2:
                assert llm.load_session(session)[:3] == prompt.tolist()
            run = engine_of(llm).generate(prompt, SamplingParams(temperature=0), max_tokens=2)
            found.append([event.token_id for event in run])
            assert run.record.cached_tokens == (2 if turn else 0)
            if turn == 0:
                llm.save_session(session)
    assert found[0] == found[1] == found[2]
    with (
        localinfer.load(model, device="cpu", threads=1, context_length=64) as llm,
        pytest.raises(SessionMismatchError, match="key-value layout"),
    ):
        llm.load_session(session)


def test_type_without_a_kernel_runs_on_the_gpu_as_on_the_cpu(emulated_gpu: None, tmp_path: Path) -> None:
    model = make_model(TensorType.IQ4_NL).write(tmp_path / "model.gguf")
    greedy, options = SamplingParams(temperature=0), {"speculation": None}
    assert generated(model, "cuda", greedy, **options) == generated(model, "cpu", greedy, **options)
