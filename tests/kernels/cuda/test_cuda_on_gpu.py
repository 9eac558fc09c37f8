"""What only a GPU can show: every kernel, graphs and library products run there, against the oracle and the CPU.

`pytest -m cuda` runs these; without a GPU they are skipped. The emulator runs the same kernels everywhere.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import CUDA_LAYOUTS, SIZES, Layout, is_float
from localinfer.kernels.ops import EmbeddingTable, LinearWeight, Projection, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.system.machine_limits import has_driver
from tests.kernels.cpu.device import CpuDevice
from tests.kernels.cuda.device import CudaTestDevice
from tests.kernels.cuda.test_cuda_launches import LAUNCHES
from tests.kernels.random_weights import decoded, quantized_activations, random_weights
from tests.models.arch_models import (
    build_model,
    build_text_model,
    normalized_error,
    run_logits,
    text_models,
)
from tests.models.decoder.test_text_head import check

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not has_driver(), reason="there is no NVIDIA driver here")]

FRESH_SEED = time.time_ns() % 2**32
"""New inputs every time; a failure shows the seed."""


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice()
    yield made
    made.close()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 16, 40])
@pytest.mark.parametrize("layout", CUDA_LAYOUTS, ids=[layout.name for layout in CUDA_LAYOUTS])
def test_product_on_the_gpu_is_the_oracles(device: CudaDevice, layout: Layout, rows: int) -> None:
    from localinfer.kernels.cuda.lower import lower_to_cuda
    from localinfer.kernels.cuda.weights import upload

    columns = 1003 if is_float(layout) else 11 * SIZES[layout].unit
    shape = (517, columns)
    data = random_weights(layout, shape, FRESH_SEED)
    x = np.random.default_rng(FRESH_SEED).standard_normal((rows, columns)).astype(np.float32)
    tape = GraphBuilder()
    inputs, selected = tape.buffer("x", columns), tape.buffer("selected", columns, Rows.OUTPUT)
    table = upload(device, Layout.F32, x.reshape(-1).view(np.uint8), 1, rows, columns)
    tape.embed(inputs, EmbeddingTable("x", rows, columns, table))
    tape.select_output(selected, inputs)
    out = tape.buffer("out", shape[0], Rows.OUTPUT)
    weight = LinearWeight("weight", *shape, upload(device, layout, data, 1, *shape))
    tape.matmul(selected, [Projection(weight, out)])
    program = lower_to_cuda(tape.finish(out), device, KVLayout("f32", []), max_batch_rows=rows, max_output_rows=rows)
    ids = np.arange(rows, dtype=np.int32)
    pages = np.array([device.allocate(256)] * 2, np.int64)
    batch = Batch(ids, [Segment(0, rows, pages)], ids)
    found = program.run(batch).copy()
    np.testing.assert_array_equal(found, program.run(batch), err_msg="the graph gives what its launches gave")
    is_exact = is_float(layout) or rows > 16
    wanted = (x.astype(np.float64) if is_exact else quantized_activations(x)) @ decoded(layout, data, shape).T
    tolerance = 0.02 if rows > 16 else 2e-6
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max(), err_msg=f"seed {FRESH_SEED}"
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archs")


@pytest.mark.parametrize("name", LAUNCHES)
def test_logits_of_every_architecture_are_the_reference_runtimes_and_the_cpus(
    device: CudaDevice, name: str, folder: Path
) -> None:
    model = build_model(folder, name)
    cpu = run_logits(model, CpuDevice(1))
    for chunk in (0, 1, 7):
        fresh = CudaDevice()
        found = run_logits(model, CudaTestDevice(fresh), chunk)
        assert normalized_error(found, model.logits) <= 1e-6
        assert normalized_error(found, cpu) <= 1e-6


@pytest.mark.parametrize("name", text_models())
def test_vectors_of_every_encoder_are_the_reference_runtimes(name: str, folder: Path) -> None:
    check(build_text_model(folder, name), CudaTestDevice(CudaDevice()))


@pytest.mark.parametrize("layout", [Layout.Q4_0, Layout.INT4_128])
def test_kernels_that_overlap_give_the_same_bits(layout: Layout) -> None:
    from tests.bench.random_llama import SHAPES, make_program

    SHAPES["small"] = (4, 512, 8, 4, 64, 1024, 2048, False)
    found = []
    for overlaps in (False, True):
        device = CudaDevice(overlaps=overlaps)
        program, kv_layout, _ = make_program(device, "small", layout, "f16", seed=FRESH_SEED)
        pages = device.allocate(2 * kv_layout.page_bytes) + np.arange(2, dtype=np.int64) * kv_layout.page_bytes
        rows = []
        for start, count in [(0, 20), *((20 + step, 1) for step in range(12)), (32, 8), (40, 4), (44, 2)]:
            ids = np.arange(start, start + count, dtype=np.int32)
            batch = Batch(ids, [Segment(start, count, pages)], np.arange(count, dtype=np.int32))
            rows += [program.run(batch).copy(), program.run(batch).copy()]
        found.append(np.concatenate(rows))
        program.close()
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_rows_alone_have_the_bits_of_rows_together_at_every_run(kv_type: str) -> None:
    """Blocks end in another order every time: the last one quantizes, merges chunks, or reads what it has stored."""
    from tests.bench.random_llama import SHAPES, make_program

    SHAPES["small"] = (4, 512, 8, 2, 64, 2048, 2048, False)
    device = CudaDevice()
    program, kv_layout, _ = make_program(device, "small", Layout.Q4_0, kv_type, seed=FRESH_SEED)
    pages = device.allocate(32 * kv_layout.page_bytes) + np.arange(32, dtype=np.int64) * kv_layout.page_bytes
    first, count = 1000, 16
    ids = np.random.default_rng(FRESH_SEED).integers(0, 2048, first + count).astype(np.int32)
    program.run(Batch(ids[:first], [Segment(0, first, pages)], np.zeros(1, np.int32)))

    def rows_by(step: int) -> list[Any]:
        rows = []
        for start in range(first, first + count, step):
            taken = np.arange(step, dtype=np.int32)
            rows.append(program.run(Batch(ids[start : start + step], [Segment(start, step, pages)], taken)).copy())
        return rows

    wanted = np.concatenate(rows_by(2))
    assert np.isfinite(wanted).all()
    for step in [1] * 20 + [4, 8, 16]:
        np.testing.assert_array_equal(np.concatenate(rows_by(step)), wanted, err_msg=f"seed {FRESH_SEED}")
    program.close()


def two_hundred_tokens(model: Path | None, device: str, **options: Any) -> Sequence[int]:
    import localinfer

    loading = {name: options.pop(name) for name in ("gpu_layers", "speculation") if name in options}
    with localinfer.load(model, device=device, **{"speculation": None, **loading}) as llm:
        sampling = {"temperature": 0, **options}
        return llm.complete("Once upon a time", max_tokens=200, ignore_eos=True, **sampling).token_ids


@pytest.mark.parametrize("options", [{}, {"gpu_layers": 2}, {"speculation": "auto"}])
@pytest.mark.parametrize("is_demo", [False, True])
def test_two_hundred_greedy_tokens_are_the_cpus(shared: Path, is_demo: bool, options: dict[str, Any]) -> None:
    model = None if is_demo else shared / "models" / "stories260K.gguf"
    assert two_hundred_tokens(model, "cuda", **options) == two_hundred_tokens(model, "cpu")


def test_a_seed_draws_the_same_text_with_drafts_and_without(shared: Path) -> None:
    model = shared / "models" / "stories260K.gguf"
    alone = two_hundred_tokens(model, "cuda", temperature=0.8, seed=FRESH_SEED)
    assert two_hundred_tokens(model, "cuda", temperature=0.8, seed=FRESH_SEED, speculation="auto") == alone


@pytest.mark.parametrize("options", [{}, {"gpu_layers": 2}])
def test_a_picture_is_answered_as_by_the_cpu_and_read_from_the_cache(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("PIL", reason="Pillow is an optional package")
    import localinfer
    from tests.support.seeing_model import picture_file, seeing_demo

    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture_file(5)}, {"type": "text", "text": "What?"}]}
    ]
    found = []
    for device in ("cpu", "cuda"):
        chosen = options if device == "cuda" else {}
        with localinfer.load(seeing_demo(tmp_path), device=device, speculation=None, disk_cache=False, **chosen) as llm:
            replies = [llm.chat(messages, temperature=0, max_tokens=60) for _ in range(2)]
            assert replies[0].token_ids == replies[1].token_ids
            assert replies[1].stats.cached_tokens == replies[1].stats.prompt_tokens - 1
            found.append(replies[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [512, 32003, 128256])
def test_tokens_of_real_vocabularies_are_drawn_as_on_the_cpu(device: CudaDevice, size: int) -> None:
    from localinfer.kernels.cpu.sampling import RowSampler
    from localinfer.kernels.cuda.sampling import UNDECIDED, Draw, SampleMode, TokenChoice

    rng = np.random.default_rng(FRESH_SEED)
    rows = rng.normal(0, 3, (16, -(-size // 4) * 4)).astype(np.float32)
    filters = [(0.8, 40, 0.95, 0.05), (1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 100, 1.0, 0.02)] * 4
    draws = [Draw(*chosen, seed=FRESH_SEED + row, position=row << 20) for row, chosen in enumerate(filters)]
    logits = device.allocate(rows.nbytes)
    device.write(logits, rows)
    choice = TokenChoice(device, logits, rows.strides[0], size, 16)
    choice.write(draws)
    device.run(list(choice.steps(SampleMode.DRAWN, 16)))
    found = choice.read(16)
    sampler = RowSampler(size)
    for row, (token, draw) in enumerate(zip(found.tolist(), draws, strict=True)):
        settings = (draw.temperature, draw.top_k, draw.top_p, draw.min_p, np.uint64(draw.seed), draw.position)
        if token != UNDECIDED:
            assert token == sampler.choose(np.ascontiguousarray(rows[row, :size]), *settings), f"seed {FRESH_SEED}"
    assert (found != UNDECIDED).sum() >= 12, "only a flat nucleus is left to the host"


def test_a_device_that_ran_out_of_memory_says_so_and_goes_on(device: CudaDevice) -> None:
    from localinfer.errors import OutOfMemoryError

    with pytest.raises(OutOfMemoryError, match="free"):
        device.allocate(1 << 50)
    address = device.allocate(64)
    device.write(address, np.arange(16, dtype=np.float32))
    out = np.empty(16, np.float32)
    device.read(address, out)
    np.testing.assert_array_equal(out, np.arange(16))
