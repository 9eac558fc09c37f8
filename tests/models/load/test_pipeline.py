"""Layers over several emulated GPUs, and experts on the CPU: what one device says, to the bit where it is promised."""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.cache.block_pool import PagePool, default_kv_memory
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import AbortableProgram, Batch, MediaRows, Segment
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.loader import load_model
from localinfer.models.load.programs import batch_rows_of
from localinfer.types import FloatArray
from tests.models.arch_models import build_text_model, normalized_error, read_config
from tests.models.small_models import write_small_llama, write_small_mixture, write_small_seer

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda import pipeline
from localinfer.kernels.cuda.pipeline import PipelineProgram
from localinfer.kernels.cuda.sharded_pages import ShardedKVLayout
from tests.models.emulated_gpu import NamedDevice, emulate_gpus

IDS = np.array([7, 20, 33, 5, 9], np.int32)
ROOMY = [64 << 30] * 3


@dataclass
class Said:
    """What a model computed: logits of a prompt and of the token after it, a token chosen there, and a page."""

    prompt: FloatArray
    following: FloatArray
    token: int
    page: NDArray[np.uint8]
    num_stages: int

    def equals(self, other: "Said") -> bool:
        """Whether every bit is the same."""
        return (
            np.array_equal(self.prompt, other.prompt)
            and np.array_equal(self.following, other.following)
            and self.token == other.token
            and np.array_equal(self.page, other.page)
        )


def said(path: Path, ids: NDArray[np.int32] = IDS, num_rows: int = 3, kv_type: str = "f16", **options: Any) -> Said:
    """Run a model on a GPU, its prompt in batches of so many rows, over pages that lie in another order."""
    device = DeviceRequest(**options)
    model = load_model(path, threads=1, context_length=64, verify=False, kv_type=kv_type, device=device)
    try:
        assert model.device == "cuda"
        pool, run = PagePool(model.kv_layout), model.program.run
        places = pool.addresses(pool.acquire(2)[::-1])
        prompt = []
        for start in range(0, 3, num_rows):
            rows = ids[start : start + num_rows]
            batch = Batch(rows, [Segment(start, len(rows), places)], np.arange(len(rows), dtype=np.int32))
            prompt.append(run(batch).copy())
        last = Batch(ids[3:4], [Segment(3, 1, places)], np.zeros(1, np.int32))
        following = run(last).copy()
        token = int(model.program.run_greedy(last)[0])  # type: ignore[attr-defined]
        page = np.empty(model.kv_layout.page_bytes, np.uint8)
        model.kv_layout.read(int(places[0]), page)  # type: ignore[attr-defined]
        program = model.program
        num_stages = len(program._stages) if isinstance(program, PipelineProgram) else 1
        return Said(np.concatenate(prompt), following, token, page, num_stages)
    finally:
        model.close()


@functools.cache
def said_by_one(path: Path) -> Said:
    """Run a model on one GPU, which is not the first."""
    return said(path, device="cuda:1", cpu_moe=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("small") / "small.gguf", num_layers=3)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_mixture(tmp_path_factory.mktemp("mixture") / "mixture.gguf", num_layers=2)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[NamedDevice]:
    return emulate_gpus(monkeypatch, ROOMY)


def test_layers_over_two_gpus_give_the_bits_of_one(small: Path) -> None:
    one = said_by_one(small)
    several = said(small, device="cuda", tensor_split=[2, 1])
    assert several.num_stages == 2
    assert several.equals(one)


def test_keys_and_values_of_two_types_lie_on_the_gpus_of_their_layers(small: Path) -> None:
    one = said(small, device="cuda", kv_type="q8_0/f16")
    assert said(small, device="cuda:2,cuda:0", kv_type="q8_0/f16").equals(one)


def test_first_layers_run_on_the_cpu_before_the_gpus(small: Path) -> None:
    one = said_by_one(small)
    mixed = said(small, device="cuda", gpu_layers=2, tensor_split=[1, 1])
    assert mixed.num_stages == 3
    np.testing.assert_allclose(mixed.prompt, one.prompt, rtol=0, atol=1e-4)
    np.testing.assert_allclose(mixed.following, one.following, rtol=0, atol=1e-4)
    assert said(small, num_rows=1, device="cuda", gpu_layers=2, tensor_split=[1, 1]).equals(mixed)


def test_experts_on_the_cpu_say_what_they_say_on_the_gpu(mixture: Path) -> None:
    one = said_by_one(mixture)
    mixed = said(mixture, device="cuda:0", cpu_moe=True)
    assert (one.num_stages, mixed.num_stages) == (1, 5)
    np.testing.assert_allclose(mixed.prompt, one.prompt, rtol=0, atol=1e-4)
    np.testing.assert_allclose(mixed.following, one.following, rtol=0, atol=1e-4)
    # Two GPUs with the same experts on the CPU compute the same, in other batches too.
    assert said(mixture, num_rows=1, device="cuda:0,cuda:1", cpu_moe=True).equals(mixed)


def test_experts_and_first_layers_on_the_cpu(mixture: Path) -> None:
    one = said_by_one(mixture)
    mixed = said(mixture, device="cuda", gpu_layers=1, cpu_moe=2)
    np.testing.assert_allclose(mixed.following, one.following, rtol=0, atol=1e-4)


def test_a_long_batch_is_left_between_two_stages(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "INTERRUPTIBLE_ROWS", 3)
    model = load_model(mixture, device=DeviceRequest(device="cuda", cpu_moe=True), threads=1, context_length=64)
    program = model.program
    assert isinstance(program, AbortableProgram)
    pool = PagePool(model.kv_layout)
    places = pool.addresses(pool.acquire(1))
    batch = Batch(IDS[:3], [Segment(0, 3, places)], np.array([2], np.int32))
    wanted = program.run(batch).copy()
    asked: list[float] = []

    def abort(done: float) -> bool:
        asked.append(done)
        return len(asked) == 2

    assert program.run_abortable(batch, abort) is None
    assert asked == [0.2, 0.4]
    np.testing.assert_array_equal(program.run_abortable(batch, lambda done: False), wanted)
    # Too short to be asked about.
    short = Batch(IDS[:1], [Segment(0, 1, places)], np.zeros(1, np.int32))
    assert program.run_abortable(short, lambda done: True) is not None
    model.close()


def test_pages_are_copied_read_and_written_in_all_their_parts(small: Path, gpus: list[NamedDevice]) -> None:
    model = load_model(
        small, device=DeviceRequest(device="cuda", gpu_layers=2, tensor_split=[1, 1]), threads=1, context_length=64
    )
    layout = model.kv_layout
    assert isinstance(layout, ShardedKVLayout)
    assert [(part.device is None, part.first, part.end) for part in layout.parts] == [
        (True, 0, 1),
        (False, 1, 2),
        (False, 2, 3),
    ]
    assert sum(layout.part_bytes) == layout.page_bytes and layout.host_page_bytes == layout.part_bytes[0]
    assert layout.devices == gpus
    pool = PagePool(layout)
    first, second = (int(address) for address in pool.addresses(pool.acquire(2)))
    data = np.random.default_rng(0).integers(0, 256, layout.page_bytes, np.uint8)
    found = np.empty_like(data)
    layout.write(first, data)
    layout.copy(first, second, layout.page_bytes)
    layout.read(second, found)
    np.testing.assert_array_equal(found, data)
    model.close()


def test_the_devices_of_an_encoder_hold_the_same_layer_of_every_page(gpus: list[NamedDevice], tmp_path: Path) -> None:
    path = build_text_model(tmp_path, "bert-encoder").path
    model = load_model(path, device=DeviceRequest(device="cuda", gpu_layers=1), threads=1, context_length=30)
    layout = model.kv_layout
    assert isinstance(layout, ShardedKVLayout)
    assert [(part.device is None, part.first, part.end) for part in layout.parts] == [(True, 0, 1), (False, 0, 1)]
    pages = layout.allocate(4 * layout.page_bytes) + layout.page_bytes * np.arange(4)
    data = np.random.default_rng(0).integers(0, 256, (4, layout.page_bytes), np.uint8)
    for page, written in zip(pages.tolist(), data, strict=True):
        layout.write(page, written)
    for page, written in zip(pages.tolist(), data, strict=True):
        found = np.empty_like(written)
        layout.read(page, found)
        np.testing.assert_array_equal(found, written)
    model.close()


def test_the_cache_takes_what_the_fullest_gpu_has_left(small: Path, gpus: list[NamedDevice]) -> None:
    model = load_model(small, device=DeviceRequest(device="cuda", tensor_split=[2, 1]), threads=1, context_length=64)
    layout = model.kv_layout
    assert isinstance(layout, ShardedKVLayout)
    gpus[0].free_bytes = lambda: 1 << 20  # type: ignore[method-assign]
    pages = (1 << 19) // layout.part_bytes[0]
    assert default_kv_memory(layout, 1 << 20) == pages * layout.page_bytes
    model.close()


def test_pages_that_do_not_fit_the_second_gpu_leave_none_on_the_first(small: Path, gpus: list[NamedDevice]) -> None:
    model = load_model(small, device=DeviceRequest(device="cuda", tensor_split=[2, 1]), threads=1, context_length=64)
    freed = []

    def is_full(num_bytes: int) -> int:
        raise OutOfMemoryError("full")

    gpus[0].free = freed.append  # type: ignore[method-assign]
    gpus[1].allocate = is_full  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError):
        model.kv_layout.allocate(4 * model.kv_layout.page_bytes)  # type: ignore[attr-defined]
    assert len(freed) == 1
    model.close()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def test_what_computed_a_page_is_in_the_key_of_stored_pages(mixture: Path, small: Path) -> None:
    def key(path: Path, **options: Any) -> str:
        model = load_model(
            path, threads=1, context_length=64, verify=False, device=DeviceRequest(device="cuda", **options)
        )
        model.close()
        return repr(model.kv_layout)

    keys = [key(small), key(small, tensor_split=[2, 1]), key(small, gpu_layers=2)]
    assert len(set(keys)) == 3
    # The same kinds of devices give the same bits, however the layers are shared.
    assert key(small, tensor_split=[1, 2]) == keys[1] != repr(KVLayout("f16", []))
    assert key(mixture, cpu_moe=1) != key(mixture, cpu_moe=True)


def test_a_model_without_experts_says_that_cpu_moe_does_nothing(
    small: Path, warnings: pytest.LogCaptureFixture
) -> None:
    load_model(small, threads=1, context_length=64, device=DeviceRequest(device="cuda", cpu_moe=True)).close()
    assert "cpu_moe has no effect: small.gguf has no experts" in warnings.text
    assert "3 of 3 layers on the GPU: they need" in warnings.text


def seen(path: Path, **options: Any) -> FloatArray:
    """Logits of a word, a picture of a row of three and a word, in one batch and in two, which are the same."""
    device = DeviceRequest(**options)
    model = load_model(path, threads=1, context_length=64, verify=False, takes_media=True, device=device)
    pool, found = PagePool(model.kv_layout), []
    ids, width = np.array([7, -2, -3, -4, 5], np.int32), model.config.hidden_size * 3
    rows = np.random.default_rng(2).standard_normal((3, width), np.float32)
    axes = np.array([[0] * 3, [1] * 3, [1, 1, 2], [1, 1, 3], [4] * 3])
    for ends in ([5], [2, 5]):
        places, start = pool.addresses(pool.acquire(1)), 0
        logits = []
        for end in ends:
            embedded = (max(1, start) - start, rows[max(1, start) - 1 : end - 1][:3])
            segment = Segment(start, end - start, places, media=MediaRows([embedded], axes[start:end]))
            taken = np.arange(end - start, dtype=np.int32)
            logits.append(model.program.run(Batch(ids[start:end], [segment], taken)).copy())
            start = end
        found.append(np.concatenate(logits))
    model.close()
    np.testing.assert_array_equal(found[0], found[1])
    return found[0]


def test_pictures_are_read_by_every_part_as_by_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several parts one embeds, two add to what their layers give, and all turn by positions on axes."""
    path = write_small_seer(tmp_path / "small.gguf")
    one = seen(path, device="cuda:1")
    np.testing.assert_array_equal(seen(path, device="cuda", tensor_split=[1, 1, 1]), one)
    assert normalized_error(seen(path, device="cuda", gpu_layers=2, tensor_split=[1, 1]), one) <= 1e-6
    on_cpu = seen(path, device="cpu")
    assert normalized_error(one, on_cpu) <= 1e-6


def test_a_batch_on_gpus_holds_the_largest_picture_that_is_seen_at_once(small: Path) -> None:
    config = read_config(small)
    assert batch_rows_of(config, 1024) == batch_rows_of(replace(config, takes_media=True), 1024) == 1024
    seeing = replace(config, architecture="gemma4", takes_media=True)
    assert batch_rows_of(seeing, 1024) == 1120
